"""The search finds a known optimum, and knows which trials were not worth their time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ckpt.errors import StorageUnavailable
from ckpt.tuning.search import CutShort, Point, Range, Trial, best_of, search

pytest.importorskip("optuna")

SPACE = {"threads": Range(1, 128), "part": Range(5, 256)}
DEFAULTS = {"threads": 4, "part": 64}


def cost_of(point: Point) -> float:
    """One at 24 threads and parts of 16; each doubling away from it costs."""
    return 1 + abs(math.log2(point["threads"] / 24)) + abs(math.log2(point["part"] / 16)) / 2


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_it_finds_a_known_optimum(seed: int) -> None:
    limits = []

    def measure(point: Point, best: float) -> float:
        limits.append(best)
        return cost_of(point)

    def go_on(trials: Sequence[Trial]) -> bool:
        return len(trials) <= 50

    known = Trial(DEFAULTS, cost_of(DEFAULTS))
    trials = search(SPACE, known, [{"threads": 999, "part": 1}], measure, go_on, seed=seed)
    assert trials[0] is known
    assert trials[1].point == {"threads": 128, "part": 5}  # what is asked for, within the space
    assert len(trials) == 51
    assert known.cost > 4.5
    assert best_of(trials).cost < 1.7
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] <= min(trial.cost for trial in trials[:-1])


def test_trials_that_end_early_never_win() -> None:
    def measure(point: Point, best: float) -> float:
        if point["threads"] > 64:
            raise StorageUnavailable("too many connections", url="s3://b")
        cost = cost_of(point)
        if cost > 1.25 * best:
            raise CutShort(1.25 * best)
        return cost

    def go_on(trials: Sequence[Trial]) -> bool:
        return len(trials) <= 40

    first = [{"threads": 100, "part": 20}, {"threads": 1, "part": 256}]
    trials = search(SPACE, Trial(DEFAULTS, cost_of(DEFAULTS)), first, measure, go_on)
    assert [trial.state for trial in trials[:3]] == ["complete", "failed", "cut short"]
    assert "too many connections" in trials[1].why
    assert math.isinf(trials[1].cost)
    best = best_of(trials)
    assert best.state == "complete"
    assert best.cost == cost_of(best.point) < cost_of(DEFAULTS)
    assert all(trial.point["threads"] > 64 for trial in trials if trial.state == "failed")
