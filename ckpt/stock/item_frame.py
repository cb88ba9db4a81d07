"""Make the frame that `torch.save` puts around tensors: all bytes of its file but their payloads.

With its CRC-32 off (an option of torch's; nothing of torch's ever checks it) the frame does not depend
on the payloads. So torch writes it around tensors over memory that nobody touches, and the payloads
go to storage from where they are.
"""

from __future__ import annotations

import functools
import math
import mmap
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_STEP_BYTES = 64
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_lock = threading.Lock()


@dataclass(frozen=True)
class Frame:
    """The bytes around the payload of one dtype and shape in a `torch.save` item."""

    head: bytes
    tail: bytes
    payload_bytes: int


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """Make the frame of a dense row-major CPU tensor. Raises TypeError if torch cannot save the dtype."""
    writer = FrameWriter([(dtype, shape)])
    try:
        parts = writer.save(writer.tensors[0])
    except KeyError as error:
        raise TypeError(f"torch cannot save tensors of {dtype}") from error
    head, *tail = [part for part in parts if isinstance(part, bytes)]
    return Frame(head, b"".join(tail), math.prod(shape) * dtype.itemsize)


class FrameWriter:
    """A file for `torch.save` that keeps all but the bytes of its `tensors`.

    They overlap in memory, each a step after the last: torch knows storages by address. No page of it
    is taken up as long as nobody touches it, and none is promised: it may exceed the machine's.
    `kinds` are the dtype and shape of each.
    """

    def __init__(self, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> None:
        self._sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
        span = _STEP_BYTES * len(kinds)
        nbytes = max(self._sizes, default=0) + span + 1
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._begin = _address(memory)
        self._end = self._begin + span
        self._parts: list[int | bytearray] = [bytearray()]
        self.tensors: list[torch.Tensor] = []
        for number, (dtype, shape) in enumerate(kinds):
            size = self._sizes[number]
            # Not `torch.empty`, which obeys torch's global default device and its filling of new memory.
            if size:
                flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=_STEP_BYTES * number)
                self.tensors.append(flat.view(dtype).view(torch.Size(shape)))
            else:
                self.tensors.append(torch.empty(torch.Size(shape), dtype=dtype, device="cpu"))

    def save(self, value: object) -> list[bytes | int]:
        """Let torch save a value, which holds each tensor once; return the file.

        That is bytes, and between them the number of the tensor whose payload is there. Raises
        KeyError if torch cannot save one of the dtypes.
        """
        # The option is global; another thread's torch.save at this moment would leave out its CRC-32
        # too, which nothing of torch's reads.
        with _lock:
            before = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)
            try:
                torch.save(value, self)  # type: ignore[arg-type]
            finally:
                torch.serialization.set_crc32_options(before)
        numbers = sorted(part for part in self._parts if isinstance(part, int))
        if numbers != [number for number, size in enumerate(self._sizes) if size]:
            raise AssertionError("torch.save wrote a tensor twice, or not at all")
        parts = [bytes(part) if isinstance(part, bytearray) else part for part in self._parts]
        return [part for part in parts if part != b""]

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        address = _address(view) if view.nbytes else 0
        if self._begin <= address < self._end:
            number = (address - self._begin) // _STEP_BYTES
            if self._sizes[number] != view.nbytes:
                raise AssertionError("torch.save wrote a tensor in an unknown way")
            self._parts += [number, bytearray()]
        else:
            frame_bytes = self._parts[-1]
            assert isinstance(frame_bytes, bytearray)
            frame_bytes += view
        return view.nbytes

    def flush(self) -> None:
        pass


def _address(memory: mmap.mmap | memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])
