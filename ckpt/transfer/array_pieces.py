"""Cut a region of a stored tensor into pieces for an array of numpy: commands read without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.format.elements import Elements
from ckpt.transfer.pieces import MemorySink, Piece, box_pieces


@dataclass(frozen=True, eq=False)
class _StridedSink:
    """An array whose elements lie in the piece with gaps between them; `strides` in elements."""

    target: Elements
    strides: Sequence[int]
    unit_bytes = 0

    def deliver(self, start: int, data: memoryview) -> None:
        assert start == 0, "a strided piece comes whole"
        elements = np.frombuffer(data, dtype=self.target.dtype)
        strides = [stride * elements.itemsize for stride in self.strides]
        self.target[...] = np.lib.stride_tricks.as_strided(elements, self.target.shape, strides)


def array_pieces(
    first_byte: int, shape: Sequence[int], offsets: Sequence[int], target: Elements
) -> Iterator[Piece]:
    """List the pieces that fill `target` with the region at `offsets` of a row-major tensor.

    The tensor has `shape` and the dtype of `target`, and begins at `first_byte` of the file. The
    region lies inside of it.
    """
    if not target.size:
        return
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    yield from box_pieces(
        first_byte + first * target.itemsize,
        target.itemsize,
        [stride for stride, length in zip(strides, target.shape, strict=True) if length > 1],
        target.squeeze(),
        run=_run_sink,
        strided=_StridedSink,
    )


def _run_sink(start: int, target: Elements) -> MemorySink | None:
    return MemorySink(bytes_of(target)) if target.flags.c_contiguous else None


def bytes_of(array: Elements) -> memoryview:
    """Return the memory of an array without gaps."""
    return array.reshape(-1).view(np.uint8).data
