"""`ckpt cp`: copy a checkpoint between any two places."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt.cli.common import Json, command, count, parse_storage_options, shown, size

__all__ = ["cp"]


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to copy.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Its new place.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another checkpoint of this library at DST.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Transfers at the same time; default by the cores.")
    ] = None,
    storage_options: Annotated[
        list[str] | None,
        typer.Option(
            "--storage-options",
            metavar="KEY=VALUE|JSON",
            help="Options of SRC; of both, without those of DST.",
        ),
    ] = None,
    dst_storage_options: Annotated[
        list[str] | None,
        typer.Option(
            "--dst-storage-options", metavar="KEY=VALUE|JSON", help="Options of DST; '{}' for none."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Copy a checkpoint to another place, on any storage: checked block by block on its way, committed last.

    Run again after an interruption it goes on: what is there already is read, and not sent again if it is right.
    """
    to_go_on = "Nothing is visible at DST; the same command goes on where this one stopped."
    with command(json, to_go_on=to_go_on) as output:
        from ckpt.tools.copy import copy

        options = parse_storage_options(storage_options)
        dst_options = None if dst_storage_options is None else parse_storage_options(dst_storage_options)
        with output.progress("copying") as progress:
            done = copy(
                source,
                destination,
                storage_options=options,
                destination_options=dst_options,
                overwrite=overwrite,
                threads=threads,
                progress=progress,
            )
        if output.as_json:
            output.json(
                {
                    "source": done.source, "destination": done.destination, "format": done.format,
                    "already_there": done.already_there,
                    "sent_files": done.sent_files, "sent_bytes": done.sent_bytes,
                    "kept_files": done.kept_files, "kept_bytes": done.kept_bytes,
                }
            )  # fmt: skip
        elif done.already_there:
            output.print(f"{shown(done.destination)} holds this checkpoint already")
        else:
            kept = (
                f", {count(done.kept_files, 'file')} there before ({size(done.kept_bytes)})"
                if done.kept_files
                else ""
            )
            sent = f"{count(done.sent_files, 'file')} sent ({size(done.sent_bytes)}){kept}"
            output.print(f"copied to {shown(done.destination)}: {sent}")
