"""Read regions of tensors, and objects, that this library stored: without torch, and without DCP's plans."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.format.columns import ObjectRow, TensorColumns
from ckpt.format.dtypes import item_bytes
from ckpt.format.elements import Elements
from ckpt.format.records import ItemRecord
from ckpt.reading.checkpoint import Checkpoint
from ckpt.transfer.array_pieces import array_pieces
from ckpt.transfer.boxes import Box
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import Fetcher, StoredFile
from ckpt.transfer.pieces import MemorySink, Piece, frame_pieces


@dataclass(frozen=True)
class ChunkPart:
    """The part of a stored chunk that is in a region.

    Attributes:
        row: of the chunk in the tensor's columns.
        begin, inside: where the part begins in the region, and in the chunk.
        lengths: its size.
    """

    row: int
    begin: tuple[int, ...]
    inside: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Its box in the region."""
        return self.begin, tuple(b + n for b, n in zip(self.begin, self.lengths, strict=True))


def chunk_parts(entry: TensorColumns, offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[ChunkPart]:
    """List the part of each chunk that is in a region."""
    first = np.array(offsets, dtype=np.int64)
    offsets_of, sizes = entry.offsets, entry.sizes
    begin = np.maximum(offsets_of, first)
    end = np.minimum(offsets_of + sizes, first + np.array(lengths, dtype=np.int64))
    for row in np.flatnonzero((begin < end).all(axis=1)).tolist():
        places = begin[row] - first, begin[row] - offsets_of[row], end[row] - begin[row]
        yield ChunkPart(row, *(tuple(place.tolist()) for place in places))


@dataclass(frozen=True)
class RegionPlan:
    """A region of a tensor, by the parts of chunks that fill it."""

    fqn: str
    entry: TensorColumns
    parts: Sequence[ChunkPart]


class PlainReader:
    """Read items of a checkpoint of this library."""

    def __init__(self, checkpoint: Checkpoint, pool: StagingPool, threads: Executor) -> None:
        self._checkpoint, self._columns, self._threads = checkpoint, checkpoint.columns, threads
        self._fetcher = Fetcher(checkpoint.store, pool, checkpoint.when_visible)

    def read(self, wanted: Sequence[tuple[RegionPlan, Elements]]) -> list[tuple[RegionPlan, Elements]]:
        """Fill arrays with regions, all together.

        Returns those that it has not read: torch must unpickle tensors of them.
        """
        rows = ((plan.entry, part.row) for plan, _ in wanted for part in plan.parts)
        self._prepare({entry.place(row)[0] for entry, row in rows})
        pieces: dict[StoredFile, list[Piece]] = defaultdict(list)
        others = []
        for plan, target in wanted:
            planned = [self._pieces(plan, part, target) for part in plan.parts]
            if None in planned:
                others.append((plan, target))
                continue
            for file, of_file in filter(None, planned):
                pieces[file] += of_file
        self._fetcher.run(pieces.items(), self._threads)
        return others

    def _prepare(self, files: Collection[int]) -> None:
        self._checkpoint.prepare({self._columns.files[number] for number in files}, self._threads)

    def _pieces(
        self, plan: RegionPlan, part: ChunkPart, target: Elements
    ) -> tuple[StoredFile, list[Piece]] | None:
        """List the pieces of a file that a part of a chunk needs; None if its elements are pickled."""
        entry, row = plan.entry, part.row
        place = ObjectRow(*entry.place(row))
        file, record = self._item(plan.fqn, entry.offsets_at(row), place)
        shape = tuple(entry.sizes_at(row))
        if record is None or record.payload_offset < 0:
            return None
        if record.payload_bytes != math.prod(shape) * item_bytes(entry.dtype):
            message = f"{plan.fqn!r}: the metadata and the manifest disagree on its size"
            raise self._checkpoint.fault(message, file.key)
        # `...`: else numpy gives a number, in place of a view of one element.
        box: tuple[Any, ...] = (..., *(slice(a, b) for a, b in zip(*part.box, strict=True)))
        pieces = list(array_pieces(record.payload_offset, shape, part.inside, target[box]))
        if file.block_crcs is not None and part.lengths == shape:
            payload = slice(record.payload_offset, record.payload_offset + record.payload_bytes)
            stop = place.offset + place.length
            pieces += frame_pieces(place.offset, stop, payload, file.block_size_bytes)
        return file, pieces

    def _item(
        self, fqn: str, offsets: Sequence[int] | None, place: ObjectRow
    ) -> tuple[StoredFile, ItemRecord | None]:
        """Find an item in its manifest, and check that it is stored: its rows may take much memory."""
        path, start, stop = self._columns.files[place.file], place.offset, place.offset + place.length
        file = self._checkpoint.file(path, start, stop)
        record = self._checkpoint.item(fqn, offsets, path, start, place.length)
        self._checkpoint.check_length(path, start, stop)
        return file, record

    def objects(self, fqns: Sequence[str]) -> dict[str, bytearray]:
        """Read objects as they are stored, unchecked."""
        rows = {fqn: row for fqn in fqns if isinstance(row := self._columns.entries[fqn], ObjectRow)}
        self._prepare({row.file for row in rows.values()})
        pieces: dict[StoredFile, list[Piece]] = defaultdict(list)
        objects: dict[str, bytearray] = {}
        for fqn, row in rows.items():
            file, _ = self._item(fqn, None, row)
            objects[fqn] = bytearray(row.length)
            sink = MemorySink(memoryview(objects[fqn]))
            pieces[file].append(Piece(row.offset, row.offset + row.length, sink))
        self._fetcher.run(pieces.items(), self._threads)
        return objects
