"""`ckpt.CheckpointManager`: when to save, what to keep, where to go on from."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ckpt.api import place_of
from ckpt.errors import CheckpointError, ConfigurationError, LoadFailed, NotFound, SaveFailed
from ckpt.ranks.group import Ranks, RanksFailed
from ckpt.tools.preflight import check_place
from ckpt.trainer_integration.events import Event, Events
from ckpt.trainer_integration.keeping import Best, KeepRule
from ckpt.trainer_integration.run.async_modes import AsyncMode, Uploads
from ckpt.trainer_integration.run.history import History
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.run.restore import Restored, restore
from ckpt.trainer_integration.run.save_decision import Decisions
from ckpt.trainer_integration.saving import Moment, SaveRule
from ckpt.trainer_integration.training_state import size_bytes, training_state

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CheckpointManager"]

OnBusy = Literal["wait", "skip", "fail"]
OnFailure = Literal["raise", "continue"]


class CheckpointManager:
    """Saves a training run while it goes on, and finds where to go on from.

        with CheckpointManager(root, save=saving.every_steps(500), keep=keeping.last(3)) as manager:
            restored = manager.restore(model=model, optimizer=optimizer, loader=loader)
            for step in range(restored.step + 1 if restored else 1, steps + 1):
                train_step()
                manager.step(step, model=model, optimizer=optimizer, loader=loader)
                if manager.preempted:
                    break

    Every rank makes one at the same point of the program, and calls the same methods with the same steps. A save
    is *staged* when the method returns: the steps can go on. It is *durable* when the checkpoint is committed; only
    durable ones are restored or counted by rules for keeping. Leaving the `with` block waits for the save in flight.

    Args:
        root: the run's folder: a path or URL. Checkpoints are its folders `step-<number>`.
        save: when to save (`ckpt.trainer_integration.saving`).
        keep: which durable checkpoints to keep (`ckpt.trainer_integration.keeping`); None keeps all.
        async_mode: what uploads while the steps go on: a `thread`, or a `process`, which the steps notice less;
            `off` waits for each save.
        on_busy: what a save does while the last one is still in flight: `wait` for it, `skip`, or `fail`.
        on_failure: what a failed save does to training: `raise` at the next step at which the ranks talk to each
            other (any, with rules that look at clocks or signals; else that of the next save), or `continue`.
        max_undurable_s: the longest time without a new durable checkpoint, after which `step` raises in any case.
        preflight: try the root out before the first step: write, read, create, delete, free space.
        events: called with each `Event`, such as `JsonLines(path)` and `OpenTelemetry(meter)`.
        process_group: the ranks that save together; default all.
        storage_options, threads, memory_budget_bytes, max_bandwidth_bytes_per_s: as for `ckpt.save`.

    Raises:
        ConfigurationError: an argument is wrong.
        CheckpointError: the ranks do not all make a manager of this root.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save: SaveRule,
        keep: KeepRule | None = None,
        async_mode: AsyncMode = "thread",
        on_busy: OnBusy = "wait",
        on_failure: OnFailure = "raise",
        max_undurable_s: float | None = None,
        preflight: bool = True,
        events: Sequence[Callable[[Event], None]] = (),
        process_group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        memory_budget_bytes: int | None = None,
        max_bandwidth_bytes_per_s: float | None = None,
    ) -> None:
        if on_busy not in ("wait", "skip", "fail"):
            raise ConfigurationError(f"on_busy must be 'wait', 'skip' or 'fail', not {on_busy!r}")
        if on_failure not in ("raise", "continue"):
            raise ConfigurationError(f"on_failure must be 'raise' or 'continue', not {on_failure!r}")
        self._root, self._storage_options, self._keep = os.fspath(root), storage_options, keep
        self._on_busy, self._on_failure, self._max_undurable_s = on_busy, on_failure, max_undurable_s
        options: dict[str, Any] = {"storage_options": storage_options, "threads": threads}
        options["memory_budget_bytes"] = memory_budget_bytes
        self._load_options = {**options, "process_group": process_group}
        options["max_bandwidth_bytes_per_s"] = max_bandwidth_bytes_per_s
        self._ranks = Ranks(process_group, no_dist=False, purpose="manager")
        self._tried_out, self._stepped, self._closed = not preflight, False, False
        self._uploads, self._history = self._agreed(
            f"CheckpointManager of {place_of(self._root)}",
            lambda: (Uploads(async_mode, process_group, options), History(self._root, storage_options)),
        )
        self._saves = Saves(self._ranks, self._uploads, self._history, keep, Events(events))
        self._decisions = Decisions(save, self._ranks, self._saves, self._history.mtbf_s, max_undurable_s)

    # -- going on from a checkpoint ------------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        step: int | Literal["latest-valid", "best"] = "latest-valid",
        strict: bool = True,
        rng: bool = True,
        trusted_objects: Collection[str] = (),
        **parts: Any,
    ) -> Restored | None:
        """Load a checkpoint into the parts of `training_state`, or a state dict, in place; on any number of ranks.

        Args:
            step: `latest-valid` is the newest durable checkpoint that passes its checks; those before it that do
                not are told of, and left as they are. `best` is that of the keep rule `best`. A number is that step.
            strict: keys that are missing in the checkpoint, or left over, are an error that names them.

        Returns:
            what was loaded; None if `latest-valid` found that no checkpoint has ever been committed here.

        Raises:
            NotFound: there is no such checkpoint.
            LoadFailed: checkpoints are there, but none can be loaded; or keys or shapes do not fit.
            CheckpointError: as `ckpt.load`.
        """
        self._check_open()
        self._settle()  # what is in flight is the newest, or to be given up
        state = self._state(state, parts, rng)
        self._try_out(state)
        began_s = time.monotonic()
        restored, passed_over = restore(
            state,
            self._ranks,
            self._history,
            lambda: self._candidates(step if isinstance(step, str) else _number(step)),
            strict=strict,
            optional={"rng"},
            load_options={**self._load_options, "trusted_objects": trusted_objects},
        )
        for found in passed_over:
            self._saves.tell("passed_over", found.step, found.reason)
        if restored is None:
            self._nothing_found(step, [f"{found.url}: {found.reason}" for found in passed_over])
            return None
        self._history.go_on_from(restored.step)
        self._saves.go_on_from(restored.step)
        self._saves.tell("restored", restored.step, restored.url, load_s=time.monotonic() - began_s)
        return replace(restored, state=state)

    def _candidates(self, step: int | str) -> Iterator[tuple[int, str]]:
        self._saves.wait_booked()
        if step == "latest-valid":
            yield from self._history.candidates()
        elif step == "best":
            rules = (
                [] if self._keep is None else [rule for rule in self._keep.rules() if isinstance(rule, Best)]
            )
            if not rules:
                raise ConfigurationError("step='best' needs a rule keeping.best(...) in keep=")
            yield from self._history.best(rules[0])
        elif isinstance(step, str):
            raise ConfigurationError(f"step must be a number, 'latest-valid' or 'best', not {step!r}")
        else:
            yield from ((step, path) for path in self._history.at(step))

    def _nothing_found(self, step: int | str, reasons: Sequence[str]) -> None:
        if reasons:
            raise LoadFailed(f"no checkpoint can be loaded: {'; '.join(reasons)}", url=self._history.url(""))
        if step != "latest-valid":
            what = "that has the metric" if step == "best" else f"of step {step}"
            raise NotFound(f"there is no durable checkpoint {what}", url=self._history.url(""))
        self._saves.tell("restored", None, "nothing: no checkpoint has been committed here")

    # -- after each step -----------------------------------------------------------------------------------

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
        """Save after `step` if a rule asks for it. Returns whether a save was begun.

        After a preemption the save is durable when this returns, and `preempted` is true.

        Args:
            state, rng, parts: as for `training_state`; or a state dict.
            metrics: of this step, for rules; those of the first rank count.
            last: no step follows (for `saving.last_step`).

        Raises:
            SaveFailed: an earlier save failed, or nothing has become durable for too long.
        """
        self._check_open()
        step = _number(step)
        is_first = not self._stepped and not self._saves.steps
        self._stepped = True
        moment = Moment(step, is_first=is_first, is_last=last)
        reason = self._decisions.reason(moment, settle=self._settle)
        begun = reason is not None and self._save_now(step, state, parts, rng, reason, metrics)
        if self.preempted:
            self.wait_durable(self._grace_left_s())
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
        return self._save_now(_number(step), state, parts, rng, "asked for", metrics)

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked a rank to end, and all ranks have saved because of it: time to leave the loop."""
        return self._decisions.preempted

    @property
    def durable_step(self) -> int | None:
        """The step of the last checkpoint that became durable, or was restored, as this rank knows it."""
        return self._saves.durable_step

    def _save_now(
        self,
        step: int,
        state: Mapping[str, Any] | None,
        parts: Mapping[str, Any],
        rng: bool,
        reason: str,
        metrics: Mapping[str, float] | None,
    ) -> bool:
        if step in self._saves.steps and any(self._ranks.most([self._saves.failed])):
            self._settle()
        if step in self._saves.steps:
            self._saves.tell("not_due", step, "it has been saved already")
            return False
        if not self._make_room(step):
            return False
        values = self._state(state, parts, rng)
        self._try_out(values)
        self._saves.begin(step, values, reason, metrics)
        return True

    def _make_room(self, step: int) -> bool:
        """See the last save off; returns whether one can begin."""
        if self._on_busy != "wait" and not self.preempted:
            (busy,) = self._ranks.most([self._saves.busy])
            if busy and self._on_busy == "fail":
                raise SaveFailed(
                    f"step {step} is due while the save before it is still in flight (on_busy='fail')"
                )
            if busy:
                self._saves.tell("not_due", step, "the save before it is still in flight")
                return False
        self._settle()
        return True

    def _settle(self) -> None:
        failure = self._saves.settle(self._grace_left_s() if self.preempted else self._max_undurable_s)
        if failure is not None and self._on_failure == "raise":
            raise failure

    def _grace_left_s(self) -> float:
        return max(0.0, self._decisions.deadline_s - time.monotonic())

    # -- before the first step, and after the last ---------------------------------------------------------

    def annotate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a durable checkpoint, say from an evaluation that took a while; those of the first rank count.

        Raises:
            NotFound: the run has no durable checkpoint of this step.
        """
        self._ranks.from_first(lambda: self._history.annotate(_number(step), metrics))

    def pin(self, step: int, *, pinned: bool = True) -> None:
        """Keep a durable checkpoint, whatever the rules say. Raises NotFound."""
        self._ranks.from_first(lambda: self._history.annotate(_number(step), pinned=pinned))

    def wait_durable(self, timeout_s: float | None = None) -> int | None:
        """Wait for the save in flight; returns the last durable step.

        Raises:
            SaveFailed: it failed, or is not durable in time, on any rank.
        """
        failure = self._saves.settle(timeout_s)
        if failure is not None:
            raise failure
        return self.durable_step

    def close(self) -> None:
        """Wait for the save in flight, and let go of everything; harmless to call twice.

        Raises:
            SaveFailed: that save failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            failure = self._saves.finish()
        finally:
            self._decisions.close()
            self._uploads.close()
            self._history.close()
        if failure is not None and self._on_failure == "raise":
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise  # otherwise it has been logged, and what ended the block matters more

    def _state(self, state: Mapping[str, Any] | None, parts: Mapping[str, Any], rng: bool) -> dict[str, Any]:
        if state is None:
            return training_state(rng=rng, **parts)
        if parts:
            raise ConfigurationError(f"give a state dict or parts ({', '.join(parts)}), not both")
        return state if isinstance(state, dict) else dict(state)

    def _try_out(self, state: Mapping[str, Any]) -> None:
        """Find out in the first minute what would fail in the first night."""
        if self._tried_out:
            return
        needed = size_bytes(state)
        began_s = time.monotonic()
        free = self._agreed(
            "preflight",
            lambda: check_place(self._root, storage_options=self._storage_options, needed_bytes=needed),
        )
        self._tried_out = True
        room = "" if free is None or not needed else f"; there is room for {free // needed} checkpoints"
        took_s = time.monotonic() - began_s
        self._saves.tell(
            "preflight", None, f"{self._history.url('')} works{room}", size_bytes=needed, took_s=took_s
        )

    def _agreed(self, call: str, work: Callable[[], Any]) -> Any:
        try:
            return self._ranks.together(call, work)
        except RanksFailed as failed:
            own = failed.failures.get(self._ranks.rank)
            raise own or failed.failures[min(failed.failures)] from None

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("this manager is closed")


def _number(step: Any) -> int:
    """A step as an integer of Python's, which NumPy's are not."""
    try:
        number = operator.index(step)
    except TypeError:
        raise ConfigurationError(f"a step is a number, not {step!r}") from None
    if number < 0:
        raise ConfigurationError(f"a step is not negative, as {number} is")
    return number
