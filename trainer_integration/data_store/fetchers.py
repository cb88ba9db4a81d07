"""Threads that fetch ahead, and that no process waits for when it ends."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Work = tuple["Future[Any]", Callable[[], Any]]

_of_process: weakref.WeakValueDictionary[int, Fetchers] = weakref.WeakValueDictionary()


def fetchers_of_process(threads: int) -> Fetchers:
    """Return the threads of this process, which all its sources share; a forked one has its own."""
    fetchers = _of_process.get(os.getpid())
    if fetchers is None:
        fetchers = _of_process[os.getpid()] = Fetchers(threads)
    return fetchers


class Fetchers:
    """A few daemon threads, which begin when they are needed and end with this object.

    The threads of a `ThreadPoolExecutor` are waited for at the end of their process, with all that is queued for them.
    """

    def __init__(self, threads: int) -> None:
        self._left = threads
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        weakref.finalize(self, _end, self._queue, threads).atexit = False

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Call `call` in a thread."""
        future: Future[Any] = Future()
        self._queue.put((future, call))
        if self._left:
            self._left -= 1
            threading.Thread(target=_work, args=(self._queue,), name="ckpt-data", daemon=True).start()
        return future


def _work(queue: SimpleQueue[_Work | None]) -> None:
    while (work := queue.get()) is not None:
        _carry_out(*work)
        del work  # else a thread that waits keeps what it has done


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _end(queue: SimpleQueue[_Work | None], threads: int) -> None:
    for _ in range(threads):
        queue.put(None)
