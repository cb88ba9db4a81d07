"""Make the columns of a checkpoint from its plan and from where each rank has put its items.

Ranks that hold alike parts lay out their files alike. So where chunks follow one another on such ranks their items
are at the same place in their files, and the columns are made as runs, without a row for each chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.errors import CommitError
from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns
from ckpt.format.runs import MANY_CHUNKS, NUMBERS, Runs, TensorRuns, find_runs
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.chunks import Entry, Group, PlacedSection
from ckpt.save_plans.file_layouts import FileLayouts, PlacedItems
from ckpt.save_plans.rules import Layout

Place = tuple[PlacedSection, int]
"""A section, and the number of an item there."""


@dataclass(frozen=True)
class _Places:
    """Where the chunks of an entry are: columns of rows or of runs."""

    file: Integers | Runs
    offset: Integers | Runs
    length: Integers | Runs


def columns_of(plan: CentralPlan, packed: Sequence[bytes], files: Sequence[Sequence[str]]) -> Columns:
    """Make the columns; `packed` and `files` are those of each rank, in order.

    Raises CommitError if the ranks have not written just what was planned.
    """
    layouts = FileLayouts(packed, list(map(len, files)))
    _check_written(plan, layouts)
    placing = _Placing(plan, layouts)
    return Columns([name for names in files for name in names], placing.entries(), plan.planner_data)


def _check_written(plan: CentralPlan, layouts: FileLayouts) -> None:
    """Check that each rank has written what it was told to write."""
    answers = plan.answers
    for group in plan.groups:
        counts = [len(placed.section.names) for placed in group.sections]
        padded = [-(-count // 8) * 8 for count in counts]
        is_item = np.concatenate(
            [np.empty(0, dtype=bool), *(np.arange(p) < c for p, c in zip(padded, counts, strict=True))]
        )
        seen: set[tuple[int, bytes]] = set()
        for rank in group.ranks:
            key = int(layouts.number[rank]), answers[rank]
            if key in seen:
                continue
            seen.add(key)
            if answers[rank]:
                bits = np.unpackbits(np.frombuffer(answers[rank], dtype=np.uint8))
                planned = np.flatnonzero(bits[is_item])
            else:
                planned = np.arange(sum(counts))
            placed = layouts.placed[key[0]]
            if not np.array_equal(planned, placed.item):
                raise _mismatch(rank, group, planned, placed)


def _mismatch(rank: int, group: Group, planned: Integers, placed: PlacedItems) -> CommitError:
    if len(planned) != len(placed.item):
        text = f"rank {rank} was to write {len(planned)} items and has written {len(placed.item)}"
        return CommitError(f"nothing was committed: {text}")
    number = int(planned[np.flatnonzero(planned != placed.item)[0]])
    names = [name for each in group.sections for name in each.section.names]
    return CommitError(f"nothing was committed: planned but not written: {names[number]!r} on rank {rank}")


class _Placing:
    """Find the places of all chunks; what many entries have in common is made once."""

    def __init__(self, plan: CentralPlan, layouts: FileLayouts) -> None:
        self._plan, self._layouts = plan, layouts
        self._numbers = _numbers_of(plan)
        self._boxes: dict[int, tuple[Runs, ...] | None] = {}

    def entries(self) -> dict[str, TensorColumns | ObjectRow]:
        """Make the entries, in the order of the plan."""
        places: dict[str, list[Place]] = defaultdict(list)
        for placed in self._plan.sections:
            for number, name in enumerate(placed.section.names):
                places[name].append((placed, number))
        written = [each for each in self._plan.entries.values() if each.name not in self._plan.carried]
        alike: dict[tuple[int, int], list[tuple[Entry, Place]]] = defaultdict(list)
        for entry in written:
            if len(places[entry.name]) == 1:
                (place,) = places[entry.name]
                alike[id(place[0]), id(entry.writers)].append((entry, place))
        found: dict[str, _Places] = {}
        for members in alike.values():
            numbers = np.array([number for _, (_, number) in members], dtype=np.int64)
            columns = self._together(members[0][1][0], members[0][0].writers, numbers)
            found |= zip((entry.name for entry, _ in members), columns, strict=True)
        for entry in written:
            if entry.name not in found:
                found[entry.name] = self._scattered(entry, places[entry.name])
        return {entry.name: self._entry(entry, found[entry.name]) for entry in written}

    def _together(self, placed: PlacedSection, writers: Integers, numbers: Integers) -> list[_Places]:
        """Find the places of items of one section, whose chunks have the same writers."""
        of_section = self._numbers[id(placed)][np.searchsorted(placed.ranks, writers)]
        return self._find(writers, self._layouts.keys(writers, of_section), numbers)

    def _find(self, writers: Integers, keys: Integers, numbers: Integers) -> list[_Places]:
        """Find the places of items, whose keys are `keys` plus the number of each."""
        begins = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        if len(writers) >= MANY_CHUNKS and len(begins) <= len(writers) // 4:
            return _Stretches(self._layouts, writers, keys, begins).places(numbers)
        layouts = self._layouts
        at = layouts.find(keys + numbers[:, None])
        columns = (layouts.first_file[writers] + layouts.file[at], layouts.offset[at], layouts.length[at])
        return [_Places(*rows) for rows in zip(*columns, strict=True)]

    def _scattered(self, entry: Entry, places: Sequence[Place]) -> _Places:
        """Find the places of an entry that ranks hold in different sections."""
        keys = np.empty(len(entry.writers), dtype=np.int64)
        for placed, number in places:
            writes = self._plan.writes(placed, number)
            of_rank = self._numbers[id(placed)][writes] + number
            keys[placed.rows[number][writes]] = self._layouts.keys(placed.ranks[writes], of_rank)
        (found,) = self._find(entry.writers, keys, np.zeros(1, dtype=np.int64))
        return found

    def _entry(self, entry: Entry, places: _Places) -> TensorColumns | ObjectRow:
        held, layout = entry.held, entry.layout
        columns = places.file, places.offset, places.length
        if held.dtype is None or layout is None:
            return ObjectRow(*(int(_values(column)[0]) for column in columns))
        runs = tuple(column for column in columns if isinstance(column, Runs))
        boxes = self._boxes_of(layout) if len(runs) == len(columns) else None
        if boxes is not None:
            return TensorRuns(held.dtype, held.shape, held.requires_grad, (*runs, *boxes))
        rows = map(_values, columns)
        return TensorColumns(held.dtype, held.shape, held.requires_grad, layout.offsets, layout.sizes, *rows)

    def _boxes_of(self, layout: Layout) -> tuple[Runs, ...] | None:
        """Find the runs of a layout's offsets and sizes; None if it is not regular."""
        if id(layout) not in self._boxes:
            most = len(layout.offsets) // 4
            runs = [find_runs(column, most) for column in (*layout.offsets.T, *layout.sizes.T)]
            regular = tuple(each for each in runs if each is not None)
            self._boxes[id(layout)] = regular if len(regular) == len(runs) else None
        return self._boxes[id(layout)]


class _Stretches:
    """Chunks one after the other on ranks whose files are laid out alike, stretch by stretch."""

    def __init__(self, layouts: FileLayouts, writers: Integers, keys: Integers, begins: Integers) -> None:
        self._layouts, self._begins, self._keys = layouts, begins, keys[begins]
        self._counts = np.diff(np.r_[begins, len(writers)])
        self._first_file = layouts.first_file[writers]
        self._files: dict[bytes, Integers | Runs] = {}

    def places(self, numbers: Integers) -> list[_Places]:
        """Find the places of items of these numbers in their section."""
        at = self._layouts.find(self._keys + numbers[:, None])
        files = map(self._file, self._layouts.file[at])
        columns = (self._columns(self._layouts.offset[at]), self._columns(self._layouts.length[at]))
        return [_Places(*each) for each in zip(files, *columns, strict=True)]

    def _columns(self, values: Integers) -> list[Runs]:
        """Make a column of each row, which has a value for each stretch."""
        is_new = np.ones(values.shape, dtype=bool)
        is_new[:, 1:] = values[:, 1:] != values[:, :-1]
        begins = np.flatnonzero(is_new)
        table = np.zeros((len(begins), NUMBERS), dtype=np.int64)
        table[:, 0] = values.reshape(-1)[begins]
        table[:, 1] = np.add.reduceat(np.tile(self._counts, len(values)), begins)
        table[:, 3] = 1
        ends = np.cumsum(is_new.sum(axis=1)).tolist()
        total = len(self._first_file)
        return [Runs(table[begin:end], total) for begin, end in zip([0, *ends], ends, strict=False)]

    def _file(self, of_rank: Integers) -> Integers | Runs:
        """Make the column of files, from which of a rank's files it is in each stretch."""
        key = of_rank.tobytes()
        if key not in self._files:
            rows = self._first_file + np.repeat(of_rank, self._counts)
            self._files[key] = find_runs(rows, len(rows) // 4) or rows
        return self._files[key]


def _values(column: Integers | Runs) -> Integers:
    return column.values() if isinstance(column, Runs) else column


def _numbers_of(plan: CentralPlan) -> dict[int, Integers]:
    """Number the first item of each section among the items of each rank that holds it."""
    numbers = {id(each): np.zeros(len(each.ranks), dtype=np.int64) for each in plan.sections}
    for group in plan.groups:
        number = 0
        for placed in group.sections:
            numbers[id(placed)][np.searchsorted(placed.ranks, group.ranks)] = number
            number += len(placed.section.names)
    return numbers
