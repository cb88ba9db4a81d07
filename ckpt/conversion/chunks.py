"""Cut tensors into chunks, share them among the ranks, describe them as DCP does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.conversion.job import ConversionJob, SentBytes
from ckpt.conversion.selection import ChosenTensor
from ckpt.errors import ConfigurationError
from ckpt.format.fqns import Path
from ckpt.format.planner_data import check_planner_data
from ckpt.stock.item_frame import frame
from ckpt.transfer.boxes import split_box
from ckpt.transfer.file_body import BytesPayload
from ckpt.writing.layout import Entry, pack, spread

_MAX_CHUNK_BYTES = 4 << 30
_MIN_CHUNK_BYTES = 64 << 20
_CHUNKS_PER_RANK = 8
_OBJECT_BATCH_BYTES = 32 << 20

Put = Callable[[Sequence[Sequence[Entry]]], None]
"""Writes files, each made of entries."""


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor that one rank writes; `number` counts those of the tensor."""

    tensor: ChosenTensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    number: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.tensor.facts.dtype.itemsize


class Chunks:
    """All tensors of a conversion, cut where they are large, the same on every rank."""

    def __init__(self, job: ConversionJob) -> None:
        self._job, size = job, job.ranks.size
        self._all: list[_Chunk] = []
        share = max(job.selection.nbytes // (size * _CHUNKS_PER_RANK), _MIN_CHUNK_BYTES)
        limit = _MAX_CHUNK_BYTES if size == 1 else min(share, _MAX_CHUNK_BYTES)
        for tensor in job.selection.tensors:
            begin, end = (0,) * len(tensor.facts.shape), tensor.facts.shape
            boxes = list(split_box(begin, end, max(limit // tensor.facts.dtype.itemsize, 1)))
            for number, (first, last) in enumerate(boxes or [(begin, end)]):
                sizes = tuple(b - a for a, b in zip(first, last, strict=True))
                self._all.append(_Chunk(tensor, first, sizes, number))
        numbers = pack([chunk.nbytes for chunk in self._all], size)[job.ranks.rank]
        self._own = [self._all[number] for number in numbers]

    def counter(self) -> SentBytes:
        """Make a counter of the bytes that this rank will send."""
        return self._job.counter(sum(chunk.nbytes for chunk in self._own))

    def put(self, put: Put) -> None:
        """Write this rank's share: on the first rank all objects, on each its tensors."""
        job = self._job
        for batch in _object_batches(job) if job.ranks.rank == 0 else ():
            put([batch])
        entries = [self._entry(chunk) for chunk in self._own]
        store = job.destination.folder
        put(spread(entries, 1 if store.capabilities.parallel_parts else store.threads))

    def _entry(self, chunk: _Chunk) -> Entry:
        tensor, dtype = chunk.tensor, chunk.tensor.facts.dtype
        try:
            framed = frame(dtype, torch.Size(chunk.sizes))
        except TypeError as error:
            raise ConfigurationError(f"{tensor.name[:200]!r}: {error}; --exclude it") from None
        payload = self._job.stream.box(tensor.source, chunk.offsets, chunk.sizes, dtype)
        index = MetadataIndex(tensor.name, torch.Size(chunk.offsets), chunk.number)
        return Entry(index, framed.head, payload, framed.tail, True)

    def metadata(self) -> Metadata:
        """Describe everything that all ranks write."""
        described: dict[str, STORAGE_TYPES] = {}
        for tensor in self._job.selection.tensors:
            properties = TensorProperties(dtype=tensor.facts.dtype, requires_grad=tensor.facts.requires_grad)
            described[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.facts.shape), [])
        for chunk in self._all:
            stored = described[chunk.tensor.name]
            assert isinstance(stored, TensorStorageMetadata)
            stored.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        described |= {chosen.name: BytesStorageMetadata() for chosen in self._job.selection.objects}
        return Metadata(described, planner_data=self.checked_paths())

    def checked_paths(self) -> dict[str, Path]:
        """Return the paths in the nested state. Raises ConfigurationError if they are not safe."""
        self._job.selection.check_paths()
        paths = self._job.selection.paths
        try:
            check_planner_data(paths)
        except ValueError as error:
            raise ConfigurationError(
                f"the state has {error}; it cannot be stored safely", url=self._job.source.url
            ) from None
        return paths


def _object_batches(job: ConversionJob) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    nbytes = 0
    for chosen in job.selection.objects:
        data = job.source.stored_object(chosen.source)
        if batch and nbytes + len(data) > _OBJECT_BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(Entry(MetadataIndex(chosen.name), b"", BytesPayload(data), b"", False))
        nbytes += len(data)
    if batch:
        yield batch
