"""`ckpt cp`: copy a checkpoint."""

from __future__ import annotations

import math
from typing import Annotated

import typer

import ckpt
from ckpt.cli.options import DestinationOptions, Expect, Json, SourceOptions, Threads, parse_storage_options
from ckpt.cli.printing.output import command
from ckpt.words import count, shown, size

EXAMPLES = """
ckpt cp runs/step-100 s3://bucket/keep/step-100
ckpt cp s3://bucket/run/step-100 step-100 --materialise
"""


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to copy.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Where the copy goes.")],
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
    """Copy a checkpoint to any storage, checking every block.

    DST becomes a checkpoint when all of it is there. After an interruption run the same command
    again: files that are at DST already are checked, and not sent again if they are right.

    A checkpoint that names bytes of others beside it is copied beside them as it is, and elsewhere
    with --materialise, as one that stands alone.
    """
    interrupted = "Nothing is visible at DST; the same command goes on where this one stopped."
    with command(json, if_interrupted=interrupted, patience_s=math.inf) as output:
        options = parse_storage_options(storage_options)
        dst_options = parse_storage_options(dst_storage_options, "--dst-storage-options")
        with output.progress("copying") as progress:
            done = ckpt.copy(
                source,
                destination,
                storage_options=options,
                destination_options=dst_options,
                overwrite=overwrite,
                materialise=materialise,
                threads=threads,
                progress=progress,
                expect=expect,
            )
        if output.as_json:
            output.json(vars(done))
        elif done.already_there:
            output.print(f"{shown(done.destination)} already holds this checkpoint")
        else:
            text = f"{count(done.sent_files, 'file')} sent ({size(done.sent_bytes)})"
            if done.kept_files:
                text += f", {count(done.kept_files, 'file')} already there ({size(done.kept_bytes)})"
            output.print(f"copied to {shown(done.destination)}: {text}")
