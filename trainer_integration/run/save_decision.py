"""Whether to save after a step: each rank by itself where the step alone decides, all together where more does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ckpt.errors import SaveFailed
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.run.signals import Signals
from ckpt.trainer_integration.saving import Moment, OnPreemption, SaveRule

__all__ = ["Decisions"]


class Decisions:
    """The rules for saving at work.

    Attributes:
        preempted: a signal has reached some rank; the same on all ranks.
        deadline_s: by when the save after that has to be durable, by `time.monotonic`.
    """

    def __init__(
        self,
        rule: SaveRule,
        ranks: Ranks,
        saves: Saves,
        mtbf_s: Callable[[], float],
        max_undurable_s: float | None,
    ) -> None:
        self._ranks, self._saves, self._mtbf_s = ranks, saves, mtbf_s
        self._max_undurable_s = max_undurable_s
        self._by_step = [found for found in rule.rules() if not found.needs_clock]
        self._by_clock = [found for found in rule.rules() if found.needs_clock]
        preemption = [found for found in rule.rules() if isinstance(found, OnPreemption)]
        self.preempted = False
        self.deadline_s = 0.0
        self._grace_s = max((found.grace_s for found in preemption), default=0.0)
        self._signals = Signals({number for found in preemption for number in found.signals})

    def reason(self, moment: Moment, *, settle: Callable[[], None]) -> str | None:
        """Why to save now, if at all; the same answer on all ranks, in other words perhaps.

        Args:
            settle: called on all ranks when a save has failed on one.

        Raises:
            SaveFailed: nothing has become durable for too long.
        """
        reason = _first_reason(self._by_step, moment)
        if not self._by_clock and self._max_undurable_s is None:
            return reason
        by_clock, overdue = self._by_clocks(moment) if self._ranks.rank == 0 else (None, False)
        signal = self._signals.received
        told = [signal is not None, by_clock is not None, self._saves.failed, overdue]
        signalled, due, failed, overdue_anywhere = self._ranks.most(told)
        if self.preempted or signalled:
            self.deadline_s = time.monotonic() + self._grace_s
        if failed:
            settle()
        if overdue_anywhere:
            raise self._overdue()
        if signalled and not self.preempted:
            self.preempted = True
            return f"{signal} asks this rank to end" if signal else "a signal asks another rank to end"
        if due:
            return by_clock or "the first rank decided so"
        return reason

    def close(self) -> None:
        """Give signals back."""
        self._signals.close()

    def _by_clocks(self, moment: Moment) -> tuple[str | None, bool]:
        """What the first rank's clock says: why to save now, and whether it has been too long."""
        saves, now_s = self._saves, time.monotonic()
        overdue = self._max_undurable_s is not None and now_s - saves.durable_at_s > self._max_undurable_s
        if saves.busy:
            return None, overdue
        moment = replace(
            moment,
            since_save_s=now_s - saves.began_s,
            stall_s=saves.stall_s,
            upload_s=saves.upload_s,
            mtbf_s=self._mtbf_s(),
        )
        return _first_reason(self._by_clock, moment), overdue

    def _overdue(self) -> SaveFailed:
        cause = self._saves.last_failure
        why = "" if cause is None else f"; the last failure: {cause}"
        return SaveFailed(
            f"nothing has become durable for {self._max_undurable_s:g} s (max_undurable_s){why}"
        )


def _first_reason(rules: list[SaveRule], moment: Moment) -> str | None:
    return next((why for rule in rules if (why := rule.due(moment))), None)
