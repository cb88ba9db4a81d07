"""Note signals that ask a job to end, and let it end well though processes of its data loader die of them first."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.run.held_errors import unwrapped
from ckpt.trainer_integration.run.loader_workers import ProtectedWorkers

_logger = logging.getLogger(__name__)

_PATIENCE_S, _LOOK_S = 0.5, 0.01
"""How long to wait for a signal to this process when a child has died: it may have been sent to both, that one first."""

_MAX_REPORTS = 1000
"""How many loaders are asked for dead workers; torch reports one loader at a time, each once."""


class Signals:
    """Note signals until `close`; handlers of the program's own are still called.

    Workers of a `DataLoader` that start from now on outlive the signals. For others, torch's handler of SIGCHLD raises
    an error in this process wherever it is when they die. After a signal that asks the job to end, that is logged
    instead: the loop goes on to its next step, which saves. The loader itself raises when it needs a dead worker.

    Several may be open in a process, and close in any order.

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
        self.reports: list[str] = []
        self._handlers: dict[signal.Signals, _Handler] = {}
        self._workers = ProtectedWorkers(signals) if signals else None
        if signals:
            _open.append(self)
        for number in signals:
            handler = self._handlers[number] = _Handler(self, signal.getsignal(number))
            signal.signal(number, handler)
        self.guard()

    def guard(self) -> None:
        """Put a guard before the handler of SIGCHLD, which torch installs when it first starts workers; log its reports."""
        if self in _open and threading.current_thread() is threading.main_thread():
            _put_guard()
            self._log()

    def note(self, number: int) -> None:
        """Note a signal that has come; from its handler."""
        self.received = signal.Signals(number).name
        _put_guard()

    def handles(self, number: int) -> bool:
        """Tell whether it notes this signal."""
        return number in self._handlers

    def close(self) -> None:
        """Restore the handlers that no other has replaced; those that stay, as others call them, note nothing any more."""
        if self not in _open:
            return
        assert self._workers is not None
        self._workers.close()
        is_main = threading.current_thread() is threading.main_thread()  # else handlers cannot be changed
        guard = unwrapped(signal.getsignal(signal.SIGCHLD))
        if isinstance(guard, _Guard) and is_main and self.received is not None:
            guard(signal.SIGCHLD, None)  # torch has not reported every worker yet
        _open.remove(self)
        for handler in (handler for each in _open for handler in each._handlers.values()):
            handler.previous = _in_use(handler.previous)
        if is_main:
            if isinstance(guard, _Guard) and not _open:
                signal.signal(signal.SIGCHLD, _in_use(guard))
            for number in self._handlers:
                current = unwrapped(signal.getsignal(number))
                if _in_use(current) is not current:
                    signal.signal(number, _in_use(current))
        self._log()

    def _log(self) -> None:
        reports = self.reports
        self.reports = []
        for report in reports:
            _logger.warning(
                "%s has asked this job to end, and a loader's process is gone: %s", self.received, report
            )


_open: list[Signals] = []


class _Handler:
    """The handler of a signal, until its owner closes; then it passes on."""

    def __init__(self, owner: Signals, previous: Any) -> None:
        self.owner = owner
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.owner in _open:
            self.owner.note(number)
        previous = _in_use(self.previous)
        if callable(previous):
            previous(number, frame)
        elif previous is not signal.SIG_IGN and not any(each.handles(number) for each in _open):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class _Guard:
    """A handler of SIGCHLD that calls another; after a signal that asks this job to end, it keeps its errors for the log."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        last: str | None = None
        for _ in range(_MAX_REPORTS):
            try:
                self.previous(number, frame)
                return
            except Exception as error:
                asked = _asked_to_end()
                if asked is None:
                    raise
                if str(error) == last:
                    return  # not torch's, but one that always raises
                last = str(error)
                asked.reports.append(last)  # not logged here: a handler may be in the middle of a line


def _in_use(handler: Any) -> Any:
    """Return the first handler of a chain that is not one of a closed owner, or a guard that is no longer needed."""
    handler = unwrapped(handler)
    while (isinstance(handler, _Handler) and handler.owner not in _open) or (
        isinstance(handler, _Guard) and not _open
    ):
        handler = unwrapped(handler.previous)
    # None: it was not installed from Python, and cannot be restored from there.
    return signal.SIG_DFL if handler is None else handler


def _put_guard() -> None:
    handler = unwrapped(signal.getsignal(signal.SIGCHLD))
    if callable(handler) and not isinstance(handler, _Guard):
        signal.signal(signal.SIGCHLD, _Guard(handler))


def _asked_to_end() -> Signals | None:
    """Return one that a signal has reached, perhaps in a moment: it may have been sent to a child first."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while _open:
        for each in _open:
            if each.received is not None:
                return each
        if time.monotonic() >= deadline_s:
            break
        time.sleep(_LOOK_S)  # the handler of a signal that comes now runs in here
    return None
