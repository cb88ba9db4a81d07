"""Choose the interval between saves, and compute the useful share of a run's time under failures.

docs/planning.md derives each formula. Times are in seconds. Failures come at random (Poisson), also while a
job saves and while it restarts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAX_EXPONENT = 700.0  # math.exp overflows soon after


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Return the work between two saves that loses least, to first order (Young 1974)."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Return the work between two saves that loses least, to higher order (Daly 2006, equation 37)."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young_interval_s(stall_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


@dataclass(frozen=True)
class UsefulTime:
    """Where the time of a run goes; the shares add up to 1.

    Attributes:
        useful: work that counts: it is in a checkpoint from which the run went on, or will.
        stall: work stopped by those saves.
        restart: from a failure to the first step after it.
        lost: work done again, and saves that came to nothing.
    """

    useful: float
    stall: float
    restart: float
    lost: float


def useful_time(
    work_s: float, *, stall_s: float, lag_s: float, restart_s: float, mtbf_s: float
) -> UsefulTime:
    """Compute the shares of a run's time.

    Args:
        work_s: work between two saves.
        stall_s: how long a save stops the work.
        lag_s: from then until the save is durable, in the background.
        restart_s: from a failure to the first step after it.
        mtbf_s: mean time between failures of the job.
    """
    if (work_s + stall_s + lag_s + restart_s) / mtbf_s > _MAX_EXPONENT:
        return UsefulTime(0.0, 0.0, 1 - _survives(restart_s, mtbf_s), _survives(restart_s, mtbf_s))
    # A life of mean length mtbf begins after a restart, which failures may repeat: mtbf (e^(restart / mtbf) - 1).
    # Its k-th save counts if it lives for k periods and the lag: a geometric series.
    saves = _survives(lag_s, mtbf_s) / math.expm1((work_s + stall_s) / mtbf_s)
    cycle_s = mtbf_s / _survives(restart_s, mtbf_s)
    useful, stall = saves * work_s / cycle_s, saves * stall_s / cycle_s
    restart = 1 - mtbf_s / cycle_s
    return UsefulTime(useful, stall, restart, max(0.0, 1 - useful - stall - restart))


def _survives(span_s: float, mtbf_s: float) -> float:
    """Return the chance that no failure comes within a span of time."""
    return math.exp(-span_s / mtbf_s)
