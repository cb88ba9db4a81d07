"""Put the commands together."""

from __future__ import annotations

from typing import Annotated, ClassVar

import typer

from ckpt.cli.printing.help import HelpfulGroup
from ckpt.cli.printing.output import EXIT_USAGE

_COMMANDS = {
    "Look": ("ls", "inspect", "report", "cat", "diff", "watch"),
    "Check": ("verify", "upkeep.scrub", "measuring.doctor", "measuring.roundtrip"),
    "Sign": ("signing.sign",),
    "Copy and convert": ("cp", "convert", "drain"),
    "Clean up": ("upkeep.rm", "upkeep.gc"),
    "Plan": ("plan", "measuring.tune"),
}
"""The modules of the commands, by groups of `--help`."""

_FIRST = """\
Checkpoints of training runs, on any storage. Try first:

  ckpt ls s3://bucket/run        which checkpoints are there, and the latest
  ckpt inspect runs/step-100     what is in one of them
  ckpt verify runs/step-100      whether every byte is what was saved
  ckpt --help                    all commands; `ckpt ls --help` has examples

A place is a path or a URL, as for ckpt.save.
`ckpt --install-completion` lets your shell complete commands and options."""


class _Commands(HelpfulGroup):
    """Those of `_COMMANDS`, whose modules have the function of the same name, and `EXAMPLES`."""

    places: ClassVar = {
        module.rpartition(".")[2]: (title, f"ckpt.cli.{module}")
        for title, modules in _COMMANDS.items()
        for module in modules
    }


app = typer.Typer(
    name="ckpt",
    cls=_Commands,
    help="List, inspect, check, mend, sign, convert, copy, remove, follow, drain, plan and tune checkpoints on any storage.",
    epilog="Exit codes: 0 fine; 1 a problem was found; 2 wrong usage; 3 not found, or not committed; "
    "4 the storage refused, or cannot be reached; 130 interrupted.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"ckpt-storage {version('ckpt-storage')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(_FIRST, err=True)
        raise typer.Exit(EXIT_USAGE)
