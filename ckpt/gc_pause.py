"""Keep Python's garbage collector from walking over records while they are being made."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_RARE = 1_000_003
"""Objects are looked at when so many more have been made; Python's own number is 700 or 2,000. No program would set this one."""

_PYTHONS = 700


class _Pause:
    """The pauses of this process, of any number of threads.

    The collector stays enabled, with another threshold: whether it is enabled is for the program to say, which may
    change it meanwhile.
    """

    def __init__(self) -> None:
        # To make an object can have a finalizer run, in this thread, which may save.
        self._lock = threading.RLock()
        self._users = {0: 0, _RARE: 0}  # by the threshold that they want
        self._set: int | None = None
        self._thresholds = gc.get_threshold()
        self._last_threshold = self._thresholds[0] or _PYTHONS  # of the program, that was not 0

    def begin(self, threshold: int) -> None:
        with self._lock:
            self._note_the_programs()
            self._users[threshold] += 1
            self._apply()

    def end(self, threshold: int) -> None:
        with self._lock:
            self._note_the_programs()
            self._users[threshold] = max(
                self._users[threshold] - 1, 0
            )  # one begun before a fork has ended already
            self._apply()

    def end_in_child(self) -> None:
        """End all in a forked child, which has none of the threads."""
        self._lock = threading.RLock()
        self._note_the_programs()
        self._users = dict.fromkeys(self._users, 0)
        self._apply()

    def _note_the_programs(self) -> None:
        found, second, third = gc.get_threshold()
        if found == self._set:
            found = self._thresholds[0]
        elif found == _RARE:  # it restores what it has found in a pause, and has set 0 meanwhile perhaps
            found = self._last_threshold
        self._thresholds = found, second, third  # the program can set others in a pause
        self._last_threshold = found or self._last_threshold

    def _apply(self) -> None:
        own = self._thresholds[0]
        if not any(self._users.values()):
            gc.set_threshold(*self._thresholds)
            self._set = None
            return
        self._set = 0 if self._users[0] or own == 0 else max(own, _RARE)
        gc.set_threshold(self._set, *self._thresholds[1:])


_pause = _Pause()
os.register_at_fork(after_in_child=_pause.end_in_child)


@contextlib.contextmanager
def _paused(threshold: int) -> Iterator[None]:
    _pause.begin(threshold)
    try:
        yield
    finally:
        _pause.end(threshold)


def no_gc() -> contextlib.AbstractContextManager[None]:
    """Pause the collector for short work that makes very many objects which all live on."""
    return _paused(0)


def rare_gc() -> contextlib.AbstractContextManager[None]:
    """Have the collector run rarely while the program waits for this thread, which makes many objects."""
    return _paused(_RARE)
