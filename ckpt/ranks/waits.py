"""Wait for other ranks: the log names the cause of a long wait, and a wait ends once a save has failed elsewhere."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ckpt.consistency import environment
from ckpt.ranks.progress import Progress

LONGEST_WAIT = timedelta(days=1)
"""In a collective: the watch ends a wait for a rank that stopped, and one that is slow may take its time."""

_SILENT_S = 10.0
_LOOK_EVERY_S = 1.0
_LOUD_RANKS = 2
"""The first ranks warn: of thousands that wait for one, two lines are enough, and one of these two waits too."""

_FAILED_EVERY_S = 0.5
_GRACE_S = 1.0
"""For gloo to wake a wait with an error that says more."""

_logger = logging.getLogger(__name__)


class _Group(Protocol):
    """Ranks that wait for each other."""

    rank: int

    @property
    def size(self) -> int: ...


class _Waits:
    """The waits of this process, and the thread that looks at them. It ends with the last wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[object, tuple[float, int, str]] = {}
        self._thread: threading.Thread | None = None

    def begin(self, key: object, rank: int, event: str) -> None:
        with self._lock:
            self._since[key] = time.monotonic(), rank, event
            if self._thread is None or not self._thread.is_alive():  # as in the child of a fork
                self._thread = threading.Thread(target=self._look, name="ckpt-waits", daemon=True)
                with contextlib.suppress(RuntimeError):  # Python is ending
                    self._thread.start()

    def end(self, key: object) -> None:
        with self._lock:
            self._since.pop(key, None)

    def _look(self) -> None:
        named = set[object]()
        while True:
            time.sleep(_LOOK_EVERY_S)
            with self._lock:
                if not self._since:
                    self._thread = None
                    return
                waits = [(key, *wait) for key, wait in self._since.items() if key not in named]
            for key, since_s, rank, event in waits:
                if time.monotonic() - since_s >= _SILENT_S:
                    named.add(key)
                    level = logging.WARNING if rank < _LOUD_RANKS else logging.INFO
                    _logger.log(level, "rank %d has been waiting for %.0f s for %s", rank, _SILENT_S, event)


_waits = _Waits()


@contextlib.contextmanager
def waiting_for(ranks: _Group, event: str) -> Iterator[None]:
    """Wait for other ranks within the block. After 10 s a line of the log says what this rank waits for: `event`."""
    if ranks.size == 1:
        yield
        return
    key = object()
    _waits.begin(key, ranks.rank, event)
    try:
        yield
    finally:
        _waits.end(key)


def finish(
    works: list[dist.Work],
    progress: Progress,
    longest_wait: timedelta = LONGEST_WAIT,
) -> None:
    """Wait until other ranks have received, or sent, these messages.

    gloo does not always wake a rank that sends to one that is gone, nor one that has a part of a message. So a
    thread waits for the messages, and this one for that thread.

    Args:
        works: is empty afterwards: what is kept of an error must not keep the group.
        progress: of this save or load; `given_up` says why it has failed on another rank.

    Raises:
        ConnectionError: it has failed, and gloo does not end the wait.
        RuntimeError: gloo's error.
    """
    done: Future[None] = Future()

    def carry_out() -> None:
        try:
            works.reverse()
            while works:
                works.pop().wait(longest_wait)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    try:
        environment.start_thread(carry_out, "ckpt-message")
    except RuntimeError:  # Python is ending, and starts no thread any more
        carry_out()
    while not wait_for([done], timeout=_FAILED_EVERY_S).done:
        reason = progress.given_up
        if reason is not None and not wait_for([done], timeout=_GRACE_S).done:
            raise ConnectionError(f"a message to or from another rank did not arrive: {reason}")
    done.result()
