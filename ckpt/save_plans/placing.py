"""Make the columns of a checkpoint from its plan and from where each rank has put its items."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.errors import CommitError
from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns
from ckpt.save_plans.central import CentralPlan

_COLUMNS = 4
_LEVEL = 1


@dataclass(frozen=True)
class PlacedItems:
    """Where a rank has put its items: numbers of the items, which are sorted, and of files, offsets and lengths."""

    item: Integers
    file: Integers
    offset: Integers
    length: Integers


def pack_placed(rows: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Pack numbers of items, their files, offsets and lengths."""
    table = np.array(sorted(rows), dtype="<i8").reshape(-1, _COLUMNS).T
    planes = np.ascontiguousarray(table).view(np.uint8).reshape(-1, 8).T
    return zlib.compress(planes.tobytes(), _LEVEL)


def _unpack_placed(packed: bytes) -> PlacedItems:
    planes = np.frombuffer(zlib.decompress(packed), dtype=np.uint8).reshape(8, -1)
    table = np.ascontiguousarray(planes.T).view("<i8").reshape(_COLUMNS, -1).astype(np.int64, copy=False)
    return PlacedItems(*table)


def columns_of(plan: CentralPlan, packed: Sequence[bytes], files: Sequence[Sequence[str]]) -> Columns:
    """Make the columns; `packed` and `files` are those of each rank, in order.

    Raises CommitError if the ranks have not written just what was planned.
    """
    placed = [_unpack_placed(each) for each in packed]
    first_file = np.cumsum([0, *(len(names) for names in files)])
    item = np.concatenate([each.item for each in placed])
    file = np.concatenate([each.file + first for each, first in zip(placed, first_file, strict=False)])
    offset = np.concatenate([each.offset for each in placed])
    length = np.concatenate([each.length for each in placed])
    begin = np.cumsum([0, *(len(each.item) for each in placed)])
    at = _row_numbers(plan, item, begin)
    inverse = np.empty_like(at)
    inverse[at] = np.arange(len(at))
    return Columns(
        [name for names in files for name in names],
        _entries(plan, file[inverse], offset[inverse], length[inverse]),
        plan.planner_data,
    )


def _row_numbers(plan: CentralPlan, item: Integers, begin: Integers) -> Integers:
    """Return the row of each item that was written, all ranks after one another."""
    sections = list(plan.sections)
    numbers = {id(each): np.zeros(len(each.ranks), dtype=np.int64) for each in sections}
    places = {id(each): plan.counts(each) for each in sections}
    cursor = begin[:-1].copy()
    for group in plan.groups:
        number = 0
        for section in group.sections:
            at = np.searchsorted(section.ranks, group.ranks)
            written = places[id(section)][at]
            places[id(section)][at] = cursor[group.ranks]
            numbers[id(section)][at] = number
            cursor[group.ranks] += written
            number += len(section.section.names)
    if (cursor != begin[1:]).any():
        rank = int(np.flatnonzero(cursor != begin[1:])[0])
        expected, got = cursor[rank] - begin[rank], begin[rank + 1] - begin[rank]
        raise CommitError(
            f"nothing was committed: rank {rank} was to write {expected} items and has written {got}"
        )
    rows = np.empty(len(item), dtype=np.int64)
    for section in sections:
        place, number_of = places[id(section)], numbers[id(section)]
        for each, name in enumerate(section.section.names):
            writes = plan.writes(section, each)
            at = place[writes]
            wrong = np.flatnonzero(item[at] != number_of[writes] + each)
            if len(wrong):
                rank = int(section.ranks[writes][wrong[0]])
                raise CommitError(f"nothing was committed: planned but not written: {name!r} on rank {rank}")
            rows[at] = plan.entries[name].first + section.rows[each][writes]
            place[writes] += 1
    return rows


def _entries(
    plan: CentralPlan, file: Integers, offset: Integers, length: Integers
) -> dict[str, TensorColumns | ObjectRow]:
    entries: dict[str, TensorColumns | ObjectRow] = {}
    for entry in plan.entries.values():
        if entry.name in plan.carried:
            continue
        first, held = entry.first, entry.held
        if held.dtype is None or entry.layout is None:
            entries[entry.name] = ObjectRow(int(file[first]), int(offset[first]), int(length[first]))
            continue
        rows = slice(first, first + entry.holders.count)
        entries[entry.name] = TensorColumns(
            held.dtype, held.shape, held.requires_grad, entry.layout.offsets, entry.layout.sizes,
            file[rows], offset[rows], length[rows],
        )  # fmt: skip
    return entries
