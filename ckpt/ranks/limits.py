"""Say how often ranks beat, and how long they wait for one that is silent."""

from __future__ import annotations

_BEAT_COST_S = 3e-3
"""Beats of so many ranks in so much longer periods take 1.5 % of a core of the store (measured)."""

_ROLL_CALL_COST_S = 1e-4
"""As long as a roll call lasts, they may take a third of it."""


class Limits:
    """Divide `timeout_s`, the time until every rank has failed.

    Attributes:
        stall_s: after so long a storage operation without progress, or a silent rank, is given up.
        stuck_s: after so long without progress, the others give up a rank that is alive.
        roll_call_s: for the ranks to answer when contact is lost; twice that while some are late.
        period_s: between two beats; more than 3 s from 1,000 ranks on.
        first_period_s: the same for the first rank, which listens to all, and so misses one sooner.
        roll_call_period_s: the same during a roll call.
    """

    def __init__(self, timeout_s: float, size: int = 1) -> None:
        self.timeout_s = timeout_s
        self.stall_s = 0.6 * timeout_s
        self.stuck_s = 0.7 * timeout_s
        shortest_s = min(3.0, timeout_s / 30)
        self.period_s = max(shortest_s, min(_BEAT_COST_S * size, timeout_s / 12))
        self.first_period_s = max(shortest_s, self.period_s / 3)
        self.roll_call_period_s = max(shortest_s / 4, min(_ROLL_CALL_COST_S * size, self.period_s / 4))
        # Who has not noticed the loss hears of it within a period.
        self.roll_call_s = min(max(10.0, 1.25 * self.period_s), 0.15 * timeout_s)
