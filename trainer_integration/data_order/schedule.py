"""Mix sources by weight: which source each sequence of all ranks is of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ckpt.trainer_integration.data_order.permutation import Numbers

OnExhausted = Literal["drop", "stop", "repeat"]


class Schedule:
    """Go through the sequences of all sources; of each source as many as its weight says, at each moment.

    Sequence j of a source with weight w is due at (j + 1/2) / w: what comes next follows from the numbers read since
    the zero point, when all were 0.

    Args:
        weights: of the sources; one of weight 0 is not read.
        read: sequences of each source that were read since the zero point.
        limits: those that each source has since the zero point, None without an end.
        on_exhausted: what happens at the end of a source: the others are read on (`drop`), all end (`stop`), or it is read
            again until the last one ends (`repeat`).
    """

    def __init__(
        self,
        weights: Sequence[float],
        read: Sequence[int],
        limits: Sequence[int] | None = None,
        on_exhausted: OnExhausted = "drop",
    ) -> None:
        self._weights = weights
        self.read = [*read]
        self._limits: Sequence[float] = [math.inf] * len(weights) if limits is None else limits
        self._last_due = math.inf
        used = [number for number, weight in enumerate(weights) if weight]
        if limits is not None and on_exhausted == "stop":
            self._last_due = min(self._due(number, limits[number] - 1) for number in used)
        if limits is not None and on_exhausted == "repeat":
            self._last_due = max(self._due(number, limits[number] - 1) for number in used)
            self._limits = [math.inf] * len(weights)

    def _due(self, number: int, sequence: int) -> float:
        return (sequence + 0.5) / self._weights[number]

    def take(self, count: int) -> tuple[Numbers, Numbers]:
        """Return the next sequences: the numbers of their sources, and their numbers there. Fewer at the end."""
        left = [min(count, limit - read) for read, limit in zip(self.read, self._limits, strict=True)]
        most = [int(max(0, n)) if weight else 0 for n, weight in zip(left, self._weights, strict=True)]
        sources = [np.full(n, source, np.int64) for source, n in enumerate(most)]
        numbers = [np.arange(read, read + n, dtype=np.int64) for read, n in zip(self.read, most, strict=True)]
        chosen = np.concatenate(sources)
        places = np.concatenate(numbers)
        due = (places + 0.5) / np.asarray(self._weights)[chosen]
        order = np.argsort(due, kind="stable")[:count]
        order = order[due[order] <= self._last_due]
        for source, taken in enumerate(np.bincount(chosen[order], minlength=len(self._weights)).tolist()):
            self.read[source] += taken
        return chosen[order], places[order]

    def skip(self, count: int) -> None:
        """Go past the next sequences, however many: most of them at once."""
        wanted = sum(self.read) + count
        low, high = 0.0, 2 * (wanted + len(self._weights)) / min(weight for weight in self._weights if weight)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(self._read_at(middle)) <= wanted else (low, middle)
        self.read = self._read_at(low)
        self.take(wanted - sum(self.read))

    def _read_at(self, due: float) -> list[int]:
        """Count the sequences of each source that are due before a moment, at least those that were read."""
        due = min(due, self._last_due)
        return [
            int(max(read, min(limit, self._count_before(number, due))))
            for number, (read, limit) in enumerate(zip(self.read, self._limits, strict=True))
        ]

    def _count_before(self, number: int, due: float) -> int:
        """Count the sequences of a source that are due before a moment, rounded as in `_due`: `take` must agree."""
        if not self._weights[number]:
            return 0
        count = max(0, math.ceil(due * self._weights[number] - 0.5))
        while count and self._due(number, count - 1) >= due:
            count -= 1
        while self._due(number, count) < due:
            count += 1
        return count
