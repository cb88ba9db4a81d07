"""`ckpt gc`: remove what saves that did not finish have left."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.table import Table

from ckpt.cli.common import (
    DryRun,
    Json,
    Root,
    StorageOptions,
    age,
    command,
    count,
    parse_storage_options,
    shown,
    size,
)
from ckpt.errors import ConfigurationError

__all__ = ["gc"]

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def gc(
    root: Root,
    grace: Annotated[
        str,
        typer.Option("--grace", metavar="TIME", help="Leave alone what is younger: 90s, 30m, 24h, 7d."),
    ] = "24h",
    depth: Annotated[int, typer.Option("--depth", min=0, max=8, help="How many folders deep to look.")] = 3,
    dry_run: DryRun = False,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Remove leftovers of saves that did not finish: files that no commit lists, and unfinished uploads.

    Only names that this library gives, and only what is older than the grace period, which has to be longer than
    any save takes.
    """
    with command(json, to_go_on="Run it again to go on; checkpoints are not touched.") as output:
        from ckpt.tools.gc import collect_garbage

        found = collect_garbage(
            root,
            storage_options=parse_storage_options(storage_options),
            grace_s=_seconds(grace),
            depth=depth,
            dry_run=dry_run,
        )
        if output.as_json:
            output.json(
                {
                    "root": found.url,
                    "dry_run": dry_run,
                    "freed_bytes": found.freed_bytes,
                    "items": [
                        {
                            "place": item.place, "key": item.key, "size_bytes": item.size_bytes,
                            "age_s": item.age_s, "unfinished": item.unfinished,
                        }
                        for item in found.items
                    ],
                    "young": found.young,
                    "restored": found.restored,
                    "skipped": found.skipped,
                }
            )  # fmt: skip
            return
        table = Table("place", "leftover", "bytes", "age", box=None, pad_edge=False)
        for item in found.items:
            nbytes = "upload" if item.unfinished else size(item.size_bytes)
            table.add_row(shown(item.place or "."), shown(item.key), nbytes, age(item.age_s))
        if found.items:
            output.print(table)
        for place in found.restored:
            output.print(f"{shown(place or '.')}: .metadata put back to what is committed")
        for place, reason in found.skipped.items():
            output.print(f"[yellow]left alone[/] {shown(place or '.')}: {shown(reason)}")
        if found.young:
            output.print(f"{count(found.young, 'leftover')} younger than {shown(grace)} left alone")
        verb = "would remove" if dry_run else "removed"
        output.print(f"{verb} {count(len(found.items), 'leftover')}, {size(found.freed_bytes)}")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ConfigurationError(f"--grace: {text!r} is no time; write 90s, 30m, 24h or 7d")
    return float(found[1]) * _UNITS[found[2]]
