"""Decide whether to save after a step, on all ranks alike: by rules, clocks and signals."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ckpt.errors import SaveFailed
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.run.held_errors import errors_held
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.run.signals import Signals
from ckpt.trainer_integration.saving import Moment, OnPreemption, SaveRule

_PATIENCE_S = 5.0
"""How long a rank that ends lets others come to its last step."""


@dataclass(frozen=True)
class _Question:
    """What the ranks ask each other after a step.

    Attributes:
        answer: whether on any rank a signal has come, a save is due, one has failed, or is overdue.
        reason: why a save is due, on rank 0.
        save_began_s: when the last save before it began, by this rank's clock.
    """

    answer: Future[list[int]]
    reason: str | None
    save_began_s: float


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
        self._question: _Question | None = None

    def reason(self, step: int, *, is_last: bool, settle: Callable[[], None]) -> str | None:
        """Return the reason to save now, or None. Ranks agree on whether; wording may differ.

        What a signal, rank 0's clock or a failed save asked for, all ranks know one step later: the
        answer is on its way while the step runs. A rank that is late holds up the others' next step.

        `settle` is called on all ranks when a save has failed on one. Raises SaveFailed if nothing
        has become durable for too long.
        """
        self._signals.guard()
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
        question, self._question = self._question, None
        signalled, due, failed, overdue_anywhere = [0] * 4 if question is None else question.answer.result()
        own = [received is not None, by_clock is not None, self._saves.failed, overdue]
        asked = _Question(self._ranks.most_later(own), by_clock, self._saves.began_s)
        if self._ranks.size > 1:
            self._question = asked
        else:
            question, (signalled, due, failed, overdue_anywhere) = asked, asked.answer.result()
        if question is None or question.save_began_s != self._saves.began_s:
            due = failed = 0  # a save that began meanwhile has settled it
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
        if due and question is not None:
            return question.reason or "a rule on rank 0's clock asked for it"
        return reason

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Put off what handlers of signals raise, where a step changes what the ranks have agreed on."""
        asks = self._ranks.size > 1 and (bool(self._by_clock) or self._max_undurable_s is not None)
        if asks or self._signals.received is not None:  # a save that was decided must not get lost
            return errors_held(look_through=False)
        return contextlib.nullcontext()

    def patience_s(self) -> float | None:
        """Return how long to wait for the save in flight; None without a limit."""
        return max(0.0, self._deadline_s - time.monotonic()) if self.preempted else self._max_undurable_s

    def close(self) -> None:
        self._signals.close()
        question, self._question = self._question, None
        if question is not None:  # other ranks may wait for what this one passes on
            with contextlib.suppress(TimeoutError):
                question.answer.exception(_PATIENCE_S)

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


def _first_reason(rules: list[SaveRule], moment: Moment) -> str | None:
    return next((reason for rule in rules if (reason := rule.due(moment))), None)
