"""Restore a table's shard from a checkpoint, whichever processes saved it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from ckpt.embeddings.chain import Chain, Generation, StoredColumn, decode_chain
from ckpt.embeddings.ownership import Kept, RowCount, Taken
from ckpt.embeddings.quantized import dequantize
from ckpt.embeddings.rows import Column, DenseRows, Ids, RowStore, range_ids
from ckpt.embeddings.shard import TableShard
from ckpt.errors import ConfigurationError, FormatError, LoadFailed
from ckpt.format.columns import TensorColumns
from ckpt.format.dtypes import dtype_name, torch_dtype
from ckpt.format.table_names import TABLES_PREFIX as PREFIX
from ckpt.reading.slices import OpenCheckpoint

_logger = logging.getLogger(__name__)

_MAX_CHAIN_BYTES = 1 << 20
_BATCH_BYTES, _FAR_BATCH_BYTES = 20 << 20, 64 << 20
"""Rows that are read together, from storage that is near, and where requests take time. There are two at a time."""

_ALIGNMENT = 64
_MAX_GAP_ROWS = 256
"""Rows of others that are read along between two runs of own rows."""


@dataclass(frozen=True)
class Selection:
    """Tables and columns that a restore takes, and differences that it accepts.

    Attributes:
        parts: names of tables (`user`) and of their columns (`user.values`), `*` allowed; none: all.
        strict: a column or table of the program that the checkpoint lacks, and a column that only the checkpoint has,
            are errors.
        may_drop: stored rows that no shard keeps are left out.
    """

    parts: Sequence[str] = ()
    strict: bool = True
    may_drop: bool = False

    def takes(self, table: str, column: str) -> bool:
        names = (table, f"{table}.{column}")
        return not self.parts or any(fnmatchcase(name, part) for name in names for part in self.parts)

    def takes_table(self, table: str, columns: Iterable[str]) -> bool:
        return not self.parts or any(self.takes(table, column) for column in columns)


@dataclass(frozen=True)
class Restored:
    """A shard that was restored.

    Attributes:
        taken: which of the stored rows were read.
        missing, left: columns that the checkpoint lacks, and columns of the checkpoint that were left out.
    """

    taken: Taken
    missing: Sequence[str]
    left: Sequence[str]


def restore_tables(
    checkpoint: OpenCheckpoint, shards: Sequence[TableShard], selection: Selection
) -> dict[str, Restored]:
    """Restore the shards of the tables that are selected; return what was restored, by table.

    Tables that were not keep their rows, and the next save writes all of them. Raises as `restore_shard`;
    ConfigurationError if `parts` names nothing.
    """
    stored = stored_tables(checkpoint)
    _check_parts(selection.parts, shards, stored)
    planned: dict[str, list[tuple[Chain, _Fit]]] = {}
    for shard in shards:
        is_there = shard.name in stored or selection.strict
        if is_there and selection.takes_table(shard.name, shard.rows.columns):
            chains = chains_of(checkpoint, shard.name)
            planned[shard.name] = [(chain, _fit_columns(shard, chain, selection)) for chain in chains]
    restored = {}
    for shard in shards:  # no row changes before all tables fit
        if shard.name in planned:
            restored[shard.name] = restore_shard(checkpoint, shard, planned[shard.name], selection.may_drop)
        else:
            shard.restart()
    return restored


def stored_tables(checkpoint: OpenCheckpoint) -> list[str]:
    """List the tables that a checkpoint has."""
    names = (name for name in checkpoint.names if name.startswith(PREFIX) and name.endswith(".chain"))
    return sorted({name[len(PREFIX) :].split(".")[0] for name in names})


def _check_parts(parts: Sequence[str], shards: Sequence[TableShard], stored: Collection[str]) -> None:
    """Raise ConfigurationError if a part names no column of a table here, and no table that other ranks may keep."""
    own = {shard.name for shard in shards}
    names = {f"{shard.name}.{column}" for shard in shards for column in shard.rows.columns} | own
    for part in parts:
        is_others = any(fnmatchcase(table, part.split(".")[0]) for table in stored if table not in own)
        if not is_others and not any(fnmatchcase(name, part) for name in names):
            raise ConfigurationError(
                f"parts= names {part!r}, and this program has {', '.join(sorted(names)[:20])}; name tables (`user`) or "
                "columns (`user.values`), `*` allowed"
            )


def restore_shard(
    checkpoint: OpenCheckpoint, shard: TableShard, planned: Sequence[tuple[Chain, _Fit]], may_drop: bool
) -> Restored:
    """Put what a checkpoint holds of a shard's rows into its store; `planned` are its chains.

    Bases first, then their deltas in order, straight into the store's memory where that is possible. The next save
    continues the chain of this shard if it holds all rows of the store, and no other chain does. A dense table keeps
    the values of columns that are missing; in other tables they begin with zeros.

    Raises:
        FormatError, IntegrityError: what is stored is no table, or damaged.
    """
    with shard.lock, contextlib.ExitStack() as stack:
        shard.restart()  # if this fails, too
        shard.rows.clear()
        own, is_same = None, all(fit.is_whole for _, fit in planned)
        stored = _Stored()
        batch = stack.enter_context(_Batch(checkpoint))
        for chain, fit in planned:
            is_own = (chain.shard, chain.shards) == (shard.shard, shard.shards)
            stored.is_counted_here = chain.shard % shard.shards == shard.shard
            changes = []
            readers = [
                _Reader(checkpoint, chain, each, shard.rows, fit, stored) for each in chain.generations
            ]
            batch.finish()
            _read_ids(checkpoint, readers)
            for reader in readers:
                before = stored.taken.rows
                reader.apply(batch)
                changes.append((reader.ids, reader.evicted))
                is_same &= stored.taken.rows - before == (reader.generation.rows if is_own else 0)
            if is_own:
                own = chain, changes
        batch.finish()
        if own is not None and is_same and _are_all(shard.rows, [ids for ids, _ in own[1]]):
            shard.resume(own[0], [(range_ids(ids), evicted) for ids, evicted in own[1][1:]])
        else:
            shard.restart(1 + max(chain.generations[-1].number for chain, _ in planned))
    taken = Taken(
        url=checkpoint.store.url,
        table=shard.name,
        shard=shard.shard,
        shards=shard.shards,
        rows=sum(generation.rows for chain, _ in planned for generation in chain.generations),
        stored=stored.counted,
        taken=stored.taken,
        first=stored.first or 0,
        last=stored.last,
        kept=Kept.of(shard.rows),
        may_drop=may_drop,
    )
    fit = planned[0][1]
    return Restored(taken, fit.missing, fit.left)


def chains_of(checkpoint: OpenCheckpoint, table: str) -> list[Chain]:
    """Read what is stored of each shard of a table; warn of rows that two of them have.

    Raises:
        LoadFailed: the checkpoint lacks the table, or one of its shards.
        FormatError, IntegrityError: what is stored is no table, or damaged.
    """
    pattern = re.compile(re.escape(f"{PREFIX}{table}.") + r"shard-\d{5,}-of-\d{5,}\.chain")
    names = [name for name in checkpoint.names if pattern.fullmatch(name)]
    url = checkpoint.store.url
    if not names:
        tables = stored_tables(checkpoint)
        known = f"; it has {', '.join(tables[:20])}" if tables else ", or any other"
        hint = "strict=False restores without it"
        raise LoadFailed(f"the checkpoint has no table {table!r}{known}; {hint}", url=url)
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
    _warn_of_rows_twice(chains, url)
    return chains


def _warn_of_rows_twice(chains: Sequence[Chain], url: str) -> None:
    """Warn of rows of a dense table in two shards: older versions saved them if two ranks kept them."""
    bases = ((chain.generations[0], chain.shard) for chain in chains)
    ranges = sorted(
        (base.first_id, base.first_id + base.rows - 1, shard)
        for base, shard in bases
        if base.first_id is not None and base.rows
    )
    for (_, until, shard), (first, last, other) in itertools.pairwise(ranges):
        if first <= until:
            _logger.warning(
                "%s: the shards %d and %d of the table %r both have rows %d to %d, as two ranks kept them; those of "
                "shard %d are restored: compare them with what they should be",
                *(url, shard, other, chains[0].table, first, min(until, last), max(shard, other)),
            )


def _read_ids(checkpoint: OpenCheckpoint, readers: Sequence[_Reader]) -> None:
    """Read the ids of all generations of a chain, together."""
    counts = {name: count for reader in readers for name, count in reader.stored_ids().items()}
    checkpoint.prepare(counts)
    arrays = {name: np.empty(count, dtype=np.int64) for name, count in counts.items()}
    checkpoint.read_into([(name, [0], torch.from_numpy(ids)) for name, ids in arrays.items()])
    for reader in readers:
        reader.take_ids(arrays)


class _Batch(contextlib.AbstractContextManager["_Batch"]):
    """Reads that are carried out together, and what is done with the rows then: while the next batch is read."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        is_far = checkpoint.store.capabilities.parallel_parts
        self.max_bytes = _FAR_BATCH_BYTES if is_far else _BATCH_BYTES
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-rows")
        self._reads: list[tuple[str, Sequence[int], torch.Tensor]] = []
        self._then: list[Callable[[], None]] = []
        self._before: tuple[Future[None] | None, list[Callable[[], None]]] = (None, [])
        # Used again and again: to touch fresh pages may take longer than to fill them.
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._memory_before = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def make_room(self, nbytes: int) -> None:
        """Begin a new batch if so many bytes more would be too many for this one."""
        if self._used_bytes + nbytes > self.max_bytes:
            self._next()

    def read(self, name: str, offsets: Sequence[int], target: torch.Tensor) -> None:
        self._reads.append((name, offsets, target))

    def read_rows(self, name: str, first: int, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Read rows of a tensor; return what they are read into, which later batches overwrite."""
        stop = self._used_bytes + count * width * dtype.itemsize
        if not len(self._memory):
            self._memory = torch.empty(self.max_bytes, dtype=torch.uint8)
        if stop <= len(self._memory):
            target = self._memory[self._used_bytes : stop].view(dtype).reshape(count, width)
        else:
            target = torch.empty(count, width, dtype=dtype)
        self._used_bytes = -(-stop // _ALIGNMENT) * _ALIGNMENT
        self.read(name, [first, 0], target)
        return target

    def then(self, step: Callable[[], None]) -> None:
        """Do something once all has been read."""
        self._then.append(step)

    def finish(self) -> None:
        """Read everything, and do all that follows."""
        self._next()
        self._next()

    def _next(self) -> None:
        reading = self._thread.submit(self._checkpoint.read_into, self._reads) if self._reads else None
        read, then = self._before
        self._before, self._reads, self._then, self._used_bytes = (reading, self._then), [], [], 0
        if read is not None:
            read.result()
        for step in then:
            step()
        self._memory, self._memory_before = self._memory_before, self._memory

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class _Reader:
    """Apply one generation to a store of rows.

    Attributes:
        ids, evicted: of all rows that it inserts, and removes.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        chain: Chain,
        generation: Generation,
        rows: RowStore,
        fit: _Fit,
        stored: _Stored,
    ) -> None:
        """`stored` counts the rows."""
        self._checkpoint, self._chain, self.generation, self._store = checkpoint, chain, generation, rows
        self._columns = fit.columns
        self._stored = stored
        self._zeros = {} if isinstance(rows, DenseRows) else fit.others
        self._prefix = PREFIX + chain.prefix(generation)
        self.ids: Ids | range = np.empty(0, dtype=np.int64)
        self.evicted = np.empty(0, dtype=np.int64)

    def stored_ids(self) -> dict[str, int]:
        """Name the entries that hold ids, and how many; they are as the chain says."""
        rows = self.generation.rows if self.generation.first_id is None else 0
        kinds = {"ids": rows, "evicted": self.generation.evicted}
        counts = {f"{self._prefix}.{kind}": count for kind, count in kinds.items() if count}
        for name, count in counts.items():
            self._check(name, "int64", (count,))
        return counts

    def take_ids(self, arrays: Mapping[str, Ids]) -> None:
        """Take what was read of them."""
        first, rows = self.generation.first_id, self.generation.rows
        self.evicted = arrays.get(f"{self._prefix}.evicted", self.evicted)
        self.ids = arrays.get(f"{self._prefix}.ids", self.ids) if first is None else self._range(first, rows)

    def apply(self, batch: _Batch) -> None:
        """Remove and insert this store's rows, with a batch of reads."""
        block_rows = self.generation.block_rows
        is_direct = self.generation.first_id is not None or self.generation.kind == "base"
        if is_direct:
            batch.finish()  # what comes before must not be written over what is read into the store's memory
        gone = self.evicted[self._store.owns(self.evicted)]
        if self.generation.kind == "base":
            gone = gone[:0]  # of the chain before it
        if len(gone) and is_direct:
            self._store.remove(gone)
        elif len(gone):
            batch.then(functools.partial(self._store.remove, gone))
        for start in range(0, self.generation.rows, block_rows):
            part = range_ids(self.ids[start : start + block_rows])
            mask = self._store.owns(part)
            self._stored.add(part, mask)
            for begin, end, owned in _runs(mask):
                ids, place = part[begin:end], (start // block_rows, begin)
                memory = {
                    column.name: self._store.memory(ids, column.name) if is_direct and owned is None else None
                    for column in self._columns
                }
                if self._zeros or any(each is None for each in memory.values()):
                    self._add_in_steps(batch, place, ids, owned)
                else:
                    self._add(batch, place, ids, owned, memory)

    def _add_in_steps(self, batch: _Batch, place: tuple[int, int], ids: Ids, owned: _Mask | None) -> None:
        """Add a run to batches, into each as many rows as it takes."""
        step = max(1, batch.max_bytes // self._row_bytes)
        for begin in range(0, len(ids), step):
            part = slice(begin, begin + step)
            batch.make_room(len(ids[part]) * self._row_bytes)
            mask = None if owned is None else owned[part]
            self._add(batch, (place[0], place[1] + begin), ids[part], mask, {})

    def _add(
        self,
        batch: _Batch,
        place: tuple[int, int],
        ids: Ids,
        owned: _Mask | None,
        memory: Mapping[str, torch.Tensor | None],
    ) -> None:
        """Add rows to a batch; they begin at a `place`: block and row."""
        rows = {
            column.name: read
            for column in self._columns
            if (read := self._read(batch, place, len(ids), column, memory.get(column.name))) is not None
        }
        if rows:
            batch.then(functools.partial(self._write, ids, owned, rows))

    @property
    def _row_bytes(self) -> int:
        zeros = sum(column.width * column.dtype.itemsize for column in self._zeros.values())
        return zeros + sum(column.width * torch_dtype(column.dtype).itemsize for column in self._columns)

    def _range(self, first: int, count: int) -> range:
        """Name ids that follow one another, once it is sure that there are so many rows."""
        column, blocks = self._chain.columns[0].name, self.generation.blocks
        if blocks > len(self._checkpoint.names):
            text = f"{self._prefix!r} cannot have {count} rows in {blocks} blocks"
            raise FormatError(text, url=self._checkpoint.store.url)
        self._checkpoint.prepare([f"{self._prefix}.{column}.{block:05d}" for block in range(blocks)])
        for block in range(blocks):
            name = f"{self._prefix}.{column}.{block:05d}"
            if tuple(self._checkpoint.tensor(name).size[:1]) != (self._rows_of(block),):
                raise FormatError(f"{name!r} has another number of rows", url=self._checkpoint.store.url)
        return range(first, first + count)

    def _rows_of(self, block: int) -> int:
        block_rows = self.generation.block_rows
        return min(block_rows, self.generation.rows - block * block_rows)

    def _read(
        self,
        batch: _Batch,
        place: tuple[int, int],
        count: int,
        column: StoredColumn,
        memory: torch.Tensor | None,
    ) -> Callable[[], torch.Tensor] | None:
        """Read a column of rows at a `place`: block and row; return how to get it then.

        That is None if it is read into the store's own memory.
        """
        block, first = place
        name = f"{self._prefix}.{column.name}.{block:05d}"
        in_block, dtype = self._rows_of(block), torch_dtype(column.dtype)
        if column.bits and self.generation.kind == "delta":
            bits: Any = column.bits
            width = -(-column.width * bits // 8)
            self._check(name, "uint8", (in_block, width))
            self._check(f"{name}.scales", "float32", (in_block, 2))
            codes = batch.read_rows(name, first, count, width, torch.uint8)
            scales = batch.read_rows(f"{name}.scales", first, count, 2, torch.float32)
            return lambda: dequantize(codes, scales, bits, column.width, dtype)
        self._check(name, column.dtype, (in_block, column.width))
        if memory is not None:
            batch.read(name, [first, 0], memory)
            return None
        rows = batch.read_rows(name, first, count, column.width, dtype)
        return lambda: rows

    def _write(
        self, ids: Ids, owned: _Mask | None, columns: Mapping[str, Callable[[], torch.Tensor]]
    ) -> None:
        rows = {name: get() for name, get in columns.items()}
        if owned is not None:
            mask = torch.from_numpy(owned)
            ids, rows = ids[owned], {name: values[mask] for name, values in rows.items()}
        for name, column in self._zeros.items():
            rows[name] = torch.zeros(len(ids), column.width, dtype=column.dtype)
        self._store.write(ids, rows)

    def _check(self, name: str, dtype: str, size: tuple[int, ...]) -> None:
        entry: TensorColumns = self._checkpoint.tensor(name)
        if (entry.dtype, tuple(entry.size)) != (dtype, size):
            raise FormatError(
                f"{name!r} is {entry.dtype} {tuple(entry.size)}; its table says {dtype} {size}",
                url=self._checkpoint.store.url,
            )


_Mask = np.ndarray[Any, np.dtype[np.bool_]]


def _runs(owned: _Mask) -> Iterator[tuple[int, int, _Mask | None]]:
    """Find the runs of wanted rows of a block, and which rows of each are wanted; small gaps are read along."""
    if owned.all():
        yield 0, len(owned), None
        return
    places = np.flatnonzero(owned)
    if not len(places):
        return
    ends = np.flatnonzero(np.diff(places) > _MAX_GAP_ROWS)
    for first, last in zip([0, *(ends + 1)], [*ends, len(places) - 1], strict=True):
        begin, end = int(places[first]), int(places[last]) + 1
        mask = owned[begin:end]
        yield begin, end, None if mask.all() else mask


def _are_all(rows: RowStore, inserted: list[Ids | range]) -> bool:
    """Tell whether all rows of a store were inserted."""
    base = inserted[0]
    if isinstance(rows, DenseRows) and isinstance(base, range):
        return base.start <= rows.first_id and rows.first_id + rows.count <= base.stop
    ids = rows.ids()
    arrays = [range_ids(each) for each in inserted]
    return np.array_equal(ids, arrays[0]) or bool(np.isin(ids, np.concatenate(arrays)).all())


def _read(checkpoint: OpenCheckpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    checkpoint.prepare([name])
    target = torch.empty(tuple(checkpoint.tensor(name).size), dtype=dtype)
    checkpoint.read_into([(name, [0] * target.dim(), target)])
    return target


@dataclass(frozen=True)
class _Fit:
    """Columns of a stored table, compared with those of the program.

    Attributes:
        columns: stored ones that are restored.
        others: columns of the program that are not.
        missing, left: those of the program that the checkpoint lacks, and those that only the checkpoint has.
    """

    columns: Sequence[StoredColumn]
    others: Mapping[str, Column]
    missing: Sequence[str]
    left: Sequence[str]

    @property
    def is_whole(self) -> bool:
        return not self.others and not self.left


def _fit_columns(shard: TableShard, chain: Chain, selection: Selection) -> _Fit:
    """Choose the columns to restore. Raises ConfigurationError if the selection does not accept how they differ."""
    own = shard.rows.columns
    stored = {column.name: column for column in chain.columns}
    asked = [name for name in sorted(own.keys() | stored.keys()) if selection.takes(shard.name, name)]
    taken = [name for name in asked if name in own and name in stored]
    for name in asked:
        here = _shape(own.get(name))
        there = _stored_shape(stored.get(name))
        if here != there and (selection.strict or name in taken or not taken):
            hint = "strict=False restores those that both have, parts= those that it names"
            raise ConfigurationError(
                f"the column {name!r} of the table {shard.name!r} is {here} here and {there} in the checkpoint; restore "
                f"into a table of the same columns{'' if name in taken else '; ' + hint}"
            )
    return _Fit(
        columns=[stored[name] for name in taken],
        others={name: column for name, column in own.items() if name not in taken},
        missing=[name for name in asked if name not in stored],
        left=[name for name in asked if name not in own],
    )


def _shape(column: Column | None) -> str:
    return "missing" if column is None else f"{dtype_name(column.dtype)} x {column.width}"


def _stored_shape(column: StoredColumn | None) -> str:
    return "missing" if column is None else f"{column.dtype} x {column.width}"


@dataclass
class _Stored:
    """Counts of rows that were written of a table, and of those that this store took, and the range of all ids.

    Attributes:
        is_counted_here: the rows of this chain are in `counted`; each shard counts some chains, together all.
    """

    counted: RowCount = field(default_factory=RowCount)
    taken: RowCount = field(default_factory=RowCount)
    first: int | None = None
    last: int = -1
    is_counted_here: bool = True

    def add(self, ids: Ids, owned: _Mask) -> None:
        """Count some rows, one or more, of which this store owns some."""
        first = int(ids.min())
        last = int(ids.max())
        self.last = last if self.first is None else max(self.last, last)
        self.first = first if self.first is None else min(self.first, first)
        own = RowCount.of(ids[owned])
        self.taken += own
        if self.is_counted_here:
            self.counted += own if own.rows == len(ids) else RowCount.of(ids)
