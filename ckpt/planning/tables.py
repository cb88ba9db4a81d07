"""Plan the saves of a table of embeddings: what bases, deltas and merges take over a chain.

Which of them a save writes is asked of the library's own rule (`ckpt.embeddings.chain.first_to_merge`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import ConfigurationError
from ckpt.format.dtypes import item_bytes
from ckpt.planning.models import DTYPES

ID_BYTES = 8
TABLE_OPTIMIZERS = ("none", "rowwise-adagrad", "adagrad", "adam")
"""One fp32 number for a row, one for an element, two for an element."""
_MAX_ROWS = 10**15


@dataclass(frozen=True)
class Table:
    """Rows of one width, with the optimizer's columns.

    Attributes:
        columns: bytes of a row in each column.
    """

    rows: int
    width: int
    columns: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return sum(self.columns)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def table_of(rows: int, width: int, dtype: str, optimizer: str) -> Table:
    """Describe a table. Raises ConfigurationError for a wrong argument."""
    if not 1 <= rows <= _MAX_ROWS or not 1 <= width <= 1 << 20:
        raise ConfigurationError(
            f"a table has from 1 to 10^15 rows of 1 to 2^20 elements, not {rows} x {width}"
        )
    if dtype not in DTYPES:
        raise ConfigurationError(f"the dtype must be one of {', '.join(DTYPES)}, not {dtype[:40]!r}")
    if optimizer not in TABLE_OPTIMIZERS:
        raise ConfigurationError(
            f"the optimizer of a table must be one of {', '.join(TABLE_OPTIMIZERS)}, not {optimizer[:40]!r}"
        )
    states = {"none": [], "rowwise-adagrad": [4], "adagrad": [4 * width], "adam": [4 * width] * 2}
    return Table(rows, width, (width * item_bytes(DTYPES[dtype]), *states[optimizer]))


@dataclass(frozen=True)
class TableSave:
    """What one save of a table writes.

    Attributes:
        kind: `base`, `delta`, or `merge`: a delta in the place of several.
        rows: that it writes.
        nbytes: of rows and ids.
        chain_bytes: that a restore of it reads: its base and deltas.
        generations: the numbers of the saves in which these lie.
    """

    kind: str
    rows: int
    nbytes: int
    chain_bytes: int
    generations: tuple[int, ...]


def touched_rows(rows: int, rate: float, intervals: int) -> int:
    """Return how many rows change in some intervals, of which each touches a random `rate` of all rows.

    Real touches come again at the same rows, so that merged deltas are smaller: this is the upper bound.
    """
    return round(rows * -math.expm1(intervals * math.log1p(-rate))) if rate < 1 else rows


def chain_saves(
    table: Table, rate: float, saves: int, *, max_deltas: int = 12, max_delta_ratio: float = 0.4
) -> list[TableSave]:
    """Follow some saves of a table of which each interval touches `rate` of the rows; the first is a base.

    Raises:
        ConfigurationError: the rate is not above 0 and at most 1.
    """
    from ckpt.embeddings.chain import Costs, first_to_merge

    if not 0 < rate <= 1:
        raise ConfigurationError(
            f"the share of touched rows must be above 0 and at most 100 %, not {100 * rate:g} %"
        )
    delta_row_bytes = ID_BYTES + table.row_bytes

    def delta_bytes(intervals: int) -> int:
        return touched_rows(table.rows, rate, intervals) * delta_row_bytes

    spans: list[int] = []  # of the deltas of the chain: intervals that each covers
    sizes: list[int] = []
    numbers: list[int] = []
    made: list[TableSave] = []
    for number in range(saves):
        first = None
        if number:
            spans.append(1)
            costs = Costs(
                base=table.rows * delta_row_bytes,
                deltas=[delta_bytes(span) for span in spans],
                merged=[delta_bytes(sum(spans[at:])) for at in range(len(spans))],
                max_deltas=max_deltas,
                max_delta_ratio=max_delta_ratio,
            )
            first = first_to_merge([costs])
        if first is None:
            spans, sizes, numbers = [], [table.nbytes], [number]
            made.append(TableSave("base", table.rows, table.nbytes, table.nbytes, (number,)))
            continue
        kind = "delta" if first == len(spans) - 1 else "merge"
        spans[first:] = [sum(spans[first:])]
        sizes[first + 1 :], numbers[first + 1 :] = [delta_bytes(spans[-1])], [number]
        rows = touched_rows(table.rows, rate, spans[-1])
        made.append(TableSave(kind, rows, sizes[-1], sum(sizes), tuple(numbers)))
    return made


def stored_bytes(saves: Sequence[TableSave], keep: int) -> int:
    """Return the most that lies in the store while the last `keep` checkpoints stay and one is being written."""
    sizes = [save.nbytes for save in saves]
    return max(
        sum(
            sizes[number]
            for number in {n for save in saves[max(0, at - keep) : at + 1] for n in save.generations}
        )
        for at in range(len(saves))
    )
