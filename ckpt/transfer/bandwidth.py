"""Cap the bandwidth of checkpoint traffic, and spread the first requests of thousands of ranks."""

from __future__ import annotations

import threading
import time

from ckpt.backends.base import Store
from ckpt.consistency import environment
from ckpt.errors import ConfigurationError

MIN_BANDWIDTH_BYTES_PER_S = 1_000_000
_BURST_S = 0.05

_FEW_RANKS = 1000
_REQUESTS_PER_S = 3500
"""The least that Amazon S3 promises for a prefix: writes. Of more it refuses some, which have to be sent again."""
_SPREAD = 0.6180339887498949
"""Multiples of it, without their integers, fill an interval evenly."""


class Pacer:
    """Makes threads wait so that together they send no more than `bytes_per_s`.

    Raises ConfigurationError for less than 1 MB/s, at which servers take connections for dead.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if not isinstance(bytes_per_s, int | float) or not bytes_per_s >= MIN_BANDWIDTH_BYTES_PER_S:
            raise ConfigurationError(
                f"max_bandwidth_bytes_per_s must be at least {MIN_BANDWIDTH_BYTES_PER_S}, not {bytes_per_s}"
            )
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._next_at_s = 0.0

    def __reduce__(self) -> tuple[type[Pacer], tuple[float]]:
        return Pacer, (self._bytes_per_s,)

    def wait(self, nbytes: int) -> None:
        """Return when `nbytes` may be sent."""
        with self._lock:
            now_s = time.monotonic()
            start_s = max(self._next_at_s, now_s - _BURST_S)
            self._next_at_s = start_s + nbytes / self._bytes_per_s
        if start_s > now_s:
            time.sleep(start_s - now_s)


def wait_for_turn(store: Store, rank: int, size: int) -> None:
    """Wait until it is this rank's turn to begin, if it is one of thousands at a bucket: some seconds at most."""
    if size > _FEW_RANKS and store.capabilities.parallel_parts:
        environment.sleep(turn_s(rank, size))


def turn_s(rank: int, size: int) -> float:
    """Return how long a rank waits."""
    return rank * _SPREAD % 1 * size / _REQUESTS_PER_S
