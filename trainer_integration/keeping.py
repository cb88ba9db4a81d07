"""Make rules that say which durable checkpoints of a run stay; `|` unites them.

    keep = keeping.last(3) | keeping.every_steps(10_000) | keeping.best(2, "val_loss")

Pinned checkpoints stay whatever the rules say. Only checkpoints that the run itself has recorded are
ever removed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckpt.errors import ConfigurationError
from ckpt.format.run_record import RunCheckpoint

__all__ = ["Best", "KeepRule", "best", "every_steps", "last", "within"]


class KeepRule:
    """A rule, or a union of several."""

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        """Return the steps to keep of durable checkpoints, which come by step, and the reasons."""
        raise NotImplementedError

    def rules(self) -> tuple[KeepRule, ...]:
        """List the rules that this one unites."""
        return (self,)

    def __or__(self, other: KeepRule) -> KeepRule:
        return _AnyKeeps((*self.rules(), *other.rules()))


@dataclass(frozen=True)
class _AnyKeeps(KeepRule):
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
        newest = checkpoints[-self.count :]
        return {checkpoint.step: f"of the last {self.count}" for checkpoint in newest}


@dataclass(frozen=True)
class _EverySteps(KeepRule):
    steps: int

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.step % self.steps == 0]
        return dict.fromkeys(steps, f"every {self.steps} steps")


@dataclass(frozen=True)
class _Within(KeepRule):
    seconds: float

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        # A clock that was set back is behind the newest of them.
        now_s = max([now_s, *(checkpoint.saved_at_s for checkpoint in checkpoints)])
        young = [old.step for old in checkpoints if now_s - old.saved_at_s <= self.seconds]
        return dict.fromkeys(young, f"of the last {self.seconds:g} s")


@dataclass(frozen=True)
class Best(KeepRule):
    """Keep the best by a metric."""

    count: int
    metric: str
    mode: Literal["min", "max"]

    def keeps(self, checkpoints: Sequence[RunCheckpoint], now_s: float) -> dict[int, str]:
        ranked = self.ranked(checkpoints)
        if not ranked:  # a name that nobody reports, perhaps, and then it must not cost checkpoints
            return {checkpoint.step: self.unmeasured for checkpoint in checkpoints}
        reason = f"of the best {self.count} by {self.metric}"
        return {checkpoint.step: reason for checkpoint in ranked[: self.count]}

    @property
    def unmeasured(self) -> str:
        """The reason to keep all where none has the metric."""
        return f"until one has the metric {self.metric!r}"

    def ranked(self, checkpoints: Sequence[RunCheckpoint]) -> list[RunCheckpoint]:
        """Sort those that have the metric, best and newest first. NaN is worst."""
        measured = [checkpoint for checkpoint in checkpoints if self.metric in checkpoint.metrics]
        return sorted(measured, key=lambda checkpoint: (self._badness(checkpoint), -checkpoint.step))

    def _badness(self, checkpoint: RunCheckpoint) -> float:
        value = checkpoint.metrics[self.metric]
        if value is None or math.isnan(value):
            return math.inf
        return value if self.mode == "min" else -value


def as_rule(rule: Any) -> KeepRule | None:
    """Return a rule, or None; an integer stands for `last`. Raises ConfigurationError for anything else."""
    if rule is None or isinstance(rule, KeepRule):
        return rule
    if isinstance(rule, bool) or not isinstance(rule, numbers.Integral):
        raise ConfigurationError(
            f"keep must be a rule of ckpt.trainer_integration.keeping, or a number of checkpoints, not {rule!r}"
        )
    return last(int(rule))


def last(count: int) -> KeepRule:
    """Keep the last `count`; one is enough, as it goes only when the next is durable."""
    _check(count >= 1, "last takes a positive number of checkpoints")
    return _Last(count)


def every_steps(steps: int) -> KeepRule:
    """Keep those of steps that are a multiple of `steps`."""
    _check(steps >= 1, "every_steps takes a positive number of steps")
    return _EverySteps(steps)


def best(count: int, metric: str, mode: Literal["min", "max"] = "min") -> KeepRule:
    """Keep the `count` best of those with a metric, given with the save or later by `annotate`.

    While no checkpoint has the metric, this keeps all of them.
    """
    _check(count >= 1, "best takes a positive number of checkpoints")
    _check(mode in ("min", "max"), f"mode must be 'min' or 'max', not {mode!r}")
    return Best(count, metric, mode)


def within(seconds: float) -> KeepRule:
    """Keep those of the last `seconds`."""
    _check(seconds > 0, "within takes a positive number of seconds")
    return _Within(seconds)


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigurationError(text)
