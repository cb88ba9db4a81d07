"""Put the commands together."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt.cli import cat, convert, cp, diff, drain, gc, inspect, ls, plan, rm, verify, watch
from ckpt.cli.measuring import doctor, roundtrip, tune

app = typer.Typer(
    name="ckpt",
    help="List, inspect, check, convert, copy, remove, follow, drain, plan and tune checkpoints on any storage.",
    epilog="Exit codes: 0 fine; 1 a problem was found; 2 wrong usage; 3 not found, or not committed; "
    "4 the storage refused, or cannot be reached; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help takes as long to import as all the rest
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _module in (
    ls,
    inspect,
    cat,
    verify,
    diff,
    convert,
    cp,
    rm,
    gc,
    watch,
    drain,
    doctor,
    roundtrip,
    plan,
    tune,
):
    app.command()(getattr(_module, _module.__name__.rpartition(".")[2]))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"ckpt-storage {version('ckpt-storage')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command with the arguments of this process."""
    app()
