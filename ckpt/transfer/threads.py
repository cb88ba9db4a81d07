"""Run work in threads: bounded, in order, and in the caller's own thread where one is enough."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

__all__ = ["in_order", "workers"]

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    threads: ThreadPoolExecutor,
    work: Callable[[T], R],
    todo: Iterable[T],
    *,
    ahead: int,
    stop: threading.Event | None = None,
) -> Iterator[R]:
    """`work` of each item of `todo`, in order; at most `ahead` are begun before the first is taken.

    Unlike `Executor.map` it does not read all of `todo` at once. When it ends early, what was begun is waited for;
    `stop` is set then, for work that can end early too.
    """
    begun: deque[Future[R]] = deque()
    try:
        for item in todo:
            begun.append(threads.submit(work, item))
            if len(begun) >= ahead:
                yield _first(begun)
        while begun:
            yield _first(begun)
    finally:
        if begun and stop is not None:
            stop.set()
        for future in begun:
            future.cancel()
        wait(begun)


def _first(begun: deque[Future[R]]) -> R:
    """The first result. Until it is there its work counts as begun, also for whoever is interrupted meanwhile."""
    result = begun[0].result()
    begun.popleft()
    return result


def workers(threads: int, name: str) -> Executor:
    """An executor of `threads` threads named `name`.

    Of one, it carries out each call when it is submitted, and none any more once one has failed.
    """
    return _Caller() if threads == 1 else ThreadPoolExecutor(threads, thread_name_prefix=name)


class _Caller(Executor):
    def __init__(self) -> None:
        self._failed = False

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        if self._failed:
            future.cancel()
            future.set_running_or_notify_cancel()  # else whoever waits for it waits for ever
            return future
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            self._failed = True
            future.set_exception(error)
        return future
