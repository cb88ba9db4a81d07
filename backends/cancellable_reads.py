"""Reads that can be cancelled, so that nothing arrives late in memory that is in use again."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from ckpt.backends.bodies import fill, remaining, split
from ckpt.errors import StorageError

CANCELLED = "cancelled: the operation passed its deadline"

IOV_MAX = 1024
_READ_THROUGH_BYTES = 2 << 20

_CACHED_PIECE_BYTES = 2 << 20
"""Small enough to stay in the processor's cache until it has been looked at, and large enough to be worth the calls."""

_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
"""Has Linux read what its page cache holds, and at most begin to read what it does not."""


def _do_nothing() -> None:
    pass


class Read:
    """One read. Its caller's buffers are written to only inside of `filling`."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self._moved = moved
        self._cancelled = False
        self._interrupt: Callable[[], None] = _do_nothing
        self._filling = threading.Lock()

    def check(self) -> None:
        """Raise StorageError if this read was cancelled."""
        if self._cancelled:
            raise StorageError(CANCELLED)

    @contextlib.contextmanager
    def filling(self, interrupt: Callable[[], None] = _do_nothing) -> Iterator[None]:
        """Allow writes to the buffers. `interrupt`, from another thread, ends them at once."""
        self._interrupt = interrupt
        with self._filling:
            self.check()
            yield
        self._moved()

    def cancel(self) -> None:
        """Cancel this read. When this returns, the buffers are not written to any more."""
        self._cancelled = True
        self._interrupt()
        with self._filling:
            pass


class Reads:
    """The running reads of one store."""

    def __init__(self) -> None:
        self._moved: Callable[[], None] = _do_nothing
        self._running: set[Read] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Reads], tuple[()]]:
        return Reads, ()

    def report_to(self, moved: Callable[[], None]) -> None:
        """Call `moved` whenever bytes have arrived for a read that begins from now on."""
        self._moved = moved

    @contextlib.contextmanager
    def begin(self) -> Iterator[Read]:
        """Yield a read that can be cancelled while it runs."""
        read = Read(self._moved)
        with self._lock:
            self._running.add(read)
        try:
            yield read
        finally:
            with self._lock:
                self._running.discard(read)

    def cancel(self) -> None:
        """Cancel all running reads."""
        with self._lock:
            running = list(self._running)
        for read in running:
            read.cancel()


def read_file(
    fd: int, offset: int, buffers: Sequence[memoryview], read: Read | None, came: Callable[[int], None]
) -> int:
    """Fill `buffers` until they or the file end; return the number of bytes. `came` is told of them as they come.

    With `read`, through memory of our own: the kernel cannot be interrupted, but the copy left out.
    """
    pending, total = [buffer for buffer in buffers if buffer.nbytes], 0
    if read is not None:
        own = memoryview(bytearray(min(sum(buffer.nbytes for buffer in pending), _READ_THROUGH_BYTES)))
    is_cached = read is None and _is_cached(fd, offset, pending)
    while pending:
        if is_cached:
            got = _read_cached(fd, offset + total, pending)
            is_cached = got > 0
            if not is_cached:
                continue
        elif read is None:
            got = os.preadv(fd, pending[:IOV_MAX], offset + total)
        else:
            read.check()
            wanted = min(sum(buffer.nbytes for buffer in pending), own.nbytes)
            got = os.preadv(fd, [own[:wanted]], offset + total)
            with read.filling():
                fill(pending, own[:got])
        if got == 0:
            break
        came(got)
        pending, total = remaining(pending, got), total + got
    return total


def _is_cached(fd: int, offset: int, buffers: Sequence[memoryview]) -> bool:
    """Tell whether the page cache has the last byte, and so probably all. Else a disk is asked for all at once."""
    last = offset + sum(buffer.nbytes for buffer in buffers) - 1
    return last > offset and _read_cached(fd, last, [buffers[-1][-1:]]) == 1


def _read_cached(fd: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Read the next piece if the page cache has it; return the number of bytes, 0 if it has not."""
    if _NOWAIT is None:
        return 0
    piece, _ = split(buffers[:IOV_MAX], _CACHED_PIECE_BYTES)
    try:
        return os.preadv(fd, piece, offset, _NOWAIT)
    except (OSError, NotImplementedError):  # also where the file system, or Python's build, does not tell
        return 0
