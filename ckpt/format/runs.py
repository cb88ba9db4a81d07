"""Hold columns as runs of arithmetic progressions: the chunks of a regular sharding in a few numbers.

Under DTensor's shardings each column of a tensor's chunks is regular, however many ranks there are: offsets grow by
the same step, files follow one another, ranks whose files are laid out alike have their chunk at the same place.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from ckpt.format.columns import Integers, TensorColumns

NUMBERS = 5
"""Of a run: start, count, step, repeats and their step."""

MANY_CHUNKS = 256
"""A tensor of fewer chunks has rows."""

_MAX_RUNS = 64
"""Looked for in a column of rows."""

_KEPT_ROWS = 1 << 16
"""Columns of at most so many rows are kept a while when they were expanded."""
_KEPT = 32
_FEW_RUNS = 8
_WINDOW = 64


class Runs:
    """A column of integers, as runs that follow one another.

    A run `(start, count, step, repeats, repeat_step)` is `start + i * step + j * repeat_step` for each `j` below
    `repeats`, and in it for each `i` below `count`.

    Attributes:
        table: shape (runs, 5); it is not changed.
        count: of the column's integers.
    """

    __slots__ = ("_ends", "_rows", "count", "table")

    def __init__(self, table: Integers, count: int) -> None:
        self.table, self.count = table, count
        self._rows: list[list[int]] | None = None
        self._ends: list[int] = []

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]]) -> Runs:
        """Make a column of runs."""
        table = np.array(runs, dtype=np.int64).reshape(-1, NUMBERS)
        return cls(table, int((table[:, 1] * table[:, 3]).sum()))

    def at(self, row: int) -> int:
        """Return the integer at `row`, which is at least 0, without making the others. Raises IndexError."""
        if self._rows is None:
            rows = self.table.tolist()
            self._ends = list(itertools.accumulate(count * repeats for _, count, _, repeats, _ in rows))
            self._rows = rows
        number = bisect.bisect_right(self._ends, row)
        start, count, step, _, repeat_step = self._rows[number]
        repeat, place = divmod(row - self._ends[number - 1] if number else row, count)
        return start + place * step + repeat * repeat_step

    def values(self) -> Integers:
        """Return the column, read-only. One that is not large is kept a while."""
        return _kept_values(self) if self.count <= _KEPT_ROWS else self._expanded()

    @property
    def total(self) -> int:
        """Sum of the column."""
        return sum(
            repeats * (count * start + step * (count * (count - 1) // 2))
            + repeat_step * count * (repeats * (repeats - 1) // 2)
            for start, count, step, repeats, repeat_step in self.table.tolist()
        )

    @property
    def highest(self) -> int:
        """The largest of the column, which is not empty."""
        highest: int = max(
            start + max((count - 1) * step, 0) + max((repeats - 1) * repeat_step, 0)
            for start, count, step, repeats, repeat_step in self.table.tolist()
        )
        return highest

    def shifted(self, by: int) -> Runs:
        """Return the column with `by` added to each integer."""
        if not by:
            return self
        table = self.table.copy()
        table[:, 0] += by
        return Runs(table, self.count)

    def _expanded(self) -> Integers:
        if len(self.table) <= _FEW_RUNS:
            parts = [_progression(*run) for run in self.table.tolist()]
            column = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype=np.int64), *parts])
        else:
            start, count, step, repeats, repeat_step = self.table.T
            lengths = count * repeats
            row = np.arange(self.count) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            repeat, place = np.divmod(row, np.repeat(count, lengths))
            column = np.repeat(start, lengths)
            column += place * np.repeat(step, lengths)
            column += repeat * np.repeat(repeat_step, lengths)
        column.flags.writeable = False
        return column


@functools.lru_cache(maxsize=_KEPT)
def _kept_values(runs: Runs) -> Integers:
    return runs._expanded()


@functools.lru_cache(maxsize=_KEPT)
def _kept_vectors(columns: tuple[Runs, ...]) -> Integers:
    return _vectors(columns)


def _vectors(columns: Sequence[Runs]) -> Integers:
    """Make vectors, a column for each dimension."""
    vectors = np.stack([column.values() for column in columns], axis=1)
    vectors.flags.writeable = False
    return vectors


def _progression(start: int, count: int, step: int, repeats: int, repeat_step: int) -> Integers:
    inner = start + step * np.arange(count, dtype=np.int64)
    if repeats == 1:
        return inner
    return (inner + repeat_step * np.arange(repeats, dtype=np.int64)[:, None]).reshape(-1)


def find_runs(values: Integers, max_runs: int) -> Runs | None:
    """Find the runs of a column, which is not empty; None if they are more than `max_runs`."""
    changes = np.flatnonzero(np.diff(values, n=2)) + 1  # where the step changes
    runs: list[tuple[int, int, int, int, int]] = []
    begin, number, total = 0, 0, len(values)
    while begin < total:
        if len(runs) == max_runs:
            return None
        start = int(values[begin])
        if begin == total - 1:
            runs.append((start, 1, 0, 1, 0))
            break
        number += int(np.searchsorted(changes[number:], begin + 1))
        count = (int(changes[number]) if number < len(changes) else total - 1) - begin + 1
        step = int(values[begin + 1]) - start
        repeats, repeat_step = _repeats(values[begin:], count)
        if count == 2 and repeats == 1 and begin + 2 < total:  # no more alike than any two
            count, step = 1, 0
        runs.append((start, count, step, repeats, repeat_step))
        begin += count * repeats
    return Runs(np.array(runs, dtype=np.int64).reshape(-1, NUMBERS), total)


def _repeats(values: Integers, count: int) -> tuple[int, int]:
    """Find how often the first `count` values come again, and by how much they grow each time."""
    if len(values) < 2 * count:
        return 1, 0
    step = int(values[count]) - int(values[0])
    same, window = 0, max(_WINDOW, count)
    while same + count < len(values):
        later = values[same + count : same + count + window]
        differs = np.flatnonzero(later - values[same : same + len(later)] != step)
        if len(differs):
            same += int(differs[0])
            break
        same, window = same + len(later), 2 * window
    repeats = 1 + same // count
    return (repeats, step) if repeats > 1 else (1, 0)


class TensorRuns(TensorColumns):
    """A tensor whose columns are runs; the arrays are made when they are asked for.

    Attributes:
        columns: of file, offset and length, then of the offsets and of the sizes in each dimension; many tensors
            share some.
    """

    columns: tuple[Runs, ...]

    def __init__(
        self, dtype: str, size: tuple[int, ...], requires_grad: bool, columns: tuple[Runs, ...]
    ) -> None:
        for name, value in (
            ("dtype", dtype),
            ("size", size),
            ("requires_grad", requires_grad),
            ("columns", columns),
        ):
            object.__setattr__(self, name, value)

    @property
    def count(self) -> int:
        return self.columns[0].count

    @property
    def file(self) -> Integers:
        return self.columns[0].values()

    @property
    def offset(self) -> Integers:
        return self.columns[1].values()

    @property
    def length(self) -> Integers:
        return self.columns[2].values()

    @property
    def offsets(self) -> Integers:
        return self._vectors(self.offset_columns)

    @property
    def sizes(self) -> Integers:
        return self._vectors(self.size_columns)

    @property
    def offset_columns(self) -> tuple[Runs, ...]:
        """Columns of the chunks' offsets, one for each dimension."""
        return self.columns[3 : 3 + len(self.size)]

    @property
    def size_columns(self) -> tuple[Runs, ...]:
        """Columns of the chunks' sizes, one for each dimension."""
        return self.columns[3 + len(self.size) :]

    def _vectors(self, columns: tuple[Runs, ...]) -> Integers:
        if not columns:
            return np.empty((self.count, 0), dtype=np.int64)
        return _kept_vectors(columns) if self.count <= _KEPT_ROWS else _vectors(columns)

    def offsets_at(self, row: int) -> list[int]:
        return [each.at(row) for each in self.offset_columns]

    def sizes_at(self, row: int) -> list[int]:
        return [each.at(row) for each in self.size_columns]

    def place(self, row: int) -> tuple[int, int, int]:
        file, offset, length = self.columns[:3]
        return file.at(row), offset.at(row), length.at(row)

    def plain(self) -> TensorColumns:
        places = self.file, self.offset, self.length
        return TensorColumns(self.dtype, self.size, self.requires_grad, self.offsets, self.sizes, *places)

    def renumbered(self, numbers: Integers, requires_grad: bool) -> TensorColumns:
        file = find_runs(numbers[self.file], self.count)
        assert file is not None  # no column has more runs than rows
        return TensorRuns(self.dtype, self.size, requires_grad, (file, *self.columns[1:]))


def shortest(tensor: TensorColumns) -> TensorColumns:
    """Return the tensor as runs, if it has many chunks and each of its columns few runs."""
    if tensor.count < MANY_CHUNKS or isinstance(tensor, TensorRuns):
        return tensor
    most = min(_MAX_RUNS, tensor.count // 4)
    columns: list[Runs] = []
    for values in (tensor.file, tensor.offset, tensor.length, *tensor.offsets.T, *tensor.sizes.T):
        runs = find_runs(values, most)
        if runs is None:
            return tensor
        columns.append(runs)
    return TensorRuns(tensor.dtype, tensor.size, tensor.requires_grad, tuple(columns))
