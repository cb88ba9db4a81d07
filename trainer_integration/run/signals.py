"""Note signals that ask a job to end, so that they are obeyed at the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from ckpt.errors import ConfigurationError


class Signals:
    """Note signals until `close`, in place of their default action, which ends the program.

    A handler that the program had installed is still called.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        signals = [*signals]
        if signals and threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "saving.on_preemption handles signals, which only the main thread can; make the manager there"
            )
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        for number in signals:
            self._previous[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Restore the handlers."""
        for number, handler in self._previous.items():
            # None: it was not installed from Python, and cannot be restored from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        previous = self._previous.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)
