"""Restore a checkpoint: the first rank chooses it, all ranks load the same one."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from ckpt import notebook
from ckpt.api import load
from ckpt.collective import place_of
from ckpt.embeddings.saving import Tables
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    DigestMismatch,
    FormatError,
    IntegrityError,
    LoadFailed,
    NotFound,
    NotVisible,
)
from ckpt.format.names import last_segment, step_of
from ckpt.format.run_record import RUN_KEY
from ckpt.format.table_names import TABLES_PREFIX
from ckpt.options import LoadOptions
from ckpt.ranks.failures import same_outcome
from ckpt.ranks.group import Ranks
from ckpt.state.load_planner import StateLoadPlanner
from ckpt.state.model_state import ModelState
from ckpt.state.optimizer_state import OptimizerState
from ckpt.state.per_rank import without_marks
from ckpt.state.state_parts import values_of
from ckpt.tools.certificate import Certificate, certificate_of
from ckpt.trainer_integration.run.history import History
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.run.near_saves import NearSaves
from ckpt.trainer_integration.run.nearest import Nearest
from ckpt.trainer_integration.run.search import GONE, Choice, Search, counted
from ckpt.words import count
from ckpt.writing.stager import Space, space_for

T = TypeVar("T")

_MAX_PARTS = 50
"""Of a state, in a notebook."""

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
    """A checkpoint that was loaded. A notebook shows it as a table.

    Attributes:
        step: after which it was saved. Of an initial checkpoint it is the number in its name, or 0.
        url: without credentials.
        passed_over: checkpoints that would have been preferred, but cannot be loaded.
        missing: keys of this rank's state that the checkpoint does not have: with `strict=False`,
            or of an optimizer that had no state yet for a parameter without a gradient.
        certificate: says whether the state is, at this moment, bit for bit what was loaded, or lists what is not, on
            this rank. It is made when it is first looked at; with FSDP1, and random states apart, on all ranks.
        state: the loaded parts by name; plain values are here alone.
        is_initial: it is the checkpoint `initial=`, not one of this run.
    """

    step: int
    url: str
    passed_over: tuple[PassedOver, ...] = ()
    missing: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)
    is_initial: bool = False
    _planner: StateLoadPlanner | None = field(default=None, repr=False, compare=False)

    @cached_property
    def certificate(self) -> Certificate:
        planner = self._planner
        if planner is None:
            raise ConfigurationError(
                "a copy of a Restored compares nothing: look at the certificate before it is copied or pickled"
            )
        made = certificate_of(planner.live(), planner)
        object.__setattr__(self, "_planner", None)  # it holds on to the parts
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}

    def _repr_html_(self) -> str:
        facts = [("step", notebook.text(self.step))]
        if self.is_initial:
            facts.append(("initial", "the run had no checkpoint of its own"))
        if self.missing:
            facts.append(("missing", notebook.text(", ".join(self.missing))))
        facts += [(f"step {each.step} passed over", notebook.text(each.reason)) for each in self.passed_over]
        parts = ((name, _short(value)) for name, value in itertools.islice(self.state.items(), _MAX_PARTS))
        summary = f"loaded: {count(len(self.state), 'part')}"
        return notebook.titled(self.url, facts, notebook.folded(summary, ("part", "value"), parts))


def _short(value: object) -> str:
    """Write a loaded part in a few words; a tensor's repr would copy it from the accelerator."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {count(len(value), 'key')}"
    return type(value).__name__


def restore(
    state: dict[str, Any],
    step: int | str,
    initial: str | os.PathLike[str] | None,
    ranks: Ranks,
    saves: Saves,
    *,
    options: LoadOptions,
    expect: str | None = None,
    load_options: Mapping[str, Any],
) -> Restored | None:
    """Load the first checkpoint for `step` that passes its checks; None if there is none.

    Raises as `CheckpointManager.restore`.
    """
    load_options = _checked(load_options, step, initial, saves, expect)
    began_s, history = time.monotonic(), saves.history
    nearest = saves.nearest if isinstance(saves, NearSaves) else None

    def attempt(url: str, choice: Choice | None = None) -> StateLoadPlanner:
        planner = _planner(options, saves, has_initial=initial is not None, is_own=choice is not None)
        if nearest is not None and choice is not None and choice.near is not None:
            read.update(nearest.load(state, choice, planner, load_options))
        else:
            load(state, url, planner=planner, **load_options)
        if saves.uploads.tables is not None:
            _restore_tables(saves.uploads.tables, url, ranks, options, load_options["storage_options"])
        saves.uploads.expected = _space_for_copies(state)
        return planner

    figures, read, is_error = dict[str, float](), Counter[str](), False
    passed_over, stock = list[PassedOver](), list[str]()  # of these, those of another program
    search = Search(step, saves)
    find_next = _finder(search, nearest, step, ranks)
    while (choice := find_next()) is not None:
        fault = choice.candidate.fault
        shown = history.shown(choice.path) if nearest is None else nearest.shown(choice)
        if fault is None:
            figures["search_s"] = time.monotonic() - began_s
            loaded, fault = _unless_damaged(lambda: attempt(history.url(choice.path), choice), ranks, read)
            if loaded is not None and fault is None:
                saved_at_s, is_durable = choice.candidate.created_at_s, choice.is_durable
                saves.go_on_from(choice.step, choice.path, saved_at_s, is_durable=is_durable)
                figures["load_s"] = time.monotonic() - began_s
                saves.tell("restored", choice.step, shown, "", **figures, **read)
                more: dict[str, Any] = {"state": without_marks(state), "_planner": loaded}
                return Restored(choice.step, shown, tuple(passed_over), _missing(loaded, saves), **more)
            if choice.near is None and ranks.from_first(lambda: search.is_gone(choice)):
                continue
        is_near, is_foreign = choice.near is not None, choice.candidate.is_foreign
        if not choice.is_lost:
            is_error |= not is_foreign or (initial is None and not is_near)
            if is_foreign or not is_near:  # it stays as it is
                history.unusable.add(choice.path)
        if is_foreign and not is_near:
            stock.append(shown)
        passed_over.append(PassedOver(choice.step, shown, str(fault)))
        saves.tell("passed_over", choice.step, str(fault))
    if is_error or step != "latest-valid":
        stock = stock if step == "latest-valid" else []
        raise _none_loads(passed_over, stock, history) if is_error else _nothing_at(step, history)
    _check_nothing_lost(ranks, history)
    if initial is None:
        saves.tell("restored", None, "nothing: no checkpoint has been committed here")
        return None
    number, shown = step_of(os.fspath(initial)) or 0, place_of(initial)
    loaded = attempt(os.fspath(initial))
    saves.tell("restored", number, f"{shown} (initial)", load_s=time.monotonic() - began_s)
    more = {"state": without_marks(state), "_planner": loaded, "is_initial": True}
    return Restored(number, shown, tuple(passed_over), _missing(loaded, saves), **more)


def _planner(options: LoadOptions, saves: Saves, *, has_initial: bool, is_own: bool) -> StateLoadPlanner:
    """Make the planner of a load; names are those of the checkpoint to begin with: the run's own have the program's."""
    own = replace(options, rename=None) if has_initial and is_own else options
    apart = () if saves.uploads.tables is None else (TABLES_PREFIX.rstrip("."),)
    return StateLoadPlanner(own, restores=is_own, records=True, restored_apart=apart)


def _checked(
    options: Mapping[str, Any], step: int | str, initial: object, saves: Saves, expect: str | None
) -> Mapping[str, Any]:
    """Return the options of a load. Raises ConfigurationError if arguments do not go together."""
    if initial is not None and step != "latest-valid":
        raise ConfigurationError("initial= goes with 'latest-valid': it is for a run without checkpoints")
    if expect is None:
        return options
    if isinstance(saves, NearSaves) or saves.uploads.tables is not None:
        raise ConfigurationError(
            "expect= does not cover local=, fallback= and tables=: it does not go with them"
        )
    return {**options, "expect": expect}


def _restore_tables(
    tables: Tables, url: str, ranks: Ranks, options: LoadOptions, storage_options: Any
) -> None:
    chosen = {"strict": options.strict, "on_shape": options.on_shape, "storage_options": storage_options}
    call = f"restore of tables of {last_segment(place_of(url))}"
    same_outcome(ranks, call, lambda: tables.restore(url, **chosen))
    tables.agree(ranks)


def _missing(loaded: StateLoadPlanner, saves: Saves) -> tuple[str, ...]:
    """List the keys of the state, and parts of tables, that the checkpoint lacks."""
    tables = saves.uploads.tables
    return (*loaded.missing, *(f"tables.{name}" for name in (tables.missing if tables else ())))


def _space_for_copies(state: Mapping[str, Any]) -> Space | None:
    # All other parts are small, and may count, or draw, when they are asked.
    large = {name: part for name, part in state.items() if isinstance(part, ModelState | OptimizerState)}
    return space_for(values_of(large))


def _finder(
    search: Search, nearest: Nearest | None, step: int | str, ranks: Ranks
) -> Callable[[], Choice | None]:
    """Return what all ranks call for the next checkpoint to try."""
    return partial(ranks.from_first, search.next) if nearest is None else nearest.merged(search, step, ranks)


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


def _unless_damaged(
    attempt: Callable[[], T], ranks: Ranks, read: Counter[str]
) -> tuple[T | None, str | None]:
    """Load on all ranks; return the outcome, or the first rank's error if it tells of damage.

    What this rank has `read` becomes the sum of all ranks.
    """
    read.clear()
    loaded: T | None = None
    error: CheckpointError | None = None
    try:
        loaded = attempt()
    except CheckpointError as raised:
        error = raised
    is_damage = isinstance(error, DAMAGE) and not isinstance(error, LoadFailed | DigestMismatch)
    own = str(error) if is_damage and ranks.rank == 0 else None, Counter(read)
    damage, total = ranks.join(own, lambda some, others: (some[0] or others[0], some[1] + others[1]))
    read.update(total - read)
    if damage is None and error is not None:
        raise error
    return loaded, damage
