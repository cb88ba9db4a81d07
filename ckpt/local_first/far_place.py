"""Ask the durable place without being held up by it: in a thread, and for some time only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from ckpt.consistency import environment
from ckpt.errors import StorageUnavailable

_AGAIN_S = 1.0
"""How long a place that was silent is waited for, until it answers."""

_LOOK_S = 60.0

T = TypeVar("T")


class Asked(Generic[T]):
    """A question, which a thread of its own asks."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._is_over = threading.Event()

        def run() -> None:
            try:
                self._future.set_result(ask())
            except BaseException as error:
                self._future.set_exception(error)
            finally:
                self._is_over.set()

        environment.start_thread(run, "ckpt-ask")

    def is_answered(self, timeout_s: float = 0.0) -> bool:
        """Wait for the answer, or until the time is up."""
        return environment.wait(self._is_over, timeout_s)

    def answer(self) -> T:
        """Wait for the answer, as long as the store's own limits let it take; return it, or raise its error."""
        while not environment.wait(self._is_over, _LOOK_S):
            pass
        return self._future.result()


class FarPlace:
    """The durable place of a run, as the nodes see it that can do without for a while.

    Args:
        place: its name in texts.
        timeout_s: how long to wait for an answer. If none came, the next questions are given a second,
            until one is answered.
    """

    def __init__(self, place: str, timeout_s: float) -> None:
        self._place, self._timeout_s, self._is_silent = place, timeout_s, False

    def wait(self, asked: Asked[T]) -> T:
        """Return the answer. Raises StorageUnavailable if it does not come in time, or the answer's error."""
        timeout_s = min(_AGAIN_S, self._timeout_s) if self._is_silent else self._timeout_s
        self._is_silent = not asked.is_answered(timeout_s)
        if self._is_silent:
            raise StorageUnavailable(f"no answer within {timeout_s:g} s", url=self._place)
        return asked.answer()

    def ask(self, question: Callable[[], T]) -> T:
        """Ask, and wait as `wait` does; the question goes on if its time is up."""
        return self.wait(Asked(question))
