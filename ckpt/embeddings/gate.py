"""Let the updates of rows through to one consistent cut: `ckpt.embeddings.UpdateGate`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckpt.errors import CheckpointError, ConfigurationError

_LONGEST_WAIT_S = 7 * 86400.0
_MOST_NAMED = 10


@dataclass(frozen=True)
class _Update:
    source: int
    apply: Callable[[], object]
    future: Future[None]


@dataclass
class _Epoch:
    """Count the updates between two cuts, by source.

    Attributes:
        arrived: those that are applied, being applied, or queued.
        marked: how many each source has sent in all.
    """

    arrived: Counter[int] = field(default_factory=Counter)
    applied: Counter[int] = field(default_factory=Counter)
    marked: Counter[int] = field(default_factory=Counter)


class UpdateGate:
    """Apply asynchronous updates such that every process that keeps rows can save them as of the same step.

    Each process has one gate, for all its shards. A source (a trainer) numbers its updates with an epoch: how many
    cuts its batch comes after. When a cut is due it tells each gate, by `mark`, how many updates of that epoch it has
    sent there, and goes on with the next epoch. Counts decide, so updates and marks may arrive in any order. An
    update of the gate's epoch is applied at once; one of the next epoch waits, without blocking a thread, until
    the body of `cut` has ended.

    A wrong count, or an update that raises, fails the gate: all calls, now and later, raise that error, as no cut
    can be trusted any more. All methods may be called from any thread.

    Args:
        sources: numbers of all that send updates.
        max_queued: how many updates may wait. With bounded staleness, sources send at most `staleness + 1` batches
            of the next epoch each.
        epoch: the first; after a restore any number that all agree on.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(self, sources: Collection[int], *, max_queued: int = 64, epoch: int = 0) -> None:
        if not sources or len(set(sources)) != len(sources):
            raise ConfigurationError(f"sources must name one or more, each once, not {list(sources)!r:.100}")
        if max_queued < 1:
            raise ConfigurationError(f"max_queued must be 1 or more, not {max_queued!r}")
        self._sources = frozenset(sources)
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._epoch = epoch
        self._last, self._now, self._next = _Epoch(), _Epoch(), _Epoch()
        self._queue: deque[_Update] = deque()
        self._due: deque[_Update] = deque()  # queued before the last cut, and not applied yet
        self._is_cutting = False
        self._fault: BaseException | None = None

    @property
    def epoch(self) -> int:
        """Epoch whose updates are applied now."""
        return self._epoch

    @property
    def queued(self) -> int:
        """How many updates wait for the next cut."""
        return len(self._queue)

    # -- while training ------------------------------------------------------------------------------------

    def submit(self, source: int, epoch: int, apply: Callable[[], object]) -> Future[None]:
        """Apply an update by calling `apply`: in this thread, or after the next cut in the thread of that.

        The future ends when it has been applied; it cannot be cancelled.

        Raises:
            ConfigurationError: too many wait (this one is not taken, and may be sent again); the source is unknown;
                the epoch is none that may be sent now; more than were marked.
        """
        update = _Update(source, apply, Future())
        update.future.set_running_or_notify_cancel()
        with self._locked():
            of_epoch = self._of(source, epoch, "update")
            is_early = epoch > self._epoch
            if is_early and len(self._queue) >= self._max_queued:
                raise ConfigurationError(
                    f"{len(self._queue)} updates of epoch {epoch} wait for the cut of epoch {self._epoch} already; send "
                    "the next when some have been applied, or give UpdateGate a larger max_queued"
                )
            of_epoch.arrived[source] += 1
            self._check_count(source, epoch, of_epoch)
            if is_early:
                self._queue.append(update)
                return update.future
        self._apply(update)
        return update.future

    def mark(self, source: int, epoch: int, updates: int) -> None:
        """Note that a source has sent so many updates of an epoch to this gate, those on their way included.

        The same mark may come again.

        Raises:
            ConfigurationError: it differs from what came before; the source is unknown; the epoch is none that may
                be marked now.
        """
        if updates < 0:
            raise ConfigurationError(
                f"source {source} marked {updates} updates: give how many it has sent here"
            )
        with self._locked():
            if epoch == self._epoch - 1 and self._last.marked.get(source) == updates:
                return
            of_epoch = self._of(source, epoch, "mark")
            earlier = of_epoch.marked.setdefault(source, updates)
            if earlier != updates:
                raise self._failed(
                    f"source {source} marked {updates} updates of epoch {epoch}, after {earlier}: the number is how "
                    "many it has sent to this process in that epoch"
                )
            self._check_count(source, epoch, of_epoch)
            self._changed.notify_all()

    # -- saves ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def cut(self, timeout_s: float = 600.0) -> Iterator[int]:
        """Wait until all of the epoch is applied; give its number; no update is applied in the body of `with`.

        Take the cut there (`Tables.async_save`, which does not wait; it can also do all this: `gate=`). Whether or not the body raises, the next epoch begins after it,
        with what has been queued, in order of arrival.

        Raises:
            CheckpointError: not all was there within `timeout_s`; it names which sources have not marked, or how
                many of whose updates are missing. The epoch goes on, and a cut may be tried again.
            ConfigurationError: another thread cuts.
        """
        with self._changed:
            self._check()
            if self._is_cutting:
                raise ConfigurationError("a cut of this gate is under way; take one at a time")
            self._is_cutting = True
            try:
                self._wait_for_all(timeout_s)
            except BaseException:
                self._is_cutting = False
                raise
        try:
            yield self._epoch
        finally:
            self._begin_next()
        with self._changed:
            self._check()

    def fail(self, error: BaseException) -> None:
        """Let every call that waits, and every later one, raise this error; the first one counts."""
        with self._locked():
            self._fault = self._fault or error
            self._changed.notify_all()

    # -- inside --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; after it, end what a gate that has failed will never apply."""
        try:
            with self._changed:
                yield
        finally:
            if self._fault is not None:
                with self._changed:
                    never = [*self._due, *self._queue]
                    self._due.clear()
                    self._queue.clear()
                for update in never:
                    update.future.set_exception(self._fault)

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _of(self, source: int, epoch: int, kind: str) -> _Epoch:
        """Return the counts that an update or a mark belongs to."""
        self._check()
        if source not in self._sources:
            raise ConfigurationError(f"source {source!r} is not among this gate's: {sorted(self._sources)}")
        if epoch < self._epoch:
            raise self._failed(
                f"source {source} sent another {kind} of epoch {epoch} after it had marked all of it, and after the cut"
            )
        if epoch > self._epoch + 1:
            raise ConfigurationError(
                f"the {kind} of source {source} is of epoch {epoch}, and the cut of epoch {self._epoch} has not been "
                "taken: a source may be one epoch ahead"
            )
        return self._now if epoch == self._epoch else self._next

    def _check_count(self, source: int, epoch: int, of_epoch: _Epoch) -> None:
        arrived, marked = of_epoch.arrived[source], of_epoch.marked.get(source)
        if marked is not None and arrived > marked:
            raise self._failed(
                f"source {source} marked {marked} updates of epoch {epoch}, and {arrived} have come"
            )

    def _failed(self, message: str) -> ConfigurationError:
        """Fail the gate, with the lock held by `_locked`."""
        error = ConfigurationError(message)
        self._fault = self._fault or error
        self._changed.notify_all()
        return error

    def _apply(self, update: _Update) -> None:
        """Apply an update outside of the lock: several threads may."""
        try:
            update.apply()
        except BaseException as error:
            is_interrupt = not isinstance(error, Exception)
            self.fail(CheckpointError("an update was interrupted") if is_interrupt else error)
            update.future.set_exception(error)
            if is_interrupt:
                raise
            return
        with self._changed:
            self._now.applied[update.source] += 1
            self._changed.notify_all()
        update.future.set_result(None)

    def _wait_for_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + min(timeout_s, _LONGEST_WAIT_S)
        while not self._is_complete():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise CheckpointError(
                    f"the cut of epoch {self._epoch} cannot be taken, after {timeout_s:g} s: {self._missing()}"
                )
            self._changed.wait(left_s)
            self._check()

    def _is_complete(self) -> bool:
        """Tell whether all sources have marked the epoch, and all that they have counted is applied."""
        return len(self._now.marked) == len(self._sources) and self._now.applied == self._now.marked

    def _missing(self) -> str:
        """Say what the cut waits for."""
        now = self._now
        texts = []
        for source in sorted(self._sources):
            marked, arrived, applied = now.marked.get(source), now.arrived[source], now.applied[source]
            if marked is None:
                texts.append(f"source {source} has not marked it ({arrived} updates have come)")
            elif arrived < marked:
                texts.append(f"{marked - arrived} of {marked} updates of source {source} have not come")
            elif applied < arrived:
                texts.append(f"{arrived - applied} of {marked} updates of source {source} are being applied")
        more = len(texts) - _MOST_NAMED
        return ", ".join(texts[:_MOST_NAMED]) + (f", and {more} more" if more > 0 else "")

    def _begin_next(self) -> None:
        with self._changed:
            self._last, self._now, self._next = self._now, self._next, _Epoch()
            self._epoch += 1
            self._due, self._queue = self._queue, deque()
            self._is_cutting = False
        while update := self._take():
            self._apply(update)

    def _take(self) -> _Update | None:
        with self._changed:
            return self._due.popleft() if self._due else None
