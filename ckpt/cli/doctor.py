"""`ckpt doctor`: what a bucket or a mount really gives."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ckpt.cli.common import (
    EXIT_PROBLEM,
    EXIT_STORAGE,
    Json,
    Output,
    StorageOptions,
    command,
    ended_as_by_ctrl_c,
    parse_storage_options,
    shown,
)

if TYPE_CHECKING:
    from ckpt.tools.doctor import Diagnosis

__all__ = ["doctor"]

_COLORS = {"fine": "green", "careful": "yellow", "problem": "red", "not measured": "dim"}
_SUMMARY = {
    "fine": "fit for checkpoints",
    "careful": "fit for checkpoints, within the limits above",
    "problem": "not fit for checkpoints as it is",
}


def doctor(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Where checkpoints will be: a path, s3://bucket/key, any other URL."
        ),
    ],
    second_url: Annotated[
        str | None,
        typer.Argument(metavar="[URL2]", help="The same place as another mount or gateway shows it."),
    ] = None,
    second_client: Annotated[
        bool,
        typer.Option("--second-client", help="Compare with another process, with connections of its own."),
    ] = False,
    wait_s: Annotated[
        float,
        typer.Option("--wait", min=0.1, metavar="SECONDS", help="How long to wait for something to be seen."),
    ] = 60.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="How long all of it may take.")
    ] = 300.0,
    storage_options: StorageOptions = None,
    second_storage_options: Annotated[
        list[str] | None,
        typer.Option(
            "--second-storage-options", metavar="KEY=VALUE|JSON", help="For URL2, where they differ."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure what a bucket or mount gives: visibility, exclusive creates, checksums, permissions, speed.

    Writes a folder of its own at URL and removes it.
    """
    with command(json, to_go_on="What was written has been removed, as far as the storage let it.") as output:
        from ckpt.tools.doctor import doctor as examine

        with ended_as_by_ctrl_c(), _status() as progress:
            found = examine(
                url,
                second_url,
                storage_options=parse_storage_options(storage_options),
                second_storage_options=parse_storage_options(second_storage_options)
                if second_storage_options
                else None,
                second_client=second_client,
                wait_s=wait_s,
                timeout_s=timeout_s,
                progress=progress,
            )
        if output.as_json:
            output.json(_as_json(found))
        else:
            _print(output, found)
        if not found.may_put:
            raise typer.Exit(EXIT_STORAGE)
        if found.verdict.value == "problem":
            raise typer.Exit(EXIT_PROBLEM)


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """What is being looked at, on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda check: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda check: status.update(shown(check))


def _as_json(found: Diagnosis) -> dict[str, Any]:
    return {
        "url": found.url,
        "second": found.second,
        "verdict": found.verdict.value,
        "findings": [
            {
                "check": finding.check,
                "verdict": finding.verdict.value,
                "result": finding.result,
                "advice": finding.advice,
                "measured": dict(finding.measured),
            }
            for finding in found.findings
        ],
        "capabilities": dataclasses.asdict(found.capabilities),
        "left_behind": list(found.left_behind),
        "took_s": found.took_s,
    }


def _print(output: Output, found: Diagnosis) -> None:
    table = Table("check", "verdict", "seen", box=None, pad_edge=False)
    for finding in found.findings:
        verdict = finding.verdict.value
        table.add_row(shown(finding.check), f"[{_COLORS[verdict]}]{verdict}[/]", shown(finding.result))
    output.print(table, "")
    advised = [finding for finding in found.findings if finding.advice]
    for finding in advised:
        color = _COLORS[finding.verdict.value]
        output.print(f"[{color}]{shown(finding.check)}:[/] {shown(finding.advice)}")
    if advised:
        output.print("")
    capabilities = dataclasses.asdict(found.capabilities)
    goes_by = [
        f"{name} {'yes' if value else 'no'}"
        for name, value in capabilities.items()
        if isinstance(value, bool)
    ]
    output.print(f"the library goes by: {', '.join(goes_by)}")
    verdict = found.verdict.value
    compared = "" if found.second is None else f", seen from {shown(found.second)} too"
    output.print(
        f"[bold {_COLORS[verdict]}]{_SUMMARY[verdict]}:[/] {shown(found.url)}{compared} ({found.took_s:.1f} s)"
    )
