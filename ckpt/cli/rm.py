"""`ckpt rm`: remove a checkpoint."""

from __future__ import annotations

from ckpt.cli.common import (
    DryRun,
    Json,
    StorageOptions,
    Url,
    command,
    count,
    parse_storage_options,
    shown,
    size,
)

__all__ = ["rm"]


def rm(url: Url, dry_run: DryRun = False, storage_options: StorageOptions = None, json: Json = False) -> None:
    """Remove a checkpoint: its commit record first, then what that lists. Nothing else is touched."""
    to_go_on = "If the removal had begun, this is no checkpoint any more; `ckpt gc` removes the rest."
    with command(json, to_go_on=to_go_on) as output:
        from ckpt.tools.remove import remove

        found = remove(url, storage_options=parse_storage_options(storage_options), dry_run=dry_run)
        if output.as_json:
            output.json(
                {
                    "url": found.url,
                    "id": found.id,
                    "dry_run": dry_run,
                    "data_bytes": found.data_bytes,
                    "keys": list(found.keys),
                }
            )
            return
        if dry_run:
            output.print(*(shown(key) for key in found.keys))
        verb = "would remove" if dry_run else "removed"
        output.print(
            f"{verb} {shown(found.url)}: {count(len(found.keys), 'object')}, {size(found.data_bytes)}"
        )
