"""Save near first: the steps go on once the nodes have a checkpoint, and it becomes durable behind them."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ckpt.errors import CheckpointError, SaveFailed, StorageUnavailable
from ckpt.format.run_record import RunCheckpoint, RunStamp, new_run_id
from ckpt.local_first.drain_process import DrainState
from ckpt.local_first.far_place import Asked, FarPlace
from ckpt.local_first.saving import Saved
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.events import Events
from ckpt.trainer_integration.keeping import KeepRule
from ckpt.trainer_integration.run.async_modes import Uploads
from ckpt.trainer_integration.run.held_errors import pause
from ckpt.trainer_integration.run.history import History
from ckpt.trainer_integration.run.in_flight import Flight, Saves, figures_of
from ckpt.trainer_integration.run.nearest import Nearest
from ckpt.trainer_integration.run.search import GONE
from ckpt.trainer_integration.run.tier import Tier, note_run

_logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S, _ASK_S, _LAST_LOOK_S = 0.2, 5.0, 5.0
_FIRST_ANSWER_S = 0.5
"""How long the first save waits for the id of the run, if nothing was restored."""


class NearSaves(Saves):
    """Saves that are committed in a tier first, and followed until they are durable."""

    def __init__(
        self,
        ranks: Ranks,
        uploads: Uploads,
        history: History,
        keep: KeepRule | None,
        events: Events,
        tier: Tier,
    ) -> None:
        super().__init__(ranks, uploads, history, keep, events)
        # Saves of a tier name no bytes of others, and persistent storage may not answer.
        self.folders.may_ask = False
        self._tier = tier
        self._given_up: list[str] = []
        self._near: dict[str, int] = {}
        self._newest: RunCheckpoint | None = None  # that is durable, of those that this process has saved
        self._asked: Asked[object] | None = None
        self._newest_durable = _Question(tier.far, lambda: self.history.newest(self.steps))
        self.nearest = Nearest(tier, history)

    def start(self) -> None:
        self._tier.start(self._ranks, self._is_durable, self.tell)

    def newest_of_others(self) -> tuple[tuple[int, str] | None, bool]:
        """Find the newest of the durable place, if that answers, and of the nodes, if it is of this run."""

        def durable() -> tuple[tuple[int, str] | None, bool, str]:
            return *_answer(self._newest_durable, warns=not self.steps), self.history.run

        newest, is_known, run = self._ranks.from_first(durable)
        near = self._tier.history
        found = [] if newest is None else [(newest[0], self.history.shown(newest[1]))]
        if self._tier.is_leader and (not run or near.stored_run() in ("", run)):
            with contextlib.suppress(CheckpointError):  # a record that is damaged counts as none
                others = (old for old in near.durable() if old.step not in self.steps)
                found += [(old.step, near.shown(old.path)) for old in others]
        return self._ranks.join(max(found, default=None), _newer), is_known

    def begin_new_run(self) -> None:
        try:
            self._ranks.from_first(lambda: self._tier.far.ask(self.history.find_all))
        except StorageUnavailable as error:
            _logger.warning("only checkpoints on record are given up: %s", error)
        self.history.begin_new_run()
        if not self.steps:  # else the nodes were asked before they had a checkpoint of this run
            self._tier.go_on_from(-1)

    def go_on_from(
        self, step: int, path: str, created_at_s: float | None, *, is_durable: bool = True
    ) -> None:
        super().go_on_from(step, path, created_at_s, is_durable=is_durable)
        self._newest, self._near = None, {} if is_durable else {path: step}
        self._given_up = []
        self._tier.go_on_from(step)
        note_run(self._tier, self._ranks.from_first(self._run))
        self._tier.begin()

    # -- saves ---------------------------------------------------------------------------------------------

    def _upload(
        self, checkpoint: RunCheckpoint, state: dict[str, Any], tags: Mapping[str, str]
    ) -> Future[Any]:
        """Begin an upload to the place that all ranks choose; each node hears what is not wanted any more."""
        tier, url = self._tier, self.history.url(checkpoint.path)
        run = self._run() if self._ranks.rank == 0 else ""
        offer, self._given_up = (not tier.has_room(), self._given_up, run), []
        is_full, given_up, run = self._ranks.join(offer, _either)
        note_run(tier, run)
        tier.begin()
        tier.drop(given_up)
        for path in given_up:
            self._near.pop(path, None)
        if is_full:
            self.tell(
                "not_local", checkpoint.step, "a node has no room for it: it is saved to the durable place"
            )
        self.clock.saw(self.nearest.seen_s + 1.0)  # commits count seconds
        stamp = RunStamp(run, self.clock)
        places = tier.places(checkpoint.path, url, self.uploads.options, has_room=not is_full)
        return self.uploads.begin_at(state, [replace(place, stamp=stamp) for place in places], tags)

    def _run(self) -> str:
        """Return, on the first rank, the id of the run; a new one if it is sure that there is none, empty if it is not."""
        history = self.history
        run = history.run or self.nearest.run or self._tier.history.stored_run()
        if not run and not history.is_read and self._asked is None:
            self._asked = Asked(history.durable)
            self._asked.is_answered(_FIRST_ANSWER_S)  # else it is known for a later save
            run = history.run
        if not run and history.is_read:
            run = new_run_id()
        if run:
            history.belong_to(run)
        return run

    def check_root(self, needed_bytes: int) -> int | None:
        """Try the run's root out; while it gives no answer, checkpoints wait near."""
        check = super().check_root
        try:
            return self._tier.far.ask(lambda: check(needed_bytes))
        except StorageUnavailable as error:
            _logger.warning("checkpoints stay %s until the durable place answers: %s", self._tier.name, error)
            return None

    def _committed(self, flight: Flight, committed: Saved, took_s: float) -> bool:
        """Note where a save was committed: near, it is not durable yet."""
        checkpoint, tier = flight.checkpoint, self._tier
        for failure in committed.failures:
            self.tell(f"not_{'local' if tier.is_local else 'durable'}", checkpoint.step, str(failure))
        if committed.place.url == self.history.url(checkpoint.path):
            self._newest = checkpoint
            return super()._committed(flight, committed.metadata, took_s)
        self._near[checkpoint.path] = checkpoint.step
        try:
            tier.note(checkpoint)
        except CheckpointError as failure:
            text = "step %d could not be noted in the record of %s: %s"
            _logger.warning(text, checkpoint.step, tier.history.place, failure)
        if self._ranks.rank == 0:
            tier.saved[checkpoint.path] = checkpoint
            try:
                self._given_up = tier.give_up(self.keep, self.history.known(), checkpoint)
            except Exception:
                _logger.exception("nothing is given up")
        figures = figures_of(committed.metadata) | {"local_s": took_s, "stall_s": flight.stall_s}
        if (copied := committed.copied) is not None:
            figures["copy_s"] = copied.took_s
            if copied.failure:
                self.tell("not_copied", checkpoint.step, f"another node has no copy: {copied.failure}")
        self.tell(tier.name, checkpoint.step, checkpoint.path, tier.history.shown(checkpoint.path), **figures)
        return False

    # -- what becomes durable ------------------------------------------------------------------------------

    def _is_durable(self, checkpoint: RunCheckpoint, state: DrainState, is_own: bool) -> None:
        """Follow up, on the first rank, a checkpoint that was carried; `is_own`: this process has saved it."""
        step, path = checkpoint.step, checkpoint.path
        if is_own and (self._newest is None or self._newest.step <= step):
            self._newest, self.durable_step = checkpoint, step
            self.durable_at_s = self.undurable_since_s = time.monotonic()
        is_recorded = True
        try:
            if is_own or self._is_there(path, state.id):  # else it was removed since
                self.history.add(checkpoint, is_own=is_own)
        except GONE:
            return
        except CheckpointError as failure:
            is_recorded = False  # nothing is removed now: others may have pinned it
            text = "step %d is durable, but could not be noted in the run's record: %s"
            _logger.warning(text, step, failure)
        if not is_own:
            is_base = path == self.base and path not in self._tier.saved  # else it was saved again meanwhile
            if is_base and self.durable_step is None:  # it was restored from the nodes
                self.durable_step, self.durable_at_s = step, time.monotonic()
            return
        figures = {"carry_s": state.took_s, "sent_bytes": float(state.sent_bytes)}
        self.tell("durable", step, path, self.history.shown(path), **figures)
        if self.keep is not None and self._newest is not None and is_recorded:
            try:
                self._retire(self.keep, self._newest)
            except Exception:
                _logger.exception("removing old checkpoints failed")

    def _is_there(self, path: str, commit_id: str) -> bool:
        candidate = self.history.examine(path)
        return candidate.id == commit_id and candidate.fault is None

    def _look(self, until_s: float) -> None:
        """Ask, on any rank, what has become durable; the first one has followed it up then, if it could in time."""
        if self._ranks.rank == 0:
            self._tier.wait_looked(until_s)
        durable = {path: step for path, step in self._near.items() if self._tier.is_durable(path)}
        if self._ranks.rank != 0 and durable:
            self.durable_step = max(durable.values())
        self._near = {path: step for path, step in self._near.items() if path not in durable}

    def wait_durable(self, timeout_s: float | None) -> SaveFailed | None:
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        failure = self.settle(timeout_s)
        if failure is not None:
            return failure

        def look() -> tuple[list[str], bool]:
            until_s = min(deadline_s, time.monotonic() + _ASK_S)
            while True:
                self._look(until_s)
                left = [checkpoint.path for checkpoint in self._tier.waiting()]
                if not left or time.monotonic() >= until_s:
                    return left, time.monotonic() >= deadline_s
                pause(_LOOK_S)

        while True:
            left, is_late = self._ranks.from_first(look)
            if not left:
                self._look(deadline_s)
                self.durable_step = self._ranks.from_first(lambda: self.durable_step)
                return None
            failed = self._ranks.join(self._tier.failed_of(left), _both)
            if {*left} <= {*failed}:
                text = f"cannot become durable: {'; '.join(f'{path}: {failed[path]}' for path in left)}"
                return SaveFailed(text, url=self._tier.history.place)
            if is_late:
                text = f"{_listed(left)}: not durable after {timeout_s:.3g} s, but {self._tier.name}"
                return SaveFailed(text, url=self._tier.history.place)

    def wait_preempted(self, grace_s: float | None) -> None:
        """Wait until the last save is near, which raises, and durable, which is told if it is not."""
        began_s = time.monotonic()
        if (failure := self.settle(grace_s)) is not None:
            raise failure
        left_s = None if grace_s is None else max(0.0, grace_s - (time.monotonic() - began_s))
        if (late := self.wait_durable(left_s)) is not None:
            self.hurries = True
            self.tell("not_durable", None, f"the time to end is up: {late}")

    def _end(self) -> None:
        """Wait until all is durable; the processes go on by themselves when the time is up, or the wait is interrupted."""
        try:
            self._wait_drained()
        except BaseException:
            self._tier.finish()
            raise
        finally:
            self._tier.close()

    def _wait_drained(self) -> None:
        timeout_s = 0.0 if self.hurries else self._tier.drain_timeout_s
        tier, deadline_s, left = self._tier, time.monotonic() + timeout_s, list[int]()
        if self._ranks.rank == 0:  # it notes what becomes durable, so its process ends last
            while (left := tier.undurable()) and time.monotonic() < deadline_s:
                self._look(deadline_s)
                pause(_LOOK_S)
            self._look(max(deadline_s, time.monotonic() + _LAST_LOOK_S))
        tier.finish()
        while not left and not tier.ended() and time.monotonic() < deadline_s:
            pause(_LOOK_S)
        if left:
            text = (
                f"step {_listed(left)}: not durable yet. A process on each node goes on carrying; after a crash of the "
                f"node's own do `ckpt drain {tier.folder.path} {self.history.place}`"
            )
            self.tell("not_durable", left[-1], text)


class _Question(Generic[T]):
    """What the durable place is asked until it answers, and waited for the first time alone."""

    def __init__(self, far: FarPlace, ask: Callable[[], T]) -> None:
        self._far = far
        self._ask = ask
        self._asked: Asked[T] | None = None

    def answer(self) -> T:
        """Return the answer. Raises StorageUnavailable if it has not come, or the answer's error."""
        if self._asked is None:
            self._asked = Asked(self._ask)
            return self._far.wait(self._asked)
        if not self._asked.is_answered():
            raise StorageUnavailable("no answer yet")
        try:
            return self._asked.answer()
        except CheckpointError:
            self._asked = Asked(self._ask)  # for the next save
            raise


def _answer(question: _Question[T], *, warns: bool) -> tuple[T | None, bool]:
    """Return what the durable place says of its newest checkpoint, and whether it says anything."""
    try:
        return question.answer(), True
    except StorageUnavailable as error:
        if warns:
            _logger.warning("whether the durable place holds checkpoints is not known: %s", error)
        return None, False


def saves_for(
    ranks: Ranks, uploads: Uploads, history: History, keep: KeepRule | None, events: Events, tier: Tier | None
) -> Saves:
    """Make the saves of a manager, with a tier or without, and start them. All ranks call it."""
    common = ranks, uploads, history, keep, events
    saves = Saves(*common) if tier is None else NearSaves(*common, tier)
    saves.start()
    return saves


def _both(some: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    return some | others


def _listed(steps: Sequence[object]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def _newer(some: tuple[int, str] | None, others: tuple[int, str] | None) -> tuple[int, str] | None:
    return max((each for each in (some, others) if each is not None), default=None)


_Offer = tuple[bool, list[str], str]


def _either(some: _Offer, others: _Offer) -> _Offer:
    return some[0] or others[0], some[1] or others[1], some[2] or others[2]
