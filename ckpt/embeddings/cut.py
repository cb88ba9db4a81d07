"""Hold what a shard was at one moment, while its rows go on changing."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from ckpt.embeddings.chain import Chain, Generation
from ckpt.embeddings.rows import Column, Ids, RowStore
from ckpt.errors import CheckpointError

_FIRST_ASIDE_ROWS = 4096

_PIECE_BYTES, _PAUSE_S = 2 << 20, 1e-4
"""Rows change between two pieces of a block; what changes waits for one piece at most, some 2 ms."""


class Cut:
    """The rows of one save, as they were when it began.

    Rows are copied when they are about to change, and not before; reading gives those copies in the place of
    what the rows have become. Which rows the save writes is chosen later (`choose`): all ranks agree on that in
    the background, and until then every row that changes is copied.

    Attributes:
        chain: what will be stored of the shard, with this generation as the last.
        ids: of the rows to write, sorted by the order of the chain.
        evicted: ids of the rows to remove.
        is_whole: all rows to write have been copied.
    """

    chain: Chain
    ids: Ids
    evicted: Ids

    def __init__(self, table: str, rows: RowStore, lock: threading.RLock, max_aside_bytes: int) -> None:
        """`lock` is held by whoever changes rows. Up to `max_aside_bytes` are copied; then the cut is given up."""
        self._table, self._rows, self._lock, self._max_aside_bytes = table, rows, lock, max_aside_bytes
        self._early: dict[int, int] | None = {}
        """Until the choice: the rows that have changed, and where their copies are; -1: there was no such row."""
        self._by_id: Ids | None = None
        self._aside: dict[str, torch.Tensor] = {}
        self._aside_rows = 0
        self._is_over = False
        self._fault: str | None = None
        self.is_whole = False

    @property
    def generation(self) -> Generation:
        return self.chain.generations[-1]

    @property
    def columns(self) -> Mapping[str, Column]:
        return self._rows.columns

    @property
    def aside_bytes(self) -> int:
        """Memory that copies take now."""
        return sum(tensor.nbytes for tensor in self._aside.values())

    # -- until the choice ----------------------------------------------------------------------------------

    def all_ids(self) -> Ids:
        """List the rows that there were, in any order."""
        with self._lock:
            now = self._rows.ids()
            changed, slots = self._changed()
        if not len(changed):
            return now
        return np.concatenate([now[~np.isin(now, changed)], changed[slots >= 0]])

    def held(self, ids: Ids) -> Ids:
        """Leave out of `ids` those that had no row."""
        with self._lock:
            there = self._rows.holds(ids)
            changed, slots = self._changed()
        if len(changed):
            places = np.searchsorted(changed, ids).clip(max=len(changed) - 1)
            there = np.where(changed[places] == ids, slots[places] >= 0, there)
        return ids[there]

    def choose(self, chain: Chain, ids: Ids, evicted: Ids) -> None:
        """Set what the save writes; only those rows are copied from now on."""
        by_id = np.argsort(ids, kind="stable") if chain.order != "id" else None
        ordered = ids if by_id is None else ids[by_id]
        all_slots = np.full(len(ids), -1, dtype=np.int32)
        with self._lock:
            changed, slots = self._changed()
            self.chain, self.ids, self.evicted = chain, ids, evicted
            self._by_id, self._sorted, self._slots, self._early = by_id, ordered, all_slots, None
            is_ours, places = self._places(changed)
            self._slots[places] = slots[is_ours]  # -1 for a row that there was not

    def _changed(self) -> tuple[Ids, Ids]:
        """Return the ids of rows that have changed before the choice, sorted, and the places of their copies."""
        early = self._early or {}
        ids, slots = (np.fromiter(each, dtype=np.int64, count=len(early)) for each in (early, early.values()))
        order = np.argsort(ids)
        return ids[order], slots[order]

    # -- while rows change ---------------------------------------------------------------------------------

    def keep(self, ids: Ids) -> None:
        """Copy those of these rows that belong to the cut and have not been; they are about to change."""
        if self._is_over or not len(ids):
            return
        early = self._early
        if early is None:
            _, places = self._places(np.unique(ids))
            places = places[self._slots[places] < 0]
            start = self._put_aside(self.ids[places])
            if start is not None:
                self._slots[places] = np.arange(start, start + len(places), dtype=np.int32)
            return
        fresh = np.array([id for id in np.unique(ids).tolist() if id not in early], dtype=np.int64)
        there = self._rows.holds(fresh)
        start = self._put_aside(fresh[there])
        if start is not None:
            early.update(dict.fromkeys(fresh[~there].tolist(), -1))
            early.update(zip(fresh[there].tolist(), range(start, start + int(there.sum())), strict=True))

    def _places(self, ids: Ids) -> tuple[NDArray[np.bool_], Ids]:
        """Tell which of these ids are in `self.ids`, and the places of those there."""
        if not len(self.ids):
            return np.zeros(len(ids), dtype=np.bool_), np.empty(0, dtype=np.int64)
        places: Ids = np.searchsorted(self._sorted, ids).clip(max=len(self.ids) - 1)
        is_ours: NDArray[np.bool_] = self._sorted[places] == ids
        places = places[is_ours]
        return is_ours, places if self._by_id is None else self._by_id[places]

    def _put_aside(self, ids: Ids) -> int | None:
        """Copy rows, and return the place of the first copy; None: there is no room, and the cut is given up."""
        start, columns = self._aside_rows, self._rows.columns
        if not len(ids):
            return start
        row_bytes = sum(column.width * column.dtype.itemsize for column in columns.values())
        if (start + len(ids)) * row_bytes > self._max_aside_bytes:
            self.close(
                f"more than {self._max_aside_bytes:,} bytes of rows changed while they were being saved; save when "
                "less changes, over a faster way, or with a larger max_aside_bytes"
            )
            return None
        kept = self._rows.read(ids, columns)
        self._aside_rows += len(ids)
        for name, column in columns.items():
            aside = _grown(self._aside.get(name), self._aside_rows, column.width, column.dtype)
            aside[start : self._aside_rows] = kept[name]
            self._aside[name] = aside
        return start

    # -- while they are saved ------------------------------------------------------------------------------

    def keep_all(self) -> None:
        """Copy all rows to write, if there is room for them; then they may change without notice."""
        with self._lock:
            places = np.flatnonzero(self._slots < 0)
            row_bytes = sum(column.width * column.dtype.itemsize for column in self.columns.values())
            if self._is_over or (self._aside_rows + len(places)) * row_bytes > self._max_aside_bytes:
                return
            start = self._put_aside(self.ids[places])
            assert start is not None
            self._slots[places] = np.arange(start, start + len(places), dtype=np.int32)
            self.is_whole = True

    def read(self, column: str, block: int) -> torch.Tensor:
        """Return one column of a block of the rows, as they were.

        Raises:
            CheckpointError: the cut was given up, or is over.
        """
        rows, shape = self.generation.block_rows, self._rows.columns[column]
        stop = min((block + 1) * rows, len(self.ids))
        values = torch.empty(stop - block * rows, shape.width, dtype=shape.dtype)
        piece = max(1, _PIECE_BYTES // (shape.width * shape.dtype.itemsize))
        for start in range(0, len(values), piece):
            if start:
                time.sleep(_PAUSE_S)  # who waits for the lock is not woken fast enough to get it otherwise
            part = slice(block * rows + start, min(block * rows + start + piece, stop))
            with self._lock:
                if self._is_over:
                    raise CheckpointError(f"the table {self._table!r} cannot be saved: {self._fault}")
                self._read_into(values[start : start + piece], column, part)
        return values

    def _read_into(self, values: torch.Tensor, column: str, part: slice) -> None:
        ids, slots = self.ids[part], self._slots[part]
        live = np.flatnonzero(slots < 0)
        if len(live) == len(ids):
            values.copy_(self._rows.read(ids, [column])[column])
            return
        if len(live):
            values[torch.from_numpy(live)] = self._rows.read(ids[live], [column])[column]
        kept = np.flatnonzero(slots >= 0)
        values[torch.from_numpy(kept)] = self._aside[column][torch.from_numpy(slots[kept].astype(np.int64))]

    def close(self, fault: str = "its save is over") -> None:
        """Free the copies; nothing can be read any more."""
        with self._lock:
            self._is_over, self._fault = True, self._fault or fault
            self._aside.clear()

    @property
    def is_over(self) -> bool:
        return self._is_over


def _grown(tensor: torch.Tensor | None, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor with room for so many rows."""
    if tensor is not None and len(tensor) >= rows:
        return tensor
    size = max(rows, _FIRST_ASIDE_ROWS if tensor is None else 2 * len(tensor))
    larger = torch.empty(size, width, dtype=dtype)
    if tensor is not None:
        larger[: len(tensor)] = tensor
    return larger
