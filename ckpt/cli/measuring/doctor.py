"""`ckpt doctor`: measure what a bucket or mount guarantees."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

import ckpt
from ckpt.cli.options import Json, StorageOptions, parse_storage_options, storage_options_of, url_of
from ckpt.cli.printing.output import EXIT_PROBLEM, EXIT_STORAGE, Output, command, sigterm_as_ctrl_c, table
from ckpt.words import shown

if TYPE_CHECKING:
    from ckpt.tools.doctor import Diagnosis

_COLORS = {"fine": "green", "careful": "yellow", "problem": "red", "not measured": "dim"}
_SUMMARY = {
    "fine": "fit for checkpoints",
    "careful": "fit for checkpoints, within the limits above",
    "problem": "not fit for checkpoints as it is",
}

EXAMPLES = """
ckpt doctor s3://bucket/run --second-client
ckpt doctor /mnt/a/run /mnt/b/run
"""


def doctor(
    url: Annotated[str, url_of("Where checkpoints will be")],
    second_url: Annotated[
        str | None,
        typer.Argument(metavar="URL2", help="The same place as another mount or gateway shows it."),
    ] = None,
    second_client: Annotated[
        bool,
        typer.Option("--second-client", help="Compare with another process that has its own connections."),
    ] = False,
    wait_s: Annotated[
        float,
        typer.Option("--wait", min=0.1, metavar="SECONDS", help="How long to wait for a change to be seen."),
    ] = 60.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="How long all of it may take.")
    ] = 300.0,
    storage_options: StorageOptions = None,
    second_storage_options: Annotated[
        list[str] | None, storage_options_of("URL2's storage, if they differ", "--second-storage-options")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what a bucket or mount guarantees.

    Tests when others see a change, exclusive creates, checksums, permissions and speed. Writes a
    folder of its own at URL and removes it.
    """
    interrupted = "The folder that doctor wrote was removed, as far as the storage allowed."
    with command(json, if_interrupted=interrupted) as output:
        with sigterm_as_ctrl_c(), output.working("measuring") as progress:
            diagnosis = ckpt.doctor(
                url,
                second_url,
                storage_options=parse_storage_options(storage_options),
                second_storage_options=parse_storage_options(
                    second_storage_options, "--second-storage-options"
                ),
                second_client=second_client,
                wait_s=wait_s,
                timeout_s=timeout_s,
                progress=progress,
            )
        if output.as_json:
            facts = dataclasses.asdict(diagnosis)
            for finding in facts["findings"]:
                finding["verdict"] = finding["verdict"].value
            output.json({**facts, "verdict": diagnosis.verdict.value})
        else:
            _print(output, diagnosis)
        if not diagnosis.may_put:
            raise typer.Exit(EXIT_STORAGE)
        if diagnosis.verdict.value == "problem":
            raise typer.Exit(EXIT_PROBLEM)


def _print(output: Output, diagnosis: Diagnosis) -> None:
    rows = table("check", "verdict", "result")
    advice = []
    for finding in diagnosis.findings:
        verdict = finding.verdict.value
        color = _COLORS[verdict]
        rows.add_row(shown(finding.check), f"[{color}]{verdict}[/]", shown(finding.result))
        if finding.advice:
            advice.append(f"[{color}]{shown(finding.check)}:[/] {shown(finding.advice)}")
    output.print(rows, "", *advice, *([""] if advice else []))
    capabilities = dataclasses.asdict(diagnosis.capabilities).items()
    assumed = [
        f"{name} {'yes' if value else 'no'}" for name, value in capabilities if isinstance(value, bool)
    ]
    output.print(f"the library assumes here: {', '.join(assumed)}")
    verdict = diagnosis.verdict.value
    compared = "" if diagnosis.second is None else f", also seen from {shown(diagnosis.second)}"
    summary = f"[bold {_COLORS[verdict]}]{_SUMMARY[verdict]}:[/]"
    output.print(f"{summary} {shown(diagnosis.url)}{compared} ({diagnosis.took_s:.1f} s)")
