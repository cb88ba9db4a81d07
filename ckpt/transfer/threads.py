"""Many small pieces of work in threads, few of them under way at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["in_order"]

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
