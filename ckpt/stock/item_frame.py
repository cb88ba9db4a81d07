"""How `torch.save` wraps a tensor: the bytes before and after its payload.

With its CRC-32 off (an option of torch's; nothing of torch's ever checks it), `torch.save` puts a plain
dense tensor between a head and a tail that depend on dtype and shape alone. So they are made once per dtype
and shape, from a tensor whose memory nobody touches, and the payload goes to storage from where it is.
"""

from __future__ import annotations

import functools
import math
import mmap
import sys
import threading
from dataclasses import dataclass

import torch

_MARK = 0xA5
_SMALL_BYTES = 4096
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_lock = threading.Lock()


@dataclass(frozen=True)
class Frame:
    """What surrounds the payload of one dtype and shape in a `torch.save` item."""

    head: bytes
    tail: bytes
    payload_bytes: int

    @property
    def item_bytes(self) -> int:
        return len(self.head) + self.payload_bytes + len(self.tail)


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """The frame of a dense row-major CPU tensor. Raises TypeError for a dtype that torch cannot save."""
    payload_bytes = math.prod(shape) * dtype.itemsize
    pattern = bytes([_MARK]) * payload_bytes if payload_bytes <= _SMALL_BYTES else None
    memory = untouched_memory(payload_bytes) if pattern is None else bytearray(pattern)
    tensor = tensor_over(memory, dtype, shape)
    sink = _Sink(payload_bytes, pattern)
    try:
        save_without_crc32(tensor, sink)
    except KeyError as error:
        raise TypeError(f"torch cannot save tensors of {dtype}") from error
    if len(sink.parts) != (2 if payload_bytes else 1):
        raise AssertionError(f"torch.save wrote a tensor of {dtype} {tuple(shape)} in an unknown way")
    head, tail = (sink.parts[0], sink.parts[-1]) if payload_bytes else (sink.parts[0], b"")
    return Frame(bytes(head), bytes(tail), payload_bytes)


def untouched_memory(nbytes: int) -> mmap.mmap:
    """Memory that takes up no page as long as nobody touches it, and is promised to nobody: it may exceed the machine's."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def tensor_over(
    memory: bytearray | mmap.mmap | memoryview, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """Make a tensor over memory, which nobody touches."""
    # Not `torch.empty`, which obeys torch's global default device and its filling of new memory.
    if len(memory) == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class _Sink:
    """A file that keeps everything but the payload."""

    def __init__(self, payload_bytes: int, pattern: bytes | None) -> None:
        self.parts = [bytearray()]
        self._payload_bytes = payload_bytes
        self._pattern = pattern

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        is_payload = self._payload_bytes > 0 and view.nbytes == self._payload_bytes
        if is_payload and (self._pattern is None or view == self._pattern):
            self.parts.append(bytearray())
        else:
            self.parts[-1] += view
        return view.nbytes

    def flush(self) -> None:
        pass


def save_without_crc32(value: object, sink: object) -> None:
    """`torch.save(value, sink)` whose frame does not depend on the content."""
    # The option is global; another thread's torch.save at this moment would leave out its CRC-32 too,
    # which nothing of torch's reads.
    with _lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(value, sink)  # type: ignore[arg-type]
        finally:
            torch.serialization.set_crc32_options(before)
