"""Search settings with Optuna; a trial that is clearly worse than the best is cut short."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointError, ConfigurationError, StorageUnavailable

_RANDOM_TRIALS = 6
"""Trials before the model of Optuna is asked."""

FAILURES: tuple[type[CheckpointError], ...] = (ConfigurationError, StorageUnavailable)
"""What may be wrong with one point, and not with the storage: too many connections, parts too small."""

Point = Mapping[str, int]
"""The values of a trial, by name."""


@dataclass(frozen=True)
class Range:
    """The least and the most of a value; between them, factors matter and not differences."""

    least: int
    most: int

    def nearest(self, value: int) -> int:
        return min(max(value, self.least), self.most)


class CutShort(Exception):
    """Ends a trial. `cost` is what it had cost until then, which is less than it would have."""

    def __init__(self, cost: float) -> None:
        super().__init__(f"cut short at {cost:.3g}")
        self.cost = cost


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        cost: of what was measured until it ended.
        state: `complete`, `cut short` because it was clearly worse than the best, or `failed`.
        why: the error of a failed one.
    """

    point: Point
    cost: float
    state: str = "complete"
    why: str = ""


def require_optuna() -> Any:
    """Import Optuna. Raises ConfigurationError that says how to install it."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigurationError(
            f"ckpt tune needs Optuna, which cannot be imported ({error}): pip install './ckpt-storage[tune]'"
        ) from None
    return optuna


def search(
    space: Mapping[str, Range],
    defaults: Trial,
    first: Sequence[Point],
    measure: Callable[[Point, float], float],
    go_on: Callable[[Sequence[Trial]], bool],
    *,
    seed: int = 0,
) -> list[Trial]:
    """Try points of `space` until `go_on` says no; return all trials, the defaults first.

    Args:
        defaults: what is known already, with its cost.
        first: points to begin with.
        measure: returns the cost of a point; its second argument is the best cost so far. It raises
            CutShort if the point has cost clearly more, StorageUnavailable if the storage could not stand it.
    """
    optuna = require_optuna()
    logs = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM_TRIALS)
        study = optuna.create_study(sampler=sampler)
        kinds = {
            name: optuna.distributions.IntDistribution(each.least, each.most, log=True)
            for name, each in space.items()
        }
        near = _within(space, defaults.point)
        study.add_trial(optuna.trial.create_trial(params=near, distributions=kinds, value=defaults.cost))
        for point in first:
            study.enqueue_trial(_within(space, point), skip_if_exists=True)
        trials = [defaults]
        while go_on(trials):
            asked = study.ask(kinds)
            trial = _measured(dict(asked.params), measure, best_of(trials).cost)
            trials.append(trial)
            if trial.state == "complete":
                study.tell(asked, trial.cost)
            elif trial.state == "cut short":
                asked.report(trial.cost, 0)  # Optuna ranks it by that, behind those that completed
                study.tell(asked, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(asked, state=optuna.trial.TrialState.FAIL)
        return trials
    finally:
        optuna.logging.set_verbosity(logs)


def best_of(trials: Sequence[Trial]) -> Trial:
    """Return the complete trial of the least cost."""
    return min((trial for trial in trials if trial.state == "complete"), key=lambda trial: trial.cost)


def _within(space: Mapping[str, Range], point: Point) -> dict[str, int]:
    return {name: each.nearest(point[name]) for name, each in space.items()}


def _measured(point: Point, measure: Callable[[Point, float], float], best: float) -> Trial:
    try:
        return Trial(point, measure(point, best))
    except CutShort as cut:
        return Trial(point, cut.cost, "cut short")
    except FAILURES as error:
        return Trial(point, math.inf, "failed", str(error))
