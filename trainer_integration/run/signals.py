"""Note signals that ask a job to end, and let it end well though processes of its data loader die of them first."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.run.held_errors import unwrapped
from ckpt.trainer_integration.run.loader_workers import ProtectedWorkers

_logger = logging.getLogger(__name__)

_PATIENCE_S, _LOOK_S = 0.5, 0.01
"""How long to wait for a signal to this process when a child has died: it may have been sent to both, that one first."""

_MAX_REPORTS = 1000
"""How many loaders are asked for dead workers; torch reports one loader at a time."""


class Signals:
    """Note signals until `close`; handlers of the program's own are still called.

    Workers of a `DataLoader` that start from now on outlive the signals. For others, torch's handler of SIGCHLD raises
    an error in this process wherever it is when they die. After a signal that asks the job to end, that is logged
    instead: the loop goes on to its next step, which saves. The loader itself raises when it needs a dead worker.

    Attributes:
        received: the name of the last signal; None before the first.

    Raises ConfigurationError outside of the main thread.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        signals = [*signals]
        if signals and threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "saving.on_preemption handles signals, which only the main thread can; make the manager there"
            )
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._guard: Callable[[int, FrameType | None], None] | None = None
        self._before_guard: Any = None
        self._reports: list[str] = []
        self._is_open = bool(signals)
        self._workers = ProtectedWorkers(signals) if signals else None
        for number in signals:
            self._previous[number] = signal.signal(number, self._note)
        self.guard()

    def guard(self) -> None:
        """Put a guard before the handler of SIGCHLD, which torch installs when it first starts workers; log its reports."""
        if self._is_open and threading.current_thread() is threading.main_thread():
            self._put_guard()
            self._log()

    def _put_guard(self) -> None:
        handler = unwrapped(signal.getsignal(signal.SIGCHLD))
        if callable(handler) and handler is not self._guard:
            self._guard, self._before_guard = partial(self._on_child, handler), handler
            signal.signal(signal.SIGCHLD, self._guard)

    def close(self) -> None:
        """Restore the handlers."""
        if self._workers is not None:
            self._workers.close()
        guard = self._guard
        is_in_place = signal.getsignal(signal.SIGCHLD) is guard
        if guard is not None and is_in_place:
            if self.received is not None:
                guard(signal.SIGCHLD, None)  # torch has not reported every worker yet
            signal.signal(signal.SIGCHLD, self._before_guard)
        for number, handler in self._previous.items():
            # None: it was not installed from Python, and cannot be restored from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous, self._is_open = {}, False
        self._log()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if self._is_open:
            self._put_guard()
        previous = self._previous.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)

    def _on_child(
        self, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None
    ) -> None:
        """Call another handler of SIGCHLD; after a signal that asks this job to end, keep its errors for the log."""
        for _ in range(_MAX_REPORTS):
            try:
                handler(number, frame)
                return
            except Exception as error:
                if not self._is_open or not self._is_asked_to_end():
                    raise
                self._reports.append(str(error))  # not logged here: a handler may be in the middle of a line

    def _is_asked_to_end(self) -> bool:
        deadline_s = time.monotonic() + _PATIENCE_S
        while self.received is None and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)  # the handler of a signal that comes now runs in here
        return self.received is not None

    def _log(self) -> None:
        reports, self._reports = self._reports, []
        for report in reports:
            _logger.warning(
                "%s has asked this job to end, and a loader's process is gone: %s", self.received, report
            )
