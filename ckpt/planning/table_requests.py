"""Count what a save and a restore of a table store and ask, as this library makes them (docs/planning.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt.planning.layout import ALIGNMENT_BYTES, FRAME_BYTES
from ckpt.planning.requests import Requests, put_requests, record_requests, stock_bytes_written
from ckpt.planning.tables import ID_BYTES, Table, TableSave

_ENTRY_INDEX_BYTES, _ENTRY_STOCK_BYTES, _ENTRY_MANIFEST_BYTES = 180, 380, 100
_RECORDS_BYTES, _RANK_RECORDS_BYTES, _BASE_BYTES = 1400, 420, 230
_CHAIN_BYTES, _CHAIN_GENERATION_BYTES = 260, 85


@dataclass(frozen=True)
class TableEntries:
    """The tensors that hold a table: each is a row of the index, and of `.metadata`.

    Attributes:
        count: of a whole chain, which every checkpoint of it lists.
        written: by the last save.
        index_bytes, stock_bytes: of the index, and of `.metadata` (0: left out).
    """

    count: int
    written: int
    index_bytes: float
    stock_bytes: float


def table_entries(table: Table, saves: list[TableSave], ranks: int) -> TableEntries:
    """Count the entries of a chain, of which `saves` made the generations, in order."""
    each = [_generation_entries(table, save, ranks) for save in saves]
    count = sum(each) + ranks
    stock_bytes = stock_bytes_written(count * _ENTRY_STOCK_BYTES)
    return TableEntries(count, each[-1] + ranks, count * _ENTRY_INDEX_BYTES, stock_bytes)


def _generation_entries(table: Table, save: TableSave, ranks: int) -> int:
    """A block of each column, and the ids of a delta, in each shard."""
    from ckpt.embeddings.shard import BLOCK_BYTES  # with torch

    block_rows = max(1, BLOCK_BYTES // max(table.columns))
    blocks = math.ceil(save.rows / ranks / block_rows)
    return ranks * (blocks * len(table.columns) + (save.kind != "base"))


def table_bytes(table: Table, saves: list[TableSave], ranks: int) -> float:
    """Return all bytes that the last of `saves`, the generations of a chain, puts into the store."""
    entries, last = table_entries(table, saves, ranks), saves[-1]
    data = last.nbytes + entries.written * (FRAME_BYTES + ALIGNMENT_BYTES / 2)
    data += ranks * (_CHAIN_BYTES + _CHAIN_GENERATION_BYTES * len(saves))
    records: float = _RECORDS_BYTES + ranks * _RANK_RECORDS_BYTES + _BASE_BYTES * (len(saves) - 1)
    records += entries.written * _ENTRY_MANIFEST_BYTES + data / 49152  # 32/3 bytes for 512 KiB
    return data + records + entries.index_bytes + entries.stock_bytes


def table_save_requests(table: Table, saves: list[TableSave], ranks: int, part_bytes: int) -> Requests:
    """Count the requests of the last of `saves`, the generations of a chain.

    Each checkpoint that it refers to gets a pin, and is looked at before the commit: its record, and of a data file the
    manifest, the size and one block.
    """
    entries = table_entries(table, saves, ranks)
    puts, gets = put_requests(saves[-1].nbytes / ranks, part_bytes)
    bases = len(saves) - 1
    of_ranks = Requests(
        puts=ranks * (float(puts) + 1) + bases, gets=ranks * float(gets) + (4 * bases + 1 if bases else 0)
    )
    return of_ranks + record_requests(entries.index_bytes, entries.stock_bytes, part_bytes)


def table_restore_requests(table: Table, saves: list[TableSave], ranks: int, request_bytes: int) -> Requests:
    """Count the requests of a restore by the ranks that saved, each of which opens the checkpoint itself."""
    of_rank = 6.0
    for save in saves:
        reads = math.ceil(save.nbytes / ranks / request_bytes)
        of_rank += 2 + reads + (save.kind != "base") * math.ceil(save.rows * ID_BYTES / ranks / request_bytes)
    return Requests(gets=ranks * of_rank)
