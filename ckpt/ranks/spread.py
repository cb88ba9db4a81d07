"""Spread the first requests of thousands of ranks over the time that a bucket takes for them anyway."""

from __future__ import annotations

from ckpt.backends.base import Store
from ckpt.consistency import environment

SPREAD = 0.6180339887498949
"""Multiples of it, without their integers, fill an interval evenly."""

_FEW_RANKS = 1000
_REQUESTS_PER_S = 3500
"""The least that Amazon S3 promises for a prefix: writes. Of more it refuses some, which have to be sent again."""


def wait_for_turn(store: Store, rank: int, size: int) -> None:
    """Wait until it is this rank's turn to begin, if it is one of thousands at a bucket: some seconds at most."""
    if size > _FEW_RANKS and store.capabilities.parallel_parts:
        environment.sleep(turn_s(rank, size))


def turn_s(rank: int, size: int) -> float:
    """Return how long a rank waits."""
    return rank * SPREAD % 1 * size / _REQUESTS_PER_S
