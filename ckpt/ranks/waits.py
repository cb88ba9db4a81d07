"""Name, in the log, what a rank has been waiting for, if it waits for others for longer than some seconds."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Protocol

_SILENT_S = 10.0
_LOOK_EVERY_S = 1.0
_LOUD_RANKS = 2
"""The first ranks warn: of thousands that wait for one, two lines are enough, and one of these two waits too."""

_logger = logging.getLogger(__name__)


class _Group(Protocol):
    """Ranks that wait for each other."""

    rank: int

    @property
    def size(self) -> int: ...


class _Waits:
    """The waits of this process, and the thread that looks at them. It ends with the last wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[object, tuple[float, int, str]] = {}
        self._thread: threading.Thread | None = None

    def begin(self, key: object, rank: int, event: str) -> None:
        with self._lock:
            self._since[key] = time.monotonic(), rank, event
            if self._thread is None or not self._thread.is_alive():  # as in the child of a fork
                self._thread = threading.Thread(target=self._look, name="ckpt-waits", daemon=True)
                with contextlib.suppress(RuntimeError):  # Python is ending
                    self._thread.start()

    def end(self, key: object) -> None:
        with self._lock:
            self._since.pop(key, None)

    def _look(self) -> None:
        named = set[object]()
        while True:
            time.sleep(_LOOK_EVERY_S)
            with self._lock:
                if not self._since:
                    self._thread = None
                    return
                waits = [(key, *wait) for key, wait in self._since.items() if key not in named]
            for key, since_s, rank, event in waits:
                if time.monotonic() - since_s >= _SILENT_S:
                    named.add(key)
                    level = logging.WARNING if rank < _LOUD_RANKS else logging.INFO
                    _logger.log(level, "rank %d has been waiting for %.0f s for %s", rank, _SILENT_S, event)


_waits = _Waits()


@contextlib.contextmanager
def waiting_for(ranks: _Group, event: str) -> Iterator[None]:
    """Wait for other ranks within the block. After 10 s a line of the log says what this rank waits for: `event`."""
    if ranks.size == 1:
        yield
        return
    key = object()
    _waits.begin(key, ranks.rank, event)
    try:
        yield
    finally:
        _waits.end(key)
