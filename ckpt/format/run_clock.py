"""The time by which the saves of a run are put in order: it does not go back when a machine's clock does."""

from __future__ import annotations

import math
import threading

from ckpt.consistency import environment


class RunClock:
    """A clock for one run in one process; from any thread.

    It is this machine's, unless that has been set back, or is behind a time that the run has seen: then it continues
    from there, as fast as time passes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_s = -math.inf
        self._read_at_s = environment.monotonic()

    def now(self) -> float:
        """Return seconds since 1970, not fewer than ever before."""
        with self._lock:
            return self._advance()

    def saw(self, moment_s: float) -> None:
        """Take note of a time by another clock, in seconds since 1970: all that comes is later, or of the same moment."""
        with self._lock:
            self._last_s = max(self._advance(), moment_s)

    def _advance(self) -> float:
        read_at_s = environment.monotonic()
        passed_s = max(0.0, read_at_s - self._read_at_s)
        self._read_at_s = read_at_s
        self._last_s = max(environment.now(), self._last_s + passed_s)
        return self._last_s

    def __reduce__(self) -> tuple[type[RunClock], tuple[()]]:
        return RunClock, ()
