"""`ckpt rm`: remove a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckpt
from ckpt.backends.options import redact_url
from ckpt.cli.options import DryRun, Json, StorageOptions, Urls, parse_storage_options
from ckpt.cli.printing.output import EXIT_PROBLEM, MAX_LINES, Output, command, for_each
from ckpt.errors import CheckpointError, NotFound
from ckpt.words import OLD_VERSIONS, count, printable, shown, size

if TYPE_CHECKING:
    from ckpt.tools.remove import Removed

EXAMPLES = """
ckpt rm runs/step-100 --dry-run
ckpt rm runs/step-100 runs/step-200
ckpt rm s3://bucket/policies --keep 3
"""


def rm(
    urls: Urls,
    dry_run: DryRun = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before the newest of a run is removed.")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Of each URL, a folder of checkpoints, remove all but the newest N."
        ),
    ] = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Remove checkpoints: of each its records first, then its data.

    Only objects that the commit record lists are removed. On a terminal it asks before it removes
    the newest checkpoint in its folder. Of a symbolic link only the link is removed. A checkpoint whose bytes others name is not removed.
    """
    interrupted = "If the removal had begun, the checkpoint is gone; `ckpt gc` removes what is left of it."
    with command(json, if_interrupted=interrupted) as output:
        options = parse_storage_options(storage_options)
        asks = sys.stdin.isatty() and sys.stderr.isatty() and not (yes or dry_run or keep is not None)

        def remove(url: str) -> None:
            if asks and not _agreed(url, options, output):
                output.print("nothing was removed")
                raise typer.Exit(EXIT_PROBLEM)
            with output.progress("looking" if dry_run else "removing") as progress:
                removed = ckpt.remove(url, storage_options=options, dry_run=dry_run, progress=progress)
            _print(output, removed, dry_run)

        def remove_older(root: str) -> None:
            from ckpt.tools.remove import older_than

            assert keep is not None
            with output.progress("looking") as progress:
                older = older_than(root, keep, storage_options=options, progress=progress)
            if older:
                for_each(output, older, remove)
            elif not output.as_json:
                output.print(f"nothing to remove: {shown(redact_url(root))} has no more than {keep}")

        for_each(output, urls, remove if keep is None else remove_older)


def _print(output: Output, removed: Removed, dry_run: bool) -> None:
    if output.as_json:
        output.json({**vars(removed), "dry_run": dry_run})
        return
    if dry_run:
        output.print(*map(shown, removed.keys[:MAX_LINES]))
        output.print_hidden(len(removed.keys) - MAX_LINES)
    verb = "would remove" if dry_run else "removed"
    if removed.is_link:
        output.print(f"{verb} the link {shown(removed.url)}; the checkpoint that it leads to stays")
        return
    amount = f"{count(len(removed.keys), 'object')}, {size(removed.data_bytes)}"
    output.print(f"{verb} {shown(removed.url)}: {amount}")
    if removed.keeps_versions:
        output.print(f"[yellow]careful:[/] {OLD_VERSIONS}")
    if removed.kept:
        names = ", ".join(map(shown, removed.referrers))
        output.print(f"{count(len(removed.kept), 'object')} stay, which a save has come to name: {names}")


def _agreed(url: str, options: Mapping[str, Any] | None, output: Output) -> bool:
    """Ask before the newest checkpoint of a folder is removed; True if it is another one."""
    folder, _, name = url.rstrip("/").rpartition("/")
    if not name or folder.endswith(("/", ":")):  # a bucket
        return True
    try:
        root = folder or ("/" if url.startswith("/") else ".")
        with output.progress("looking") as progress:
            listed = ckpt.list_checkpoints(root, storage_options=options, depth=1, progress=progress)
    except NotFound:
        return True  # the removal itself says why
    except CheckpointError as error:
        return _confirmed(f"{redact_url(url)} may be the newest in its folder ({error})")
    committed = [each for each in listed if each.state == "committed" and each.path]
    if not any(each.latest and each.path == name for each in committed):
        return True
    which = "the newest of" if len(committed) > 1 else "the only one of"
    return _confirmed(f"{redact_url(url)} is {which} {count(len(committed), 'checkpoint')} in its folder")


def _confirmed(fact: str) -> bool:
    try:
        return typer.confirm(printable(f"{fact}. Remove it?"), err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None
