"""Decide whether to save after a step, on all ranks alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ckpt.errors import SaveFailed
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.run.signals import Signals
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
        self._signals = Signals({signal for rule in preemption for signal in rule.signals})

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
        by_clock, overdue = self._by_clocks(moment) if self._ranks.rank == 0 else (None, False)
        signal = self._signals.received
        own = [signal is not None, by_clock is not None, self._saves.failed, overdue]
        signalled, due, failed, overdue_anywhere = self._ranks.most(own)
        if self.preempted or signalled:
            self._deadline_s = time.monotonic() + self._grace_s
        if failed:
            settle()
        if overdue_anywhere:
            raise self._overdue()
        if signalled and not self.preempted:
            self.preempted = True
            return f"{signal} asks this rank to end" if signal else "a signal asks another rank to end"
        if due:
            return by_clock or "a rule on rank 0's clock asked for it"
        return reason

    def patience_s(self) -> float | None:
        """Return how long to wait for the save in flight; None without a limit."""
        return max(0.0, self._deadline_s - time.monotonic()) if self.preempted else self._max_undurable_s

    def close(self) -> None:
        self._signals.close()

    def _by_clocks(self, moment: Moment) -> tuple[str | None, bool]:
        """Return (reason to save now by this rank's clock or None, whether it is overdue)."""
        saves, now_s = self._saves, time.monotonic()
        overdue = self._max_undurable_s is not None and now_s - saves.durable_at_s > self._max_undurable_s
        if saves.busy:
            return None, overdue
        moment = replace(
            moment,
            since_save_s=now_s - saves.began_s,
            stall_s=saves.stall_s,
            upload_s=saves.upload_s,
            mtbf_s=saves.history.mtbf_s(),
        )
        return _first_reason(self._by_clock, moment), overdue

    def _overdue(self) -> SaveFailed:
        cause = self._saves.last_failure
        why = "" if cause is None else f"; the last failure: {cause}"
        return SaveFailed(
            f"no checkpoint has become durable for {self._max_undurable_s:g} s (max_undurable_s){why}"
        )


def _first_reason(rules: list[SaveRule], moment: Moment) -> str | None:
    return next((reason for rule in rules if (reason := rule.due(moment))), None)
