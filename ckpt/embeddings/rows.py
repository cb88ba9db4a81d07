"""Hold the rows of one shard of a table, or say what an own store of rows must offer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ckpt.errors import ConfigurationError

Ids = NDArray[np.int64]
"""Ids of rows, int64: any 64 bits, such as a hash."""

Rows = Mapping[str, torch.Tensor]
"""Rows by column, each of shape [rows, width]."""

Order = Literal["id", "hash"]
"""How the rows of a checkpoint are sorted, so that a process reads its own in few runs."""


@dataclass(frozen=True)
class Column:
    """A column of a table, such as the values, or the state of an optimizer.

    Attributes:
        width: elements in a row.
    """

    width: int
    dtype: torch.dtype


class RowStore(Protocol):
    """The rows of one shard, kept by the program: a dense tensor, a hash table, ...

    All methods are called with the table's lock held (`TableShard.writing`).
    """

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns that a row has."""

    @property
    def order(self) -> Order:
        """ "id" where a shard holds a range of ids, "hash" where it holds what `home_of` gives it."""

    def ids(self) -> Ids:
        """Return the ids of all rows, each once."""

    def owns(self, ids: Ids) -> NDArray[np.bool_]:
        """Tell of each id whether its row belongs into this shard, if it exists."""

    def read(self, ids: Ids, columns: Collection[str]) -> Rows:
        """Return copies of some columns of rows, in the order of `ids`, all of which are there."""

    def holds(self, ids: Ids) -> NDArray[np.bool_]:
        """Tell of each id whether its row is there."""

    def write(self, ids: Ids, rows: Rows) -> None:
        """Put rows in the place of those with the same id, or beside the others.

        `rows` lacks the columns that were restored into their `memory`; copy from it, it is used again after the call.
        """

    def clear(self) -> None:
        """Forget all rows, before others are restored; a dense table need not."""

    def remove(self, ids: Ids) -> None:
        """Forget rows; those that are not there do not matter."""

    def memory(self, ids: Ids, column: str) -> torch.Tensor | None:
        """Show the memory of rows [len(ids), width], for them to be restored there; None if it is not in one piece."""


class DenseRows:
    """Show tensors as rows with the ids `first_id`, `first_id` + 1, ...

    Args:
        first_id: id of the first row.
        columns: tensors on the CPU with one row each for each id: [rows, width] or [rows].

    Raises:
        ConfigurationError: the tensors do not fit together.
    """

    order: Order = "id"

    def __init__(self, first_id: int, **columns: torch.Tensor) -> None:
        counts = {name: len(tensor) for name, tensor in columns.items()}
        if len(set(counts.values())) != 1:
            raise ConfigurationError(
                f"the columns of a table must have the same number of rows, not {counts}"
            )
        self.first_id, self.count = first_id, next(iter(counts.values()))
        if not -(1 << 63) <= first_id <= (1 << 63) - max(1, self.count):
            raise ConfigurationError(
                f"the ids of {self.count} rows from first_id={first_id} on exceed 64 bits"
            )
        self._tensors = {name: _matrix(name, tensor) for name, tensor in columns.items()}
        self.columns = {name: Column(t.shape[1], t.dtype) for name, t in self._tensors.items()}

    @property
    def last_id(self) -> int:
        """The id of the last row, if there is one."""
        return self.first_id + max(1, self.count) - 1

    def ids(self) -> Ids:
        return range_ids(range(self.first_id, self.first_id + self.count))

    def owns(self, ids: Ids) -> NDArray[np.bool_]:
        return self.holds(ids)

    def holds(self, ids: Ids) -> NDArray[np.bool_]:
        return (ids >= self.first_id) & (ids <= self.last_id) & (self.count > 0)

    def read(self, ids: Ids, columns: Collection[str]) -> Rows:
        index = self._index(ids)
        return {name: self._tensors[name].index_select(0, index) for name in columns}

    def write(self, ids: Ids, rows: Rows) -> None:
        places = ids - self.first_id
        for name, values in rows.items():
            tensor = self._tensors[name]
            if tensor.is_contiguous():  # whole rows are copied twice as fast as elements
                _whole_rows(tensor)[places] = _whole_rows(values.to(tensor.dtype).contiguous())
            else:
                tensor.index_copy_(0, torch.from_numpy(places), values)

    def clear(self) -> None:
        """Leave the rows: all are restored."""

    def memory(self, ids: Ids, column: str) -> torch.Tensor | None:
        start = int(ids[0]) - self.first_id
        if int(ids[-1]) - int(ids[0]) != len(ids) - 1 or not bool((np.diff(ids) == 1).all()):
            return None
        return self._tensors[column][start : start + len(ids)]

    def remove(self, ids: Ids) -> None:
        raise ConfigurationError("a dense table has all its rows always: it evicts none")

    def _index(self, ids: Ids) -> torch.Tensor:
        return torch.from_numpy(ids - self.first_id)


def _matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.dim() not in (1, 2):
        raise ConfigurationError(f"the column {name!r} must be a tensor on the CPU, [rows] or [rows, width]")
    matrix = tensor.detach()
    return matrix.unsqueeze(1) if matrix.dim() == 1 else matrix


def _whole_rows(tensor: torch.Tensor) -> NDArray[np.void]:
    """Show each row of a contiguous tensor as one item of its bytes."""
    rows, width = tensor.shape
    data: NDArray[np.void] = tensor.view(torch.uint8).numpy().view(f"V{width * tensor.element_size()}")
    return data.reshape(rows)


def range_ids(ids: Ids | range) -> Ids:
    """Return ids that may be a range as an array."""
    return np.arange(len(ids), dtype=np.int64) + ids.start if isinstance(ids, range) else ids


def home_of(ids: Ids, shards: int) -> NDArray[np.int64]:
    """Give each id (int64, or uint64 of the same bits) a shard from 0 to `shards` - 1.

    Shards are ranges of a hash, so few rows move when their number changes.
    """
    homes: Ids = ((hash_of(ids) >> np.uint64(32)) * np.uint64(shards) >> np.uint64(32)).astype(np.int64)
    return homes


def hash_of(ids: Ids) -> NDArray[np.uint64]:
    """Mix the bits of ids (splitmix64); never changes, as checkpoints are sorted by it."""
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def sorted_ids(ids: Ids, order: Order) -> Ids:
    """Sort ids as a checkpoint does; of equal ones, keep one."""
    unique = ids if bool((ids[1:] > ids[:-1]).all()) else np.unique(ids)  # a difference may overflow
    return unique if order == "id" else unique[np.argsort(hash_of(unique), kind="stable")]
