"""Write a checkpoint of this library or of stock DCP: all ranks write chunks, the first commits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
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

from ckpt.backends.bodies import Body
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY, proves_no_commit
from ckpt.conversion.selection import ChosenTensor
from ckpt.conversion.target import FileTarget, Target, Written
from ckpt.errors import ConfigurationError
from ckpt.format.names import last_segment, rank_directory
from ckpt.format.planner_data import check_planner_data
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.stock.item_frame import frame
from ckpt.stock.metadata_writer import pickled_metadata
from ckpt.transfer.boxes import split_box
from ckpt.transfer.file_body import BytesPayload
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.layout import Entry, pack, place, spread
from ckpt.writing.rank_files import RankFiles
from ckpt.writing.receipts import PlacedItem, collect, pack_items, records_of
from ckpt.writing.save_objects import SaveObjects

_MAX_CHUNK_BYTES = 4 << 30
_MIN_CHUNK_BYTES = 64 << 20
_CHUNKS_PER_RANK = 8
_OBJECT_BATCH_BYTES = 32 << 20


class CheckpointTarget(Target):
    """A checkpoint of this library. An existing one stays until this one is committed."""

    def __post_init__(self) -> None:
        self._chunks = _Chunks(self)
        self._objects = SaveObjects(self.ranks.rank)
        self._coordinator = Coordinator(self.destination.folder, self._objects)

    def begin(self) -> None:
        self.destination.folder.prepare(rank_directory(self.ranks.rank))
        if self.ranks.rank == 0:
            self._chunks.check_paths()
            self._coordinator.look(overwrite=self.overwrite)

    def write(self) -> Written:
        store = self.destination.folder
        files = RankFiles(store, self._objects, self.pool, self.count_sent)
        for group in self._chunks.files():
            files.put(group)
        receipt = files.finish(last_segment(store.url))
        self.source.check_unchanged()
        return Written(len(receipt.files), files.data_bytes, receipt)

    def publish(self, written: Sequence[Written]) -> None:
        columns, record = records_of(
            self._chunks.metadata(),
            _receipts(written),
            save_id=self._objects.token,
            world_size=self.ranks.size,
            tags=self.source.tags,
        )
        self._coordinator.commit(columns, record)

    def proves_failure(self, error: BaseException) -> bool:
        return proves_no_commit(error)

    def discard(self) -> None:
        self._objects.discard(self.destination.folder)


class StockCheckpointTarget(FileTarget):
    """A checkpoint of stock DCP: `__<rank>_<number>.distcp`, and `.metadata`, which comes last."""

    def __post_init__(self) -> None:
        self._chunks = _Chunks(self)

    def begin(self) -> None:
        self.destination.folder.prepare("")
        if self.ranks.rank == 0:
            self._chunks.check_paths()
            self.refuse_existing(
                (COMMIT_KEY, STOCK_METADATA_KEY),
                "there is a checkpoint here already; choose another place, or remove it first",
            )

    def write(self) -> Written:
        rank, data_bytes = self.ranks.rank, 0
        names: list[str] = []
        placed: list[PlacedItem] = []
        for group in self._chunks.files():
            files: dict[str, Body] = {}
            for number, entries in enumerate(group, len(names)):
                items = place(entries)
                files[f"__{rank}_{number}.distcp"] = self.body(items, check_source=False)
                for item, index in zip(items, (entry.index for entry in entries), strict=True):
                    chunk = None if index.offset is None else tuple(index.offset)
                    placed.append(PlacedItem(index.fqn, chunk, index.index, number, item.offset, item.length))
            self.put_all(files)
            names += files
            data_bytes += sum(body.nbytes for body in files.values())
        self.source.check_unchanged()
        folder = last_segment(self.destination.folder.url)
        receipt = RankReceipt(rank, folder, None, names, pack_items(placed))
        return Written(len(names), data_bytes, receipt)

    def publish(self, written: Sequence[Written]) -> None:
        columns = collect(self._chunks.metadata(), _receipts(written))
        columns.version = CURRENT_DCP_VERSION
        self.put_bytes(STOCK_METADATA_KEY, pickled_metadata(columns))


def _receipts(written: Sequence[Written]) -> list[RankReceipt]:
    return [rank.receipt for rank in written if rank.receipt is not None]


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


class _Chunks:
    """All tensors of a conversion, cut where they are large, the same on every rank."""

    def __init__(self, target: Target) -> None:
        self._target, self._selection = target, target.selection
        rank, size = target.ranks.rank, target.ranks.size
        self._all: list[_Chunk] = []
        share = max(self._selection.nbytes // (size * _CHUNKS_PER_RANK), _MIN_CHUNK_BYTES)
        limit = _MAX_CHUNK_BYTES if size == 1 else min(share, _MAX_CHUNK_BYTES)
        for tensor in self._selection.tensors:
            begin, end = (0,) * len(tensor.facts.shape), tensor.facts.shape
            boxes = list(split_box(begin, end, max(limit // tensor.facts.dtype.itemsize, 1)))
            for number, (first, last) in enumerate(boxes or [(begin, end)]):
                sizes = tuple(b - a for a, b in zip(first, last, strict=True))
                self._all.append(_Chunk(tensor, first, sizes, number))
        self._own = [self._all[n] for n in pack([chunk.nbytes for chunk in self._all], size)[rank]]
        target.total_bytes = sum(chunk.nbytes for chunk in self._own)

    def files(self) -> Iterator[list[list[Entry]]]:
        """Lay out this rank's files, in groups to be written at the same time.

        The first rank writes all objects, and each its share of the tensors.
        """
        if self._target.ranks.rank == 0:
            for batch in self._object_batches():
                yield [batch]
        store = self._target.destination.folder
        entries = [self._entry(chunk) for chunk in self._own]
        yield spread(entries, 1 if store.capabilities.parallel_parts else store.threads)

    def _object_batches(self) -> Iterator[list[Entry]]:
        batch: list[Entry] = []
        nbytes = 0
        for chosen in self._selection.objects:
            data = self._target.source.stored_object(chosen.source)
            if batch and nbytes + len(data) > _OBJECT_BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(Entry(MetadataIndex(chosen.name), b"", BytesPayload(data), b"", False))
            nbytes += len(data)
        if batch:
            yield batch

    def _entry(self, chunk: _Chunk) -> Entry:
        tensor, dtype = chunk.tensor, chunk.tensor.facts.dtype
        try:
            framed = frame(dtype, torch.Size(chunk.sizes))
        except TypeError as error:
            raise ConfigurationError(f"{tensor.name[:200]!r}: {error}; --exclude it") from None
        payload = self._target.source.payload(tensor.source, dtype, chunk.sizes, chunk.offsets)
        index = MetadataIndex(tensor.name, torch.Size(chunk.offsets), chunk.number)
        return Entry(index, framed.head, payload, framed.tail, True)

    def check_paths(self) -> None:
        """Raise ConfigurationError if the paths in the nested state are not safe."""
        self._selection.check_paths()
        try:
            check_planner_data(self._selection.paths)
        except ValueError as error:
            raise ConfigurationError(
                f"the state has {error}; it cannot be stored safely", url=self._target.source.url
            ) from None

    def metadata(self) -> Metadata:
        """Describe everything that all ranks write, as DCP does."""
        described: dict[str, STORAGE_TYPES] = {}
        for tensor, chunks in itertools.groupby(self._all, key=lambda chunk: chunk.tensor):
            properties = TensorProperties(dtype=tensor.facts.dtype, requires_grad=tensor.facts.requires_grad)
            boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks]
            described[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.facts.shape), boxes)
        described |= {chosen.name: BytesStorageMetadata() for chosen in self._selection.objects}
        return Metadata(described, planner_data=self._selection.paths)
