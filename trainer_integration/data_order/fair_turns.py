"""Give turns to shards: always to the one that is furthest behind its share."""

from __future__ import annotations

import heapq


class Turns:
    """Give each shard turns in proportion to its weight.

    A shard's next turn follows from its own number of turns alone. So any subset of the shards,
    read on its own, is read in the order that it has among all; and only each shard's position is
    saved.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int]] = []

    def add(self, index: int, *, taken: int, phase: float, weight: float) -> None:
        """Add a shard that had `taken` turns; `phase`, 0 to 1, spreads shards of equal turns."""
        heapq.heappush(self._waiting, ((taken + phase) / weight, index))

    def next(self) -> int:
        """Remove and return the shard whose turn it is."""
        return heapq.heappop(self._waiting)[1]

    def __bool__(self) -> bool:
        return bool(self._waiting)
