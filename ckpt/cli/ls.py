"""`ckpt ls`: list checkpoints."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import ckpt
from ckpt.cli.options import Depth, Json, Root, StorageOptions, parse_storage_options
from ckpt.cli.printing.output import command
from ckpt.words import age, shown, size, tags_text

if TYPE_CHECKING:
    from ckpt.tools.ls import ListedCheckpoint

_COLORS = {
    "committed": "green", "durable": "green", "local": "cyan", "incomplete": "yellow", "foreign": "cyan", "damaged": "red", "unreadable": "red",
}  # fmt: skip
_HEADING = ("", "checkpoint", "step", "state", "size", "age", "ranks", "tags")

EXAMPLES = """
ckpt ls runs
ckpt ls s3://bucket/run
ckpt ls runs --json | jq -r '.checkpoints[] | select(.latest).url'
"""


def ls(root: Root, depth: Depth = 3, storage_options: StorageOptions = None, json: Json = False) -> None:
    """List the checkpoints in a folder and below it.

    Shows step, state, size, age, number of ranks and tags. After the size of its own data stands what a
    checkpoint names in others. An asterisk marks the latest complete
    checkpoint. On a node's own disk those that were carried to the durable place are `durable`, others `local`.
    """
    with command(json) as output:
        options = parse_storage_options(storage_options)
        with output.progress("listing") as progress:
            checkpoints = ckpt.list_checkpoints(root, storage_options=options, depth=depth, progress=progress)
        if output.as_json:
            root_url = _root_url(checkpoints, root)
            listed = [vars(each) | {"state": _state(each, root)} for each in checkpoints]
            output.json({"root": root_url, "checkpoints": listed})
            return
        if not checkpoints:
            output.print("no checkpoints")
            return
        output.print_columns(
            [_HEADING, *(_cells(each, root) for each in checkpoints)],
            names=1,
            right=[2, 4, 5, 6],
            optional=3,
            colors=_COLORS,
        )
        for each in checkpoints:
            if each.problem is not None:
                output.print(f"[red]{shown(each.path or '.')}:[/] {shown(each.problem)}")


def _cells(each: ListedCheckpoint, root: str) -> tuple[str, ...]:
    return (
        "*" if each.latest else "",
        each.path or ".",
        "" if each.step is None else str(each.step),
        _state(each, root),
        _size(each),
        age(None if each.created_at_s is None else time.time() - each.created_at_s),
        "" if each.world_size is None else f"{each.world_size:,}",
        tags_text(each.tags),
    )


def _state(each: ListedCheckpoint, root: str) -> str:
    """Tell the state of a checkpoint, and in the folder of a run on a node's disk whether it is durable."""
    from ckpt.draining.marker import durable_of

    folder, name = os.path.split(os.path.join(root, each.path) if each.path else root.rstrip("/"))
    if each.state != "committed" or "://" in root or durable_of(folder) is None:
        return each.state
    from ckpt.local_first.drain_process import read_status

    known = read_status(folder).get(name)
    return "durable" if known is not None and (known.id, known.state) == (each.id, "durable") else "local"


def _size(each: ListedCheckpoint) -> str:
    own = "" if each.size_bytes is None else size(each.size_bytes)
    return f"{own} + {size(each.referred_bytes)}" if each.referred_bytes else own


def _root_url(checkpoints: list[ListedCheckpoint], root: str) -> str:
    """Name the root as the store does, without credentials."""
    from ckpt.backends.options import redact_url

    if not checkpoints:
        return redact_url(root)
    first = checkpoints[0]
    return first.url.removesuffix(f"/{first.path}") if first.path else first.url
