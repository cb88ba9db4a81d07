"""Hold what a shard was at one moment, while its rows go on changing."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import torch

from ckpt.embeddings.chain import Chain, Generation
from ckpt.embeddings.rows import Column, Ids, RowStore
from ckpt.errors import CheckpointError

_FIRST_ASIDE_ROWS = 4096


class Cut:
    """The rows that one save writes, as they were when it began.

    Rows are copied when they are about to change, and not before; reading gives those copies in the place of
    what the rows have become.

    Attributes:
        chain: what will be stored of the shard, with this generation as the last.
        ids: of the rows to write, sorted by the order of the chain.
        evicted: ids of the rows to remove.
    """

    def __init__(
        self,
        chain: Chain,
        ids: Ids,
        evicted: Ids,
        rows: RowStore,
        lock: threading.RLock,
        max_aside_bytes: int,
    ) -> None:
        """`lock` is held by whoever changes rows. Up to `max_aside_bytes` are copied; then the cut is given up."""
        self.chain, self.ids, self.evicted = chain, ids, evicted
        self._rows, self._lock, self._max_aside_bytes = rows, lock, max_aside_bytes
        self._by_id = np.argsort(ids, kind="stable") if chain.order != "id" else None
        self._sorted = ids if self._by_id is None else ids[self._by_id]
        self._slots = np.full(len(ids), -1, dtype=np.int32)
        self._aside: dict[str, torch.Tensor] = {}
        self._aside_rows = 0
        self._is_over = False
        self._fault: str | None = None

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

    def keep(self, ids: Ids) -> None:
        """Copy those of these rows that belong to the cut and have not been; they are about to change."""
        if self._is_over or not len(self.ids):
            return
        places = np.searchsorted(self._sorted, ids).clip(max=len(self.ids) - 1)
        places = np.unique(places[self._sorted[places] == ids])
        places = places if self._by_id is None else self._by_id[places]
        places = places[self._slots[places] < 0]
        if not len(places):
            return
        columns = self._rows.columns
        row_bytes = sum(column.width * column.dtype.itemsize for column in columns.values())
        if (self._aside_rows + len(places)) * row_bytes > self._max_aside_bytes:
            self.close(
                f"more than {self._max_aside_bytes:,} bytes of rows changed while they were being saved; save when "
                "less changes, over a faster way, or with a larger max_aside_bytes"
            )
            return
        kept = self._rows.read(self.ids[places], columns)
        stop = self._aside_rows + len(places)
        for name, column in columns.items():
            self._aside[name] = _grown(self._aside.get(name), stop, column.width, column.dtype)
            self._aside[name][self._aside_rows : stop] = kept[name]
        self._slots[places] = np.arange(self._aside_rows, stop, dtype=np.int32)
        self._aside_rows = stop

    def read(self, column: str, block: int) -> torch.Tensor:
        """Return one column of a block of the rows, as they were.

        Raises:
            CheckpointError: the cut was given up, or is over.
        """
        with self._lock:
            if self._is_over:
                raise CheckpointError(f"the table {self.chain.table!r} cannot be saved: {self._fault}")
            rows = self.generation.block_rows
            part = slice(block * rows, (block + 1) * rows)
            ids, slots = self.ids[part], self._slots[part]
            live = np.flatnonzero(slots < 0)
            if len(live) == len(ids):
                return self._rows.read(ids, [column])[column]
            shape = self._rows.columns[column]
            values = torch.empty(len(ids), shape.width, dtype=shape.dtype)
            if len(live):
                values[torch.from_numpy(live)] = self._rows.read(ids[live], [column])[column]
            kept = np.flatnonzero(slots >= 0)
            values[torch.from_numpy(kept)] = self._aside[column][
                torch.from_numpy(slots[kept].astype(np.int64))
            ]
            return values

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
