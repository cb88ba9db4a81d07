"""Decide what happens in a simulation: by chance with a seed, or every possibility in turn."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Choices", "Exhaustive", "Seeded"]


class Choices(ABC):
    """Decide whatever a simulation leaves open."""

    @abstractmethod
    def pick(self, question: str, weights: Sequence[float]) -> int:
        """Return an index of `weights`, never that of a 0; the first is the uneventful choice."""

    @abstractmethod
    def fraction(self, question: str) -> float:
        """Return how much of a bound is used up, from 0 to 1."""

    def duration(self) -> float:
        """Return how much of the longest time a request takes, from 0 to 1."""
        return 0.5


class Seeded(Choices):
    """Decide by chance; the same seed decides the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick(self, question: str, weights: Sequence[float]) -> int:
        return self.random.choices(range(len(weights)), weights)[0]

    def fraction(self, question: str) -> float:
        """Return a random fraction; half of the time 0 or 1, as things go wrong at the ends."""
        drawn = self.random.random()
        return 0.0 if drawn < 0.25 else 1.0 if drawn < 0.5 else 2 * drawn - 1

    def duration(self) -> float:
        return self.random.random()


@dataclass(eq=False)
class Exhaustive(Choices):
    """Decide in every way in which at most `deviations` decisions differ from the uneventful one.

    Each round of `for choices in Exhaustive.all(...)` is another way; run the whole simulation anew
    in each. (Bounded search by re-execution, as CHESS does for the preemptions of threads.)

    Attributes:
        deviations: how many more are allowed.
        path: the decisions of this round.
        usual_fraction: the uneventful answer to `fraction`, 0 or 1; the other one is a deviation.
    """

    deviations: int
    path: list[int] = field(default_factory=list)
    usual_fraction: float = 0.0
    _sizes: list[int] = field(init=False, default_factory=list)

    @staticmethod
    def all(deviations: int, *, usual_fraction: float = 0.0) -> Iterator[Exhaustive]:
        """Yield the choices of one round after another."""
        path: list[int] = []
        while True:
            choices = Exhaustive(deviations, path, usual_fraction)
            yield choices
            path = choices.path[: len(choices._sizes)]
            while path and path[-1] + 1 == choices._sizes[len(path) - 1]:
                path.pop()
            if not path:
                return
            path[-1] += 1

    def pick(self, question: str, weights: Sequence[float]) -> int:
        if self.deviations == 0:  # so it goes on as usual, to the end
            return 0
        allowed = [index for index, weight in enumerate(weights) if index == 0 or weight > 0]
        if len(allowed) == 1:
            return 0
        if len(self._sizes) == len(self.path):
            self.path.append(0)
        decision = self.path[len(self._sizes)]
        self._sizes.append(len(allowed))
        self.deviations -= decision != 0
        return allowed[decision]

    def fraction(self, question: str) -> float:
        return abs(self.usual_fraction - self.pick(question, (1, 1)))
