"""Run work in threads: all of it at once, or in order, or in the caller's own thread where one is enough."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from ckpt.lanes import usable_cores

T = TypeVar("T")
R = TypeVar("R")


def thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Make an executor of `threads` threads named `name`."""
    return ThreadPoolExecutor(threads, thread_name_prefix=name)


def workers(threads: int, name: str) -> Executor:
    """Make an executor as `thread_pool` does, unless `threads` is 1.

    It then carries out each call in the caller's thread when it is submitted, and none after one
    that failed.
    """
    return _Caller() if threads == 1 else thread_pool(threads, name)


def run_all(
    threads: Executor, work: Callable[[T], R], todo: Iterable[T], *, stop: threading.Event | None = None
) -> list[R]:
    """Carry out `work` for every item of `todo` at the same time and return the results.

    After an error nothing more is begun, and `stop` is set for work that can end early. The error
    is raised once nothing is running any more.
    """
    begun: list[Future[R]] = []
    has_failed = threading.Event()

    def run(item: T) -> R:
        try:
            return work(item)
        except BaseException:
            has_failed.set()
            raise

    try:
        for item in todo:  # which may take its time to say what is next
            if has_failed.is_set():
                break
            begun.append(threads.submit(run, item))
        done, _ = wait(begun, return_when=FIRST_EXCEPTION)
        return [future.result() for future in begun if future in done]
    finally:
        _end(begun, stop)


def share(work: Callable[[T], R], todo: Sequence[T], name: str, *, most: int = 8) -> list[R]:
    """Carry out `work` for every item of `todo`, in this thread and in others, and return the results.

    There is a thread for each core, and up to `most`. They may take milliseconds to begin: this one does not wait for them.
    After an error nothing more is begun; it is raised once nothing is running any more.
    """
    results: list[Any] = [None] * len(todo)
    left = deque(enumerate(todo))

    def take() -> None:
        try:
            while True:
                try:
                    number, item = left.popleft()
                except IndexError:
                    return
                results[number] = work(item)
        finally:
            left.clear()

    others = min(most, usable_cores(), len(todo)) - 1
    if others < 1:
        take()
        return results
    begun: list[Future[None]] = []
    with thread_pool(others, name) as threads:
        try:
            with contextlib.suppress(RuntimeError):  # no more threads can be started
                begun += (threads.submit(take) for _ in range(others))
            take()
        finally:
            left.clear()
    for future in begun:
        future.result()
    return results


def in_order(
    threads: Executor,
    work: Callable[[T], R],
    todo: Iterable[T],
    *,
    ahead: int,
    stop: threading.Event | None = None,
) -> Generator[R]:
    """Yield the result of `work` for each item of `todo`, in order; at most `ahead` run before the first is taken.

    Unlike `Executor.map` it does not read all of `todo` at once. If it ends early, it waits for
    what has begun; `stop` is then set for work that can end early.
    """
    if isinstance(threads, _Caller):  # nothing runs ahead
        yield from map(work, todo)
        return
    begun: deque[Future[R]] = deque()
    try:
        for item in todo:
            begun.append(threads.submit(work, item))
            if len(begun) >= ahead:
                yield _first(begun)
        while begun:
            yield _first(begun)
    finally:
        if begun:
            _end(begun, stop)


def _first(begun: deque[Future[R]]) -> R:
    """Take the first result. Until it is there its work counts as begun, also if the wait is interrupted."""
    result = begun[0].result()
    begun.popleft()
    return result


def _end(begun: Iterable[Future[R]], stop: threading.Event | None) -> None:
    """Begin nothing more, and wait until nothing is running."""
    if stop is not None:
        stop.set()
    for future in begun:
        future.cancel()
    wait(begun)


class _Caller(Executor):
    def __init__(self) -> None:
        self._failed = False

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        if self._failed:
            future.cancel()
            future.set_running_or_notify_cancel()  # else a wait for it never ends
            return future
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            self._failed = True
            future.set_exception(error)
        return future
