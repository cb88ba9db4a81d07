"""Cut a region of a stored tensor into pieces for a tensor: runs of the file that one sink takes.

The best sink is the destination's own memory. The others copy out of scratch: the destination is on
a device, has another dtype, or has gaps where the file has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ckpt.format.elements import StoredTensor
from ckpt.transfer.pieces import MemorySink, Piece, Sink, box_pieces
from ckpt.transfer.tensor_memory import copy_elements, flat_pairs, has_memory_view, memory_of, tensor_over


@dataclass(frozen=True, eq=False)
class FlatSink:
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
    yield from box_pieces(
        start,
        stored.dtype.itemsize,
        [stored.strides[d] for d in order],
        view,
        run=lambda at, part: _run_sink(at, part, stored.dtype),
        strided=lambda part, strides: _StridedSink(part, stored.dtype, strides),
    )


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
