"""Restore a checkpoint: the first rank chooses it, all ranks load the same one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckpt.api import load, place_of
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    FormatError,
    IntegrityError,
    LoadFailed,
    NotFound,
    NotVisible,
)
from ckpt.format.names import last_segment
from ckpt.format.run_record import RUN_KEY
from ckpt.ranks.failures import same_outcome
from ckpt.ranks.group import Ranks
from ckpt.tools.ls import step_of
from ckpt.trainer_integration.run.history import History
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.run.near_saves import NearSaves
from ckpt.trainer_integration.run.search import GONE, Choice, Search, counted
from ckpt.trainer_integration.run.strict_planner import NamingLoadPlanner
from ckpt.trainer_integration.training_state import OptimizerState

T = TypeVar("T")

DAMAGE = (IntegrityError, FormatError, NotVisible, *GONE)
"""Errors of a checkpoint that is passed over for an older one."""


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
    nearest = saves.nearest if isinstance(saves, NearSaves) else None
    optimizers = {name for name, part in state.items() if isinstance(part, OptimizerState)}

    def attempt(url: str, choice: Choice | None = None) -> NamingLoadPlanner:
        planner = NamingLoadPlanner(strict=strict, optional={"rng"}, optimizers=optimizers)
        if nearest is not None and choice is not None and choice.near is not None:
            figures.update(nearest.load(state, choice, planner, ranks, load_options))
        else:
            load(state, url, planner=planner, **load_options)
        if (tables := saves.tables) is not None:
            storage_options = load_options["storage_options"]
            call = f"restore of tables of {last_segment(place_of(url))}"
            same_outcome(ranks, call, lambda: tables.restore(url, storage_options=storage_options))
        return planner

    figures: dict[str, float] = {}
    passed_over, stock = list[PassedOver](), list[str]()  # of these, those of another program
    search, is_error = Search(step, saves), False
    find_next = search.next if nearest is None else nearest.merged(search, step, ranks)
    while (choice := ranks.from_first(find_next)) is not None:
        fault = choice.candidate.fault
        shown = history.shown(choice.path) if nearest is None else nearest.shown(choice)
        if fault is None:
            figures["search_s"] = time.monotonic() - began_s
            loaded, fault = _unless_damaged(lambda: attempt(history.url(choice.path), choice), ranks)
            if loaded is not None and fault is None:
                saved_at_s, is_durable = choice.candidate.created_at_s, choice.is_durable
                saves.go_on_from(choice.step, choice.path, saved_at_s, is_durable=is_durable)
                saves.tell("restored", choice.step, shown, "", load_s=time.monotonic() - began_s, **figures)
                return Restored(choice.step, shown, tuple(passed_over), loaded.missing, state)
            if choice.near is None and ranks.from_first(lambda: search.is_gone(choice)):
                continue
        if choice.near is not None:
            is_error = True
        elif not choice.is_lost:
            is_error |= initial is None or not choice.candidate.is_foreign
            history.unusable.add(choice.path)
        if choice.candidate.is_foreign:
            stock.append(shown)
        passed_over.append(PassedOver(choice.step, shown, str(fault)))
        saves.tell("passed_over", choice.step, str(fault))
    if is_error:
        raise _none_loads(passed_over, stock if step == "latest-valid" else [], history)
    if step != "latest-valid":
        raise _nothing_at(step, history)
    _check_nothing_lost(ranks, history)
    if initial is None:
        saves.tell("restored", None, "nothing: no checkpoint has been committed here")
        return None
    number, shown = step_of(os.fspath(initial)) or 0, place_of(initial)
    missing = attempt(os.fspath(initial)).missing
    saves.tell("restored", number, f"{shown} (initial)", load_s=time.monotonic() - began_s)
    return Restored(number, shown, tuple(passed_over), missing, state, is_initial=True)


def _none_loads(passed_over: Sequence[PassedOver], stock: Sequence[str], history: History) -> LoadFailed:
    """Make the error that says why no checkpoint can be loaded; `stock` are those of another program."""
    reasons = "; ".join(f"{checkpoint.url}: {checkpoint.reason}" for checkpoint in passed_over)
    if stock and len(stock) == len(passed_over):  # with others, it is an error too
        reasons += f"; restore(initial={stock[0]!r}) begins from it"
    return LoadFailed(f"no checkpoint can be loaded: {reasons}", url=history.place)


def _nothing_at(step: int | str, history: History) -> NotFound:
    which = "with the metric" if step == "best" else f"of step {step}"
    return NotFound(f"there is no durable checkpoint {which}", url=history.place)


def _check_nothing_lost(ranks: Ranks, history: History) -> None:
    """Raise LoadFailed, on all ranks, if the run has had checkpoints."""
    if steps := ranks.from_first(lambda: [checkpoint.step for checkpoint in history.durable()]):
        raise LoadFailed(
            f"{history.place}: {RUN_KEY} lists {counted(steps)} as committed here, but none is there: copy them too; "
            f"or remove {RUN_KEY} to begin anew",
            url=history.place,
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
