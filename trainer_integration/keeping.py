"""Rules for keeping: which durable checkpoints of a run stay when a new one has become durable.

    keep = keeping.last(3) | keeping.every_steps(10_000) | keeping.best(2, "val_loss")

A union keeps what any of its rules keeps. What is pinned stays whatever the rules say. Only checkpoints that the
run itself has recorded are ever removed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt.errors import ConfigurationError
from ckpt.format.run_record import RunCheckpoint

__all__ = ["Best", "KeepRule", "best", "every_steps", "last", "within"]


class KeepRule:
    """One rule, or a union of several."""

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        """Which of `checkpoints`, the durable ones by step, to keep, and why.

        Args:
            now_s: seconds since 1970.
        """
        raise NotImplementedError

    def rules(self) -> tuple[KeepRule, ...]:
        """The rules that this one is a union of."""
        return (self,)

    def __or__(self, other: KeepRule) -> KeepRule:
        return _Union((*self.rules(), *other.rules()))


@dataclass(frozen=True)
class _Union(KeepRule):
    members: tuple[KeepRule, ...]

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        kept: dict[int, str] = {}
        for rule in reversed(self.members):
            kept |= rule.keeps(checkpoints, now_s)
        return kept

    def rules(self) -> tuple[KeepRule, ...]:
        return self.members


@dataclass(frozen=True)
class _Last(KeepRule):
    count: int

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        return {found.step: f"of the last {self.count}" for found in checkpoints[-self.count :]}


@dataclass(frozen=True)
class _EverySteps(KeepRule):
    steps: int

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        return {f.step: f"every {self.steps} steps" for f in checkpoints if f.step % self.steps == 0}


@dataclass(frozen=True)
class _Within(KeepRule):
    seconds: float

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        young = [found.step for found in checkpoints if now_s - found.saved_at_s <= self.seconds]
        return dict.fromkeys(young, f"of the last {self.seconds:g} s")


@dataclass(frozen=True)
class Best(KeepRule):
    """The best by a metric."""

    count: int
    metric: str
    mode: Literal["min", "max"]

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        best = self.ranked(checkpoints)[: self.count]
        return {found.step: f"of the best {self.count} by {self.metric}" for found in best}

    def ranked(self, checkpoints: Sequence[RunCheckpoint]) -> list[RunCheckpoint]:
        """Those that have the metric, the best first; of equal ones the newer. What is not a number is worst."""
        known = [found for found in checkpoints if self.metric in found.metrics]
        return sorted(known, key=lambda found: (self._badness(found), -found.step))

    def _badness(self, found: RunCheckpoint) -> float:
        value = found.metrics[self.metric]
        if value is None or math.isnan(value):
            return math.inf
        return value if self.mode == "min" else -value


def last(count: int) -> KeepRule:
    """The last `count` durable checkpoints. One is enough: it goes only when the next one is durable."""
    _check(count >= 1, "last takes a positive number")
    return _Last(count)


def every_steps(steps: int) -> KeepRule:
    """Those of steps that are a multiple of `steps`."""
    _check(steps >= 1, "every_steps takes a positive number of steps")
    return _EverySteps(steps)


def best(count: int, metric: str, mode: Literal["min", "max"] = "min") -> KeepRule:
    """The `count` best by a metric given with the save, or later by `annotate`. Those without it are none of them."""
    _check(count >= 1, "best takes a positive number")
    _check(mode in ("min", "max"), f"mode must be 'min' or 'max', not {mode!r}")
    return Best(count, metric, mode)


def within(seconds: float) -> KeepRule:
    """Those of the last `seconds`."""
    _check(seconds > 0, "within takes a positive number of seconds")
    return _Within(seconds)


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigurationError(text)
