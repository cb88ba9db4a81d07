"""Keep Python's garbage collector from walking over records while they are being made."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


class _Pause:
    """The pause of this process, of any number of threads.

    The collector stays enabled, with a threshold that is never reached: whether it is enabled is for the
    program to say, which may change it meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._thresholds = gc.get_threshold()

    def begin(self) -> None:
        thresholds = gc.get_threshold()  # before the lock: this can make the collector run
        with self._lock:
            if self._threads == 0 or thresholds[0] != 0:  # the program can set others in a pause
                self._thresholds = thresholds
            self._threads += 1
            gc.set_threshold(0)

    def end(self) -> None:
        with self._lock:
            if self._threads == 1:
                self._restore()
            self._threads = max(self._threads - 1, 0)  # a pause begun before a fork has ended already

    def end_in_child(self) -> None:
        """End it in a forked child, which has none of the threads."""
        self._lock = threading.Lock()
        if self._threads > 0:
            self._restore()
            self._threads = 0

    def _restore(self) -> None:
        if gc.get_threshold()[0] == 0:  # else the program has set others
            gc.set_threshold(*self._thresholds)


_pause = _Pause()
os.register_at_fork(after_in_child=_pause.end_in_child)


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Pause the collector for short work that makes very many objects which all live on."""
    _pause.begin()
    try:
        yield
    finally:
        _pause.end()
