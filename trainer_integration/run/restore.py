"""Restore a checkpoint: the first rank chooses it, all ranks load the same one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ckpt.api import load, place_of
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
from ckpt.format.names import last_segment
from ckpt.format.run_record import RUN_KEY
from ckpt.ranks.failures import same_outcome
from ckpt.ranks.group import Ranks
from ckpt.reading.latest import Candidate
from ckpt.tools.ls import step_of
from ckpt.trainer_integration.keeping import Best
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.run.strict_planner import NamingLoadPlanner
from ckpt.trainer_integration.training_state import OptimizerState

T = TypeVar("T")

_GONE = (NotCommitted, NotFound, CommitConflict)
DAMAGE = (IntegrityError, FormatError, NotVisible, *_GONE)
"""Errors of a checkpoint that is passed over for an older one."""
_MAX_LOOKS = 20
"""How often to list the run, while another process removes what was listed."""


@dataclass(frozen=True)
class PassedOver:
    """A newer or better checkpoint that was not loaded, and the reason. A restore changes nothing in it."""

    step: int
    url: str
    reason: str


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was loaded.

    Attributes:
        step: after which it was saved. Of an initial checkpoint it is the number in its name, or 0.
        url: without credentials.
        passed_over: checkpoints that would have been preferred, but cannot be loaded.
        missing: keys of this rank's state that the checkpoint does not have: with `strict=False`,
            or of an optimizer that had no state yet for a parameter without a gradient.
        state: the loaded parts by name; plain values are here alone.
        is_initial: it is the checkpoint `initial=`, not one of this run.
    """

    step: int
    url: str
    passed_over: tuple[PassedOver, ...] = ()
    missing: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)
    is_initial: bool = False


class _Choice(NamedTuple):
    """A checkpoint to load, or to pass over because of its fault, or as it `is_lost`: not there any more."""

    step: int
    path: str
    candidate: Candidate
    is_lost: bool = False


def restore(
    state: dict[str, Any],
    step: int | str,
    initial: str | os.PathLike[str] | None,
    ranks: Ranks,
    saves: Saves,
    *,
    strict: bool,
    load_options: Mapping[str, Any],
) -> Restored | None:
    """Load the first checkpoint for `step` that passes its checks; None if there is none.

    Raises as `CheckpointManager.restore`.
    """
    if initial is not None and step != "latest-valid":
        raise ConfigurationError("initial= goes with 'latest-valid': it is for a run without checkpoints")
    began_s, history = time.monotonic(), saves.history
    optimizers = {name for name, part in state.items() if isinstance(part, OptimizerState)}

    def attempt(url: str) -> NamingLoadPlanner:
        planner = NamingLoadPlanner(strict=strict, optional={"rng"}, optimizers=optimizers)
        load(state, url, planner=planner, **load_options)
        if (tables := saves.tables) is not None:
            storage_options = load_options["storage_options"]
            call = f"restore of tables of {last_segment(place_of(url))}"
            same_outcome(ranks, call, lambda: tables.restore(url, storage_options=storage_options))
        return planner

    passed_over: list[PassedOver] = []
    stock: list[str] = []  # of those passed over
    search, is_error = _Search(step, saves), False
    while (choice := ranks.from_first(search.next)) is not None:
        shown, fault = history.shown(choice.path), choice.candidate.fault
        if fault is None:
            loaded, fault = _unless_damaged(lambda: attempt(history.url(choice.path)), ranks)
            if loaded is not None and fault is None:
                saves.go_on_from(choice.step, choice.path, choice.candidate.created_at_s)
                saves.tell("restored", choice.step, shown, load_s=time.monotonic() - began_s)
                return Restored(choice.step, shown, tuple(passed_over), loaded.missing, state)
            if ranks.from_first(lambda: search.is_gone(choice)):
                continue
        if not choice.is_lost:
            is_error |= initial is None or not choice.candidate.is_foreign
            history.unusable.add(choice.path)
        if choice.candidate.is_foreign:
            stock.append(shown)
        passed_over.append(PassedOver(choice.step, shown, str(fault)))
        saves.tell("passed_over", choice.step, str(fault))
    if is_error:
        reasons = "; ".join(f"{checkpoint.url}: {checkpoint.reason}" for checkpoint in passed_over)
        if step == "latest-valid" and len(stock) == len(passed_over):  # with others, it is an error too
            reasons += f"; restore(initial={stock[0]!r}) begins from it"
        raise LoadFailed(f"no checkpoint can be loaded: {reasons}", url=history.place)
    if step != "latest-valid":
        which = "with the metric" if step == "best" else f"of step {step}"
        raise NotFound(f"there is no durable checkpoint {which}", url=history.place)
    if steps := ranks.from_first(lambda: [checkpoint.step for checkpoint in history.durable()]):
        raise LoadFailed(
            f"{history.place}: {RUN_KEY} lists {_counted(steps)} as committed here, but none is there: copy them too; "
            f"or remove {RUN_KEY} to begin anew",
            url=history.place,
        )
    if initial is None:
        saves.tell("restored", None, "nothing: no checkpoint has been committed here")
        return None
    number, shown = step_of(os.fspath(initial)) or 0, place_of(initial)
    missing = attempt(os.fspath(initial)).missing
    saves.tell("restored", number, f"{shown} (initial)", load_s=time.monotonic() - began_s)
    return Restored(number, shown, tuple(passed_over), missing, state, is_initial=True)


class _Search:
    """Find checkpoints to try, the preferred ones first; on the first rank.

    Another process may commit a newer checkpoint and remove older ones meanwhile. So when one that
    was listed is not there, record and listing are read again before anything older is taken.
    """

    def __init__(self, step: int | str, saves: Saves) -> None:
        self._step, self._saves, self._history = step, saves, saves.history
        self._settled: set[str] = set()  # folders that were tried, or hold no checkpoint
        self._gone: list[tuple[int, str]] = []  # that hold no checkpoint, since one was last found
        self._has_moved = False
        self._choices = self._find()

    def next(self) -> _Choice | None:
        """Return the next checkpoint to try; None if there is no other."""
        return next(self._choices, None)

    def is_gone(self, choice: _Choice) -> bool:
        """Tell whether a checkpoint that could not be loaded was replaced or removed meanwhile."""
        try:
            self._has_moved = self._history.examine(choice.path) != choice.candidate
        except _GONE:
            self._has_moved = True
        if self._has_moved:
            self._settled.discard(choice.path)
        return self._has_moved

    def _find(self) -> Iterator[_Choice]:
        self._saves.wait_booked()
        for _ in range(_MAX_LOOKS):
            self._history.look_again()
            self._has_moved = False
            for number, path in self._unsettled():
                try:
                    candidate = self._history.examine(path)
                except _GONE as error:
                    self._has_moved = True
                    if not isinstance(error, CommitConflict):
                        self._settled.add(path)
                        self._gone.append((number, path))
                    continue
                if self._has_moved:
                    self._history.look_again()
                    if self._unsettled()[:1] != [(number, path)]:
                        break
                    self._has_moved = False
                self._settled.add(path)
                yield from self._lost(number)
                yield _Choice(number, path, candidate)
                if self._has_moved:
                    break
            if not self._has_moved:
                return
        raise LoadFailed(
            "checkpoints of this run are removed faster than they can be read: is another process saving "
            "here? Try again",
            url=self._history.place,
        )

    def _lost(self, instead: int) -> Iterator[_Choice]:
        """Report checkpoints that are gone, though on record, and would have come before step `instead`."""
        recorded = {checkpoint.path for checkpoint in self._history.durable()}
        lost = [(number, path) for number, path in self._gone if path in recorded]
        self._gone.clear()
        if lost:
            steps = _counted([number for number, _ in lost])
            fault = (
                f"{RUN_KEY} lists {steps} as committed, but no checkpoint is there any more; the next one that is "
                f"there is of step {instead}: stop and bring it back, unless it was removed on purpose"
            )
            yield _Choice(*lost[0], Candidate(fault), is_lost=True)

    def _unsettled(self) -> list[tuple[int, str]]:
        return [(number, path) for number, path in self._candidates() if path not in self._settled]

    def _candidates(self) -> list[tuple[int, str]]:
        if self._step == "latest-valid":
            return self._history.candidates()
        if self._step == "best":
            for rule in () if self._saves.keep is None else self._saves.keep.rules():
                if isinstance(rule, Best):
                    return self._history.best(rule)
            raise ConfigurationError("step='best' needs a rule keeping.best(...) in keep=")
        if isinstance(self._step, str):
            raise ConfigurationError(f"step must be an integer, 'latest-valid' or 'best', not {self._step!r}")
        return self._history.at(self._step)


def _counted(steps: Sequence[int]) -> str:
    return (
        f"{len(steps)} checkpoints (steps {min(steps)} to {max(steps)})" if steps[1:] else f"step {steps[0]}"
    )


def _unless_damaged(attempt: Callable[[], T], ranks: Ranks) -> tuple[T | None, str | None]:
    """Load on all ranks; return the outcome, or the first rank's error if it tells of damage."""
    loaded: T | None = None
    error: CheckpointError | None = None
    try:
        loaded = attempt()
    except CheckpointError as raised:
        error = raised
    is_damage = isinstance(error, DAMAGE) and not isinstance(error, LoadFailed)
    damage = ranks.from_first(lambda: str(error) if is_damage else None)
    if damage is None and error is not None:
        raise error
    return loaded, damage
