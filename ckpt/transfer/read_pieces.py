"""Cut a region of a stored tensor into pieces for a tensor: runs of the file that one sink takes.

The best sink is the destination's own memory. The others copy out of scratch: the destination is on
a device, has another dtype, or has gaps where the file has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ckpt.consistency.checksums import crc64nvme
from ckpt.format.elements import StoredTensor
from ckpt.transfer.pieces import MemorySink, Note, Piece, Sink, box_pieces
from ckpt.transfer.region_digests import RegionDigest
from ckpt.transfer.tensor_memory import copy_elements, flat_pairs, has_memory_view, memory_of, tensor_over


@dataclass(frozen=True, eq=False)
class FlatSink:
    """A tensor that takes its elements in row-major order; `dtype` is that of the file.

    `cast_note` takes the checksums of elements that are cast.
    """

    target: torch.Tensor
    dtype: torch.dtype
    cast_note: Note | None = None

    @property
    def unit_bytes(self) -> int:
        return self.dtype.itemsize

    def deliver(self, start: int, data: memoryview) -> None:
        elements = _elements(data, self.dtype)
        if self.cast_note is not None and self.target.dtype != self.dtype:
            at = start // self.dtype.itemsize * self.target.element_size()
            elements = _noted(elements.to(self.target.dtype), at, self.cast_note)
        for part, of_elements in flat_pairs(self.target, start // self.dtype.itemsize, elements):
            copy_elements(of_elements, part)


@dataclass(frozen=True, eq=False)
class _StridedSink:
    """A tensor whose elements lie in the piece with gaps between them."""

    target: torch.Tensor
    dtype: torch.dtype
    strides: Sequence[int]
    note: Note | None = None
    cast_note: Note | None = None
    unit_bytes = 0

    def deliver(self, start: int, data: memoryview) -> None:
        assert start == 0, "a strided piece comes whole"
        elements = _elements(data, self.dtype).as_strided(self.target.shape, tuple(self.strides))
        if self.note is not None:
            elements = _noted(elements.contiguous(), 0, self.note)
            if self.cast_note is not None and self.target.dtype != self.dtype:
                elements = _noted(elements.to(self.target.dtype), 0, self.cast_note)
        copy_elements(elements, self.target)


def _noted(elements: torch.Tensor, start: int, note: Note) -> torch.Tensor:
    """Report the checksum of elements without gaps, and return them."""
    data = memory_of(elements)
    note(start, data.nbytes, crc64nvme(data))
    return elements


def file_order(stored: StoredTensor, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a region of `stored`, of size `lengths`, in the order in which its elements lie there.

    Dimensions of one element need no step, and come last. The others go from the largest step to the smallest, so that
    also a tensor stored column by column is read as rows.
    """
    order = sorted((d for d, n in enumerate(lengths) if n > 1), key=lambda d: -stored.strides[d])
    return *order, *(d for d, n in enumerate(lengths) if n <= 1)


def region_pieces(
    stored: StoredTensor,
    offsets: Sequence[int],
    lengths: Sequence[int],
    target: torch.Tensor,
    digest: RegionDigest | None = None,
) -> Iterator[Piece]:
    """List the pieces that fill `target` with the region of `stored` at `offsets`, of size `lengths`.

    `digest` takes the checksums of its elements, as they lie in the file: in `file_order`.

    Raises ValueError if the region is not inside the stored tensor, or `target` has another shape.
    """
    inside = all(0 <= o <= o + n <= size for o, n, size in zip(offsets, lengths, stored.shape, strict=True))
    if not inside or tuple(target.shape) != tuple(lengths):
        raise ValueError(
            f"region {tuple(offsets)}+{tuple(lengths)} of {stored.shape} into {tuple(target.shape)}"
        )
    if 0 in lengths:
        return
    first = sum(o * stride for o, stride in zip(offsets, stored.strides, strict=True))
    order = [d for d in file_order(stored, lengths) if lengths[d] > 1]
    single = [d for d, n in enumerate(lengths) if n == 1]
    view = target.detach().permute([*order, *single])[(...,) + (0,) * len(single)]
    start = stored.first_byte + first * stored.dtype.itemsize
    pieces = box_pieces(
        start,
        stored.dtype.itemsize,
        [stored.strides[d] for d in order],
        view,
        run=lambda at, part: _run_sink(at, part, stored.dtype),
        strided=lambda part, strides: _StridedSink(part, stored.dtype, strides),
    )
    yield from pieces if digest is None else _noting(pieces, digest, stored.dtype)


def _noting(pieces: Iterable[Piece], digest: RegionDigest, dtype: torch.dtype) -> Iterator[Piece]:
    """Let pieces, which come in the order of their elements, report their checksums."""
    elements = 0
    for piece in pieces:
        sink = piece.sink
        note = partial(_add_behind, digest.add, elements * dtype.itemsize)
        if isinstance(sink, MemorySink):
            elements += sink.memory.nbytes // dtype.itemsize
        else:
            assert isinstance(sink, FlatSink | _StridedSink)
            cast_note = partial(_add_behind, digest.add_cast, elements * sink.target.element_size())
            elements += sink.target.numel()
            if isinstance(sink, FlatSink):
                sink = dataclasses.replace(sink, cast_note=cast_note)
            else:
                sink = dataclasses.replace(sink, note=note, cast_note=cast_note)
        yield dataclasses.replace(piece, sink=sink, note=note)


def _add_behind(add: Note, begin: int, start: int, nbytes: int, crc: int) -> None:
    add(begin + start, nbytes, crc)


def _run_sink(start: int, target: torch.Tensor, dtype: torch.dtype) -> Sink | None:
    """Make the sink of a run without gaps; None if its elements are not aligned and must be copied."""
    if target.dtype == dtype and has_memory_view(target):
        return MemorySink(memory_of(target))
    return FlatSink(target, dtype) if start % dtype.itemsize == 0 else None


def _elements(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    elements = tensor_over(data)
    if elements.data_ptr() % dtype.itemsize:
        elements = elements.clone()
    return elements.view(dtype)
