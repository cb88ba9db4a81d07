"""A table that grows: rows by id in a dict, as a program might keep them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from ckpt.embeddings.rows import Column, Ids, Order, Rows, home_of


class DictRows:
    """Rows of one shard of a table that is sharded by a hash of the id."""

    order: Order = "hash"

    def __init__(self, columns: Mapping[str, Column], shard: int = 0, shards: int = 1) -> None:
        self.columns = dict(columns)
        self.shard, self.shards = shard, shards
        self.rows: dict[int, dict[str, torch.Tensor]] = {}

    def ids(self) -> Ids:
        return np.array(list(self.rows), dtype=np.int64)

    def owns(self, ids: Ids) -> NDArray[np.bool_]:
        return np.equal(home_of(ids, self.shards), self.shard)

    def holds(self, ids: Ids) -> NDArray[np.bool_]:
        return np.array([int(id) in self.rows for id in ids], dtype=bool)

    def read(self, ids: Ids, columns: Collection[str]) -> Rows:
        wanted = [self.rows[int(id)] for id in ids]
        return {
            name: torch.stack([row[name] for row in wanted])
            if wanted
            else torch.empty(0, self.columns[name].width, dtype=self.columns[name].dtype)
            for name in columns
        }

    def write(self, ids: Ids, rows: Rows) -> None:
        for number, id in enumerate(ids):
            self.rows[int(id)] = {name: values[number].clone() for name, values in rows.items()}

    def clear(self) -> None:
        self.rows.clear()

    def remove(self, ids: Ids) -> None:
        for id in ids:
            self.rows.pop(int(id), None)

    def memory(self, ids: Ids, column: str) -> torch.Tensor | None:
        return None
