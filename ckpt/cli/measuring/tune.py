"""`ckpt tune`: find the settings with which a bucket or mount is fastest."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckpt
from ckpt.cli.options import (
    SIZE_UNITS,
    Json,
    StorageOptions,
    parse_quantity,
    parse_storage_options,
    url_of,
)
from ckpt.cli.printing.output import Output, command, sigterm_as_ctrl_c, table
from ckpt.words import count, shown, size

if TYPE_CHECKING:
    from ckpt.tuning.tune import Measured, Tuned

_Seconds = Annotated[float, typer.Option(metavar="N", help="About how long it may take.")]
_Megabytes = Annotated[
    float | None,
    typer.Option(
        metavar="N", help="MiB to save and load in a trial; by default so that some dozens fit into the time."
    ),
]
_Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="The most memory that a rank may use beyond the tensors.")
]
_File = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The file to write; by default $CKPT_CONFIG or ./ckpt.toml."),
]
_Write = Annotated[
    bool | None,
    typer.Option("--write/--no-write", help="Write always, or never; by default what gains 3 % or more."),
]

EXAMPLES = """
ckpt tune s3://bucket/run --seconds 600
ckpt tune /mnt/run --memory 1GiB --file ckpt.toml
"""


def tune(
    url: Annotated[str, url_of("The folder that checkpoints are saved to")],
    seconds: _Seconds = 300.0,
    max_trials: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="End the search after so many trials.")
    ] = None,
    megabytes: _Megabytes = None,
    memory: _Memory = "256MiB",
    file: _File = None,
    write: _Write = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the search.")] = 0,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Find the fastest threads, part size, files and memory for a place.

    Saves and loads there again and again with settings that Optuna proposes, compares the best with the
    defaults in turns, and writes a file that every save, load and command reads. docs/tuning.md tells
    more. Needs pip install './ckpt-storage[tune]'.
    """
    interrupted = "What the trials wrote was removed; no settings were written."
    with command(json, if_interrupted=interrupted) as output, sigterm_as_ctrl_c():
        options = parse_storage_options(storage_options)
        memory_bytes = int(parse_quantity("--memory", memory, SIZE_UNITS, "256MiB or 2GB"))
        with output.countdown() as progress:
            result = ckpt.tune(
                url, storage_options=options, seconds=seconds, max_trials=max_trials, megabytes=megabytes, memory_budget_bytes=memory_bytes,
                path=file, write=write, seed=seed, progress=progress,
            )  # fmt: skip
        if output.as_json:
            output.json(_as_json(result))
        else:
            _print(output, result)


def _print(output: Output, result: Tuned) -> None:
    states = [trial.state for trial in result.trials]
    others = [f"{states.count(state)} {state}" for state in ("cut short", "failed") if state in states]
    trials = ", ".join([count(len(states), "trial"), *others])
    output.print(f"{shown(result.url)}: {size(result.state_bytes)} a trial, {trials}")
    rows = table("", ">threads", ">parts", ">files", ">memory", ">save", ">load")
    for name, measured in (("defaults", result.defaults), ("best", result.best)):
        rows.add_row(name, *_cells(measured))
    output.print(rows)
    rounds = f"medians of {count(result.defaults.rounds, 'round')} in turns"
    if result.is_noteworthy:
        output.print(f"the best takes [bold green]{100 * result.gain:.0f} % less time[/] ({rounds})")
    else:
        output.print(f"the defaults are within 3 % of the best ({rounds})")
    if result.path is not None:
        output.print(f"written: {shown(result.path)}")
    else:
        output.print("no settings were written")


def _cells(measured: Measured) -> tuple[str, ...]:
    settings = measured.settings
    return (
        f"{settings.threads}",
        size(settings.part_size_bytes or 0),
        "default" if settings.files_per_rank is None else f"{settings.files_per_rank}",
        size(settings.memory_budget_bytes or 0),
        f"{measured.save_s:.2f} s",
        f"{measured.load_s:.2f} s",
    )


def _as_json(result: Tuned) -> dict[str, Any]:
    facts = dataclasses.asdict(result)
    for trial in facts["trials"]:
        trial["cost"] = trial["cost"] if math.isfinite(trial["cost"]) else None
    return facts | {"is_noteworthy": result.is_noteworthy}
