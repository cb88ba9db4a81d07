"""Keep the rows of one shard in a hash table that grows."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray

from ckpt.embeddings import Column, home_of
from ckpt.embeddings.rows import Ids, Order, Rows

LEDGER = ("updates", "batches", "squares", "last")
"""Whole numbers that each row carries: how many samples updated it, the sums of the numbers of their batches and of
the squares of these, and the last batch."""

_EPSILON = np.float32(1e-6)
_FIRST_CAPACITY = 1024


class HashRows:
    """Rows of one shard: embeddings, row-wise Adagrad, and a ledger of all updates.

    A row begins with its first update; until then it is zero, and takes no memory.
    """

    order: Order = "hash"

    def __init__(self, width: int, shard: int = 0, shards: int = 1) -> None:
        self.columns = {
            "values": Column(width, torch.float32),
            "adagrad": Column(1, torch.float32),
            "ledger": Column(len(LEDGER), torch.int64),
        }
        self.shard, self.shards = shard, shards
        self.clear()

    def __len__(self) -> int:
        return len(self._slots)

    # -- for the training ----------------------------------------------------------------------------------

    def lookup(self, ids: Ids) -> NDArray[np.float32]:
        """Return embeddings [len(ids), width]."""
        slots = self._slots_of(ids)
        values = np.zeros((len(ids), self.columns["values"].width), dtype=np.float32)
        values[slots >= 0] = self._data["values"][slots[slots >= 0]]
        return values

    def update(
        self, ids: Ids, counts: Ids, gradients: NDArray[np.float32], batch: int, rate: float = 0.1
    ) -> None:
        """Take a step of Adagrad for rows, each once; `counts` are the samples of `batch` that used them.

        Each operation is rounded by itself, and sums of squares are exact: so the result does not depend on which
        rows are updated together.
        """
        slots = self._insert(ids)
        data, gradients = self._data, gradients.astype(np.float32, copy=False)
        data["adagrad"][slots, 0] += np.square(gradients, dtype=np.float64).mean(axis=1).astype(np.float32)
        steps = gradients / (np.sqrt(data["adagrad"][slots]) + _EPSILON)
        data["values"][slots] -= np.float32(rate) * steps
        data["ledger"][slots, :3] += counts[:, None] * np.array([1, batch, batch * batch])
        data["ledger"][slots, 3] = np.maximum(data["ledger"][slots, 3], batch)

    def unused_since(self, batch: int) -> Ids:
        """Return the ids of rows that no batch after this one has updated."""
        ids = self.ids()
        unused: Ids = ids[self._data["ledger"][self._slots_of(ids), 3] <= batch]
        return unused

    # -- for checkpoints: `ckpt.embeddings.RowStore` -------------------------------------------------------

    def ids(self) -> Ids:
        return np.fromiter(self._slots, dtype=np.int64, count=len(self._slots))

    def owns(self, ids: Ids) -> NDArray[np.bool_]:
        return np.equal(home_of(ids, self.shards), self.shard)

    def holds(self, ids: Ids) -> NDArray[np.bool_]:
        return self._slots_of(ids) >= 0

    def read(self, ids: Ids, columns: Collection[str]) -> Rows:
        slots = self._slots_of(ids)
        return {name: torch.from_numpy(self._data[name][slots]) for name in columns}

    def write(self, ids: Ids, rows: Rows) -> None:
        slots = self._insert(ids)
        for name, values in rows.items():
            self._data[name][slots] = values.numpy()

    def remove(self, ids: Ids) -> None:
        self._free += [slot for id in ids.tolist() if (slot := self._slots.pop(id, None)) is not None]

    def clear(self) -> None:
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._data = {
            name: np.zeros((0, column.width), dtype=torch.empty(0, dtype=column.dtype).numpy().dtype)
            for name, column in self.columns.items()
        }

    def memory(self, ids: Ids, column: str) -> torch.Tensor | None:
        return None  # rows stand in the order in which they came

    def _slots_of(self, ids: Ids) -> Ids:
        """Return the place of each row; -1 if there is none."""
        slots = self._slots
        return np.fromiter((slots.get(id, -1) for id in ids.tolist()), dtype=np.int64, count=len(ids))

    def _insert(self, ids: Ids) -> Ids:
        """Return the place of each row; new ones are zero."""
        new = ids[self._slots_of(ids) < 0]
        if len(self._free) < len(new):
            self._grow(len(new) - len(self._free))
        for id in new.tolist():
            self._slots[id] = slot = self._free.pop()
            for array in self._data.values():
                array[slot] = 0
        return self._slots_of(ids)

    def _grow(self, rows: int) -> None:
        old = len(self._data["values"])
        size = max(old + rows, 2 * old, _FIRST_CAPACITY)
        for name, array in self._data.items():
            self._data[name] = np.zeros((size, array.shape[1]), dtype=array.dtype)
            self._data[name][:old] = array
        self._free += range(size - 1, old - 1, -1)
