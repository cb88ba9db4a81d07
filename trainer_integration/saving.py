"""Make rules that say after which steps a `CheckpointManager` saves.

    save = saving.every_steps(500) | saving.every_seconds(1800) | saving.on_preemption()

A union saves when any of its rules does. Rules that depend on the step alone are decided by each
rank for itself; for those that look at clocks or signals the ranks exchange a few integers after
each step.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
    """The end of a step, as rules see it.

    All but the first three attributes are the first rank's, and for rules with `needs_clock` only.

    Attributes:
        is_first: the run has no checkpoint, and this is its first step since it started.
        is_last: the trainer says that no step follows.
        since_save_s: seconds since the last save began, or the manager was made.
        stall_s: mean seconds for which a save stops the steps; None before the first.
        upload_s: mean seconds until a save is durable; None before the first one that was.
        mtbf_s: mean time between failures of this run, as observed.
    """

    step: int
    is_first: bool = False
    is_last: bool = False
    since_save_s: float = 0.0
    stall_s: float | None = None
    upload_s: float | None = None
    mtbf_s: float = math.inf


class SaveRule:
    """One rule, or a union of several."""

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
class _Condition(SaveRule):
    """Save for `reason` when a condition holds."""

    holds: Callable[[Moment], bool]
    reason: str
    needs_clock: bool = False

    def due(self, moment: Moment) -> str | None:
        return self.reason.format(moment.step) if self.holds(moment) else None


@dataclass(frozen=True)
class _Interval(SaveRule):
    """Save at an interval that follows from the mean stall of a save, once measured."""

    interval: Callable[[Moment, float], tuple[float, str]]
    needs_clock: bool = True

    def due(self, moment: Moment) -> str | None:
        if moment.stall_s is None:
            return "to measure how long a save takes"
        interval_s, reason = self.interval(moment, moment.stall_s)
        # More often than uploads take is not possible, however cheap the stall.
        is_due = moment.since_save_s >= max(interval_s, moment.upload_s or 0.0)
        return reason if is_due else None


@dataclass(frozen=True)
class OnPreemption(SaveRule):
    """Save when a signal reaches any rank. The manager looks for signals, so `due` returns None."""

    grace_s: float
    signals: tuple[signal.Signals, ...]
    needs_clock: bool = True

    def due(self, moment: Moment) -> str | None:
        return None


def every_steps(steps: int) -> SaveRule:
    """Save after every step that is a multiple of `steps`."""
    _check(steps >= 1, "every_steps takes a positive number of steps")
    return _Condition(lambda moment: moment.step > 0 and moment.step % steps == 0, f"every {steps} steps")


def at_steps(steps: Iterable[int]) -> SaveRule:
    """Save after these steps."""
    chosen = frozenset(steps)
    return _Condition(lambda moment: moment.step in chosen, "step {} is listed in at_steps")


def first_step() -> SaveRule:
    """Save after the first step of a run without checkpoints: faults show in the first minute."""
    return _Condition(lambda moment: moment.is_first, "the run has no checkpoint yet")


def last_step() -> SaveRule:
    """Save after the step for which the trainer says `last=True`."""
    return _Condition(lambda moment: moment.is_last, "the last step")


def every_seconds(seconds: float) -> SaveRule:
    """Save when so much time has passed since the last save began."""
    _check(seconds > 0, "every_seconds takes a positive number of seconds")
    return _Condition(lambda moment: moment.since_save_s >= seconds, f"every {seconds:g} s", True)


def overhead_budget(fraction: float) -> SaveRule:
    """Save as often as saves stop the steps for at most this fraction of the time."""
    _check(0 < fraction < 1, "overhead_budget takes a fraction between 0 and 1")

    def interval(moment: Moment, stall_s: float) -> tuple[float, str]:
        reason = f"a save stops steps for {stall_s:.3g} s, at most {fraction:.2%} of the time"
        return stall_s / fraction, reason

    return _Interval(interval)


def young_daly(mtbf_s: float | None = None) -> SaveRule:
    """Save at the interval that loses least, `sqrt(2 x stall x MTBF)`.

    Args:
        mtbf_s: mean time between failures of the whole job; None estimates it from the run's
            starts, beginning with one failure a day.
    """
    _check(mtbf_s is None or mtbf_s > 0, "young_daly takes a positive number of seconds")

    def interval(moment: Moment, stall_s: float) -> tuple[float, str]:
        failure_s = moment.mtbf_s if mtbf_s is None else mtbf_s
        interval_s = math.sqrt(2 * stall_s * failure_s)
        stated_s = max(interval_s, moment.upload_s or 0.0)
        return interval_s, (
            f"Young-Daly: every {stated_s:.3g} s for a stall of {stall_s:.3g} s and a failure every {failure_s:.3g} s"
        )

    return _Interval(interval)


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
