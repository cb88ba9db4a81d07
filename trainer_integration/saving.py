"""Make rules that say after which steps a `CheckpointManager` saves; `|` unites them.

save = saving.every_steps(500) | saving.every_seconds(1800) | saving.on_preemption()
"""

from __future__ import annotations

import math
import numbers
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckpt.errors import ConfigurationError

__all__ = [
    "Moment",
    "OnPreemption",
    "SaveRule",
    "at_steps",
    "every_seconds",
    "every_steps",
    "first_step",
    "last_step",
    "on_preemption",
    "overhead_budget",
    "young_daly",
]


@dataclass(frozen=True)
class Moment:
    """The end of a step, as rules see it; those without `needs_clock` see the first three alone.

    Attributes:
        is_first: the run has no checkpoint, and this is its first step since it started.
        is_last: the trainer says that no step follows.
        since_save_s: seconds since the last save began, or the manager was made.
        stall_s: mean seconds for which a save stops the steps; None before the first.
        upload_s: mean seconds until a save is durable; None before the first one that was.
        mtbf_s: mean seconds between failures of this run, as observed.
    """

    step: int
    is_first: bool = False
    is_last: bool = False
    since_save_s: float = 0.0
    stall_s: float | None = None
    upload_s: float | None = None
    mtbf_s: float = math.inf


class SaveRule:
    """A rule, or a union of several; `needs_clock` if it looks at clocks or signals.

    The ranks then talk after each step, and go by the first rank's clock.
    """

    needs_clock: bool = False

    def due(self, moment: Moment) -> str | None:
        """Return the reason to save after this step, or None."""
        raise NotImplementedError

    def rules(self) -> tuple[SaveRule, ...]:
        """List the rules that this one unites."""
        return (self,)

    def __or__(self, other: SaveRule) -> SaveRule:
        return _AnyDue((*self.rules(), *other.rules()))


@dataclass(frozen=True)
class _AnyDue(SaveRule):
    members: tuple[SaveRule, ...]

    def due(self, moment: Moment) -> str | None:
        return next((reason for rule in self.members if (reason := rule.due(moment))), None)

    def rules(self) -> tuple[SaveRule, ...]:
        return self.members


@dataclass(frozen=True)
class _EverySteps(SaveRule):
    steps: int

    def due(self, moment: Moment) -> str | None:
        return f"every {self.steps} steps" if moment.step and moment.step % self.steps == 0 else None


@dataclass(frozen=True)
class _AtSteps(SaveRule):
    steps: frozenset[int]

    def due(self, moment: Moment) -> str | None:
        return f"step {moment.step} is listed in at_steps" if moment.step in self.steps else None


@dataclass(frozen=True)
class _FirstStep(SaveRule):
    def due(self, moment: Moment) -> str | None:
        return "the run has no checkpoint yet" if moment.is_first else None


@dataclass(frozen=True)
class _LastStep(SaveRule):
    def due(self, moment: Moment) -> str | None:
        return "the last step" if moment.is_last else None


@dataclass(frozen=True)
class _EverySeconds(SaveRule):
    needs_clock = True
    seconds: float

    def due(self, moment: Moment) -> str | None:
        return f"every {self.seconds:g} s" if moment.since_save_s >= self.seconds else None


@dataclass(frozen=True)
class _OverheadBudget(SaveRule):
    needs_clock = True
    fraction: float

    def due(self, moment: Moment) -> str | None:
        if moment.stall_s is None:
            return "to measure how long a save takes"
        interval_s = max(moment.stall_s / self.fraction, moment.upload_s or 0.0)
        text = f"a save stops steps for {moment.stall_s:.3g} s, at most {self.fraction:.2%} of the time"
        return text if moment.since_save_s >= interval_s else None


@dataclass(frozen=True)
class _YoungDaly(SaveRule):
    needs_clock = True
    mtbf_s: float | None

    def due(self, moment: Moment) -> str | None:
        if moment.stall_s is None:
            return "to measure how long a save takes"
        mtbf_s = moment.mtbf_s if self.mtbf_s is None else self.mtbf_s
        # More often than uploads take is not possible, however cheap the stall.
        interval_s = max(math.sqrt(2 * moment.stall_s * mtbf_s), moment.upload_s or 0.0)
        text = f"Young-Daly: every {interval_s:.3g} s for a stall of {moment.stall_s:.3g} s and a failure every {mtbf_s:.3g} s"
        return text if moment.since_save_s >= interval_s else None


@dataclass(frozen=True)
class OnPreemption(SaveRule):
    """Save when a signal reaches any rank. The manager looks for signals, so `due` returns None."""

    needs_clock = True
    grace_s: float
    signals: tuple[signal.Signals, ...]

    def due(self, moment: Moment) -> str | None:
        return None


def as_rule(rule: Any) -> SaveRule:
    """Return a rule; an integer stands for `every_steps`. Raises ConfigurationError for anything else."""
    if isinstance(rule, SaveRule):
        return rule
    if isinstance(rule, bool) or not isinstance(rule, numbers.Integral):
        raise ConfigurationError(
            f"save must be a rule of ckpt.trainer_integration.saving, or a number of steps, not {rule!r}"
        )
    return every_steps(int(rule))


def every_steps(steps: int) -> SaveRule:
    """Save after every step that is a multiple of `steps`."""
    _check(steps >= 1, "every_steps takes a positive number of steps")
    return _EverySteps(steps)


def at_steps(steps: Iterable[int]) -> SaveRule:
    """Save after these steps."""
    return _AtSteps(frozenset(steps))


def first_step() -> SaveRule:
    """Save after the first step of a run without checkpoints: faults show in the first minute."""
    return _FirstStep()


def last_step() -> SaveRule:
    """Save after the step for which the trainer says `last=True`."""
    return _LastStep()


def every_seconds(seconds: float) -> SaveRule:
    """Save when so much time has passed since the last save began."""
    _check(seconds > 0, "every_seconds takes a positive number of seconds")
    return _EverySeconds(seconds)


def overhead_budget(fraction: float) -> SaveRule:
    """Save as often as saves stop the steps for at most this fraction of the time."""
    _check(0 < fraction < 1, "overhead_budget takes a fraction between 0 and 1")
    return _OverheadBudget(fraction)


def young_daly(mtbf_s: float | None = None) -> SaveRule:
    """Save at the interval that loses least, `sqrt(2 x stall x MTBF)`.

    Args:
        mtbf_s: mean time between failures of the whole job; None estimates it from the run's
            starts, beginning with one failure a day.
    """
    _check(mtbf_s is None or mtbf_s > 0, "young_daly takes a positive number of seconds")
    return _YoungDaly(mtbf_s)


def on_preemption(
    grace_s: float = 30.0, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
) -> SaveRule:
    """Save after the same step on all ranks when one of `signals` has reached any of them.

    Args:
        grace_s: the longest wait for that save to become durable; torchrun kills after 30 s.
    """
    _check(grace_s > 0, "grace_s must be positive")
    return OnPreemption(grace_s, tuple(signals))


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigurationError(text)
