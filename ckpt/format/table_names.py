"""Name the entries of tables of rows, and count the rows of a checkpoint's tables by the sizes of its entries."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ckpt.format.bounds import Amount

TABLES_PREFIX = "tables."
"""Begins the names of all entries of tables in a checkpoint."""

_ENTRY = re.compile(
    re.escape(TABLES_PREFIX) + r"(?P<table>[\w-]+)\.(?P<shard>shard-\d{5,}-of-\d{5,})\."
    r"(?:chain|(?P<number>\d{6,})\.(?:ids|(?P<evicted>evicted)|(?P<column>.+)\.\d{5,}(?P<scales>\.scales)?))"
)


class TableRows(msgspec.Struct, frozen=True, array_like=True):
    """How many rows a table has at least, over all shards.

    Attributes:
        rows: those of the bases, less those that later saves evicted.
        evicted: those that the last save evicted.
    """

    rows: Amount
    evicted: Amount


def shard_name(table: str, shard: int, shards: int) -> str:
    """Begin the names of a shard's entries, without `TABLES_PREFIX`."""
    return f"{table}.shard-{shard:05d}-of-{shards:05d}"


def is_of_table(fqn: str) -> bool:
    """Return whether an entry of a checkpoint is one of a table."""
    return fqn.startswith(TABLES_PREFIX) and _ENTRY.fullmatch(fqn) is not None


def rows_of_tables(sizes: Iterable[tuple[str, Sequence[int]]]) -> dict[str, TableRows]:
    """Count the rows of each table by the names and sizes of entries; others are skipped."""
    rows: _Counts = defaultdict(lambda: defaultdict(int))
    evicted: _Counts = defaultdict(lambda: defaultdict(int))
    columns: dict[tuple[str, str], str] = {}
    for fqn, size in sizes:
        found = _ENTRY.fullmatch(fqn) if fqn.startswith(TABLES_PREFIX) else None
        if found is None or found["number"] is None or found["scales"] or not size:
            continue
        shard = (found["table"], found["shard"])
        number = int(found["number"])
        if found["evicted"]:
            evicted[shard][number] += size[0]
        elif found["column"] and columns.setdefault(shard, found["column"]) == found["column"]:
            rows[shard][number] += size[0]  # all columns have as many
    tables: dict[str, list[int]] = {}
    for shard in rows.keys() | evicted.keys():
        numbers = sorted(rows[shard].keys() | evicted[shard].keys())
        later = sum(evicted[shard][number] for number in numbers[1:])
        total = tables.setdefault(shard[0], [0, 0])
        total[0] += max(0, rows[shard][numbers[0]] - later)
        total[1] += evicted[shard][numbers[-1]]
    return {table: TableRows(*total) for table, total in sorted(tables.items())}


_Counts = Mapping[tuple[str, str], dict[int, int]]
