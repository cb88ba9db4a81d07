"""Cut a region of a stored tensor into pieces: runs of the file that one sink takes.

The best sink is the destination's own memory. The others copy out of scratch: the destination is on
a device, has another dtype, or has gaps where the file has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ckpt.format.stored_tensor import StoredTensor
from ckpt.transfer.boxes import span
from ckpt.transfer.pieces import MemorySink, Piece
from ckpt.transfer.tensor_memory import copy_elements, flat_pairs, has_memory_view, memory_of, tensor_over

_STRIDED_BYTES = 4 << 20
"""The longest run of a file that is read whole for the rows that are wanted of it."""

_WORTH_SKIPPING_BYTES = 2 << 20
"""A gap between wanted rows that is worth a request of its own; less is read and dropped."""


@dataclass(frozen=True, eq=False)
class _FlatSink:
    """A tensor that takes its elements in row-major order; `dtype` is that of the file."""

    target: torch.Tensor
    dtype: torch.dtype

    @property
    def unit_bytes(self) -> int:
        return self.dtype.itemsize

    def deliver(self, start: int, data: memoryview) -> None:
        elements = _elements(data, self.dtype)
        for part, of_elements in flat_pairs(self.target, start // self.dtype.itemsize, elements):
            copy_elements(of_elements, part)


@dataclass(frozen=True, eq=False)
class _StridedSink:
    """A tensor whose elements lie in the piece with gaps between them."""

    target: torch.Tensor
    dtype: torch.dtype
    strides: Sequence[int]
    unit_bytes = 0

    def deliver(self, start: int, data: memoryview) -> None:
        assert start == 0, "a strided piece comes whole"
        elements = _elements(data, self.dtype)
        copy_elements(elements.as_strided(self.target.shape, tuple(self.strides)), self.target)


def region_pieces(
    stored: StoredTensor, offsets: Sequence[int], lengths: Sequence[int], target: torch.Tensor
) -> Iterator[Piece]:
    """List the pieces that fill `target` with the region of `stored` at `offsets`, of size `lengths`.

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
    # Dimensions of one element need no step. The others go from the largest step to the smallest, so that also a
    # tensor stored column by column is read as rows.
    order = sorted((d for d, n in enumerate(lengths) if n > 1), key=lambda d: -stored.strides[d])
    single = [d for d, n in enumerate(lengths) if n == 1]
    view = target.detach().permute([*order, *single])[(...,) + (0,) * len(single)]
    start = stored.first_byte + first * stored.dtype.itemsize
    yield from _box_pieces(start, stored.dtype, [stored.strides[d] for d in order], view)


def _box_pieces(
    start: int, dtype: torch.dtype, strides: Sequence[int], target: torch.Tensor
) -> Iterator[Piece]:
    """List the pieces of a box of the file that begins at byte `start` and has the shape of `target`."""
    shape, itemsize = target.shape, dtype.itemsize
    span_bytes = span(shape, strides) * itemsize
    if span_bytes == target.numel() * itemsize:  # one run without gaps
        if target.dtype == dtype and has_memory_view(target):
            yield Piece(start, start + span_bytes, MemorySink(memory_of(target)))
            return
        if start % itemsize == 0:
            yield Piece(start, start + span_bytes, _FlatSink(target, dtype))
            return
    row_bytes = span(shape[1:], strides[1:]) * itemsize if shape else itemsize
    step_bytes = strides[0] * itemsize if shape else itemsize
    sparse = bool(shape) and step_bytes - row_bytes > _WORTH_SKIPPING_BYTES
    if span_bytes <= _STRIDED_BYTES and not sparse:
        yield Piece(start, start + span_bytes, _StridedSink(target, dtype, strides))
        return
    together = 1 if sparse or row_bytes > _STRIDED_BYTES else max(1, _STRIDED_BYTES // step_bytes)
    for row in range(0, shape[0], together):
        rows = target[row : row + together]
        if rows.shape[0] == 1:
            yield from _box_pieces(start + row * step_bytes, dtype, strides[1:], rows[0])
        else:
            yield from _box_pieces(start + row * step_bytes, dtype, strides, rows)


def _elements(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    elements = tensor_over(data)
    if elements.data_ptr() % dtype.itemsize:
        elements = elements.clone()
    return elements.view(dtype)
