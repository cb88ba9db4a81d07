"""Threads for transfers. Where one is enough, it is the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["workers"]

T = TypeVar("T")


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
