"""Restore a table's shard from a checkpoint, whichever processes saved it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt.embeddings.chain import Chain, Generation, StoredColumn, decode_chain
from ckpt.embeddings.quantized import dequantize
from ckpt.embeddings.rows import Ids, RowStore
from ckpt.embeddings.shard import TableShard
from ckpt.errors import ConfigurationError, FormatError, LoadFailed
from ckpt.format.columns import TensorColumns
from ckpt.format.dtypes import dtype_name, torch_dtype
from ckpt.reading.slices import OpenCheckpoint

PREFIX = "tables."
"""Begins the names of all entries of tables in a checkpoint."""

_MAX_CHAIN_BYTES = 1 << 20
_BATCH_BYTES = 64 << 20
_MAX_GAP_ROWS = 256
"""Rows of others that are read along between two runs of own rows."""


def restore_shard(checkpoint: OpenCheckpoint, shard: TableShard) -> int:
    """Put what a checkpoint holds of a shard's rows into its store; return how many were read.

    Bases first, then their deltas in order, straight into the store's memory where that is possible. The next save
    goes on with the chain of this shard if it holds all rows of the store, and no other chain does.

    Raises:
        LoadFailed: the checkpoint lacks the table, or one of its shards.
        ConfigurationError: the table has other columns.
        FormatError, IntegrityError: what is stored is no table, or damaged.
    """
    chains = chains_of(checkpoint, shard.name)
    for chain in chains:
        _check_columns(shard, chain)
    with shard.lock:
        shard.restart()  # if this fails, too
        shard.rows.clear()
        own, is_same = None, True
        count = 0
        for chain in chains:
            is_own = (chain.shard, chain.shards) == (shard.shard, shard.shards)
            changes = []
            for generation in chain.generations:
                reader = _Reader(checkpoint, chain, generation, shard.rows)
                changes.append(reader.apply())
                count += reader.rows
                is_same &= reader.rows == (generation.rows if is_own else 0)
            if is_own:
                own = chain, changes
        if own is not None and is_same and _are_all(shard.rows.ids(), [ids for ids, _ in own[1]]):
            shard.resume(own[0], own[1][1:])
        else:
            shard.restart(1 + max(chain.generations[-1].number for chain in chains))
    return count


def chains_of(checkpoint: OpenCheckpoint, table: str) -> list[Chain]:
    """Read what is stored of each shard of a table. Raises as `restore_shard`."""
    pattern = re.compile(re.escape(f"{PREFIX}{table}.") + r"shard-\d{5,}-of-\d{5,}\.chain")
    names = [name for name in checkpoint.names if pattern.fullmatch(name)]
    url = checkpoint.store.url
    if not names:
        tables = sorted(
            {name[len(PREFIX) :].split(".")[0] for name in checkpoint.names if name.startswith(PREFIX)}
        )
        known = f"; it has {', '.join(tables[:20])}" if tables else ", or any other"
        raise LoadFailed(f"the checkpoint has no table {table!r}{known}", url=url)
    chains = []
    for name in names:
        size = checkpoint.tensor(name).size
        if len(size) != 1 or size[0] > _MAX_CHAIN_BYTES:
            raise FormatError(f"{name!r} does not describe a table's shard: {size} bytes", url=url)
        text = bytes(_read(checkpoint, name, torch.uint8).numpy())
        chains.append(decode_chain(text, url=url, name=name[len(PREFIX) :]))
    chains.sort(key=lambda chain: chain.shard)
    shards = chains[0].shards
    if [(c.shard, c.shards) for c in chains] != [(number, shards) for number in range(shards)]:
        have = ", ".join(f"{c.shard} of {c.shards}" for c in chains[:20])
        raise LoadFailed(f"the table {table!r} is not complete: there are the shards {have}", url=url)
    return chains


class _Reader:
    """Apply one generation to a store of rows."""

    def __init__(
        self, checkpoint: OpenCheckpoint, chain: Chain, generation: Generation, rows: RowStore
    ) -> None:
        self._checkpoint, self._chain, self._generation, self._store = checkpoint, chain, generation, rows
        self._prefix = PREFIX + chain.prefix(generation)
        self.rows = 0

    def apply(self) -> tuple[Ids, Ids]:
        """Remove and insert this store's rows; return all ids that it inserts, and removes."""
        evicted = self._ids("evicted", self._generation.evicted)
        first, count = self._generation.first_id, self._generation.rows
        ids = self._ids("ids", count) if first is None else self._range(first, count)
        gone = evicted[self._store.owns(evicted)]
        if len(gone):
            self._store.remove(gone)
        wanted: list[_Run] = []
        nbytes = 0
        for run in _runs(self._store.owns(ids), self._generation.block_rows):
            wanted.append(run)
            if (
                run.owned is not None
                or self._store.memory(ids[run.start : run.stop], self._first_column) is None
            ):
                nbytes += (run.stop - run.start) * self._row_bytes
            if nbytes >= _BATCH_BYTES:
                self._insert(ids, wanted)
                wanted, nbytes = [], 0
        self._insert(ids, wanted)
        return ids, evicted

    @property
    def _first_column(self) -> str:
        return self._chain.columns[0].name

    @property
    def _row_bytes(self) -> int:
        return sum(column.width * torch_dtype(column.dtype).itemsize for column in self._chain.columns)

    def _ids(self, kind: str, count: int) -> Ids:
        if not count:
            return np.empty(0, dtype=np.int64)
        name = f"{self._prefix}.{kind}"
        self._check(name, "int64", (count,))
        ids: Ids = _read(self._checkpoint, name, torch.int64).numpy()
        if int(ids.min()) < 0:
            raise FormatError(f"{name!r} has a negative id", url=self._checkpoint.store.url)
        return ids

    def _range(self, first: int, count: int) -> Ids:
        """Make ids that follow one another, once it is sure that there are so many rows."""
        column, blocks = self._chain.columns[0].name, self._generation.blocks
        if blocks > len(self._checkpoint.names):
            text = f"{self._prefix!r} cannot have {count} rows in {blocks} blocks"
            raise FormatError(text, url=self._checkpoint.store.url)
        self._checkpoint.prepare([f"{self._prefix}.{column}.{block:05d}" for block in range(blocks)])
        for block in range(blocks):
            name = f"{self._prefix}.{column}.{block:05d}"
            if tuple(self._checkpoint.tensor(name).size[:1]) != (self._rows_of(block),):
                raise FormatError(f"{name!r} has another number of rows", url=self._checkpoint.store.url)
        return np.arange(first, first + count, dtype=np.int64)

    def _rows_of(self, block: int) -> int:
        block_rows = self._generation.block_rows
        return min(block_rows, self._generation.rows - block * block_rows)

    def _insert(self, ids: Ids, runs: Sequence[_Run]) -> None:
        """Read runs of rows, all together, and put those that are this store's into it."""
        reads: list[tuple[str, Sequence[int], torch.Tensor]] = []
        inserts: list[tuple[_Run, dict[str, Any]]] = []
        for run in runs:
            parts: dict[str, Any] = {}
            for column in self._chain.columns:
                parts[column.name] = self._target(ids, run, column, reads)
            inserts.append((run, parts))
        self._checkpoint.read_into(reads)
        for run, parts in inserts:
            rows = {
                c.name: _exact(parts[c.name], c) for c in self._chain.columns if parts[c.name] is not None
            }
            part = slice(run.start, run.stop)
            if rows:
                owned = run.owned
                chosen = rows if owned is None else {n: t[torch.from_numpy(owned)] for n, t in rows.items()}
                self._store.write(ids[part] if owned is None else ids[part][owned], chosen)
            self.rows += run.stop - run.start if run.owned is None else int(run.owned.sum())

    def _target(
        self, ids: Ids, run: _Run, column: StoredColumn, reads: list[tuple[str, Sequence[int], torch.Tensor]]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """Plan the read of a column of a run; return what it fills, None if that is the store's own memory."""
        block_rows = self._generation.block_rows
        block = run.start // block_rows
        name = f"{self._prefix}.{column.name}.{block:05d}"
        in_block = self._rows_of(block)
        count, offsets = run.stop - run.start, [run.start - block * block_rows, 0]
        if column.bits and self._generation.kind == "delta":
            width = -(-column.width * column.bits // 8)
            self._check(name, "uint8", (in_block, width))
            self._check(f"{name}.scales", "float32", (in_block, 2))
            codes, scales = torch.empty(count, width, dtype=torch.uint8), torch.empty(count, 2)
            reads += [(name, offsets, codes), (f"{name}.scales", offsets, scales)]
            return codes, scales
        self._check(name, column.dtype, (in_block, column.width))
        own = self._store.memory(ids[run.start : run.stop], column.name) if run.owned is None else None
        target = own
        if own is None:
            target = torch.empty(count, column.width, dtype=torch_dtype(column.dtype))
        assert target is not None
        reads.append((name, offsets, target))
        return None if own is not None else target

    def _check(self, name: str, dtype: str, size: tuple[int, ...]) -> None:
        entry: TensorColumns = self._checkpoint.tensor(name)
        if (entry.dtype, tuple(entry.size)) != (dtype, size):
            raise FormatError(
                f"{name!r} is {entry.dtype} {tuple(entry.size)}; its table says {dtype} {size}",
                url=self._checkpoint.store.url,
            )


class _Run:
    """Rows of one block that are read together.

    `owned` tells which of them are wanted; None if all are.
    """

    def __init__(self, start: int, stop: int, owned: np.ndarray[Any, np.dtype[np.bool_]] | None) -> None:
        self.start, self.stop, self.owned = start, stop, owned


def _runs(owned: np.ndarray[Any, np.dtype[np.bool_]], block_rows: int) -> Iterator[_Run]:
    """Find the runs of wanted rows; none goes over the end of a block, small gaps are read along."""
    for start in range(0, len(owned), block_rows):
        places = np.flatnonzero(owned[start : start + block_rows])
        if not len(places):
            continue
        ends = np.flatnonzero(np.diff(places) > _MAX_GAP_ROWS)
        for first, last in zip([0, *(ends + 1)], [*ends, len(places) - 1], strict=True):
            begin, end = start + int(places[first]), start + int(places[last]) + 1
            mask = owned[begin:end]
            yield _Run(begin, end, None if mask.all() else mask)


def _are_all(ids: Ids, inserted: list[Ids]) -> bool:
    """Tell whether all these rows were inserted."""
    return np.array_equal(ids, inserted[0]) or bool(np.isin(ids, np.concatenate(inserted)).all())


def _exact(part: Any, column: StoredColumn) -> torch.Tensor:
    if not isinstance(part, tuple):
        assert isinstance(part, torch.Tensor)
        return part
    bits: Any = column.bits
    codes, scales = part
    return dequantize(codes, scales, bits, column.width, torch_dtype(column.dtype))


def _read(checkpoint: OpenCheckpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    checkpoint.prepare([name])
    target = torch.empty(tuple(checkpoint.tensor(name).size), dtype=dtype)
    checkpoint.read_into([(name, [0] * target.dim(), target)])
    return target


def _check_columns(shard: TableShard, chain: Chain) -> None:
    stored = {column.name: (column.width, column.dtype) for column in chain.columns}
    wanted: Mapping[str, tuple[int, str]] = {
        name: (column.width, dtype_name(column.dtype)) for name, column in shard.rows.columns.items()
    }
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise ConfigurationError(
                f"the column {name!r} of the table {shard.name!r} is {_text(wanted.get(name))} here and "
                f"{_text(stored.get(name))} in the checkpoint; restore into a table of the same columns"
            )


def _text(column: tuple[int, str] | None) -> str:
    return "missing" if column is None else f"{column[1]} x {column[0]}"
