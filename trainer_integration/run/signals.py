"""Signals that ask a job to end: noted when they come, obeyed at the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from ckpt.errors import ConfigurationError

__all__ = ["Signals"]


class Signals:
    """Notes signals in the place of what they would do by themselves, until `close`.

    A handler that the program had installed is still called; the default action, which ends it, is not taken.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        signals = [*signals]
        if signals and threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("on_preemption: signals can be handled in the main thread only")
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        for number in signals:
            self._previous[number] = signal.signal(number, self._note)

    def close(self) -> None:
        for number, handler in self._previous.items():
            # None: it was not installed from Python, and cannot be put back from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        previous = self._previous.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)
