"""Whose turn it is among shards: always that which is furthest behind its share."""

from __future__ import annotations

import heapq

__all__ = ["Turns"]


class Turns:
    """Shards that take turns, each as often as its weight says.

    A shard's next turn follows from its own number of turns alone. So any part of the shards, read on its own,
    is read in the order in which it appears in the whole; and nothing but each shard's position is to be saved.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int]] = []

    def add(self, index: int, *, taken: int, phase: float, weight: float) -> None:
        """Shard `index` had `taken` turns. `phase`, from 0 to 1, spreads the shards of equal turns."""
        heapq.heappush(self._waiting, ((taken + phase) / weight, index))

    def next(self) -> int:
        """The shard whose turn it is; it has no other until it is added again."""
        return heapq.heappop(self._waiting)[1]

    def __bool__(self) -> bool:
        return bool(self._waiting)
