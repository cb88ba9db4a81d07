"""Count the objects, bytes and requests of a save, a restore and a removal, as this library makes them.

tests/planning compares each with a real save and load before a server that counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ckpt.consistency.checksums import BLOCK_SIZE_BYTES
from ckpt.planning.layout import Layout, Numbers
from ckpt.planning.models import Model


@dataclass(frozen=True)
class Requests:
    """Requests to an object store.

    Attributes:
        puts: PUT and POST: objects, parts of objects, and the begin and end of an upload in parts.
        gets: GET and HEAD.
        lists: pages of listings.
        deletes: DELETE, of up to 1,000 objects each.
    """

    puts: float = 0
    gets: float = 0
    lists: float = 0
    deletes: float = 0

    @property
    def writes(self) -> float:
        """What is priced as a write ("class A")."""
        return self.puts + self.lists

    @property
    def reads(self) -> float:
        """What is priced as a read ("class B")."""
        return self.gets

    def __add__(self, other: Requests) -> Requests:
        return Requests(
            self.puts + other.puts,
            self.gets + other.gets,
            self.lists + other.lists,
            self.deletes + other.deletes,
        )

    def times(self, factor: float) -> Requests:
        return Requests(self.puts * factor, self.gets * factor, self.lists * factor, self.deletes * factor)


# Bytes of records, as they were measured (docs/planning.md).
_MANIFEST_BYTES, _MANIFEST_ITEM_BYTES, _MANIFEST_BLOCK_BYTES = 240, 50, 32 / 3
_INDEX_BYTES, _INDEX_TENSOR_BYTES, _INDEX_FILE_BYTES, _INDEX_ROW_BYTES = 270, 27, 38, 0.5
_INDEX_NAMES, _INDEX_REGULAR_BYTES = 3, 17
_STOCK_BYTES, _STOCK_TENSOR_BYTES, _STOCK_ROW_BYTES = 212, 130, 130
_COMMIT_BYTES, _COMMIT_RANK_BYTES = 350, 145

_MAX_STOCK_BYTES = 256 << 20
"""Of a `.metadata`: a larger one is left out."""

_MAX_FILE_BYTES = 128 << 30
_WINDOW_BYTES = 4 << 30
_WHOLE_BYTES = 1 << 20
_SHARED_PART_BYTES = 16 << 20
_MIN_FILE_BYTES = 32 << 20
_DELETE_BATCH = 1000


@dataclass(frozen=True)
class Stored:
    """One checkpoint as it is stored in an object store.

    Attributes:
        data_bytes, record_bytes: of data files; of manifests, index, commit record and `.metadata`.
        rank_bytes: of the data file of a rank that writes, [pp, fsdp, tp].
        writers: ranks that write; `files`: the data files that they make on a file system.
        items: stored slices of tensors.
        index_bytes, stock_bytes: of the index and of `.metadata` (0: left out), which are part of `record_bytes`.
    """

    data_bytes: float
    record_bytes: float
    rank_bytes: Numbers
    writers: int
    files: int
    items: int
    index_bytes: float
    stock_bytes: float

    @property
    def nbytes(self) -> float:
        return self.data_bytes + self.record_bytes

    @property
    def objects(self) -> int:
        """A data file and a manifest of each rank; index, commit record, and `.metadata` unless it is left out."""
        return 2 * self.writers + 2 + (self.stock_bytes > 0)


def stored(model: Model, layout: Layout, *, threads: int) -> Stored:
    """Describe one checkpoint of a model."""
    writers = int(layout.writers.sum())
    rank_bytes = layout.file_bytes / np.maximum(layout.writers, 1)
    data_bytes, items = float(layout.file_bytes.sum()), float(layout.items.sum())
    name_bytes = sum(len(tensor.fqn) for tensor in model.tensors)
    manifests = writers * _MANIFEST_BYTES + data_bytes / BLOCK_SIZE_BYTES * _MANIFEST_BLOCK_BYTES
    manifests += items * (_MANIFEST_ITEM_BYTES + name_bytes / len(model.tensors))
    index: float = _INDEX_BYTES + _INDEX_NAMES * name_bytes + len(model.tensors) * _INDEX_TENSOR_BYTES
    index += writers * _INDEX_FILE_BYTES + layout.rows * _INDEX_ROW_BYTES
    index += layout.regular * _INDEX_REGULAR_BYTES
    stock = _STOCK_BYTES + len(model.tensors) * _STOCK_TENSOR_BYTES + items * _STOCK_ROW_BYTES
    stock = stock_bytes_written(stock)
    commit = _COMMIT_BYTES + writers * _COMMIT_RANK_BYTES
    per_rank = np.clip(rank_bytes // _MIN_FILE_BYTES, 1, threads)
    return Stored(
        data_bytes=data_bytes,
        record_bytes=manifests + index + stock + commit,
        rank_bytes=rank_bytes,
        writers=writers,
        files=int((per_rank * layout.writers).sum()),
        items=round(items),
        index_bytes=index,
        stock_bytes=stock,
    )


COMMIT_STEPS = 9
"""Requests of a save that are made in sequence: two looks, a manifest, index, look, commit, look, `.metadata`, look."""

OPEN_STEPS = 5
"""Of a load: commit record, size and seal of `.metadata`, index, manifest. Those of more than 1 MiB take two requests."""


def save_requests(layout: Layout, what: Stored, *, part_bytes: int) -> Requests:
    """Count the requests of a save by all ranks to an empty place.

    The first of a process also tries how the server treats conditions: two puts and a delete.
    """
    files = np.ceil(what.rank_bytes / _MAX_FILE_BYTES)
    puts, gets = put_requests(what.rank_bytes / np.maximum(files, 1), part_bytes)
    writers = layout.writers
    of_ranks = Requests(
        puts=float(((files * puts + 1) * writers).sum()), gets=float((files * gets * writers).sum())
    )
    return of_ranks + record_requests(what.index_bytes, what.stock_bytes, part_bytes)


def stock_bytes_written(stock_bytes: float) -> float:
    """Return how much of a `.metadata` of so many bytes is written: one that is too large is left out."""
    return stock_bytes if stock_bytes <= _MAX_STOCK_BYTES else 0


def record_requests(index_bytes: float, stock_bytes: float, part_bytes: int) -> Requests:
    """Count the requests for index, commit record and `.metadata`; in the place of one that is left out an older one is deleted."""
    records = [put_requests(nbytes, part_bytes) for nbytes in (index_bytes, stock_bytes) if nbytes]
    is_left_out = not stock_bytes
    return Requests(
        puts=sum(float(puts) for puts, _ in records) + 1,
        gets=sum(float(gets) for _, gets in records) + 5 + is_left_out,
        deletes=int(is_left_out),
    )


def put_requests(nbytes: Numbers | float, part_bytes: int) -> tuple[Numbers, Numbers]:
    """Count puts and gets for objects of these sizes: one put; or begin, parts, end, and a look at the size."""
    nbytes = np.asarray(nbytes)
    in_parts = nbytes > part_bytes
    return np.where(in_parts, np.ceil(nbytes / part_bytes) + 2, 1), np.where(in_parts, 1.0, 0.0)


def restore_requests(layout: Layout, what: Stored, *, request_bytes: int) -> Requests:
    """Count the requests of a load by the ranks that saved, each of which wants what it holds.

    Each manifest is read once. Replicas read the files of their position together, in parts. A slice that
    tensor-parallel ranks share is in the file of one of them; at most one request each reads it there.
    """
    mesh, writers = layout.mesh, layout.writers
    in_parts = mesh.dp * np.ceil(what.rank_bytes * writers / (mesh.dp * _SHARED_PART_BYTES)) + writers - 1
    of_file = np.ceil(what.rank_bytes / request_bytes) + what.rank_bytes // _WINDOW_BYTES
    own = writers + (in_parts if mesh.dp > 1 else writers * of_file)
    elsewhere = mesh.dp * layout.shared_items * (mesh.tp - 1) / mesh.tp
    return Requests(gets=float((own + elsewhere).sum()) + 4 + (what.index_bytes > _WHOLE_BYTES))


def remove_requests(what: Stored) -> Requests:
    """Count the requests of a removal, also by retention."""
    batches = math.ceil((2 * what.writers + 1) / _DELETE_BATCH)
    return Requests(gets=6, lists=2, deletes=2 + batches)
