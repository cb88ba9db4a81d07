"""`ckpt rm`: remove a checkpoint."""

from __future__ import annotations

import ckpt
from ckpt.cli.options import DryRun, Json, StorageOptions, Url, parse_storage_options
from ckpt.cli.output import command, count, shown, size


def rm(url: Url, dry_run: DryRun = False, storage_options: StorageOptions = None, json: Json = False) -> None:
    """Remove a checkpoint: its commit record first, then its data.

    Only objects that the commit record lists are removed.
    """
    interrupted = "If the removal had begun, the checkpoint is gone; `ckpt gc` removes what is left of it."
    with command(json, if_interrupted=interrupted) as output:
        removed = ckpt.remove(url, storage_options=parse_storage_options(storage_options), dry_run=dry_run)
        if output.as_json:
            output.json({**vars(removed), "dry_run": dry_run})
            return
        if dry_run:
            output.print(*map(shown, removed.keys))
        verb = "would remove" if dry_run else "removed"
        amount = f"{count(len(removed.keys), 'object')}, {size(removed.data_bytes)}"
        output.print(f"{verb} {shown(removed.url)}: {amount}")
