"""Save one shard of a table by what changed in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.embeddings.chain import MAX_FIRST_ID, VERSION, Chain, Costs, Generation, StoredColumn
from ckpt.embeddings.compared import Comparison
from ckpt.embeddings.cut import Cut
from ckpt.embeddings.ownership import Kept, Offer, check_owned, sample_of
from ckpt.embeddings.quantized import Bits, quantize
from ckpt.embeddings.rows import DenseRows, Ids, RowStore, sorted_ids
from ckpt.embeddings.touched import Touched, as_set, ids_of
from ckpt.errors import ConfigurationError
from ckpt.format.dtypes import dtype_name
from ckpt.format.table_names import shard_name

BLOCK_BYTES = 32 << 20
"""Rows are stored in blocks of about so many bytes a column."""

_ID_BYTES = 8
_MAX_DELTAS = 14
"""A checkpoint refers to 16 others at most."""

_QUANTIZED = (torch.float32, torch.bfloat16, torch.float16)
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


@dataclass
class _Change:
    """What one generation of the chain changed: ids, sorted."""

    touched: Ids
    evicted: Ids


class TableShard:
    """One process's shard of a table, of which saves write only what changed.

    Change rows inside `writing`, or call `touch` after changes while no save runs. Any thread may call any method.

    Args:
        name: of the table, the same on all processes: letters, digits, `_`, `-`.
        rows: where the program keeps them.
        shard, shards: which shard this is, of how many.
        quantize: columns of floats whose deltas are stored in 8 or 4 bits; an element is off by at most
            (largest - smallest of its row) / 510 or / 30. None by default.
        max_deltas: of a chain, up to 14; then they are merged into one, or a new base is written.
        max_delta_ratio: largest size of a chain's deltas together, of that of the base.
        max_aside_bytes: memory for copies of rows that change during their save; if it is not enough, the save
            fails, and training goes on.
        compare: find the rows that have changed by digests of small blocks of them, so that nobody has to tell;
            rows stay as they are during a call of `save` or `async_save`, and may change without `writing` after it.
        allow_gaps: of a dense table: ids between this shard and the next ones belong to no shard. By default that is
            an error of a save.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(
        self,
        name: str,
        rows: RowStore,
        *,
        shard: int = 0,
        shards: int = 1,
        quantize: Mapping[str, Bits] | None = None,
        max_deltas: int = 12,
        max_delta_ratio: float = 0.4,
        max_aside_bytes: int = 1 << 30,
        compare: bool = False,
        allow_gaps: bool = False,
    ) -> None:
        if not name or not set(name) <= _NAME_CHARACTERS:
            raise ConfigurationError(
                f"a table's name consists of letters, digits, _ and -, not {name!r:.100}"
            )
        if not 0 <= shard < shards:
            raise ConfigurationError(f"shard must be from 0 to {shards - 1}, not {shard}")
        if not 1 <= max_deltas <= _MAX_DELTAS or not max_delta_ratio > 0:
            raise ConfigurationError(
                f"max_deltas must be from 1 to {_MAX_DELTAS}, and max_delta_ratio above 0"
            )
        if any(column.width < 1 for column in rows.columns.values()):
            raise ConfigurationError(f"a column of {name!r} has no elements in a row")
        self.name, self.rows, self.shard, self.shards = name, rows, shard, shards
        self._bits = _checked_bits(rows, quantize or {})
        self._max_deltas, self._max_delta_ratio = max_deltas, max_delta_ratio
        self._max_aside_bytes = max_aside_bytes
        self._allow_gaps = allow_gaps
        self.lock = threading.RLock()
        self._touched, self._evicted = Touched(), Touched()
        self._chain: Chain | None = None
        self._changes: list[_Change] = []
        self._number = 0
        self._cut: Cut | None = None
        self._writers = 0
        self._pending: list[_Change] = []
        self._comparison = Comparison(rows) if compare else None
        self.may_change = threading.Event()  # rows, of which nobody tells
        self.may_change.set()

    # -- while training ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, batch: Any) -> Iterator[None]:
        """Change, or insert, the rows of `batch` (`touch` says what it may be) in the body of `with`.

        A save that runs keeps them as they were before.
        """
        with self.lock:
            ids = self._checked(batch)
            if self._cut is not None:
                self._cut.keep(ids)
            self._touched.add(ids)
            self._writers += 1
            try:
                yield
            finally:
                self._writers -= 1

    def touch(self, batch: Any) -> None:
        """Note that rows have changed: their ids, a bitmap of all rows, or a sparse gradient.

        Bitmaps and gradients of `DenseRows` are those of its tensors: their row 0 has the id `first_id`.

        Raises:
            ConfigurationError: an id that this shard cannot have; or a save runs, which needs the rows as they
                were, and fails. They are noted all the same.
        """
        with self.lock:
            ids = self._checked(batch)
            self._touched.add(ids)
            if len(ids) and self._cut is not None and not (self._cut.is_over or self._cut.is_whole):
                self._cut.close("rows changed outside of `writing` while they were being saved")
                raise ConfigurationError(
                    f"rows of {self.name!r} changed while they are being saved, so that save fails: change them "
                    "inside `with shard.writing(ids):`, or wait for the save"
                )

    def evict(self, batch: Any) -> None:
        """Remove rows, here and, with the next save, from the checkpoint."""
        with self.lock:
            ids = np.unique(self._checked(batch))
            if self._cut is not None:
                self._cut.keep(ids)
            self.rows.remove(ids)
            self._touched.discard(ids)
            self._evicted.add(ids)

    def _checked(self, batch: Any) -> Ids:
        ids = ids_of(batch, self.rows.first_id if isinstance(self.rows, DenseRows) else 0)
        check_owned(self, ids)
        return ids

    # -- saves ---------------------------------------------------------------------------------------------

    def check_not_writing(self) -> None:
        """Raise ConfigurationError in the body of `writing`; wait for other threads that are there."""
        with self.lock:
            if self._writers:
                raise ConfigurationError(f"call this outside of `writing` of {self.name!r}")

    def check_idle(self) -> None:
        """Raise ConfigurationError while a save runs, and in the body of `writing`, for which one would wait."""
        with self.lock:
            self.check_not_writing()
            if self._cut is not None:
                raise ConfigurationError(f"a save of {self.name!r} has not ended; tell it by `settle`")

    def begin(self) -> Cut:
        """Begin a save: what is changed from now on belongs to the next one; `choose` must follow.

        Raises:
            ConfigurationError: the last save has not been settled; or the caller is in the body of `writing`.
        """
        with self.lock:
            self.check_idle()
            if self._comparison is not None:
                self._look(self._comparison)
                self.may_change.clear()
            self._unsaved, self._touched, self._evicted = self._change(), Touched(), Touched()
            self._cut = Cut(self.name, self.rows, self.lock, self._max_aside_bytes)
            return self._cut

    def offer(self) -> Offer:
        """Describe the shard to the other ranks, for the save that has begun."""
        with self.lock:
            kept = Kept.of(self.rows, self._allow_gaps)
            sample = sample_of(self.rows) if self._chain is None else ()
            return Offer(self.name, self.shard, self.shards, kept, sample, self.costs())

    def costs(self) -> Costs | None:
        """Say what the save that has begun could write; None if it can only be a base."""
        if self._chain is None:
            return None
        deltas, merged, row_bytes = _sizes([*self._changes, self._unsaved], self.rows)
        base = self._chain.generations[0].rows * row_bytes
        return Costs(base, deltas, merged, self._max_deltas, self._max_delta_ratio)

    def choose(self, first: int | None = None) -> Cut:
        """Choose what the save that has begun writes.

        `first`: write a delta in the place of the chain's deltas from this index on; None: all rows.

        Raises:
            ConfigurationError: a row does not belong into this shard.
        """
        cut, changes = self._cut, [*self._changes, self._unsaved]
        assert cut is not None
        if first is None:
            ids = sorted_ids(cut.all_ids(), self.rows.order)
            evicted = self._unsaved.evicted
            kept: list[Generation] = []
            check_owned(self, ids)
        else:
            assert self._chain is not None
            merged = _merged(changes[first:])
            merged.touched = cut.held(merged.touched)
            ids, evicted = sorted_ids(merged.touched, self.rows.order), merged.evicted
            kept = self._chain.generations[: first + 1]
            changes = [*changes[:first], merged]
        generation = Generation(
            number=self._number,
            kind="base" if first is None else "delta",
            rows=len(ids),
            evicted=len(evicted),
            block_rows=_block_rows(self.rows),
            first_id=_first_id(ids),
        )
        version = _version(None if first is None else self._chain, ids, evicted)
        chain = _chain_of(self, _stored_columns(self.rows, self._bits), [*kept, generation], version)
        self._number += 1
        self._pending = [] if first is None else changes
        cut.choose(chain, ids, evicted)
        if self._comparison is not None:
            cut.keep_all()
            if cut.is_whole:
                self.may_change.set()
        return cut

    def settle(self, *, durable: bool) -> None:
        """End a save: it was committed, or its changes go into the next one."""
        with self.lock:
            self.may_change.set()
            cut, self._cut = self._cut, None
            if cut is None:
                return
            cut.close()
            if durable:
                self._chain, self._changes = cut.chain, self._pending
                return
            both = _merged([self._unsaved, self._change()])
            self._touched, self._evicted = Touched([both.touched]), Touched([both.evicted])

    def resume(self, chain: Chain, changes: list[tuple[Ids, Ids]]) -> None:
        """Go on from what was restored; `changes` are the ids that each delta of `chain` touched, and evicted."""
        with self.lock:
            is_same = (chain.shard, chain.shards) == (
                self.shard,
                self.shards,
            ) and chain.columns == _stored_columns(self.rows, self._bits)
            self.restart(1 + chain.generations[-1].number)
            self._touched, self._evicted = Touched(), Touched()
            if is_same and chain.order == self.rows.order:
                if self._comparison is not None:
                    self._comparison.look()
                self._chain = chain
                self._changes = [_Change(as_set(touched), as_set(evicted)) for touched, evicted in changes]

    def restart(self, number: int = 0) -> None:
        """Let the next save write a base; its generation has at least this number."""
        with self.lock:
            self._chain, self._changes, self._number = None, [], max(number, self._number)

    def _look(self, comparison: Comparison) -> None:
        """Note what has changed since the last look."""
        changed, gone = comparison.look()
        if self._chain is not None:  # else all rows are saved
            self._touched.discard(gone)
            self._evicted.add(gone)
            self._touched.add(changed)

    def _change(self) -> _Change:
        return _Change(self._touched.ids(), self._evicted.ids())


def _version(before: Chain | None, ids: Ids, evicted: Ids) -> int:
    """Choose the version of a chain that continues another one."""
    has_negative = any(len(each) and int(each.min()) < 0 for each in (ids, evicted))
    return VERSION if has_negative else 1 if before is None else before.version


def _chain_of(
    shard: TableShard, columns: list[StoredColumn], generations: list[Generation], version: int
) -> Chain:
    return Chain(
        version=version,
        table=shard.name,
        shard=shard.shard,
        shards=shard.shards,
        order=shard.rows.order,
        columns=columns,
        generations=generations,
    )


def entries_of(cut: Cut) -> dict[str, Any]:
    """Make the entries that a save writes for a cut: tensors, and those to be read when they are due.

    Values that a program changes meanwhile are `Due`; ids, codes and the chain are as they are.
    """
    chain, generation = cut.chain, cut.generation
    prefix = chain.prefix(generation)
    description = torch.frombuffer(bytearray(chain.encode()), dtype=torch.uint8)
    entries: dict[str, Any] = {f"{shard_name(chain.table, chain.shard, chain.shards)}.chain": description}
    if generation.evicted:
        entries[f"{prefix}.evicted"] = torch.from_numpy(cut.evicted)
    if generation.rows and generation.first_id is None:
        entries[f"{prefix}.ids"] = torch.from_numpy(cut.ids)
    for block in range(generation.blocks):
        for column in chain.columns:
            name = f"{prefix}.{column.name}.{block:05d}"
            if column.bits and generation.kind == "delta":
                bits: Any = column.bits
                entries[name], entries[f"{name}.scales"] = quantize(cut.read(column.name, block), bits)
            else:
                entries[name] = Due(cut, column.name, block)
    return entries


@dataclass(frozen=True)
class Due:
    """A column of a block of rows, to be read when it is written."""

    cut: Cut
    column: str
    block: int

    def placeholder(self) -> torch.Tensor:
        """Make a tensor of its shape and dtype without values."""
        column = self.cut.columns[self.column]
        rows = self.cut.generation.block_rows
        count = min(rows, self.cut.generation.rows - self.block * rows)
        return torch.empty(count, column.width, dtype=column.dtype, device="meta")

    def read(self) -> torch.Tensor:
        return self.cut.read(self.column, self.block)


def _sizes(changes: list[_Change], rows: RowStore) -> tuple[list[int], list[int], int]:
    """Return the bytes of deltas, of what they are merged from each of them on, and of a row."""
    row_bytes = _ID_BYTES + sum(c.width * c.dtype.itemsize for c in rows.columns.values())
    # A merge holds an id in the place of the last delta that touched it.
    ids = np.concatenate([change.touched for change in reversed(changes)])
    deltas = np.repeat(np.arange(len(changes))[::-1], [len(change.touched) for change in reversed(changes)])
    last = deltas[np.unique(ids, return_index=True)[1]]
    merged = np.bincount(last, minlength=len(changes))[::-1].cumsum()[::-1] * row_bytes
    return [_bytes_of(change, row_bytes) for change in changes], merged.tolist(), row_bytes


def _stored_columns(rows: RowStore, bits: Mapping[str, Bits]) -> list[StoredColumn]:
    return [
        StoredColumn(name=name, width=c.width, dtype=dtype_name(c.dtype), bits=bits.get(name, 0))
        for name, c in rows.columns.items()
    ]


def _block_rows(rows: RowStore) -> int:
    widest = max(column.width * column.dtype.itemsize for column in rows.columns.values())
    return max(1, BLOCK_BYTES // widest)


def _merged(changes: list[_Change]) -> _Change:
    """Join changes that follow one another: all ids evicted at some time, and those touched since."""
    evicted = np.unique(np.concatenate([change.evicted for change in changes]))
    if not len(evicted):
        return _Change(np.unique(np.concatenate([change.touched for change in changes])), evicted)
    touched = np.empty(0, dtype=np.int64)
    for change in changes:
        touched = np.union1d(np.setdiff1d(touched, change.evicted, assume_unique=True), change.touched)
    return _Change(touched, evicted)


def _first_id(ids: Ids) -> int | None:
    """Return the first of ids that are consecutive; None if they are not, or it cannot be stored."""
    if not len(ids) or not 0 <= int(ids[0]) <= MAX_FIRST_ID or int(ids[-1]) - int(ids[0]) != len(ids) - 1:
        return None
    return int(ids[0]) if bool((np.diff(ids) == 1).all()) else None


def _bytes_of(change: _Change, row_bytes: int) -> int:
    return len(change.touched) * row_bytes + len(change.evicted) * _ID_BYTES


def _checked_bits(rows: RowStore, bits: Mapping[str, Bits]) -> dict[str, Bits]:
    for name, count in bits.items():
        column = rows.columns.get(name)
        if column is None or column.dtype not in _QUANTIZED:
            raise ConfigurationError(
                f"quantize names {name!r}, which is no column of floats of 32 or 16 bits"
            )
        if count not in (8, 4):
            raise ConfigurationError(f"quantize takes 8 or 4 bits, not {count!r} ({name!r})")
    return dict(bits)
