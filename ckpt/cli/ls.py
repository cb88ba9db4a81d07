"""`ckpt ls`: list checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import ckpt
from ckpt.backends.options import nearest, redact_url
from ckpt.cli.options import Depth, Json, Root, StorageOptions, parse_storage_options
from ckpt.cli.printing.output import Output, command
from ckpt.errors import ConfigurationError
from ckpt.words import METRIC_TAG, age, count, shown, size, tags_text

if TYPE_CHECKING:
    from ckpt.tools.ls import ListedCheckpoint

_COLORS = {
    "committed": "green", "durable": "green", "local": "cyan", "incomplete": "yellow", "foreign": "cyan", "damaged": "red", "unreadable": "red",
}  # fmt: skip
_MAX_METRICS = 4
"""Columns that are shown without being chosen."""
_FIELDS = ("step", "state", "size", "age", "ranks", "save", "named by", "tags", "id", "url")
"""Columns. Metrics and tags add others, which have their names."""

_Key = tuple[bool, float, str]

EXAMPLES = """
ckpt ls runs
ckpt ls s3://bucket/run --latest
ckpt ls runs --sort -loss --columns step,loss,size
ckpt ls runs --json | jq -r '.checkpoints[] | select(.latest).url'
"""


def ls(
    root: Root,
    latest: Annotated[
        bool, typer.Option("--latest", help="Only the latest complete one of each run.")
    ] = False,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Sort by a column, a metric or a tag; -COLUMN: the largest first."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help=f"Show these: {', '.join(_FIELDS)}, any metric or tag."),
    ] = None,
    depth: Depth = 3,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """List the checkpoints in a folder and below it.

    Shows step, state, size, age, number of ranks, metrics and tags. After the size of its own data stands what a
    checkpoint names in others. An asterisk marks the latest complete checkpoint. On a node's own disk those that were
    carried to the durable place are `durable`, others `local`.
    """
    with command(json) as output:
        options = parse_storage_options(storage_options)
        with output.progress("listing") as progress:
            checkpoints = ckpt.list_checkpoints(root, storage_options=options, depth=depth, progress=progress)
        listing = _Listing(root, checkpoints)
        chosen = (
            [] if columns is None else [listing.checked("--columns", name) for name in columns.split(",")]
        )
        checkpoints = [each for each in checkpoints if each.latest or not latest]
        if sort is not None:
            name = listing.checked("--sort", sort.removeprefix("-"))
            checkpoints.sort(key=lambda each: listing.key(each, name), reverse=sort.startswith("-"))
        if output.as_json:
            root_url = _root_url(checkpoints, root)
            listed = [vars(each) | {"state": _state(each, root)} for each in checkpoints]
            output.json({"root": root_url, "checkpoints": listed})
            return
        if not checkpoints:
            output.print("no checkpoints")
            return
        _print(output, listing, checkpoints, chosen)
        for each in checkpoints:
            if each.problem is not None:
                output.print(f"[red]{shown(each.path or '.')}:[/] {shown(each.problem)}")


def _print(
    output: Output, listing: _Listing, checkpoints: Sequence[ListedCheckpoint], chosen: Sequence[str]
) -> None:
    names = chosen or listing.usual(checkpoints)
    rows = [("", "checkpoint", *names)]
    for each in checkpoints:
        mark = "*" if each.latest else ""
        rows.append((mark, each.path or ".", *(listing.cell(each, name) for name in names)))
    texts = {"state", "tags", "id", "url", *listing.tags}
    right = [at for at, name in enumerate(names, 2) if name not in texts]
    hidden = output.print_columns(rows, names=1, right=right, optional=max(0, len(names) - 3), colors=_COLORS)
    if hidden:
        output.print(f"[dim]no room for {', '.join(map(shown, hidden))}: --columns chooses[/]")


class _Listing:
    """The columns of checkpoints."""

    def __init__(self, root: str, checkpoints: Sequence[ListedCheckpoint]) -> None:
        self._root = root
        self._dependents = Counter(
            os.path.join(os.path.dirname(each.path), base) for each in checkpoints for base in each.bases
        )
        self.metrics = list(dict.fromkeys(name for each in checkpoints for name in each.metrics))
        tags = dict.fromkeys(name for each in checkpoints for name in each.tags)
        self.tags = [name for name in tags if name != "step" and not name.startswith(METRIC_TAG)]

    def checked(self, option: str, name: str) -> str:
        """Return the name of a column. Raises ConfigurationError if there is none."""
        known = [*_FIELDS, *self.metrics, *self.tags]
        if name not in known:
            raise ConfigurationError(
                f"{option}: there is no {name!r}{nearest(name, known)}; there are {', '.join(known)}"
            )
        return name

    def usual(self, checkpoints: Sequence[ListedCheckpoint]) -> list[str]:
        """List the columns that are shown if none are chosen."""
        names = ["step", "state", "size", "age", "ranks"]
        if any(self._dependents[each.path] for each in checkpoints):
            names.append("named by")
        names += [name for name in self.metrics if name not in _FIELDS][:_MAX_METRICS]
        return names + ["tags"] * any(self._other_tags(each) for each in checkpoints)

    def cell(self, each: ListedCheckpoint, name: str) -> str:
        """Write what a checkpoint has in a column."""
        dependents = self._dependents[each.path]
        made: dict[str, Callable[[], str]] = {
            "step": lambda: "" if each.step is None else str(each.step),
            "state": lambda: _state(each, self._root),
            "size": lambda: _size(each),
            "age": lambda: age(None if each.created_at_s is None else time.time() - each.created_at_s),
            "ranks": lambda: "" if each.world_size is None else f"{each.world_size:,}",
            "save": lambda: "" if each.save_s is None else f"{each.save_s:.2f} s",
            "named by": lambda: count(dependents, "other") if dependents else "",
            "tags": lambda: tags_text(self._other_tags(each)),
            "id": lambda: each.id or "",
            "url": lambda: each.url,
        }
        if name in made:
            return made[name]()
        if name in each.metrics:
            value = each.metrics[name]
            return "?" if value is None else f"{value:.4g}"
        return each.tags.get(name, "")

    def key(self, each: ListedCheckpoint, name: str) -> _Key:
        """Return what a column is sorted by: numbers before texts, those without a value first."""
        numbers: dict[str, float | None] = {
            "step": each.step,
            "size": each.size_bytes,
            "age": None if each.created_at_s is None else -each.created_at_s,
            "ranks": each.world_size,
            "save": each.save_s,
            "named by": self._dependents[each.path],
        }
        if name in numbers or name in each.metrics:
            number = numbers[name] if name in numbers else each.metrics[name]
            return False, -math.inf if number is None else number, ""
        text = self.cell(each, name)
        try:
            return False, float(text), ""
        except ValueError:
            return bool(text), -math.inf, text

    def _other_tags(self, each: ListedCheckpoint) -> dict[str, str]:
        """Return the tags that no other column shows."""
        return {
            name: text
            for name, text in each.tags.items()
            if name.removeprefix(METRIC_TAG) not in self.metrics[:_MAX_METRICS]
            and (name, text) != ("step", str(each.step))
        }


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
    if not checkpoints:
        return redact_url(root)
    first = checkpoints[0]
    return first.url.removesuffix(f"/{first.path}") if first.path else first.url
