"""Carry out transfers in threads: in few while the processor is the limit, in all where they wait for a network.

Where a store takes or gives bytes as fast as the processor moves them, more threads than cores only take turns with
one another: eight on two cores took 10 to 40 % more CPU than two, and no less time. On a long way most of them wait,
and all are needed. Which of both it is shows after some milliseconds: Linux tells how long a thread ran, or wanted to.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_LOOK_S = 0.025
_WAITING = 0.15
"""Threads that use less than this share of their time have a network to wait for: all of them run."""

_COMPARED_S = 0.045
_BUSY = 0.7
"""Threads that use less than this share may have: twice as many run. The system does not tell it in time for less than 45 ms."""

_WAITED = 2
"""Time in which a thread waited for a core counts twice: where cores are scarce, more threads do not help."""


def run_in_lanes(
    submit: Callable[[Callable[[], None]], Future[None]],
    work: Callable[[T], R],
    todo: Iterable[T],
    *,
    most: int,
) -> list[R]:
    """Carry out `work` for every item of `todo`, in up to `most` threads, and return the results in order.

    `submit` gives a call to an executor, which others may use too. After an error nothing more is begun; it is raised
    once nothing of this run is running any more.
    """
    lanes = _Lanes(submit, work, most)
    try:
        for item in todo:  # which may take its time to say what is next
            if lanes.error is not None:
                break
            lanes.add(item)
        lanes.finish()
    finally:
        lanes.end()
    if lanes.error is not None:
        raise lanes.error
    return lanes.results


class _Lanes(Generic[T, R]):
    """Threads that take one item after the other while there are any."""

    def __init__(
        self, submit: Callable[[Callable[[], None]], Future[None]], work: Callable[[T], R], most: int
    ) -> None:
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self._submit, self._work, self._most = submit, work, most
        self._limit = min(usable_cores(), most)
        self._looked_at_s = self._compared_at_s = time.monotonic()
        self._queue: deque[tuple[int, T]] = deque()
        self._left = 0  # items that are not done
        self._begun: list[Future[None]] = []
        self._asked = 0  # threads that were asked for, and have not ended
        self._is_closed = False
        # Of each thread that runs: when it was looked at, and how much it had used then.
        self._running: dict[_Use, tuple[float, float]] = {}
        self._change = threading.Condition()

    def add(self, item: T) -> None:
        with self._change:  # a thread that sees nothing to do has ended before, or takes it
            self._queue.append((len(self.results), item))
            self.results.append(None)
            self._left += 1
        self._look()
        self._start()

    def finish(self) -> None:
        """Wait until all are done, or one has failed."""
        while True:
            with self._change:
                if (self._asked or self._running) and self._left and self.error is None:
                    self._change.wait(_LOOK_S if self._limit < self._most else None)
                if not self._left or self.error is not None:
                    return
                if not (self._queue or self._asked or self._running):
                    raise RuntimeError("threads ended before they had done what they were given")
            self._look()
            self._start()

    def end(self) -> None:
        """Begin nothing more, and wait until nothing is running. Others may keep a thread that was asked for."""
        with self._change:
            self._is_closed = True
            self._queue.clear()
        for future in self._begun:
            future.cancel()
        with self._change:
            while self._running:
                self._change.wait()

    def _start(self) -> None:
        """Ask for as many threads as may run, where there is something to do."""
        while True:
            with self._change:
                if not self._queue or self.error is not None or self._asked >= self._limit:
                    return
                self._asked += 1
            future, others = None, 0
            try:
                future = self._submit(self._lane)
            except BaseException as error:
                with self._change:
                    self._asked -= 1
                    others = self._asked
                    self._limit = self._most = max(1, others)
                if not (self._begun and isinstance(error, Exception)):
                    raise
            if future is None:
                if not others:  # those that are there do the rest; if none is left, the caller does
                    self._lane()
                return
            self._begun.append(future)
            future.add_done_callback(self._ended)
            if future.cancelled():
                raise RuntimeError("these threads take nothing more")

    def _ended(self, _: Future[None]) -> None:
        with self._change:
            self._asked -= 1
            self._change.notify_all()

    def _lane(self) -> None:
        use = _Use()
        with self._change:
            if self._is_closed:
                return
            self._running[use] = time.monotonic(), use.wanted_s()
        outer = _own.set(use)  # there is another run's, where the caller does the rest
        try:
            while True:
                with self._change:
                    if self.error is not None or not self._queue:
                        return
                    number, item = self._queue.popleft()
                result = self._work(item)
                with self._change:
                    self.results[number] = result
                    self._left -= 1
        except BaseException as error:
            with self._change:
                self.error = self.error or error
            raise
        finally:
            _own.reset(outer)
            with self._change:
                del self._running[use]
                self._change.notify_all()

    def _look(self) -> None:
        """Let more run, if those that run have not run, nor wanted to, for much of their time: all, or twice as many."""
        now_s = time.monotonic()
        if self._limit == self._most or now_s - self._looked_at_s < _LOOK_S:
            return
        self._looked_at_s = now_s
        passed_s = used_s = 0.0
        with self._change:  # none of them ends
            readings = {use: (now_s, use.wanted_s()) for use in self._running}
            for use, (then_s, used_then_s) in self._running.items():
                if now_s - then_s >= _LOOK_S / 2:  # else it says nothing yet
                    passed_s += now_s - then_s
                    used_s += readings[use][1] - used_then_s
            if passed_s and not used_s >= _WAITING * passed_s:
                self._limit = self._most
            elif passed_s and now_s - self._compared_at_s >= _COMPARED_S:
                if used_s < _BUSY * passed_s:
                    self._limit = min(2 * self._limit, self._most)
                self._running, self._compared_at_s = readings, now_s


class _Use:
    """The time that a thread, and others on its behalf, have run or wanted to."""

    def __init__(self) -> None:
        self._threads = {threading.get_native_id()}
        self._ended_s = 0.0
        self._lock = threading.Lock()

    def wanted_s(self) -> float:
        with self._lock:  # none of them ends
            return self._ended_s + sum(map(wanted_s, self._threads))

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` in another thread, which ends with it."""
        me = threading.get_native_id()
        with self._lock:
            self._threads.add(me)
        try:
            function()
        finally:
            with self._lock:
                self._threads.discard(me)
                self._ended_s += wanted_s(me)


_own: ContextVar[_Use | None] = ContextVar("ckpt's lane", default=None)
"""Each greenlet has its own, as they take turns within one thread."""


def on_behalf(function: Callable[[], None]) -> Callable[[], None]:
    """Have `function`, which a thread of its own will call, count as work of this thread."""
    use = _own.get()
    return function if use is None else functools.partial(use.call, function)


def wanted_s(thread: int) -> float:
    """Tell how long a thread has run, and twice how long it waited for a core; NaN where the system does not say."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            ran_ns, waited_ns, _ = file.read().split()
        return (int(ran_ns) + _WAITED * int(waited_ns)) / 1e9
    except (OSError, ValueError):
        return math.nan


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
