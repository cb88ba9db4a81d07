"""Decide whether to save after a step, on all ranks alike: by rules, clocks and signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType
from typing import Any

from ckpt.errors import ConfigurationError, SaveFailed
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.saving import Moment, OnPreemption, SaveRule


class Decisions:
    """Apply the rules for saving; `preempted` once a signal has reached any rank."""

    def __init__(self, rule: SaveRule, ranks: Ranks, saves: Saves, max_undurable_s: float | None) -> None:
        self._ranks, self._saves, self._max_undurable_s = ranks, saves, max_undurable_s
        self._by_step = [rule for rule in rule.rules() if not rule.needs_clock]
        self._by_clock = [rule for rule in rule.rules() if rule.needs_clock]
        preemption = [rule for rule in self._by_clock if isinstance(rule, OnPreemption)]
        self.preempted = self._has_stepped = False
        self._deadline_s = 0.0
        self._grace_s = max((rule.grace_s for rule in preemption), default=0.0)
        self._signals = Signals({number for rule in preemption for number in rule.signals})

    def reason(self, step: int, *, is_last: bool, settle: Callable[[], None]) -> str | None:
        """Return the reason to save now, or None. Ranks agree on whether; wording may differ.

        `settle` is called on all ranks when a save has failed on one. Raises SaveFailed if nothing
        has become durable for too long.
        """
        is_first = not self._has_stepped and not self._saves.steps
        self._has_stepped = True
        moment = Moment(step, is_first=is_first, is_last=is_last)
        reason = _first_reason(self._by_step, moment)
        if not self._by_clock and self._max_undurable_s is None:
            return reason
        limit_s, undurable_s = self._max_undurable_s, time.monotonic() - self._saves.undurable_since_s
        overdue = self._ranks.rank == 0 and limit_s is not None and undurable_s > limit_s
        by_clock = self._by_clock_reason(moment) if self._ranks.rank == 0 else None
        received = self._signals.received
        own = [received is not None, by_clock is not None, self._saves.failed, overdue]
        signalled, due, failed, overdue_anywhere = self._ranks.most(own)
        if self.preempted or signalled:
            self._deadline_s = time.monotonic() + self._grace_s
        if failed:
            settle()
        if overdue_anywhere:
            cause = self._saves.last_failure
            why = "" if cause is None else f"; the last failure: {cause}"
            raise SaveFailed(f"no checkpoint has become durable for {limit_s:g} s (max_undurable_s){why}")
        if signalled and not self.preempted:
            self.preempted = True
            return f"{received} asks this rank to end" if received else "a signal asks another rank to end"
        if due:
            return by_clock or "a rule on rank 0's clock asked for it"
        return reason

    def patience_s(self) -> float | None:
        """Return how long to wait for the save in flight; None without a limit."""
        return max(0.0, self._deadline_s - time.monotonic()) if self.preempted else self._max_undurable_s

    def close(self) -> None:
        self._signals.close()

    def _by_clock_reason(self, moment: Moment) -> str | None:
        """Return the reason to save now by this rank's clock, if any."""
        saves = self._saves
        if saves.busy:
            return None
        moment = replace(
            moment,
            since_save_s=time.monotonic() - saves.began_s,
            stall_s=saves.stall_s,
            upload_s=saves.upload_s,
            mtbf_s=saves.history.mtbf_s(),
        )
        return _first_reason(self._by_clock, moment)


class Signals:
    """Note signals until `close`; handlers of the program's own are still called."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        signals = [*signals]
        if signals and threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "saving.on_preemption handles signals, which only the main thread can; make the manager there"
            )
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        for number in signals:
            self._previous[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Restore the handlers."""
        for number, handler in self._previous.items():
            # None: it was not installed from Python, and cannot be restored from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        previous = self._previous.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)


def _first_reason(rules: list[SaveRule], moment: Moment) -> str | None:
    return next((reason for rule in rules if (reason := rule.due(moment))), None)
