"""Tensors of a source as payloads of files that are written: read piece by piece when each piece is due."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch

from ckpt.conversion.source import Region, Source
from ckpt.transfer.boxes import flat_boxes
from ckpt.transfer.file_body import Due, StreamedPayload

__all__ = ["Counter", "Stream", "TensorPiece"]

_REGIONS_AT_ONCE = 4096
"""Planning a read takes some kilobytes for each region, and a part can hold very many small tensors."""


class TensorPiece(StreamedPayload):
    """The box of a tensor at `offsets`, of size `sizes`, dense and row-major, in any dtype."""

    def __init__(
        self, stream: Stream, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        super().__init__(math.prod(sizes) * dtype.itemsize, stream.read)
        self.name, self.offsets, self.sizes, self.dtype = name, tuple(offsets), tuple(sizes), dtype


class Stream:
    """Where the payloads of one conversion come from."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._order = {name: number for number, name in enumerate(source.tensors)}

    def piece(
        self, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype
    ) -> TensorPiece:
        return TensorPiece(self, name, offsets, sizes, dtype)

    def whole(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> TensorPiece:
        return TensorPiece(self, name, (0,) * len(shape), shape, dtype)

    def read(self, due: Sequence[Due]) -> None:
        """Fill all memory that is due of a part, in as few reads as the source can do it within bounded memory."""
        regions: list[Region] = []
        for payload, begin, memory in due:
            assert isinstance(payload, TensorPiece)
            if not memory.nbytes:
                continue
            flat = torch.frombuffer(memory, dtype=torch.uint8).view(payload.dtype)
            first, position = begin // payload.dtype.itemsize, 0
            for box in flat_boxes(payload.sizes, first, first + flat.numel()):
                shape = [part.stop - part.start for part in box]
                count = math.prod(shape)
                offsets = [o + part.start for o, part in zip(payload.offsets, box, strict=True)]
                regions.append(Region(payload.name, offsets, flat[position : position + count].view(shape)))
                position += count
        # In the source's order, of which neighbours are read together.
        regions.sort(key=lambda region: self._order[region.name])
        for start in range(0, len(regions), _REGIONS_AT_ONCE):
            self._source.read(regions[start : start + _REGIONS_AT_ONCE])


class Counter:
    """Bytes sent so far, told to whoever shows progress. What is sent again does not count beyond the total."""

    def __init__(self, total_bytes: int, progress: Callable[[int, int], None]) -> None:
        self.total_bytes, self._progress = total_bytes, progress
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done_bytes = min(self._done_bytes + nbytes, self.total_bytes)
            self._progress(self._done_bytes, self.total_bytes)
