"""Which checkpoint to go on from: the first rank looks and decides, all ranks load the same one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.api import load
from ckpt.errors import (
    CheckpointError,
    CommitConflict,
    FormatError,
    IntegrityError,
    LoadFailed,
    NotCommitted,
    NotFound,
    NotVisible,
)
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.run.history import History
from ckpt.trainer_integration.run.strict_planner import NamingLoadPlanner
from ckpt.trainer_integration.training_state import OptimizerState

__all__ = ["PassedOver", "Restored", "restore"]

_DAMAGE = (IntegrityError, FormatError, NotVisible, NotCommitted, NotFound, CommitConflict)


@dataclass(frozen=True)
class PassedOver:
    """A newer or better checkpoint that was not loaded, and why. Nothing of it was changed."""

    step: int
    url: str
    reason: str


@dataclass(frozen=True)
class Restored:
    """What was loaded.

    Attributes:
        step: after which it was saved.
        passed_over: what would have been preferred, but cannot be loaded.
        missing: keys of this rank's state that the checkpoint does not have: with `strict=False`, or of an
            optimizer that had nothing to save for a parameter, as that had got no gradient yet.
        state: what was loaded by name; plain values are here alone.
    """

    step: int
    url: str
    passed_over: tuple[PassedOver, ...] = ()
    missing: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class _Choice:
    """What the first rank tells the others: where to load from, if anywhere, and what it passed over on its way."""

    found: tuple[int, str] | None
    passed_over: tuple[tuple[int, str, str], ...]


def restore(
    state: dict[str, Any],
    ranks: Ranks,
    history: History,
    candidates: Callable[[], Iterator[tuple[int, str]]],
    *,
    strict: bool,
    optional: Collection[str],
    load_options: dict[str, Any],
) -> tuple[Restored | None, tuple[PassedOver, ...]]:
    """Load the first of `candidates` that passes its checks, on all ranks; and which were passed over.

    Raises:
        LoadFailed: the state does not fit the checkpoint.
        CheckpointError: the storage, or another rank, failed.
    """
    chooser = _Chooser(history, candidates) if ranks.rank == 0 else None
    passed_over: tuple[PassedOver, ...] = ()
    failure: str | None = None
    optimizers = {name for name, part in state.items() if isinstance(part, OptimizerState)}
    while True:
        choice = ranks.from_first(lambda: chooser.next(failure) if chooser else _Choice(None, ()))  # noqa: B023
        passed_over = tuple(
            PassedOver(step, history.url(path), why) for step, path, why in choice.passed_over
        )
        history.unusable |= {path for _, path, _ in choice.passed_over}
        if choice.found is None:
            return None, passed_over
        step, path = choice.found
        planner = NamingLoadPlanner(strict=strict, optional=optional, optimizers=optimizers)
        error: CheckpointError | None = None
        try:
            load(state, history.url(path), planner=planner, **load_options)
        except CheckpointError as raised:
            error = raised
        failure = ranks.from_first(lambda: _text_of_damage(error))  # noqa: B023
        if failure is None:
            if error is not None:
                raise error
            return Restored(step, history.url(path), passed_over, planner.missing), passed_over


class _Chooser:
    """The first rank's walk through the candidates."""

    def __init__(self, history: History, candidates: Callable[[], Iterator[tuple[int, str]]]) -> None:
        self._history, self._candidates = history, candidates
        self._left: Iterator[tuple[int, str]] | None = None
        self._tried: tuple[int, str] | None = None
        self._passed_over: list[tuple[int, str, str]] = []

    def next(self, failure: str | None) -> _Choice:
        """The next one worth loading.

        Args:
            failure: why the last one could not be loaded.
        """
        if self._tried is not None and failure is not None:
            self._passed_over.append((*self._tried, failure))
        if self._left is None:
            self._left = self._candidates()
        for step, path in self._left:
            reason, damaged = self._history.why_not(path)
            if reason is None:
                self._tried = step, path
                return _Choice(self._tried, tuple(self._passed_over))
            if damaged:
                self._passed_over.append((step, path, reason))
        return _Choice(None, tuple(self._passed_over))


def _text_of_damage(error: CheckpointError | None) -> str | None:
    """What is wrong with the checkpoint; None if nothing is, or something else is."""
    return str(error) if isinstance(error, _DAMAGE) and not isinstance(error, LoadFailed) else None
