"""Find the rows that have changed where nobody tells: by digests of small blocks of rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ckpt.embeddings.rows import Ids, RowStore, range_ids
from ckpt.embeddings.touched import as_set

_BLOCK_BYTES = 2 << 10
"""Rows are compared in blocks of about so many bytes: fewer are slower, more name more rows that did not change."""

_BATCH_ROWS = 1 << 16
_LARGE, _SMALL = 2, 4
"""Blocks are cut anew where one has so many times more rows than at first, or all so many times less."""

Digests = NDArray[np.uint64]
"""Two words for each digest of a block: [blocks, words]."""


class Comparison:
    """Compare a store of rows with what it was at the last look.

    Keeps 16 bytes for each column of each block and, where the ids do not follow one another, 8 for each row.
    """

    def __init__(self, rows: RowStore) -> None:
        self._rows = rows
        row_bytes = sum(column.width * column.dtype.itemsize for column in rows.columns.values())
        self._block_rows = max(1, _BLOCK_BYTES // row_bytes)
        self._last: _Look | None = None

    def look(self) -> tuple[Ids, Ids]:
        """Return the ids of the rows of blocks that changed since the last look, and of rows that are gone."""
        ids, last = as_set(self._rows.ids()), self._last
        if last is None or not len(last.starts) or len(ids) * _SMALL < len(last.starts) * self._block_rows:
            starts = ids[:: self._block_rows]
        else:
            starts = self._split(ids, last.starts)
        follow = len(ids) > 0 and int(ids[-1]) - int(ids[0]) == len(ids) - 1
        kept = range(int(ids[0]), int(ids[-1]) + 1) if follow else ids
        self._last = now = _Look(kept, starts, self._digests(ids, starts, not follow))
        return now.changes_since(last)

    def _split(self, ids: Ids, starts: Ids) -> Ids:
        """Cut blocks that have grown."""
        edges = _edges(ids, starts)
        more = [
            ids[edges[block] : edges[block + 1] : self._block_rows]
            for block in np.flatnonzero(np.diff(edges) > _LARGE * self._block_rows)
        ]
        return np.union1d(starts, np.concatenate(more)) if more else starts

    def _digests(self, ids: Ids, starts: Ids, with_ids: bool) -> Digests:
        """Digest all columns of each block, `with_ids` or not."""
        edges = _edges(ids, starts)
        step = max(1, _BATCH_ROWS // self._block_rows)
        batches = []
        for first in range(0, len(starts), step):
            part = edges[first : first + step + 1]
            batches.append(self._digests_of(ids[part[0] : part[-1]], part - part[0], with_ids))
        return np.concatenate(batches) if batches else np.empty((0, 0), dtype=np.uint64)

    def _digests_of(self, ids: Ids, edges: NDArray[np.int64], with_ids: bool) -> Digests:
        columns = self._rows.columns
        tensors = {name: self._rows.memory(ids, name) if len(ids) else None for name in columns}
        if missing := [name for name, tensor in tensors.items() if tensor is None and len(ids)]:
            tensors |= self._rows.read(ids, missing)
        datas: list[tuple[Any, int]] = [(ids.view(np.uint8).data, ids.itemsize)] if with_ids else []
        for name, column in columns.items():
            tensor, size = tensors[name], column.width * column.dtype.itemsize
            empty = torch.empty(0, dtype=torch.uint8)
            flat = empty if tensor is None else tensor.contiguous().view(torch.uint8).reshape(-1)
            datas.append((flat.numpy().data, size))
        digest = xxhash.xxh3_128_digest
        made = [
            b"".join([digest(data[begin:end]) for begin, end in itertools.pairwise((edges * size).tolist())])
            for data, size in datas
        ]
        return np.hstack([np.frombuffer(each, dtype=np.uint64).reshape(-1, 2) for each in made])


@dataclass(frozen=True)
class _Look:
    """Rows as they were: their ids, sorted, those at which blocks begin, and the blocks' digests."""

    ids: Ids | range
    starts: Ids
    digests: Digests

    def changes_since(self, last: _Look | None) -> tuple[Ids, Ids]:
        ids, ids_before = (range_ids(each) for each in (self.ids, last.ids if last else range(0)))
        if last is None or last.digests.shape[1] != self.digests.shape[1]:
            return ids, np.setdiff1d(ids_before, ids, assume_unique=True)
        places = np.searchsorted(last.starts, self.starts).clip(max=len(last.starts) - 1)
        same = (last.starts[places] == self.starts) & (_stops(last.starts)[places] == _stops(self.starts))
        same &= (last.digests[places] == self.digests).all(axis=1)
        touched = ids[np.repeat(~same, np.diff(_edges(ids, self.starts)))]
        others = np.ones(len(last.starts), dtype=bool)
        others[places[same]] = False
        before = ids_before[np.repeat(others, np.diff(_edges(ids_before, last.starts)))]
        return touched, np.setdiff1d(before, touched, assume_unique=True)


def _edges(ids: Ids, starts: Ids) -> NDArray[np.int64]:
    """Return where each block begins among sorted ids, and the end; what is before the first belongs to it."""
    edges = np.empty(len(starts) + 1, dtype=np.int64)
    edges[0], edges[-1] = 0, len(ids)
    edges[1:-1] = np.searchsorted(ids, starts[1:])
    return edges


def _stops(starts: Ids) -> Ids:
    return np.append(starts[1:], np.iinfo(np.int64).max)
