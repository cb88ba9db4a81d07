"""`ckpt report`: draw a checkpoint or a run as a page."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpt.cli.options import Depth, Json, StorageOptions, parse_storage_options
from ckpt.cli.printing.output import command
from ckpt.errors import ConfigurationError
from ckpt.whole_files import write_whole
from ckpt.words import shown, size

EXAMPLES = """
ckpt report runs/step-100
ckpt report s3://bucket/run -o run.html --events events.jsonl
"""


def report(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A checkpoint, or a folder of checkpoints: a path or URL.")
    ],
    out: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The page to write; - is standard output.")
    ] = "report.html",
    events: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Events of the run, as JsonLines wrote them; by default events.jsonl in a local ROOT.",
        ),
    ] = None,
    depth: Depth = 3,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Draw a checkpoint, or a run, as one page to look at in a browser, without a network.

    Of a checkpoint: what is in it by module, dtype and part, how long its save took, each rank. Of a folder of
    checkpoints: its history and the latest. Reads records, no data. Replaces FILE.
    """
    with command(json, if_interrupted="No page was written.") as output:
        if out == "-" and json:
            raise ConfigurationError("--json and -o - both need standard output; give -o a file")
        if os.path.isdir(out):
            raise ConfigurationError(f"-o names a file, and {out} is a folder; write -o {out}/report.html")
        from ckpt.report.report import make_report

        options = parse_storage_options(storage_options)
        with output.progress("reading records") as progress:
            made = make_report(url, storage_options=options, events=events, depth=depth, progress=progress)
        page = made.html.encode()
        if out == "-":
            sys.stdout.buffer.write(page)
            return
        path = _write(out, page)
        if output.as_json:
            output.json({"url": made.url, "kind": made.kind, "path": str(path), "size_bytes": len(page)})
            return
        output.print(f"wrote {shown(out)} ({size(len(page))}); open it in a browser: {shown(path.as_uri())}")


def _write(out: str, page: bytes) -> Path:
    """Write the page, which appears when it is whole. Raises ConfigurationError."""
    path = Path(out).absolute()
    try:
        if path.exists() and not path.is_file():  # a device or pipe, in whose place no file must come
            path.write_bytes(page)
        else:
            write_whole(path, page)
    except OSError as error:
        raise ConfigurationError(f"-o {out} cannot be written: {error.strerror}") from error
    return path
