"""Restore a checkpoint: the first rank chooses it, all ranks load the same one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt.api import load
from ckpt.errors import (
    CheckpointError,
    CommitConflict,
    ConfigurationError,
    FormatError,
    IntegrityError,
    LoadFailed,
    NotCommitted,
    NotFound,
    NotVisible,
)
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.keeping import Best
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.run.strict_planner import NamingLoadPlanner
from ckpt.trainer_integration.training_state import OptimizerState

_DAMAGE = (IntegrityError, FormatError, NotVisible, NotCommitted, NotFound, CommitConflict)


@dataclass(frozen=True)
class PassedOver:
    """A newer or better checkpoint that was not loaded, and the reason. It was not changed."""

    step: int
    url: str
    reason: str


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was loaded.

    Attributes:
        step: after which it was saved.
        passed_over: checkpoints that would have been preferred, but cannot be loaded.
        missing: keys of this rank's state that the checkpoint does not have: with `strict=False`,
            or of an optimizer that had no state yet for a parameter without a gradient.
        state: the loaded parts by name; plain values are here alone.
    """

    step: int
    url: str
    passed_over: tuple[PassedOver, ...] = ()
    missing: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)


class _Choice(NamedTuple):
    """A checkpoint to load, or to pass over because of its damage."""

    step: int
    path: str
    damage: str | None


def restore(
    state: dict[str, Any],
    step: int | str,
    ranks: Ranks,
    saves: Saves,
    *,
    strict: bool,
    load_options: Mapping[str, Any],
) -> Restored | None:
    """Load the first checkpoint for `step` that passes its checks; None if there is none.

    Raises as `CheckpointManager.restore`.
    """
    began_s, history = time.monotonic(), saves.history
    optimizers = {name for name, part in state.items() if isinstance(part, OptimizerState)}
    passed_over: list[PassedOver] = []
    choices = _choices(step, saves)
    while (choice := ranks.from_first(lambda: next(choices, None))) is not None:
        url, damage = history.url(choice.path), choice.damage
        planner = NamingLoadPlanner(strict=strict, optional={"rng"}, optimizers=optimizers)
        if damage is None:
            damage = _load(state, url, planner, ranks, load_options)
        if damage is None:
            saves.go_on_from(choice.step)
            saves.tell("restored", choice.step, url, load_s=time.monotonic() - began_s)
            return Restored(choice.step, url, tuple(passed_over), planner.missing, state)
        history.unusable.add(choice.path)
        passed_over.append(PassedOver(choice.step, url, damage))
        saves.tell("passed_over", choice.step, damage)
    if passed_over:
        reasons = "; ".join(f"{checkpoint.url}: {checkpoint.reason}" for checkpoint in passed_over)
        raise LoadFailed(f"no checkpoint can be loaded: {reasons}", url=history.url(""))
    if step != "latest-valid":
        which = "with the metric" if step == "best" else f"of step {step}"
        raise NotFound(f"there is no durable checkpoint {which}", url=history.url(""))
    saves.tell("restored", None, "nothing: no checkpoint has been committed here")
    return None


def _choices(step: int | str, saves: Saves) -> Iterator[_Choice]:
    """Check the records of the candidates, the preferred ones first; on the first rank."""
    saves.wait_booked()
    for number, path in _candidates(step, saves):
        try:
            damage = saves.history.damage(path)
        except (NotFound, NotCommitted):
            continue
        yield _Choice(number, path, damage)


def _candidates(step: int | str, saves: Saves) -> list[tuple[int, str]]:
    if step == "latest-valid":
        return saves.history.candidates()
    if step == "best":
        for rule in () if saves.keep is None else saves.keep.rules():
            if isinstance(rule, Best):
                return saves.history.best(rule)
        raise ConfigurationError("step='best' needs a rule keeping.best(...) in keep=")
    if isinstance(step, str):
        raise ConfigurationError(f"step must be an integer, 'latest-valid' or 'best', not {step!r}")
    return saves.history.at(step)


def _load(
    state: dict[str, Any], url: str, planner: NamingLoadPlanner, ranks: Ranks, options: Mapping[str, Any]
) -> str | None:
    """Load a checkpoint on all ranks; return the first rank's error if it tells of damage."""
    error: CheckpointError | None = None
    try:
        load(state, url, planner=planner, **options)
    except CheckpointError as raised:
        error = raised
    is_damage = isinstance(error, _DAMAGE) and not isinstance(error, LoadFailed)
    damage = ranks.from_first(lambda: str(error) if is_damage else None)
    if damage is None and error is not None:
        raise error
    return damage
