"""Run saves behind the trainer: one at a time, waited for at the program's end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

_logger = logging.getLogger(__name__)

T = TypeVar("T")


SaveState = Literal["staged", "local", "durable", "failed"]


class SaveFuture(Future[Metadata]):
    """A save that `ckpt.async_save` has begun: done when the checkpoint is durable, that is committed at its URL.

    `result(timeout)` waits for at most `timeout` seconds, returns DCP's metadata, and raises what `ckpt.save`
    would raise, or TimeoutError. It cannot be cancelled.

    Args:
        local: the save to the nodes' disks, if there is one.
    """

    def __init__(self, local: Future[Metadata] | None = None) -> None:
        super().__init__()
        self._local = local

    @property
    def local(self) -> Future[Metadata]:
        """The save until it is committed on the nodes' disks; without `local=`, or without room there, at its URL."""
        return self if self._local is None else self._local

    @property
    def state(self) -> SaveState:
        """Where the save is, as this rank knows it: `staged`, `local`, `durable` or `failed`."""
        if self.done():
            return "durable" if self.exception() is None else "failed"
        return "local" if self.local is not self and self.local.done() else "staged"


class Background:
    """The one save that may run in the background.

    A program that ends waits for it. The interpreter lets no new thread start once it is ending, so
    the wait comes before that: when `concurrent.futures` waits for its own threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Future[Any] | None = None
        os.register_at_fork(after_in_child=self._forget)
        threading._register_atexit(self._wait_at_exit)  # type: ignore[attr-defined]

    def start(self, prepare: Callable[[], Callable[[], T]], future: Future[T] | None = None) -> Future[T]:
        """Wait for the previous save, call `prepare`, and run the function it returns in a thread.

        The `future` to use may be given.
        """
        with self._lock:
            self._wait_for_previous()
            work = prepare()
            future = Future() if future is None else future
            future.set_running_or_notify_cancel()
            works, self._running = [work], future
            del work
            try:
                threading.Thread(target=_run, args=(works, future), name="ckpt-async-save").start()
            except BaseException as error:
                # Without a thread; or Ctrl-C while this one waits for it to begin. Only one of them finds the work.
                if _taken(works) is not None:
                    future.set_exception(error)
                raise
            return future

    def _forget(self) -> None:
        """Start afresh in a forked child, which has none of the threads."""
        self._lock, self._running = threading.Lock(), None

    def _wait_for_previous(self) -> None:
        if self._running is None or self._running.done():
            return
        started_s = time.monotonic()
        self._running.exception()  # its outcome is for the holder of its future
        _logger.warning(
            "async_save waited %.1f s for the previous save to finish; save less often, or to faster storage",
            time.monotonic() - started_s,
        )

    def _wait_at_exit(self) -> None:
        if self._running is not None:
            with contextlib.suppress(BaseException):
                self._running.exception()


def _run(works: list[Callable[[], T]], future: Future[T]) -> None:
    """Run the one item of `works`, and drop it before the future is set."""
    time.sleep(0)  # else the trainer waits until this thread first waits for something
    work = _taken(works)
    if work is None:
        return
    try:
        result = work()
    except BaseException as error:
        # Logged too, as nobody may ask the future; as text, as a handler may keep the record.
        _logger.error("a save in the background failed: %s", "".join(traceback.format_exception(error)))
        # The future may live long, and must not keep the copied state alive.
        del work
        _without_frames(error)
        future.set_exception(error)
    else:
        del work
        future.set_result(result)


def _taken(works: list[Callable[[], T]]) -> Callable[[], T] | None:
    """Take the one item of a list; None if another thread has taken it."""
    with contextlib.suppress(IndexError):
        return works.pop()
    return None


def _without_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and its causes: their frames keep the copied state alive."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        cause = todo.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        cause.__traceback__ = None
        failures = getattr(cause, "failures", {}).values()
        todo += [cause.__cause__, cause.__context__]
        todo += [failure[0] if isinstance(failure, tuple) else failure for failure in failures]
