"""Restore a checkpoint: the first rank chooses it, all ranks load the same one."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class _Attempt:
    """The step and folder to load next, if any, and those that were passed over."""

    candidate: tuple[int, str] | None
    passed_over: tuple[tuple[int, str, str], ...]


def restore(
    state: dict[str, Any],
    step: int | str,
    ranks: Ranks,
    saves: Saves,
    *,
    strict: bool,
    load_options: Mapping[str, Any],
) -> Restored | None:
    """Load the first candidate for `step` that passes its checks; None if there is none.

    Raises:
        NotFound: a step, or the best one, was asked for, and is not there.
        LoadFailed: no candidate can be loaded, or the state does not fit the checkpoint.
        CheckpointError: the storage, or another rank, failed.
    """
    began_s, history = time.monotonic(), saves.history
    restored, passed_over = _load_first(state, step, ranks, saves, strict=strict, load_options=load_options)
    for checkpoint in passed_over:
        saves.tell("passed_over", checkpoint.step, checkpoint.reason)
    if restored is not None:
        history.go_on_from(restored.step)
        saves.go_on_from(restored.step)
        saves.tell("restored", restored.step, restored.url, load_s=time.monotonic() - began_s)
        return restored
    if passed_over:
        reasons = "; ".join(f"{checkpoint.url}: {checkpoint.reason}" for checkpoint in passed_over)
        raise LoadFailed(f"no checkpoint can be loaded: {reasons}", url=history.url(""))
    if step != "latest-valid":
        which = "with the metric" if step == "best" else f"of step {step}"
        raise NotFound(f"there is no durable checkpoint {which}", url=history.url(""))
    saves.tell("restored", None, "nothing: no checkpoint has been committed here")
    return None


def _load_first(
    state: dict[str, Any],
    step: int | str,
    ranks: Ranks,
    saves: Saves,
    *,
    strict: bool,
    load_options: Mapping[str, Any],
) -> tuple[Restored | None, tuple[PassedOver, ...]]:
    history, chooser = saves.history, _Chooser(saves, step)
    optimizers = {name for name, part in state.items() if isinstance(part, OptimizerState)}
    failure: str | None = None
    while True:
        attempt = ranks.from_first(functools.partial(chooser.next, failure))
        passed_over = tuple(PassedOver(n, history.url(path), why) for n, path, why in attempt.passed_over)
        history.unusable |= {path for _, path, _ in attempt.passed_over}
        if attempt.candidate is None:
            return None, passed_over
        number, path = attempt.candidate
        planner = NamingLoadPlanner(strict=strict, optional={"rng"}, optimizers=optimizers)
        error: CheckpointError | None = None
        try:
            load(state, history.url(path), planner=planner, **load_options)
        except CheckpointError as raised:
            error = raised
        failure = ranks.from_first(functools.partial(_damage, error))
        if failure is None:
            if error is not None:
                raise error
            return Restored(number, history.url(path), passed_over, planner.missing, state), passed_over


class _Chooser:
    """The first rank's walk through the candidates."""

    def __init__(self, saves: Saves, step: int | str) -> None:
        self._saves, self._step = saves, step
        self._left: Iterator[tuple[int, str]] | None = None
        self._tried: tuple[int, str] | None = None
        self._passed_over: list[tuple[int, str, str]] = []

    def next(self, failure: str | None) -> _Attempt:
        """Find the next candidate worth loading.

        Args:
            failure: why the last one could not be loaded.
        """
        if self._tried is not None and failure is not None:
            self._passed_over.append((*self._tried, failure))
        if self._left is None:
            self._saves.wait_booked()
            self._left = self._candidates()
        for step, path in self._left:
            reason, is_damaged = self._saves.history.why_not(path)
            if reason is None:
                self._tried = step, path
                return _Attempt(self._tried, tuple(self._passed_over))
            if is_damaged:
                self._passed_over.append((step, path, reason))
        return _Attempt(None, tuple(self._passed_over))

    def _candidates(self) -> Iterator[tuple[int, str]]:
        """List steps and folders, the preferred ones first."""
        history, keep, step = self._saves.history, self._saves.keep, self._step
        if step == "latest-valid":
            return iter(history.candidates())
        if step == "best":
            for rule in () if keep is None else keep.rules():
                if isinstance(rule, Best):
                    return iter(history.best(rule))
            raise ConfigurationError("step='best' needs a rule keeping.best(...) in keep=")
        if isinstance(step, str):
            raise ConfigurationError(f"step must be an integer, 'latest-valid' or 'best', not {step!r}")
        return iter([(step, path) for path in history.at(step)])


def _damage(error: CheckpointError | None) -> str | None:
    """Describe the damage of a checkpoint; None if the load worked, or something else is wrong."""
    return str(error) if isinstance(error, _DAMAGE) and not isinstance(error, LoadFailed) else None
