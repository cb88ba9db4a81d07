"""Draw values that no checkpoint has, and put them into records."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

VALUES: list[Any] = [
    1 << 60, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, -(1 << 63), -1, 0, 1, 1 << 32, 2.5, 1e308, None, True, "",
    "..", "../outside", "/etc/passwd", "a\\b", "a\0b", "rank-00000/../x", "commit.json", ".metadata", "x" * 3000,
    "\x1b[2J", "\u202e", "9" * 30, [], {}, [[]], [1 << 60] * 3, [0] * 100, {"": {}}, "qint8", "float32", "save",
]  # fmt: skip
HOSTILE: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(VALUES),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.text(max_size=20),
    st.binary(max_size=20),
)


def cut_bytes(raw: bytearray, cut: str, start: int, stop: int) -> None:
    """Cut bytes off at `start` ("end"), or take out ("middle") or repeat ("double") those from there to `stop`."""
    if cut == "end":
        del raw[start:]
    elif cut == "middle":
        del raw[start:stop]
    elif cut == "double":
        raw[stop:stop] = raw[start:stop]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places in nested lists and dicts."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for number in range(len(value)):
            yield from leaves(value[number], (*path, number))


def change_places(value: Any, data: st.DataObject, *, json_only: bool) -> None:
    """Change, remove or double a few places in a record."""
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(leaves(value))))
        new = copy.deepcopy(data.draw(HOSTILE))  # lists are changed in place
        if json_only and isinstance(new, bytes):
            new = new.hex()
        if not path:
            continue
        parent = value
        for step in path[:-1]:
            parent = parent[step]
        action = data.draw(st.sampled_from(["set", "set", "set", "delete", "double"]))
        if action == "delete":
            del parent[path[-1]]
        elif action == "double" and isinstance(parent, list):
            parent.append(parent[path[-1]])
        else:
            parent[path[-1]] = new


def fields_of(metadata: Any) -> list[tuple[Any, str]]:
    """List every field of stock metadata that can be set."""
    fields: list[tuple[Any, str]] = []
    for stored in metadata.state_dict_metadata.values():
        if hasattr(stored, "chunks"):
            fields += [(stored, name) for name in ("size", "chunks", "properties")]
            fields += [(chunk, name) for chunk in stored.chunks for name in ("offsets", "sizes")]
    for info in metadata.storage_data.values():
        fields += [(info, name) for name in ("relative_path", "offset", "length", "transform_descriptors")]
    return [*fields, (metadata, "planner_data"), (metadata, "storage_meta"), (metadata, "version")]
