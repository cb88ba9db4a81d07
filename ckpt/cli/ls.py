"""`ckpt ls`: the checkpoints under a root."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ckpt.cli.common import (
    Json,
    Output,
    Root,
    StorageOptions,
    age,
    command,
    parse_storage_options,
    shown,
    size,
)

if TYPE_CHECKING:
    from ckpt.tools.ls import Found

__all__ = ["ls"]

_COLORS = {"committed": "green", "incomplete": "yellow", "foreign": "cyan", "damaged": "red"}


def ls(
    root: Root,
    depth: Annotated[int, typer.Option("--depth", min=0, max=8, help="How many folders deep to look.")] = 3,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """List the checkpoints under a root: step, state, size, age, world size, tags; * is the latest that is whole."""
    with command(json) as output:
        from ckpt.tools.ls import list_checkpoints

        options = parse_storage_options(storage_options)
        found = list_checkpoints(root, storage_options=options, depth=depth)
        if output.as_json:
            output.json({"root": root_url(found, root), "checkpoints": [_as_json(what) for what in found]})
        else:
            _print(output, found)


def root_url(found: list[Found], root: str) -> str:
    """The root without credentials, as the store names it."""
    from ckpt.backends.options import redact_url

    if found:
        path = found[0].path
        return found[0].url.removesuffix(f"/{path}") if path else found[0].url
    return redact_url(root)


def _as_json(found: Found) -> dict[str, Any]:
    return {
        "path": found.path,
        "url": found.url,
        "state": found.state,
        "step": found.step,
        "size_bytes": found.size_bytes,
        "created_at_s": found.created_at_s,
        "world_size": found.world_size,
        "id": found.id,
        "tags": dict(found.tags),
        "problem": found.problem,
        "latest": found.latest,
    }


def _print(output: Output, found: list[Found]) -> None:
    if not found:
        output.print("no checkpoints")
        return
    table = Table("", "checkpoint", "step", "state", "size", "age", "ranks", "tags", box=None, pad_edge=False)
    for what in found:
        since = None if what.created_at_s is None else time.time() - what.created_at_s
        table.add_row(
            "*" if what.latest else "",
            shown(what.path or "."),
            "" if what.step is None else str(what.step),
            f"[{_COLORS[what.state]}]{what.state}[/]",
            "" if what.size_bytes is None else size(what.size_bytes),
            age(since),
            "" if what.world_size is None else str(what.world_size),
            ", ".join(f"{shown(name)}={shown(value)}" for name, value in what.tags.items()),
        )
    output.print(table)
    for what in found:
        if what.problem is not None:
            output.print(f"[red]{shown(what.path or '.')}:[/] {shown(what.problem)}")
