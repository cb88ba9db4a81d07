"""Cut items that several ranks want into parts of bytes: one rank reads a part, all take it."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ckpt.consistency.checksums import crc64nvme
from ckpt.format.elements import StoredTensor
from ckpt.transfer.boxes import flat_boxes, span
from ckpt.transfer.fetcher import StoredFile
from ckpt.transfer.pieces import MemorySink, Piece, frame_pieces
from ckpt.transfer.read_pieces import FlatSink, region_pieces
from ckpt.transfer.region_digests import RegionDigest
from ckpt.transfer.tensor_memory import tensor_over

ALIGNMENT_BYTES = 64
"""Of each item in a part: elements are aligned there, whatever their dtype."""


@dataclass(eq=False)
class Parcel:
    """An item of a file, or a region of the tensor in it: its bytes in one order, and who takes them here.

    Attributes:
        file: that holds it.
        start, stop: where the item lies in the file.
    """

    file: StoredFile
    start: int
    stop: int
    _taken_bytes: int = field(init=False, default=0)

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def pieces(self, start: int, stop: int, memory: memoryview) -> Iterator[Piece]:
        """List what to read, to fill `memory` with the parcel's bytes `[start, stop)`."""
        raise NotImplementedError

    def take(self, start: int, data: memoryview) -> None:
        """Take the parcel's bytes from `start` on."""
        self._put(start, data)
        self._taken_bytes += data.nbytes
        if self._taken_bytes == self.nbytes:
            self._finish()

    def cut(self, at: int) -> int:
        """Return a place at or before byte `at` where the parcel can be cut, such that no block is read twice."""
        raise NotImplementedError

    def _put(self, start: int, data: memoryview) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class WholeParcel(Parcel):
    """An item as it is stored, such as a pickled object; `then` is given all of it."""

    then: Callable[[bytearray], None]
    _data: bytearray = field(init=False, default_factory=bytearray)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def pieces(self, start: int, stop: int, memory: memoryview) -> Iterator[Piece]:
        yield Piece(self.start + start, self.start + stop, MemorySink(memory))

    def cut(self, at: int) -> int:
        return _block_start(self.file, self.start, at)

    def _put(self, start: int, data: memoryview) -> None:
        if not self._data:
            self._data = bytearray(self.nbytes)
        self._data[start : start + data.nbytes] = data

    def _finish(self) -> None:
        self.then(self._data)


@dataclass(eq=False)
class TensorParcel(Parcel):
    """A region of a dense tensor, its elements in row-major order.

    Attributes:
        stored: the tensor in the file.
        offsets, target: the region, and where this rank wants it; of one shape.
        commit: called when all of it is there.
        is_whole: the region is the whole tensor, of which the item's frame is checked too.
        digest: takes the checksums of all bytes, in row-major order.
    """

    commit: Callable[[], None]
    stored: StoredTensor
    offsets: tuple[int, ...]
    target: torch.Tensor
    is_whole: bool
    digest: RegionDigest | None = None

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.stored.dtype.itemsize

    def pieces(self, start: int, stop: int, memory: memoryview) -> Iterator[Piece]:
        dtype, at = self.stored.dtype, 0
        for box in flat_boxes(self.target.shape, start // dtype.itemsize, stop // dtype.itemsize):
            shape = [side.stop - side.start for side in box]
            nbytes = math.prod(shape) * dtype.itemsize
            elements = tensor_over(memory[at : at + nbytes]).view(dtype).view(shape)
            offsets = [offset + side.start for offset, side in zip(self.offsets, box, strict=True)]
            yield from region_pieces(self.stored, offsets, shape, elements)
            at += nbytes
        if start == 0 and self.is_whole and self.file.block_crcs is not None:
            first = self.stored.first_byte
            payload = slice(first, first + self.stored.payload_bytes)
            yield from frame_pieces(self.start, self.stop, payload, self.file.block_size_bytes)

    def cut(self, at: int) -> int:
        shape, strides = self.target.shape, self.stored.strides
        if list(strides) == sorted(strides, reverse=True) and span(shape, strides) == math.prod(shape):
            skipped = sum(o * stride for o, stride in zip(self.offsets, strides, strict=True))
            place = _block_start(self.file, self.stored.first_byte + skipped * self.stored.dtype.itemsize, at)
            if place % self.stored.dtype.itemsize == 0:
                return place
        return at - at % ALIGNMENT_BYTES

    def _put(self, start: int, data: memoryview) -> None:
        cast_note = None
        if self.digest is not None:
            # Bytes of another rank were verified on their way by the checksum of a whole part.
            self.digest.add(start, data.nbytes, crc64nvme(data))
            cast_note = self.digest.add_cast
        FlatSink(self.target, self.stored.dtype, cast_note).deliver(start, data)

    def _finish(self) -> None:
        self.commit()


@dataclass(frozen=True)
class Segment:
    """Bytes `[start, stop)` of a parcel, which lie in a part from byte `at` on."""

    parcel: Parcel
    start: int
    stop: int
    at: int


def cut_parts(parcels: Sequence[Parcel], count: int) -> list[list[Segment]]:
    """Cut the bytes of all parcels, none of them empty, one after the other into `count` parts of about one size."""
    begins = [0, *itertools.accumulate(map(_extent, parcels))]
    cuts = [_cut(parcels, begins, begins[-1] * number // count) for number in range(count)]
    cuts.append((len(parcels), 0))
    return [list(_between(parcels, first, last)) for first, last in itertools.pairwise(cuts)]


def part_bytes(part: Sequence[Segment]) -> int:
    """Return how long a part is."""
    return part[-1].at + part[-1].stop - part[-1].start if part else 0


def _cut(parcels: Sequence[Parcel], begins: Sequence[int], at: int) -> tuple[int, int]:
    """Return the parcel, and the place in it, where byte `at` of all of them lies, or a better place before it."""
    number = bisect.bisect_right(begins, at) - 1
    parcel = parcels[number]
    return number, max(0, parcel.cut(min(at - begins[number], parcel.nbytes)))


def _between(parcels: Sequence[Parcel], first: tuple[int, int], last: tuple[int, int]) -> Iterator[Segment]:
    at = 0
    for number in range(first[0], min(last[0] + 1, len(parcels))):
        parcel = parcels[number]
        start = first[1] if number == first[0] else 0
        stop = last[1] if number == last[0] else parcel.nbytes
        if start < stop:
            yield Segment(parcel, start, stop, at)
            at += -(-(stop - start) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _extent(parcel: Parcel) -> int:
    return -(-parcel.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _block_start(file: StoredFile, first: int, at: int) -> int:
    """Return the last place at or before byte `at` of a run that begins at `first` where a block begins."""
    return at - (first + at) % (file.block_size_bytes if file.block_crcs is not None else ALIGNMENT_BYTES)
