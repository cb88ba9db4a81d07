"""Send DCP's plans as columns: a planner gets and gives the same objects, which are made where they arrive.

DCP pickles each object of a plan and reads it with the garbage collector on: 200 bytes and 30
microseconds for each item, of all ranks, on the coordinator.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckpt.gc_pause import no_gc

_NONE = -1
_LEVEL = 1


def packed_plan(plan: SavePlan) -> SavePlan:
    """Return an equal plan that is pickled as columns; the same one if it holds more than DCP's planner makes."""
    if len(plan.items) == 0 or not all(map(_is_plain, plan.items)):
        return plan
    return dataclasses.replace(plan, items=_PackedItems(plan.items))


class _PackedItems(list[WriteItem]):
    """Items that are pickled as columns, and unpickled as a list."""

    def __reduce__(self) -> Any:
        with no_gc():
            return _unpacked, _columns(self)


def _is_plain(item: WriteItem) -> bool:
    """Tell whether an item is made of what columns hold."""
    index, data = item.index, item.tensor_data
    if type(item) is not WriteItem or type(index) is not MetadataIndex or item.bytes_io_data is not None:
        return False
    if data is None:
        return index.offset is None
    if type(data) is not TensorWriteData or type(data.chunk) is not ChunkStorageMetadata:
        return False
    sizes = data.size, data.chunk.sizes, data.chunk.offsets
    is_plain = type(data.properties) is TensorProperties and index.offset == data.chunk.offsets
    return is_plain and all(type(each) is torch.Size and len(each) == len(data.size) for each in sizes)


def _columns(items: Sequence[WriteItem]) -> tuple[Any, ...]:
    properties: dict[Any, int] = {}
    shared: list[TensorProperties] = []
    numbers: list[int] = []
    for item in items:
        index, data = item.index, item.tensor_data
        numbers += item.type.value, _NONE if index.index is None else index.index
        if data is None:
            numbers.append(_NONE)
            continue
        key = data.properties.__getstate__()  # type: ignore[no-untyped-call]
        kind = properties.setdefault(key, len(shared))
        if kind == len(shared):
            shared.append(data.properties)
        numbers += kind, len(data.size), *data.size, *data.chunk.offsets, *data.chunk.sizes
    names = [item.index.fqn for item in items]
    text, is_text = "\0".join(names), not any("\0" in name for name in names)
    encoded = zlib.compress(text.encode(errors="surrogatepass"), _LEVEL) if is_text else names
    return encoded, shared, zlib.compress(np.array(numbers, dtype=np.int64).tobytes(), _LEVEL)


def _unpacked(
    encoded: bytes | list[str], properties: list[TensorProperties], numbers: bytes
) -> list[WriteItem]:
    names = encoded
    if isinstance(names, bytes):
        names = zlib.decompress(names).decode(errors="surrogatepass").split("\0")
    with no_gc():
        return _items(names, properties, np.frombuffer(zlib.decompress(numbers), dtype=np.int64).tolist())


def _items(names: list[str], properties: list[TensorProperties], numbers: list[int]) -> list[WriteItem]:
    items: list[WriteItem] = []
    types = {kind.value: kind for kind in WriteItemType}
    sizes: dict[tuple[int, ...], torch.Size] = {}  # most are shared

    def size(begin: int, count: int) -> torch.Size:
        key = tuple(numbers[begin : begin + count])
        return sizes.get(key) or sizes.setdefault(key, torch.Size(key))

    at = 0
    for name in names:
        kind, number, shared = types[numbers[at]], numbers[at + 1], numbers[at + 2]
        hint = None if number == _NONE else number
        at += 3
        if shared == _NONE:
            items.append(WriteItem(MetadataIndex(name, None, hint), kind))
            continue
        count = numbers[at]
        at += 1
        offsets = size(at + count, count)
        chunk = ChunkStorageMetadata(offsets, size(at + 2 * count, count))
        data = TensorWriteData(chunk, properties[shared], size(at, count))
        items.append(WriteItem(MetadataIndex(name, offsets, hint), kind, tensor_data=data))
        at += 3 * count
    return items
