"""Files over stored items, for torch's own parser: in memory without a copy, or in storage page by page."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

_PAGE_BYTES = 4096
MAX_FRAME_BYTES = 4 << 20

ReadAt = Callable[[int, memoryview], None]
"""Fills a buffer with an item's bytes from an offset on."""


class ItemFile(io.RawIOBase):
    """A file of `nbytes` bytes that can be read anywhere."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self._position = 0

    @abstractmethod
    def _bytes_at(self, start: int, max_bytes: int) -> bytes | memoryview:
        """Return bytes from `start` on, which is inside of the file: at least one."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self.nbytes)[whence])
        return self._position

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        total = 0
        while total < view.nbytes and self._position < self.nbytes:
            data = self._bytes_at(self._position, view.nbytes - total)
            view[total : total + len(data)] = data
            total += len(data)
            self._position += len(data)
        return total


class MemoryFile(ItemFile):
    """A file over bytes in memory."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B").toreadonly()
        super().__init__(self._view.nbytes)

    def _bytes_at(self, start: int, max_bytes: int) -> memoryview:
        return self._view[start : start + max_bytes]


class PagedFile(ItemFile):
    """A file over an item in storage, which fetches the pages that are read, and no more than `max_bytes`.

    `failure` is the error of `read_at`, which torch's parser turns into one of its own.
    """

    def __init__(self, read_at: ReadAt, nbytes: int, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(nbytes)
        self._read_at = read_at
        self._max_bytes = max_bytes
        self._pages: dict[int, bytes] = {}
        self.failure: Exception | None = None

    def prefetch(self, offsets: Sequence[int], threads: Executor) -> None:
        """Fetch the pages of these offsets, many at a time, as far as they may be fetched at all."""
        numbers = sorted({offset // _PAGE_BYTES for offset in offsets if 0 <= offset < self.nbytes})
        list(threads.map(self._page, numbers[: self._max_bytes // _PAGE_BYTES - len(self._pages)]))

    def _bytes_at(self, start: int, max_bytes: int) -> bytes:
        number, skipped = divmod(start, _PAGE_BYTES)
        return self._page(number)[skipped : skipped + max_bytes]

    def _page(self, number: int) -> bytes:
        if number not in self._pages:
            if len(self._pages) * _PAGE_BYTES >= self._max_bytes:
                raise ValueError("the item's frame is too large")
            page = bytearray(min(_PAGE_BYTES, self.nbytes - number * _PAGE_BYTES))
            try:
                self._read_at(number * _PAGE_BYTES, memoryview(page))
            except Exception as error:
                self.failure = error
                raise
            self._pages[number] = bytes(page)
        return self._pages[number]
