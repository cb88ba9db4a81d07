"""Encode and decode the runs of an index, which may be hostile: a few bytes can claim any number of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckpt.errors import FormatError
from ckpt.format.columns import Integers, ObjectRow, TensorColumns, compressed, expanded
from ckpt.format.runs import NUMBERS, Runs, TensorRuns

MAX_ROWS_OF_TENSOR = 1 << 24
_MAX_RUNS = 1 << 27
_MAX_LOOKED_AT = 1 << 27
_LIMIT = 1 << 62


@dataclass(frozen=True)
class PackedRuns:
    """The runs of an index.

    Attributes:
        regular: of each tensor that has runs, the number of its entry, and of its columns in the order of `TensorRuns`.
        column_runs: how many runs each column has.
        runs: their numbers, packed: the start of each run of all columns, the count of each, and so on.
    """

    regular: list[list[int]] = field(default_factory=list)
    column_runs: list[int] = field(default_factory=list)
    runs: bytes = b""


def pack_runs(entries: Iterable[TensorColumns | ObjectRow]) -> PackedRuns:
    """Pack the runs of those entries that have some. Columns that are equal are written once."""
    by_identity: dict[Runs, int] = {}
    by_content: dict[bytes, int] = {}
    tables: list[Integers] = []
    regular: list[list[int]] = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, TensorRuns):
            continue
        for column in entry.columns:
            if column not in by_identity:
                known = by_content.setdefault(column.table.tobytes(), len(tables))
                if known == len(tables):
                    tables.append(column.table)
                by_identity[column] = known
        regular.append([number, *(by_identity[column] for column in entry.columns)])
    if not regular:
        return PackedRuns()
    return PackedRuns(regular, list(map(len, tables)), compressed(list(np.concatenate(tables).T)))


class RunTable:
    """The columns of `PackedRuns`, checked. Raises FormatError, as its methods do."""

    def __init__(self, packed: PackedRuns) -> None:
        counts = packed.column_runs
        total = runs_of(packed)
        if not counts:
            if packed.runs or packed.regular:
                raise FormatError("runs of no column")
            self._columns: list[Runs] = []
            return
        table = np.ascontiguousarray(expanded(packed.runs, NUMBERS * total).reshape(NUMBERS, total).T)
        begins = np.cumsum([0, *counts[:-1]])
        lengths, last = _checked(table)
        totals = np.add.reduceat(lengths, begins).tolist()
        self._most = np.maximum.reduceat(last, begins).tolist()
        ends = [*begins[1:].tolist(), total]
        spans = zip(begins.tolist(), ends, totals, strict=True)
        self._columns = [Runs(table[begin:end], count) for begin, end, count in spans]

    def columns(self, numbers: Sequence[int], dimensions: int, chunks: int, files: int) -> tuple[Runs, ...]:
        """Return the columns of a tensor."""
        if len(numbers) != 3 + 2 * dimensions or any(
            not 0 <= number < len(self._columns) for number in numbers
        ):
            raise FormatError("a tensor without all of its columns")
        chosen = tuple(self._columns[number] for number in numbers)
        if any(column.count != chunks for column in chosen):
            raise FormatError("a column of another length than its entry")
        if self._most[numbers[0]] >= files:
            raise FormatError("an item in no file")
        return chosen


def runs_of(packed: PackedRuns) -> int:
    """Count all runs. Raises FormatError if that is absurd."""
    if any(count < 1 for count in packed.column_runs):
        raise FormatError("a column without runs")
    total = sum(packed.column_runs)
    if total > _MAX_RUNS:
        raise FormatError("more runs than any checkpoint has")
    return total


def _checked(table: Integers) -> tuple[Integers, Integers]:
    """Check that all integers of runs are sizes or offsets, by those at their corners.

    Returns how many each run has, and the largest of each.
    """
    start, count, step, repeats, repeat_step = table.T
    if (
        min(int(count.min()), int(repeats.min())) < 1
        or max(int(count.max()), int(repeats.max())) > MAX_ROWS_OF_TENSOR
    ):
        raise FormatError("a run of an absurd length")
    lowest, highest = start, start
    for times, by in ((count - 1, step), (repeats - 1, repeat_step)):
        room = (_LIMIT - 1) // np.maximum(times, 1)
        if ((lowest < 0) | (highest >= _LIMIT) | (by > room) | (by < -room)).any():
            raise FormatError("a number that is no size or offset")
        lowest, highest = lowest + np.minimum(times * by, 0), highest + np.maximum(times * by, 0)
    if ((lowest < 0) | (highest >= _LIMIT)).any():
        raise FormatError("a number that is no size or offset")
    lengths = count * repeats
    if int(lengths.max()) > MAX_ROWS_OF_TENSOR:
        raise FormatError("a run of an absurd length")
    return lengths, highest


class BoxCheck:
    """Check that chunks lie in their tensors; what many tensors have in common once."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, Runs, Runs]] = set()
        self._looked_at = 0

    def inside(self, tensor: TensorRuns) -> bool:
        """Tell whether all chunks of a tensor lie in it. Raises FormatError if there is too much to look at."""
        return all(map(self._fits, tensor.size, tensor.offset_columns, tensor.size_columns))

    def _fits(self, limit: int, offsets: Runs, sizes: Runs) -> bool:
        key = limit, offsets, sizes
        if key in self._seen:
            return True
        self._looked_at += offsets.count
        if self._looked_at > _MAX_LOOKED_AT:
            raise FormatError("more different chunks than any checkpoint has")
        offset, size = offsets.values(), sizes.values()
        if not bool(((offset >= 0) & (size >= 0) & (size <= limit - offset)).all()):
            return False
        self._seen.add(key)
        return True
