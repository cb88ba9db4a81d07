"""Reads that can be cancelled, so that nothing arrives late in memory that is in use again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ckpt.errors import StorageError

CANCELLED = "cancelled: the operation passed its deadline"


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
