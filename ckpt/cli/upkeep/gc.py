"""`ckpt gc`: remove leftovers of interrupted saves."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

import ckpt
from ckpt.cli.options import (
    TIME_UNITS,
    Depth,
    DryRun,
    Json,
    Root,
    StorageOptions,
    parse_quantity,
    parse_storage_options,
)
from ckpt.cli.printing.output import MAX_LINES, command
from ckpt.words import OLD_VERSIONS, age, count, shown, size

EXAMPLES = """
ckpt gc runs --dry-run
ckpt gc s3://bucket/run --grace 7d
"""


def gc(
    root: Root,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="Keep what is younger than this: 90s, 30m, 24h, 7d.")
    ] = "24h",
    depth: Depth = 3,
    dry_run: DryRun = False,
    uncommitted_models: Annotated[
        bool,
        typer.Option(
            "--uncommitted-models", help="Also remove models that are whole but have no commit record."
        ),
    ] = False,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Remove leftovers of interrupted saves.

    Leftovers are files that no commit record lists, and unfinished uploads. Only names that this
    library gives are removed, and only what is older than --grace, which must be longer than any
    save takes. Safetensors files that other programs can still read stay, though their commit
    record is lost.
    """
    with command(json, if_interrupted="Checkpoints were not touched; run it again to go on.") as output:
        with output.progress("looking" if dry_run else "collecting") as progress:
            garbage = ckpt.collect_garbage(
                root,
                storage_options=parse_storage_options(storage_options),
                grace_s=parse_quantity("--grace", grace, TIME_UNITS, "90s, 30m, 24h or 7d"),
                depth=depth,
                dry_run=dry_run,
                uncommitted_models=uncommitted_models,
                progress=progress,
            )
        if output.as_json:
            facts = dataclasses.asdict(garbage)
            url = facts.pop("url")
            output.json({"root": url, "dry_run": dry_run, "freed_bytes": garbage.freed_bytes, **facts})
            return
        rows = [("checkpoint", "leftover", "bytes", "age")]
        for item in garbage.items[:MAX_LINES]:
            nbytes = "upload" if item.unfinished and not item.size_bytes else size(item.size_bytes)
            rows.append((item.place or ".", item.key, nbytes, age(item.age_s)))
        if garbage.items:
            output.print_columns(rows, names=1, right=[2, 3])
            output.print_hidden(len(garbage.items) - MAX_LINES)
        for place in garbage.restored:
            output.print(f"{shown(place or '.')}: .metadata restored to the committed one")
        for place, reason in garbage.skipped.items():
            output.print(f"[yellow]skipped[/] {shown(place or '.')}: {shown(reason)}")
        for place, referrers in garbage.referred.items():
            names = ", ".join(map(shown, referrers))
            output.print(f"kept what is left of {shown(place or '.')}, as others name it: {names}")
        for place in garbage.models:
            output.print(
                f"[yellow]kept[/] {shown(place or '.')}: a model without commit.json, which other programs can "
                "read; bring commit.json back, or remove it with --uncommitted-models"
            )
        if garbage.young:
            output.print(f"kept {count(garbage.young, 'leftover')} younger than {shown(grace)}")
        if garbage.keeps_versions:
            output.print(f"[yellow]careful:[/] {OLD_VERSIONS}")
        verb = "would remove" if dry_run else "removed"
        output.print(f"{verb} {count(len(garbage.items), 'leftover')}, {size(garbage.freed_bytes)}")
