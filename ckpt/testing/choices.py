"""Decide what happens in a simulation: by chance with a seed, or every possibility in turn."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

__all__ = ["Choices", "Exhaustive", "Seeded"]


class Choices(ABC):
    """Decide whatever a simulation leaves open."""

    @abstractmethod
    def pick(self, what: str, weights: Sequence[float]) -> int:
        """Return the index of a possibility; the first is the uneventful one, one of weight 0 is never picked."""

    @abstractmethod
    def fraction(self, what: str) -> float:
        """Return how much of a bound is used up, from 0 to 1."""

    def duration(self) -> float:
        """Return how much of the longest time a request takes, from 0 to 1."""
        return 0.5


class Seeded(Choices):
    """Decide by chance; the same seed decides the same."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)

    def pick(self, what: str, weights: Sequence[float]) -> int:
        left = self.random.random() * sum(weights)
        for index, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return index
        return 0

    def fraction(self, what: str) -> float:
        """Return a random fraction; half of the time 0 or 1, as things go wrong at the ends."""
        drawn = self.random.random()
        return 0.0 if drawn < 0.25 else 1.0 if drawn < 0.5 else 2 * drawn - 1

    def duration(self) -> float:
        return self.random.random()


class Exhaustive(Choices):
    """Decide in every way in which at most `deviations` decisions differ from the uneventful one.

    Each round of `for choices in Exhaustive.all(...)` is another way; run the whole simulation anew in each.
    (Bounded search by re-execution, as CHESS does for the preemptions of threads.)
    """

    def __init__(self, deviations: int, path: list[int], usual_fraction: float = 0.0) -> None:
        self._left = deviations
        self._usual = usual_fraction
        self.path = path
        self._sizes: list[int] = []
        self._made = 0

    @staticmethod
    def all(deviations: int, *, usual_fraction: float = 0.0) -> Iterator[Exhaustive]:
        """Yield the choices of one round after another.

        `usual_fraction`, 0 or 1, is the uneventful answer to `fraction`; the other one is a deviation.
        """
        path: list[int] = []
        while True:
            choices = Exhaustive(deviations, path, usual_fraction)
            yield choices
            path = choices._next_path()
            if not path:
                return

    def pick(self, what: str, weights: Sequence[float]) -> int:
        if self._left == 0:  # so it goes on as usual, to the end
            return 0
        allowed = [index for index, weight in enumerate(weights) if index == 0 or weight > 0]
        if len(allowed) == 1:
            return 0
        if self._made == len(self.path):
            self.path.append(0)
        made = self.path[self._made]
        self._made += 1
        self._sizes.append(len(allowed))
        self._left -= made != 0
        return allowed[made]

    def fraction(self, what: str) -> float:
        return abs(self._usual - self.pick(what, (1, 1)))

    def _next_path(self) -> list[int]:
        """Return the path of the next round; empty after the last."""
        path = self.path[: self._made]
        while path and path[-1] + 1 == self._sizes[len(path) - 1]:
            path.pop()
        if path:
            path[-1] += 1
        return path
