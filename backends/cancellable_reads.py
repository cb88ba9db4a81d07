"""Reads that can be broken off, so that nothing arrives late in memory that is in use again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ckpt.errors import StorageError

__all__ = ["Read", "Reads"]


class Read:
    """One read; its caller's buffers are written to only inside of `filling`."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self._moved = moved
        self._is_broken = False
        self._interrupt: Callable[[], None] = lambda: None
        self._filling = threading.Lock()

    def check(self) -> None:
        """Raise StorageError if nobody waits for this read any more."""
        if self._is_broken:
            raise StorageError("given up")

    @contextlib.contextmanager
    def filling(self, interrupt: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Inside, the buffers may be written to. `interrupt`, from another thread, makes that end at once."""
        self._interrupt = interrupt
        with self._filling:
            self.check()
            yield
        self._moved()

    def break_off(self) -> None:
        """When this returns, the buffers are not written to any more."""
        self._is_broken = True
        self._interrupt()
        with self._filling:
            pass


class Reads:
    """The reads of one store that are running.

    Attributes:
        moved: called whenever bytes have arrived.
    """

    def __init__(self) -> None:
        self.moved: Callable[[], None] = lambda: None
        self._running: set[Read] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Reads], tuple[()]]:
        return Reads, ()

    @contextlib.contextmanager
    def begin(self) -> Iterator[Read]:
        """A read, while it runs."""
        read = Read(self.moved)
        with self._lock:
            self._running.add(read)
        try:
            yield read
        finally:
            with self._lock:
                self._running.discard(read)

    def break_off(self) -> None:
        """Break off all reads that are running."""
        with self._lock:
            running = list(self._running)
        for read in running:
            read.break_off()
