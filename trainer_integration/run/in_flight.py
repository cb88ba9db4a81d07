"""Save one step at a time, end it on all ranks alike, record it, remove old checkpoints."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from ckpt.errors import CheckpointError, ConfigurationError, SaveFailed
from ckpt.format.dcp_view import stored_bytes
from ckpt.format.run_clock import RunClock
from ckpt.format.run_record import RunCheckpoint
from ckpt.ranks.group import Ranks
from ckpt.tools.preflight import check_place
from ckpt.trainer_integration.events import Event, Events
from ckpt.trainer_integration.keeping import Best, KeepRule
from ckpt.trainer_integration.run.async_modes import Uploads
from ckpt.trainer_integration.run.folders import Folders
from ckpt.trainer_integration.run.held_errors import wait_for
from ckpt.trainer_integration.run.history import History, plain_metrics
from ckpt.words import METRIC_TAG
from ckpt.writing.writer import SaveMeta

_logger = logging.getLogger(__name__)

_WEIGHT_OF_THE_LAST = 0.3

OnBusy = Literal["wait", "skip", "fail"]


@dataclass
class Flight:
    """A save that has been staged.

    Attributes:
        future: the save.
        durable: set after it, when its outcome is known here and in the run's record.
        booked: set last, when the checkpoints that no rule keeps any more have been removed.
    """

    checkpoint: RunCheckpoint
    began_s: float
    stall_s: float = 0.0
    future: Future[Any] = field(default_factory=Future)
    durable: threading.Event = field(default_factory=threading.Event)
    booked: threading.Event = field(default_factory=threading.Event)


class Saves:
    """Begin and end saves, in the main thread of every rank; rank 0 keeps the record and reports.

    Attributes:
        uploads: how saves are begun.
        steps: those that have a checkpoint, or one in flight, on all ranks alike.
        durable_step: the last durable one, as this rank knows it.
        base: folder of the last checkpoint that was saved or restored, on all ranks alike.
        durable_at_s: when it became durable, by `time.monotonic`; of a restored one, by its record.
        undurable_since_s: when this process began, restored, or last made a checkpoint durable.
        stall_s, upload_s: mean seconds of a save, the last ones counting most.
    """

    def __init__(
        self, ranks: Ranks, uploads: Uploads, history: History, keep: KeepRule | None, events: Events
    ) -> None:
        self._ranks, self.uploads, self._events = ranks, uploads, events
        self.history, self.keep = history, keep
        self.clock = RunClock()
        self.folders = Folders(ranks, history)
        self._flight: Flight | None = None
        self._booked: threading.Event | None = None
        self.steps: set[int] = set()
        self.base: str | None = None
        self.durable_step: int | None = None
        self.durable_at_s = self.undurable_since_s = self.began_s = time.monotonic()
        self.stall_s: float | None = None
        self.upload_s: float | None = None
        self.last_failure: BaseException | None = None
        self.hurries = False  # nothing waits any more that can go on without this program
        self._kept: dict[int, str] = {}
        self._unmeasured = ""
        _all.add(self)

    @property
    def busy(self) -> bool:
        """Tell whether a save in the background, or the removals after it, are under way on this rank."""
        return self.uploads.mode != "off" and self._booked is not None and not self._booked.is_set()

    @property
    def failed(self) -> bool:
        """Tell whether a save has failed that is not reported yet, as this rank sees it."""
        flight = self._flight
        return flight is not None and flight.durable.is_set() and flight.future.exception() is not None

    def start(self) -> None:
        """Begin what goes on beside the saves. All ranks call it."""

    def newest_of_others(self) -> tuple[tuple[int, str] | None, bool]:
        """Find step and URL of the newest checkpoint that others saved, and whether all places have answered; on all ranks."""
        newest = self._ranks.from_first(lambda: self.history.newest(self.steps))
        return (None if newest is None else (newest[0], self.history.shown(newest[1]))), True

    def begin_new_run(self) -> None:
        """Give up, with the next checkpoint, all those of the root that these saves have not made; on all ranks."""
        self._ranks.from_first(self.history.find_all)
        self.history.begin_new_run()

    def go_on_from(
        self, step: int, path: str, created_at_s: float | None, *, is_durable: bool = True
    ) -> None:
        """Give up the checkpoints after `step`, that at `path`; those steps will be saved again."""
        self.history.go_on_from(step)
        self.clock.saw(-math.inf if created_at_s is None else created_at_s)
        self.base = path
        self.steps = {saved for saved in self.steps if saved < step} | {step}
        age_s = 0.0 if created_at_s is None else max(0.0, time.time() - created_at_s)
        self.undurable_since_s = time.monotonic()
        self.durable_step = step if is_durable else None
        self.durable_at_s = self.undurable_since_s - age_s

    def begin(
        self, step: int, state: dict[str, Any], reason: str, metrics: Mapping[str, float] | None
    ) -> None:
        """Stage `state` and begin its upload. Errors of the storage show when it is settled."""
        self.wait_booked()
        checkpoint = RunCheckpoint(
            step=step,
            path=self.folders.path(step),
            saved_at_s=self.clock.now(),
            metrics=plain_metrics(metrics),
        )
        self.began_s = time.monotonic()
        flight = Flight(checkpoint, self.began_s)
        self.tell("due", step, reason)
        self.steps.add(step)
        try:
            tags = {f"{METRIC_TAG}{name}": str(value) for name, value in (metrics or {}).items()}
            flight.future = self._upload(checkpoint, state, {"step": str(step)} | tags)
        except BaseException as error:
            if isinstance(error, ConfigurationError) or not isinstance(error, CheckpointError):
                self.steps.discard(step)  # nothing is in flight: Ctrl-C, or a mistake of the caller
                raise
            flight.future.set_exception(error)
        flight.stall_s = time.monotonic() - flight.began_s
        self.stall_s = _mean(self.stall_s, flight.stall_s)
        self.tell("staged", step, checkpoint.path, stall_s=flight.stall_s)
        self._flight, self._booked = flight, flight.booked
        caller = threading.get_ident()
        flight.future.add_done_callback(lambda _: self._book(flight, caller))

    def _upload(
        self, checkpoint: RunCheckpoint, state: dict[str, Any], tags: Mapping[str, str]
    ) -> Future[Any]:
        """Begin an upload; what its future has, `_committed` gets."""
        base = None if self.base in (None, checkpoint.path) else self.history.url(self.base)
        return self.uploads.begin(state, self.history.url(checkpoint.path), tags, base)

    def settle(self, timeout_s: float | None = None) -> SaveFailed | None:
        """Wait until the save in flight is durable; return its failure, the same on all ranks.

        Raises SaveFailed on all ranks if some rank's save is not durable in time; it goes on.
        """
        flight = self._flight
        if flight is None:
            return None
        late = not wait_for(flight.durable, timeout_s)
        error = None if late else flight.future.exception()
        failed, late_anywhere = self._ranks.most([error is not None, late])
        step, url = flight.checkpoint.step, self.history.shown(flight.checkpoint.path)
        if late_anywhere:
            raise SaveFailed(f"step {step} is not durable after {timeout_s:.3g} s", url=url)
        self._flight = None
        if not failed:
            self.base = flight.checkpoint.path
            return None
        self.steps.discard(step)
        if isinstance(error, SaveFailed):
            return error
        cause = "the error is on another rank" if error is None else f"{type(error).__name__}: {error}"
        return SaveFailed(f"the save of step {step} failed: {cause}", url=url)

    def close(self) -> BaseException | None:
        """Wait for the save in flight; return its failure. Other ranks may be gone."""
        try:
            self.wait_booked()
            flight, self._flight = self._flight, None
            return None if flight is None else flight.future.exception()
        except BaseException:  # Ctrl-C: the program ends
            self.hurries = True
            raise
        finally:
            self._end()
            self.uploads.close()
            self.history.close()
            self._events.flush()

    def _end(self) -> None:
        """End what goes on beside the saves; events are told until then."""

    def check_root(self, nbytes: int) -> int | None:
        """Try the run's root out; return its free bytes, if they are known. Raises as `check_place`."""
        root, storage_options = self.history.root, self.history.storage_options
        return check_place(root, storage_options=storage_options, needed_bytes=nbytes)

    def wait_durable(self, timeout_s: float | None) -> SaveFailed | None:
        """Wait until the last save is durable; return why it is not, on all ranks. Raises as `settle`."""
        return self.settle(timeout_s)

    def wait_preempted(self, grace_s: float | None) -> None:
        """Wait as `wait_durable`, before the program is killed. Raises that error."""
        if (failure := self.wait_durable(grace_s)) is not None:
            raise failure

    def wait_booked(self) -> None:
        """Wait for the removals after a save: such a folder must not be read or saved into."""
        if self._booked is not None:
            wait_for(self._booked)

    def tell(self, kind: str, step: int | None, reason: str = "", url: str = "", **values: float) -> None:
        """Report an event, on rank 0."""
        if self._ranks.rank == 0:
            if self.durable_step is not None:
                values["durable_age_s"] = time.monotonic() - self.durable_at_s
            self._events.tell(Event(kind, step, reason, values, url=url))

    def _book(self, flight: Flight, caller: int) -> None:
        """Follow up a save, in the thread in which its upload ended; the `caller` of the save trains on."""
        is_recorded = False
        try:
            is_recorded = self._conclude(flight)
        except Exception:  # nobody would see it: futures keep what callbacks raise to themselves
            _logger.exception("recording a save failed")
        finally:
            flight.durable.set()
            if self.keep is None or not is_recorded:
                flight.booked.set()
            elif threading.get_ident() != caller:
                self._clear(flight)
            else:  # the save was waited for, removals need not be
                try:
                    threading.Thread(target=self._clear, args=[flight], name="ckpt-keep", daemon=True).start()
                except RuntimeError:  # Python is ending
                    self._clear(flight)

    def _clear(self, flight: Flight) -> None:
        """Remove the checkpoints that no rule keeps any more."""
        try:
            assert self.keep is not None
            self._retire(self.keep, flight.checkpoint)
        except Exception:
            _logger.exception("removing old checkpoints failed")
        finally:
            flight.booked.set()

    def _conclude(self, flight: Flight) -> bool:
        """Note and report the outcome of a save; tell whether it is in the run's record, by this rank."""
        error, step = flight.future.exception(), flight.checkpoint.step
        took_s = time.monotonic() - flight.began_s
        if error is not None:
            self.last_failure = error
            self.tell("failed", step, str(error), upload_s=took_s)
            return False
        self.upload_s = _mean(self.upload_s, took_s)
        return self._committed(flight, flight.future.result(), took_s)

    def _committed(self, flight: Flight, committed: Any, took_s: float) -> bool:
        """Note and report a checkpoint that is durable; tell whether it is in the run's record, by this rank."""
        step, path, is_recorded = flight.checkpoint.step, flight.checkpoint.path, True
        self.durable_at_s = self.undurable_since_s = time.monotonic()
        self.durable_step = step
        if self._ranks.rank != 0:
            return False
        try:
            self.history.add(flight.checkpoint)
        except CheckpointError as failure:
            is_recorded = False  # nothing is removed now: others may have pinned it
            text = "step %d is durable, but could not be noted in the run's record: %s"
            _logger.warning(text, step, failure)
        figures = figures_of(committed) | {"upload_s": took_s, "stall_s": flight.stall_s}
        self.tell("durable", step, path, self.history.shown(path), **figures)
        return is_recorded

    def _retire(self, keep: KeepRule, newest: RunCheckpoint) -> None:
        for checkpoint, failure in self.history.retire(keep, newest.path):
            if failure is None:
                self.tell("removed", checkpoint.step, _why(checkpoint), self.history.shown(checkpoint.path))
            else:
                self.tell("not_removed", checkpoint.step, str(failure))
        self._kept.pop(newest.step, None)  # saved anew, after going back
        referred = dict.fromkeys(self.history.referred, "later checkpoints name its bytes")
        kept = {newest.step: "the newest"} | referred | self.history.kept(keep)
        for step, reason in sorted(kept.items()):
            if self._kept.get(step) != reason:
                self.tell("kept", step, reason)
        self._kept = kept
        text = _unmeasured(keep, newest.step, kept, self.history)
        if text and text != self._unmeasured:  # once
            self.tell("unmeasured", newest.step, text)
        self._unmeasured = text


def _why(removed: RunCheckpoint) -> str:
    return "it was saved again" if removed.superseded else "no rule keeps it"


def leaves_out(saves: Saves, ranks: Ranks, step: int, on_busy: OnBusy, settle: Callable[[], None]) -> bool:
    """Tell whether to leave out `step`, on all ranks: it was saved, or the save before it is in flight.

    `settle` is called if a save has failed, as that may be the one of this step. Raises SaveFailed with "fail".
    """
    if step in saves.steps and any(ranks.most([saves.failed])):
        settle()
    if step in saves.steps:
        saves.tell("not_due", step, "it has been saved already")
        return True
    if on_busy == "wait":
        return False
    (busy,) = ranks.most([saves.busy])
    if busy and on_busy == "fail":
        raise SaveFailed(f"step {step} is due, but the save before it is still in flight (on_busy='fail')")
    if busy:
        saves.tell("not_due", step, "the save before it is still in flight")
    return bool(busy)


def _unmeasured(keep: KeepRule, newest_step: int, kept: Mapping[int, str], history: History) -> str:
    """Say that checkpoints stay because none has the metric of a rule; empty if that is not so."""
    for rule in reversed(keep.rules()):
        if isinstance(rule, Best) and any(
            reason == rule.unmeasured and step != newest_step for step, reason in kept.items()
        ):
            names = {name for checkpoint in history.durable() for name in checkpoint.metrics}
            metrics = ", ".join(map(repr, sorted(names))) or "none"
            return (
                f"no checkpoint has the metric {rule.metric!r}, so all are kept; the metrics there: {metrics}"
            )
    return ""


_all: weakref.WeakSet[Saves] = weakref.WeakSet()


def _wait_at_exit() -> None:
    """Finish removals if a program never closed its manager: later no thread can start."""
    for saves in [*_all]:
        with contextlib.suppress(BaseException):
            saves.wait_booked()


threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_all.clear)  # a child has no thread to end a save


def figures_of(metadata: Metadata) -> dict[str, float]:
    """List what is known of a save that was committed."""
    size_bytes, carried_bytes = stored_bytes(metadata)
    figures: dict[str, float] = {"size_bytes": size_bytes}
    if carried_bytes:
        figures["carried_bytes"] = carried_bytes
    if isinstance(metadata.storage_meta, SaveMeta):
        figures |= {**metadata.storage_meta.seconds, "retries": metadata.storage_meta.retries}
    return figures


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT_OF_THE_LAST * (value - mean)
