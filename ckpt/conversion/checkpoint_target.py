"""Conversions to checkpoints: this library's, and those of stock DCP. Each rank writes a share, the first one commits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.backends.base import exists
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY, proves_no_commit
from ckpt.conversion.job import Job, is_settled
from ckpt.conversion.output_files import OutputFiles
from ckpt.conversion.selection import ChosenTensor
from ckpt.conversion.stock_files import StockFiles
from ckpt.errors import AlreadyExists, ConfigurationError
from ckpt.format.fqns import Path
from ckpt.format.names import last_segment, rank_directory
from ckpt.format.planner_data import check_planner_data
from ckpt.stock.item_frame import frame
from ckpt.stock.metadata_writer import pickled_metadata
from ckpt.transfer.boxes import split_box
from ckpt.transfer.file_body import BytesPayload
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.layout import Entry, pack, spread
from ckpt.writing.rank_files import RankFiles
from ckpt.writing.receipts import RankReceipt, collect
from ckpt.writing.save_objects import SaveObjects

__all__ = ["write_checkpoint", "write_stock_checkpoint"]

_MAX_CHUNK_BYTES = 4 << 30
_MIN_CHUNK_BYTES = 64 << 20
_CHUNKS_PER_RANK = 8
_OBJECT_BATCH_BYTES = 32 << 20


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


def write_checkpoint(job: Job) -> None:
    """Write a checkpoint of this library. It is one when it is committed; what was there before stays until then."""
    store, ranks = job.place.folder, job.ranks
    objects = SaveObjects(ranks.rank)
    chunks = _chunks(job)
    coordinator = Coordinator(store, objects) if ranks.rank == 0 else None

    def discard() -> None:
        objects.discard(store)

    def begin() -> None:
        store.prepare(rank_directory(ranks.rank))
        if coordinator is not None:
            _checked_paths(job)
            coordinator.look(overwrite=job.overwrite)

    def write() -> RankReceipt:
        mine = _share(job, chunks)
        counter = job.counter(sum(chunk.nbytes for chunk in mine))
        files = RankFiles(store, objects, job.pool, counter.add)
        _put(job, mine, files.put)
        receipt = files.receipt(last_segment(store.url), files.put_manifest())
        job.source.check_unchanged()
        job.wrote(len(receipt.files), files.data_bytes)
        return receipt

    def commit() -> None:
        assert coordinator is not None
        coordinator.commit(_metadata(job, chunks), receipts, world_size=ranks.size, tags=job.source.tags)

    with job.discarding(discard):
        ranks.together(job.call, begin)
        receipts = ranks.gather(ranks.together(job.call, write))
    job.publish(commit, discard, proves_no_commit)


def write_stock_checkpoint(job: Job) -> None:
    """Write a checkpoint of stock DCP; `.metadata`, which makes it one, comes last."""
    store, ranks = job.place.folder, job.ranks
    chunks = _chunks(job)
    mine = _share(job, chunks)
    counter = job.counter(sum(chunk.nbytes for chunk in mine))
    output = OutputFiles(store, job.pool, replace=job.overwrite, pace=counter.add)
    files = StockFiles(output, ranks.rank)

    def begin() -> None:
        store.prepare("")
        if ranks.rank == 0:
            _checked_paths(job)
        for key in (COMMIT_KEY, STOCK_METADATA_KEY) if ranks.rank == 0 else ():
            if exists(store, key):
                raise AlreadyExists(
                    "there is a checkpoint here already; choose another place, or remove it first",
                    url=store.url, key=key,
                )  # fmt: skip

    def write() -> RankReceipt:
        _put(job, mine, files.put)
        job.source.check_unchanged()
        receipt = files.receipt(last_segment(store.url))
        job.wrote(len(receipt.files), files.data_bytes)
        return receipt

    def finish() -> None:
        columns = collect(_metadata(job, chunks), receipts)
        columns.version = CURRENT_DCP_VERSION
        output.put_bytes(STOCK_METADATA_KEY, pickled_metadata(columns))

    with job.discarding(output.discard):
        ranks.together(job.call, begin)
        receipts = ranks.gather(ranks.together(job.call, write))
    job.publish(finish, output.discard, is_settled)


def _chunks(job: Job) -> list[_Chunk]:
    """All tensors, cut where they are large, the same on every rank."""
    share = job.choice.nbytes // (job.ranks.size * _CHUNKS_PER_RANK)
    limit = _MAX_CHUNK_BYTES if job.ranks.size == 1 else min(max(share, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    found = []
    for tensor in job.choice.tensors:
        begin, end = (0,) * len(tensor.facts.shape), tensor.facts.shape
        boxes = list(split_box(begin, end, max(limit // tensor.facts.dtype.itemsize, 1))) or [(begin, end)]
        for number, (first, last) in enumerate(boxes):
            found.append(
                _Chunk(tensor, first, tuple(b - a for a, b in zip(first, last, strict=True)), number)
            )
    return found


def _share(job: Job, chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """What this rank writes."""
    return [chunks[n] for n in pack([chunk.nbytes for chunk in chunks], job.ranks.size)[job.ranks.rank]]


def _put(job: Job, chunks: Sequence[_Chunk], put: Callable[[Sequence[Sequence[Entry]]], None]) -> None:
    if job.ranks.rank == 0:
        for batch in _object_batches(job):
            put([batch])
    stream = job.stream
    entries = []
    for chunk in chunks:
        dtype = chunk.tensor.facts.dtype
        try:
            framed = frame(dtype, torch.Size(chunk.sizes))
        except TypeError as error:
            raise ConfigurationError(f"{chunk.tensor.name[:200]!r}: {error}; --exclude it") from None
        payload = stream.piece(chunk.tensor.source, chunk.offsets, chunk.sizes, dtype)
        index = MetadataIndex(chunk.tensor.name, torch.Size(chunk.offsets), chunk.number)
        entries.append(Entry(index, framed.head, payload, framed.tail, True))
    capabilities = job.place.folder.capabilities
    put(spread(entries, 1 if capabilities.parallel_parts else job.place.folder.threads))


def _object_batches(job: Job) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    nbytes = 0
    for found in job.choice.objects:
        data = job.source.stored_object(found.source)
        if batch and nbytes + len(data) > _OBJECT_BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(Entry(MetadataIndex(found.name), b"", BytesPayload(data), b"", False))
        nbytes += len(data)
    if batch:
        yield batch


def _metadata(job: Job, chunks: Sequence[_Chunk]) -> Metadata:
    """DCP's description of what all ranks write."""
    described: dict[str, STORAGE_TYPES] = {}
    for tensor in job.choice.tensors:
        properties = TensorProperties(dtype=tensor.facts.dtype, requires_grad=tensor.facts.requires_grad)
        described[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.facts.shape), [])
    for chunk in chunks:
        stored = described[chunk.tensor.name]
        assert isinstance(stored, TensorStorageMetadata)
        stored.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
    for found in job.choice.objects:
        described[found.name] = BytesStorageMetadata()
    return Metadata(described, planner_data=_checked_paths(job))


def _checked_paths(job: Job) -> dict[str, Path]:
    job.choice.check_paths()
    paths = job.choice.paths
    try:
        check_planner_data(paths)
    except ValueError as error:
        raise ConfigurationError(
            f"the state has {error}; it cannot be stored safely", url=job.source.url
        ) from None
    return paths
