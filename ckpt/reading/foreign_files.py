"""Read the files of another program that this library stores as tensors of bytes, checked as in any load."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.errors import NotFound
from ckpt.format.columns import TensorColumns
from ckpt.reading.slices import OpenCheckpoint

_AHEAD_BYTES = 1 << 20
"""Shorter reads are served from a run of this length: every read of a store takes a request."""


class ForeignFiles:
    """The files of a committed checkpoint, by name. Raises as `OpenCheckpoint`."""

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self._checkpoint = OpenCheckpoint(url, storage_options)
        self._lock = threading.Lock()  # of what is noted about manifests

    @property
    def names(self) -> list[str]:
        return self._checkpoint.names

    def size_bytes(self, name: str) -> int:
        """Return the size of a file. Raises NotFound if there is none of that name."""
        entry: TensorColumns = self._checkpoint.tensor(name)
        if entry.dtype != "uint8" or len(entry.size) != 1:
            raise NotFound(f"{name[:200]!r} is a tensor, not a file", url=self._checkpoint.store.url)
        return int(entry.size[0])

    def open(self, name: str) -> FileReader:
        """Open a file. Raises NotFound if there is none of that name."""
        size_bytes = self.size_bytes(name)
        with self._lock:
            self._checkpoint.prepare([name])

        def read(start: int, buffer: memoryview) -> None:
            (elements,) = self._checkpoint.read([(name, [start], [buffer.nbytes])])
            buffer[:] = elements.data

        return FileReader(size_bytes, read)

    def close(self) -> None:
        self._checkpoint.close()


class FileReader(io.RawIOBase):
    """A stored file of `size_bytes`, of which `read` fills a buffer from a position on."""

    def __init__(self, size_bytes: int, read: Callable[[int, memoryview], None]) -> None:
        self._size_bytes, self._read, self._position = size_bytes, read, 0
        self._ahead, self._ahead_from = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position: {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = max(0, min(view.nbytes, self._size_bytes - self._position))
        if nbytes >= _AHEAD_BYTES:
            self._read(self._position, view[:nbytes])
        elif nbytes:
            begin = self._position - self._ahead_from
            if not 0 <= begin < self._ahead.nbytes:
                length = min(_AHEAD_BYTES, self._size_bytes - self._position)
                ahead = memoryview(bytearray(length))
                self._read(self._position, ahead)
                self._ahead, self._ahead_from, begin = ahead, self._position, 0
            nbytes = min(nbytes, self._ahead.nbytes - begin)
            view[:nbytes] = self._ahead[begin : begin + nbytes]
        self._position += nbytes
        return nbytes
