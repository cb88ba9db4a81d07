"""Check the `planner_data` of a checkpoint, and encode it as a typed record: plain values only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

_MAX_PLAIN_NODES = 50_000_000
_MAX_DEPTH = 128
_MAX_PATH_PARTS = 128
_MAX_PATH_GROWTH = 16
_PATH_SLACK = 1 << 20
_MAX_PADDING = 16
_MAX_INTEGER_DIGITS = 600
_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})
_TEXT = {str}
HASH_MODULUS = (1 << 61) - 1
"""Numbers from here on share the hashes of smaller ones: as keys they can make a dict slow."""


class _List(msgspec.Struct, array_like=True, tag="l"):
    items: list[PlainValue]


class _Tuple(msgspec.Struct, array_like=True, tag="t"):
    items: list[PlainValue]


class _Dict(msgspec.Struct, array_like=True, tag="d"):
    keys: list[bool | int | str | _Bytes | None]
    values: list[PlainValue]


class _Bytes(msgspec.Struct, array_like=True, tag="b"):
    data: bytes


class _LargeInteger(msgspec.Struct, array_like=True, tag="i"):
    digits: str


PlainValue = bool | int | float | str | _Bytes | _List | _Tuple | _Dict | _LargeInteger | None


def pack(value: Any, depth: int = 0) -> PlainValue:
    """Make a record of a plain value. Raises ValueError for any other, or one nested too deep to be read."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise ValueError(f"values nested more than {_MAX_DEPTH} deep")
    if kind is list:
        return _List([pack(item, depth + 1) for item in value])
    if kind is tuple:
        is_of_texts = set(map(type, value)) == _TEXT  # most are paths of tensors
        return _Tuple(
            list(value) if is_of_texts and depth < _MAX_DEPTH else [pack(each, depth + 1) for each in value]
        )
    if kind in (dict, OrderedDict):
        keys: Any = [pack(key) for key in value]
        return _Dict(keys, [pack(item, depth + 1) for item in value.values()])
    if kind is bytes:
        return _Bytes(value)
    if kind is int and not -(1 << 63) <= value < 1 << 63:
        return _LargeInteger(f"{value:x}")
    if kind in (str, int, float, bool, type(None)):
        return value  # type: ignore[no-any-return]
    raise ValueError(f"a {kind.__module__}.{kind.__qualname__}")


def unpack(value: PlainValue) -> Any:
    """Restore the value that `pack` was given. Raises ValueError where a record contradicts itself."""
    if isinstance(value, _List):
        return [unpack(item) for item in value.items]
    if isinstance(value, _Tuple):
        return tuple(unpack(item) for item in value.items)
    if isinstance(value, _Dict):
        keys = [unpack(key) for key in value.keys]
        if len(keys) != len(value.values) or not all(map(_is_key, keys)):
            raise ValueError("a dict with unfit keys")
        return dict(zip(keys, map(unpack, value.values), strict=True))
    if isinstance(value, _Bytes):
        return value.data
    if isinstance(value, _LargeInteger):
        if len(value.digits) > _MAX_INTEGER_DIGITS:
            raise ValueError("an absurd number")
        return int(value.digits, 16)
    return value


def check_planner_data(planner_data: Any) -> None:
    """Raise ValueError unless it is plain values that a load can use without undue time or memory."""
    _check_plain(planner_data)
    _check_paths(planner_data)


class NotPlain(ValueError):
    """A value that is none of the plain ones: `value`."""

    def __init__(self, value: Any) -> None:
        kind = type(value)
        super().__init__(f"a {kind.__module__}.{kind.__qualname__}")
        self.value = value

    def __reduce__(self) -> Any:
        """Pickle the text alone: the value may be anything."""
        return ValueError, self.args


def _is_key(value: object) -> bool:
    if type(value) is int:
        return -HASH_MODULUS < value < HASH_MODULUS
    return type(value) in (str, bytes, bool, type(None))


def _check_plain(value: Any) -> None:
    """Look at each part once, however often it is shared."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        part = todo.pop()
        kind = type(part)
        if kind in _LEAVES:
            continue
        if kind not in (dict, OrderedDict, list, tuple):
            raise NotPlain(part)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if len(seen) > _MAX_PLAIN_NODES:
            raise ValueError("too many values")
        if kind is tuple and set(map(type, part)) == _TEXT:  # most are paths of tensors
            continue
        if isinstance(part, dict) and not all(map(_is_key, part)):
            raise ValueError("dict keys other than str, bytes, int below 2^61, bool and None")
        todo.extend(part.values() if isinstance(part, dict) else part)


def _check_paths(planner_data: Any) -> None:
    """Refuse paths of which DCP's planner would build lists or nests much larger than what is stored.

    From a path like `("layers", 3, "weight")` it makes a list, padded up to the index. A name is the
    path to it, joined by dots: paths that are far longer have parts that a pickle stores once.
    """
    if not isinstance(planner_data, dict):
        return
    names_size = sum(1 + len(name) for name in planner_data if isinstance(name, str))
    left = _MAX_PATH_GROWTH * names_size + _PATH_SLACK
    # Each node of the tree of paths has a number: a list is told from others by that of its own.
    nodes: dict[tuple[int | str, ...], int] = {}
    lengths: dict[int, int] = {}
    for path in planner_data.values():
        if not isinstance(path, tuple):
            continue
        if len(path) > _MAX_PATH_PARTS:
            raise ValueError(f"a path of {len(path)} parts")
        kinds = set(map(type, path))
        if not kinds <= {str, int}:
            continue
        texts = path if kinds == _TEXT else [part for part in path if isinstance(part, str)]
        left -= len(path) + sum(map(len, texts))
        if left < 0:
            raise ValueError("paths far longer than their names")
        if int not in kinds:
            continue
        node = 0
        for part in path:
            key: tuple[int | str, ...] = (node, part)
            if isinstance(part, int):
                if part < 0:
                    raise ValueError("a path into a list with a negative index")
                lengths[node] = max(lengths.get(node, 0), part + 1)
                key = (node, "index", str(part))  # the hashes of numbers can be chosen
            node = nodes.setdefault(key, len(nodes) + 1)
    if sum(lengths.values()) > _MAX_PADDING * len(planner_data) + 1024:
        raise ValueError("paths into lists far longer than their entries")
