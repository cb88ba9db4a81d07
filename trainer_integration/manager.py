"""Save a run by rules, keep checkpoints by rules, restore: `ckpt.CheckpointManager`."""

from __future__ import annotations

import contextlib
import operator
import os
import random
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ckpt.backends.options import options_dict
from ckpt.collective import place_of
from ckpt.consistency.block_digests import checked_algorithm
from ckpt.content.checks import Checks, Level
from ckpt.embeddings.saving import Tables
from ckpt.errors import CheckpointError, ConfigurationError, short_traceback
from ckpt.local_first.options import LocalTier
from ckpt.options import LoadOptions, ManagerOptions, check_options
from ckpt.ranks.failures import same_outcome
from ckpt.ranks.group import Ranks
from ckpt.ranks.nodes import first_of_node
from ckpt.references.frozen import Patterns
from ckpt.state.state_parts import size_bytes, training_state
from ckpt.trainer_integration import keeping, saving
from ckpt.trainer_integration.events import Event, Events
from ckpt.trainer_integration.keeping import KeepRule
from ckpt.trainer_integration.run.async_modes import AsyncMode, Uploads
from ckpt.trainer_integration.run.beginning import Beginning
from ckpt.trainer_integration.run.held_errors import errors_held
from ckpt.trainer_integration.run.history import History
from ckpt.trainer_integration.run.in_flight import OnBusy, Saves, leaves_out
from ckpt.trainer_integration.run.near_saves import saves_for
from ckpt.trainer_integration.run.restore import Restored, restore
from ckpt.trainer_integration.run.save_decision import Decisions
from ckpt.trainer_integration.run.tier import Tier, tier_of
from ckpt.trainer_integration.saving import SaveRule
from ckpt.writing.stock_metadata import DEFAULT_MAX_BYTES, checked_max_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CheckpointManager"]

_Metrics = Mapping[str, float] | None

_PREFLIGHT_SPREAD_S = 1e-3
"""A thousand nodes try the storage out over a second, and not at once."""


class CheckpointManager:
    """Save a training run while it goes on, and find where to go on from.

        with CheckpointManager(root, save=saving.every_steps(500), keep=keeping.last(3)) as manager:
            restored = manager.restore(model=model, optimizer=optimizer, loader=loader)
            for step in range(restored.step + 1 if restored else 1, steps + 1):
                train_step()
                manager.step(step, model=model, optimizer=optimizer, loader=loader)

    Every rank makes one at the same point of the program, and calls the same methods with the same
    steps. A save is *staged* when the method returns: the steps can go on. It is *durable* when the
    checkpoint is committed in `root`; only those are restored, and newer ones that are `local`.

    Args:
        root: the run's folder: a path or URL. Checkpoints are its folders `step-<number>`.
        save: when to save (`ckpt.trainer_integration.saving`); 500 is short for `every_steps(500)`.
        keep: durable checkpoints to keep (`ckpt.trainer_integration.keeping`); 3 is `last(3)`; default all.
        async_mode: upload while the steps go on in a `thread`, or in a `process`, which they notice less; `off` waits.
        on_busy: if the last save is still in flight, `wait` for it, `skip` the new one, or `fail`.
        on_failure: `raise` a failed save's error at the next step at which the ranks talk, or `continue`.
        max_undurable_s: without a new durable checkpoint for so long, `step` raises in any case.
        references: write only what changed since the last checkpoint (`docs/only-what-changed.md`).
        frozen: what never changes, and is not even compared.
        tables: saved and restored with every state, by what changed (`docs/tables.md`).
        local: a folder on each node's own disk, or a `ckpt.LocalTier`: saves go there first (`docs/local-first.md`).
        fallback: a folder that all nodes see: what `root` refuses is saved there, and moved when it answers again.
        preflight: from each node, before the first step: write, read, create, delete; free space.
        options: a `ckpt.options.ManagerOptions`: a new run in the folder of an old one, checks of saves.
        events: called with each `Event`, such as `JsonLines(path)` and `OpenTelemetry(meter)`.
        process_group, no_dist, storage_options and all others: as for `ckpt.save`.

    Raises ConfigurationError if an argument is wrong, CheckpointError if not all ranks make a manager of this root.
    """

    @short_traceback
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save: SaveRule | int,
        keep: KeepRule | int | None = None,
        async_mode: AsyncMode = "thread",
        on_busy: OnBusy = "wait",
        on_failure: Literal["raise", "continue"] = "raise",
        max_undurable_s: float | None = None,
        references: bool = False,
        frozen: Collection[str] = (),
        tables: Tables | None = None,
        local: str | os.PathLike[str] | LocalTier | None = None,
        fallback: str | os.PathLike[str] | None = None,
        preflight: bool = True,
        events: Sequence[Callable[[Event], None]] = (),
        process_group: Any = None,
        no_dist: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        memory_budget_bytes: int | None = None,
        max_bandwidth_bytes_per_s: float | None = None,
        stock_metadata_max_bytes: int | None = DEFAULT_MAX_BYTES,
        checks: Checks | Level | None = None,
        block_digests: str | None = None,
        options: ManagerOptions | None = None,
    ) -> None:
        self._on_busy, self._on_failure, self._tables = on_busy, on_failure, tables
        common: dict[str, Any] = {"storage_options": storage_options, "threads": threads}
        common["memory_budget_bytes"] = memory_budget_bytes
        self._ranks = Ranks(process_group, no_dist=no_dist, purpose="manager")
        self._is_closed, self._needs_preflight = False, preflight
        chosen = options if isinstance(options, ManagerOptions) else ManagerOptions()
        of_saves = max_bandwidth_bytes_per_s, stock_metadata_max_bytes, checks, block_digests

        def prepare() -> tuple[SaveRule, KeepRule | None, Uploads, History]:
            common["storage_options"] = options_dict(storage_options)
            save_options = common | _save_options(*of_saves)
            patterns = _checked(on_busy, on_failure, references, frozen, tables, options)
            uploads = Uploads(async_mode, self._ranks, process_group, save_options, patterns, tables, no_dist)
            uploads.save_options, uploads.resume_check = chosen.save_options, chosen.resume_check
            history = History(root, common["storage_options"])
            return saving.as_rule(save), keeping.as_rule(keep), uploads, history

        made = _described(root, tables, fallback, local)
        save_rule, keep_rule, uploads, history = same_outcome(self._ranks, made, prepare)
        self._load_options = {**common, "process_group": process_group, "no_dist": no_dist}
        tier = _tier(made, local, fallback, history, uploads)
        self._saves = saves_for(self._ranks, uploads, history, keep_rule, Events(events), tier)
        self._beginning = Beginning(self._saves, chosen.on_existing)
        self._decisions = Decisions(save_rule, self._ranks, self._saves, max_undurable_s)

    @short_traceback
    def restore(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        step: int | Literal["latest-valid", "best"] = "latest-valid",
        initial: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        rng: bool = True,
        trusted_objects: Collection[str] = (),
        read_once: bool = True,
        expect: str | None = None,
        options: LoadOptions | None = None,
        **parts: Any,
    ) -> Restored | None:
        """Load a checkpoint into parts, or a state dict, in place, on any number of ranks.

        Args:
            step: `latest-valid` is the newest durable checkpoint that passes its checks; newer ones that do not are
                reported. `best` is that of the keep rule. A number is that step.
            initial: where to begin if the run has no checkpoint yet, with `latest-valid`: any that `ckpt.load` reads.
            strict: as in `ckpt.options.LoadOptions`; None takes all that the checkpoint has of the parts.
            options: of the load: `rename`, `on_shape`, `allow_casts`.
            trusted_objects, read_once: as in `ckpt.load`; the former default to those of `SaveOptions`.
            expect: the digest of the checkpoint, `sha256:...`. Another one that is chosen is refused, as by `ckpt.load`.

        Returns what was loaded; None if `latest-valid` is none, on record neither. Raises:
            NotFound: the checkpoint asked for does not exist.
            LoadFailed: checkpoints exist, or are on record, but none can be loaded; or keys or shapes do not fit.
        """
        self._check_open()
        self._settle()  # the save in flight is the newest one, or a step to be given up
        checked, wanted = self._made(state, parts, rng), step if isinstance(step, str) else _number(step)
        options = _with_strict(options, strict)
        settings = {**self._load_options, "trusted_objects": self._saves.uploads.trust(trusted_objects)}
        settings["read_once"] = read_once
        where = initial, self._ranks, self._saves
        restored = restore(checked, wanted, *where, options=options, expect=expect, load_options=settings)
        self._beginning.is_settled = True
        return restored

    def step(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        last: bool = False,
        rng: bool = True,
        **parts: Any,
    ) -> bool:
        """Save after `step` if a rule asks for it; return whether a save was begun.

        After a preemption the save is durable when this returns, and `preempted` is true.

        Args:
            state, rng, parts: as for `training_state`; or a state dict.
            metrics: of this step, for rules; those of the first rank count. `last`: no step follows.

        Raises:
            SaveFailed: an earlier save failed, or nothing has become durable for too long.
            ConfigurationError: there is neither a state nor a part: nothing to save.
        """
        self._check_open()
        step = _number(step)
        _check_any(state, parts, self._tables)
        self._beginning.check(step)
        with self._decisions.held():
            reason = self._decisions.reason(step, is_last=last, settle=self._settle)
            made = partial(self._made, state, parts, rng)
            begun = reason is not None and self._save(step, reason, metrics, made)
            if self.preempted:
                self._saves.wait_preempted(self._decisions.patience_s())
            elif not begun:
                self._saves.uploads.provide()
        return begun

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        rng: bool = True,
        **parts: Any,
    ) -> bool:
        """Save after `step`, whatever the rules say; otherwise like `step`."""
        self._check_open()
        _check_any(state, parts, self._tables)
        return self._save(_number(step), "asked for", metrics, lambda: self._made(state, parts, rng))

    @property
    def preempted(self) -> bool:
        """Tell whether a signal has asked a rank to end: all have saved, leave the loop."""
        return self._decisions.preempted

    @property
    def durable_step(self) -> int | None:
        """Return the step that last became durable, or was restored, as this rank knows it."""
        return self._saves.durable_step

    def annotate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a durable checkpoint; those of the first rank count. Raises NotFound."""
        self._ranks.from_first(lambda: self._saves.history.annotate(_number(step), metrics))

    def pin(self, step: int, *, pinned: bool = True) -> None:
        """Keep a durable checkpoint, whatever the rules say. Raises NotFound."""
        self._ranks.from_first(lambda: self._saves.history.annotate(_number(step), pinned=pinned))

    def wait_durable(self, timeout_s: float | None = None) -> int | None:
        """Wait for the save in flight; return the last durable step. Raises SaveFailed, also if it is not durable in time."""
        with errors_held():
            if (failure := self._saves.wait_durable(timeout_s)) is not None:
                raise failure
        return self.durable_step

    def close(self) -> None:
        """Wait for the save in flight, and what is near; release everything. Raises SaveFailed if it failed."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with errors_held():
                failure = self._saves.close()
        finally:
            self._decisions.close()
        _raise(failure, self._on_failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._saves.hurries = error is not None
        with contextlib.suppress(*(() if error is None else (CheckpointError,))):  # `error` matters more
            self.close()

    def _save(self, step: int, reason: str, metrics: _Metrics, state: Callable[[], dict[str, Any]]) -> bool:
        self._beginning.check(step, is_save=True)
        with errors_held():
            on_busy = "wait" if self.preempted else self._on_busy
            if leaves_out(self._saves, self._ranks, step, on_busy, self._settle):
                return False
            self._settle()
            self._saves.begin(step, state(), reason, metrics)
            return True

    def _settle(self) -> None:
        failure = self._saves.settle(self._decisions.patience_s())
        _raise(failure, self._on_failure)

    def _made(self, state: Mapping[str, Any] | None, parts: Mapping[str, Any], rng: bool) -> dict[str, Any]:
        """Make the state dict; the root is checked once that its size is known."""
        values = _state_of(state, parts, rng)
        if self._needs_preflight:
            _check_root(values, self._tables, self._ranks, self._saves)
            self._needs_preflight = False
        return values

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError("this CheckpointManager is closed; make a new one")


def _raise(failure: BaseException | None, on_failure: str) -> None:
    """Raise the failure of a save, if there is one and `on_failure` wants it."""
    if failure is not None and on_failure == "raise":
        raise failure


def _with_strict(options: LoadOptions | None, strict: bool | None) -> LoadOptions:
    options = options or LoadOptions()
    check_options("options", options, LoadOptions)
    return options if strict is None else replace(options, strict=strict)


def _described(root: str | os.PathLike[str], tables: object, fallback: object, local: object) -> str:
    """Describe a manager by what all ranks have to agree about."""
    parts = (" with tables", tables), (" with a fallback", fallback), (" with a local tier", local)
    copies = " and copies" if isinstance(local, LocalTier) and local.copies else ""
    return f"CheckpointManager of {place_of(root)}{''.join(text for text, has in parts if has is not None)}{copies}"


def _save_options(
    max_bandwidth_bytes_per_s: float | None,
    stock_metadata_max_bytes: int | None,
    checks: Checks | Level | None,
    block_digests: str | None,
) -> dict[str, Any]:
    """Check the options that saves have and restores do not. Raises ConfigurationError."""
    return {
        "max_bandwidth_bytes_per_s": max_bandwidth_bytes_per_s,
        "stock_metadata_max_bytes": checked_max_bytes(stock_metadata_max_bytes),
        "checks": Checks.of(checks),
        "block_digests": checked_algorithm(block_digests),
    }


def _tier(
    made: str,
    local: str | os.PathLike[str] | LocalTier | None,
    fallback: str | os.PathLike[str] | None,
    history: History,
    uploads: Uploads,
) -> Tier | None:
    """Make the tier, on all ranks or none: as the manager was described, all have one or none has."""
    if local is None and fallback is None:
        return None
    job = uploads.ranks.from_first(lambda: secrets.token_hex(8))
    return same_outcome(uploads.ranks, made, lambda: tier_of(local, fallback, history, job, uploads))


def _check_root(state: Mapping[str, Any], tables: Tables | None, ranks: Ranks, saves: Saves) -> None:
    """Try the root out on a rank of each node; see whether it has room for `state` and tables."""
    history = saves.history
    needed = size_bytes(state) + (0 if tables is None else tables.size_bytes())
    began_s = time.monotonic()
    is_first, nodes = first_of_node(ranks)

    def check() -> int | None:
        if not is_first:
            return None
        time.sleep(random.random() * (nodes - 1) * _PREFLIGHT_SPREAD_S)
        return saves.check_root(needed)

    free = same_outcome(ranks, "preflight", check)
    room = "" if free is None or not needed else f"; there is room for {free // needed} checkpoints"
    took_s = time.monotonic() - began_s
    saves.tell("preflight", None, f"{history.place} works{room}", size_bytes=needed, took_s=took_s)


def _state_of(state: Mapping[str, Any] | None, parts: Mapping[str, Any], rng: bool) -> dict[str, Any]:
    if state is None:
        return training_state(rng=rng, **parts)
    if parts:
        raise ConfigurationError(f"give a state dict or parts ({', '.join(parts)}), not both")
    return state if isinstance(state, dict) else dict(state)


def _check_any(state: Mapping[str, Any] | None, parts: Mapping[str, Any], tables: Tables | None) -> None:
    """Refuse to save random states alone: that would be a checkpoint from which nothing goes on."""
    if tables is None and not state and all(part is None for part in parts.values()):
        raise ConfigurationError("nothing to save: pass the parts (model=model, ...) or a state dict")


def _check_choice(name: str, value: object, *choices: object) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} must be {', '.join(map(repr, choices))}, not {value!r}")


def _checked(
    on_busy: object,
    on_failure: object,
    references: object,
    frozen: Collection[str],
    tables: object,
    options: object,
) -> Patterns | None:
    """Check arguments; return what need not be compared, None if saves do not refer to others."""
    if tables is not None and not isinstance(tables, Tables):
        raise ConfigurationError(f"tables must be a ckpt.embeddings.Tables, not {tables!r:.100}")
    if options is not None and not isinstance(options, ManagerOptions):
        raise ConfigurationError(f"options must be a ckpt.options.ManagerOptions, not {options!r:.100}")
    _check_choice("on_busy", on_busy, "wait", "skip", "fail")
    _check_choice("on_failure", on_failure, "raise", "continue")
    _check_choice("references", references, True, False)
    patterns = Patterns(frozen)
    if patterns and not references and tables is None:
        raise ConfigurationError("frozen= is for references=True")
    return patterns if references or tables is not None else None


def _number(step: Any) -> int:
    """Return a step as Python's own integer, which NumPy's are not."""
    try:
        number = operator.index(step)
    except TypeError:
        raise ConfigurationError(f"step must be an integer, not {step!r}") from None
    if number < 0:
        raise ConfigurationError(f"step must not be negative, but is {number}")
    return number
