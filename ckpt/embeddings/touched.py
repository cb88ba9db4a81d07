"""Remember which rows have changed since the last checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ckpt.embeddings.rows import Ids
from ckpt.errors import ConfigurationError

_MAX_PENDING = 1 << 20


class Touched:
    """A set of ids, made from batches of them with repetitions."""

    def __init__(self, ids: Iterable[Ids] = ()) -> None:
        self._pending = [np.empty(0, dtype=np.int64), *ids]
        self._count = sum(map(len, self._pending))

    def add(self, ids: Ids) -> None:
        """Add ids, of which many may be there already."""
        self._pending.append(ids)
        self._count += len(ids)
        if self._count > _MAX_PENDING + 2 * len(self._pending[0]):
            self.ids()

    def discard(self, ids: Ids) -> None:
        """Take ids out."""
        self._keep(np.setdiff1d(self.ids(), ids))

    def ids(self) -> Ids:
        """Return the ids, sorted, each once."""
        if len(self._pending) > 1:  # the first is a set already
            self._keep(np.unique(np.concatenate(self._pending)))
        return self._pending[0]

    def _keep(self, ids: Ids) -> None:
        self._pending, self._count = [ids], len(ids)


def as_set(ids: Ids) -> Ids:
    """Sort ids, and keep one of equal ones; fast where they are so already."""
    return ids if bool((ids[1:] > ids[:-1]).all()) else np.unique(ids)  # a difference may overflow


def ids_of(batch: object, first_id: int = 0) -> Ids:
    """Return the ids of rows that a batch, a bitmap or a sparse gradient touches.

    Takes tensors or arrays of ids (any shape; any 64 bits: uint64 becomes the int64 of the same bits), bool ones of
    one element for each row, and sparse tensors, whose first index is the row. The rows of the last two are counted
    from `first_id`.

    Raises:
        ConfigurationError: it is none of these.
    """
    if isinstance(batch, torch.Tensor) and batch.is_sparse:
        batch = batch.detach()._indices()[0] + first_id
    array = batch.detach().cpu().numpy() if isinstance(batch, torch.Tensor) else np.asarray(batch)
    if array.dtype == np.bool_ and array.ndim == 1:
        return np.flatnonzero(array).astype(np.int64) + first_id
    if array.size and array.dtype.kind not in "iu":
        raise ConfigurationError(
            f"rows are named by ids (int64, uint64), a bitmap (bool) or a sparse gradient, not by {array.dtype}"
        )
    return array.reshape(-1).astype(np.int64, copy=True)
