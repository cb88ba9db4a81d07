"""Take and send only so many bytes a second, over all connections."""

from __future__ import annotations

import threading
import time

__all__ = ["Pacer"]


class Pacer:
    """Make the threads of all connections wait, so that together they move `bytes_per_s`."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._next_at_s = 0.0

    def wait(self, nbytes: int) -> None:
        """Return when `nbytes` may be received or sent."""
        with self._lock:
            start_s = max(self._next_at_s, time.monotonic())
            self._next_at_s = start_s + nbytes / self._bytes_per_s
        time.sleep(max(0.0, start_s - time.monotonic()))
