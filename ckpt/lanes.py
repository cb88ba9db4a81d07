"""Carry out transfers in threads: in few while the processor is the limit, in all where they wait for a network.

Where a store takes or gives bytes as fast as the processor moves them, more threads than cores only take turns with
one another: eight on two cores took 10 to 15 % more CPU than two, and no less time. On a long way most of them wait,
and all are needed. Which of both it is shows after some milliseconds: Linux tells how long a thread ran, or wanted to.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_LOOK_S = 0.025
_BUSY = 1 / 2
"""Threads that use less than this share of their time have a network to wait for."""


def run_in_lanes(
    submit: Callable[[Callable[[], None]], Future[None]],
    work: Callable[[T], R],
    todo: Iterable[T],
    *,
    most: int,
) -> list[R]:
    """Carry out `work` for every item of `todo`, in up to `most` threads, and return the results in order.

    `submit` gives a call to an executor. After an error nothing more is begun; the first one is raised once nothing is
    running any more.
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
        self._looked_at_s = time.monotonic()
        self._queue: deque[tuple[int, T]] = deque()
        self._begun: list[Future[None]] = []
        self._running = 0
        # Of each thread: when it began, and how much it had used then.
        self._since: dict[int, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def add(self, item: T) -> None:
        with self._lock:  # a thread that sees nothing to do has ended before, or takes it
            self._queue.append((len(self.results), item))
            self.results.append(None)
        self._look()
        self._start()

    def finish(self) -> None:
        """Wait until all are done, or one has failed."""
        while self.error is None:
            pause_s = _LOOK_S if self._limit < self._most else None
            _, pending = wait(self._begun, pause_s, return_when=FIRST_EXCEPTION)
            if not pending:
                return
            self._look()
            self._start()

    def end(self) -> None:
        """Begin nothing more, and wait until nothing is running."""
        self._queue.clear()
        for future in self._begun:
            future.cancel()
        wait(self._begun)

    def _start(self) -> None:
        """Start as many threads as may run, where there is something to do."""
        while True:
            with self._lock:
                if not self._queue or self.error is not None or self._running >= self._limit:
                    return
                self._running += 1
            self._begun.append(self._submit(self._lane))

    def _lane(self) -> None:
        me = threading.get_native_id()
        with self._lock:
            self._since[me] = time.monotonic(), wanted_s(me)
        while True:
            with self._lock:
                if self.error is not None or not self._queue:
                    self._running -= 1
                    del self._since[me]
                    return
                number, item = self._queue.popleft()
            try:
                self.results[number] = self._work(item)
            except BaseException as error:
                with self._lock:
                    self.error = self.error or error
                raise

    def _look(self) -> None:
        """Let all run from now on, if those that run have not run, nor wanted to, for much of their time."""
        now_s = time.monotonic()
        if self._limit == self._most or now_s - self._looked_at_s < _LOOK_S:
            return
        self._looked_at_s = now_s
        with self._lock:  # none of them ends
            lanes = [*self._since.items()]
            used_s = sum(wanted_s(thread) - then_s for thread, (_, then_s) in lanes)
        if not used_s >= _BUSY * sum(now_s - began_s for _, (began_s, _) in lanes):
            self._limit = self._most


def wanted_s(thread: int) -> float:
    """Tell how long a thread has run or waited for a core; NaN where the system does not say."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            ran_ns, waited_ns, _ = file.read().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9
    except (OSError, ValueError):
        return math.nan


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
