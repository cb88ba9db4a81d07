"""`ckpt cp`: copy a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import ckpt
from ckpt.cli.options import (
    DestinationOptions,
    Expect,
    Json,
    SourceOptions,
    Threads,
    check_expect,
    parse_storage_options,
)
from ckpt.cli.printing.output import Output, command, for_each
from ckpt.errors import ConfigurationError
from ckpt.words import count, shown, size

if TYPE_CHECKING:
    from ckpt.tools.findings import Copied

EXAMPLES = """
ckpt cp runs/step-100 s3://bucket/keep/step-100
ckpt cp runs/step-100 runs/step-200 s3://bucket/keep
ckpt cp s3://bucket/run/step-100 step-100 --materialise
"""


def cp(
    sources: Annotated[list[str], typer.Argument(metavar="SRC...", help="The checkpoints to copy.")],
    destination: Annotated[
        str,
        typer.Argument(metavar="DST", help="Where the copy goes; of several SRC, the folder of the copies."),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another checkpoint of this library at DST.")
    ] = False,
    materialise: Annotated[
        bool, typer.Option("--materialise", help="Copy the bytes too that SRC names in other checkpoints.")
    ] = False,
    expect: Expect = None,
    threads: Threads = None,
    storage_options: SourceOptions = None,
    dst_storage_options: DestinationOptions = None,
    json: Json = False,
) -> None:
    """Copy checkpoints to any storage, checking every block.

    DST becomes a checkpoint when all of it is there. After an interruption run the same command
    again: files that are at DST already are checked, and not sent again if they are right.

    A checkpoint that names bytes of others beside it is copied beside them as it is, and elsewhere
    with --materialise, as one that stands alone.
    """
    interrupted = "Nothing is visible at DST; the same command goes on where this one stopped."
    with command(json, if_interrupted=interrupted, patience_s=math.inf) as output:
        options = parse_storage_options(storage_options)
        dst_options = parse_storage_options(dst_storage_options, "--dst-storage-options")
        check_expect(expect, sources)
        destinations = _destinations(sources, destination)

        def copy(source: str) -> None:
            with output.progress("copying") as progress:
                done = ckpt.copy(
                    source,
                    destinations[source],
                    storage_options=options,
                    destination_options=dst_options,
                    overwrite=overwrite,
                    materialise=materialise,
                    threads=threads,
                    progress=progress,
                    expect=expect,
                )
            _print(output, done)

        for_each(output, sources, copy)


def _destinations(sources: Sequence[str], destination: str) -> dict[str, str]:
    """Name the destination of each source: of several, the folders of their names in `destination`."""
    if len(sources) == 1:
        return {sources[0]: destination}
    # `.` and `..` have a name too.
    places = [source if "://" in source else os.path.abspath(source) for source in sources]
    names = [place.rstrip("/").rpartition("/")[2] for place in places]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"two of these {len(sources)} checkpoints have the same name, and would be copied to the same place: copy "
            "them one by one"
        )
    folder = destination.rstrip("/")
    return {source: f"{folder}/{name}" for source, name in zip(sources, names, strict=True)}


def _print(output: Output, done: Copied) -> None:
    if output.as_json:
        output.json(vars(done))
    elif done.already_there:
        output.print(f"{shown(done.destination)} already holds this checkpoint")
    else:
        text = f"{count(done.sent_files, 'file')} sent ({size(done.sent_bytes)})"
        if done.kept_files:
            text += f", {count(done.kept_files, 'file')} already there ({size(done.kept_bytes)})"
        output.print(f"copied to {shown(done.destination)}: {text}")
