"""Arrange what is in a checkpoint as a tree of modules, with a bounded number of leaves."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.tools.inspect import Inspection, ObjectInfo, TensorInfo

PARTS = ("weights", "optimizer", "other")

_MAX_LEAVES = 12_000
"""Of a page of a few MB. What is smaller than the largest of them is summed by module, part and dtype."""
_MAX_LEVELS = 32
_MAX_NAME = 160
"""Characters of one part of a name; what is longer is cut in the middle."""

_Entry = TensorInfo | ObjectInfo
_Path = tuple[str, ...]
_Kind = tuple[int, str]


@dataclass
class _Sum:
    """Entries of one kind below a module, taken together."""

    count: int = 0
    nbytes: int = 0
    referred: int = 0


def tree_of(inspection: Inspection) -> list[Any]:
    """Return the tree as it goes into the page.

    A module is `[name, children]`; a leaf is `[name, part, dtype, bytes, referred bytes, count, shape, sharding]`. The
    bytes of all leaves are those of all tensors (each element once) and objects.
    """
    entries: Sequence[_Entry] = [*inspection.tensors.values(), *inspection.objects.values()]
    kept = entries
    if len(entries) > _MAX_LEAVES:
        kept = heapq.nlargest(_MAX_LEAVES, entries, key=_bytes_of)
    root: dict[str, Any] = {}
    modules: set[_Path] = {()}
    for entry in kept:
        path = _path_of(entry.fqn)
        modules.update(path[:depth] for depth in range(1, len(path)))
        _module(root, path[:-1]).setdefault("", []).append(_leaf(path[-1], entry))
    if len(kept) < len(entries):
        names = {entry.fqn for entry in kept}
        _add_sums(root, modules, [entry for entry in entries if entry.fqn not in names])
    return ["", _children(root)]


def _add_sums(root: dict[str, Any], modules: set[_Path], rest: Sequence[_Entry]) -> None:
    for levels in (_MAX_LEVELS, 4, 2, 1, 0):  # until it is few enough: names may be anything
        sums: dict[tuple[_Path, _Kind], _Sum] = defaultdict(_Sum)
        for entry in rest:
            path = _path_of(entry.fqn)[:-1][:levels]
            while path not in modules:
                path = path[:-1]
            total = sums[path, _kind(entry)]
            total.count += 1
            total.nbytes += _bytes_of(entry)
            total.referred += entry.referred_bytes
        if len(sums) <= _MAX_LEAVES:
            break
    for (path, (part, dtype)), total in sums.items():
        leaf = [f"{total.count:,} smaller", part, dtype, total.nbytes, total.referred, total.count, "", ""]
        _module(root, path).setdefault("", []).append(leaf)


def _module(root: dict[str, Any], path: _Path) -> dict[str, Any]:
    """Return the dict of a module: its modules by name with a dot before it, its leaves at the empty name."""
    module = root
    for name in path:
        module = module.setdefault(f".{name}", {})
    return module


def _children(module: dict[str, Any]) -> list[Any]:
    modules = [[name[1:], _children(below)] for name, below in module.items() if name]
    return [*modules, *module.get("", [])]


def _path_of(fqn: str) -> _Path:
    return tuple(shortened(name) for name in fqn.split(".", _MAX_LEVELS - 1))


def _leaf(name: str, entry: _Entry) -> list[Any]:
    shape, sharding = "", ""
    if isinstance(entry, TensorInfo):
        shape, sharding = "x".join(map(str, entry.shape)) or "scalar", entry.sharding
    return [name, *_kind(entry), _bytes_of(entry), entry.referred_bytes, 1, shape[:_MAX_NAME], sharding]


def _kind(entry: _Entry) -> _Kind:
    return PARTS.index(entry.part), entry.dtype if isinstance(entry, TensorInfo) else "object"


def _bytes_of(entry: _Entry) -> int:
    return entry.nbytes if isinstance(entry, TensorInfo) else entry.length


def shortened(text: str, most: int = _MAX_NAME) -> str:
    """Cut a text in its middle."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - 1) // 2 :]}"
