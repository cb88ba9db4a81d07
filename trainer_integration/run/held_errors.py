"""Put off exceptions that handlers of signals raise inside a manager's call until its state is whole again.

A handler runs in the main thread between any two instructions: also while a lock is held that another thread needs,
or when an upload has begun that is not noted yet. What it raises there would leave the manager broken, or hanging.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_logger = logging.getLogger(__name__)

_LOOK_S = 0.1

_hold: _Hold | None = None
"""The one of the call that the main thread is in."""

_handled: list[int] = []
"""Signals that had handlers of Python when all were last looked through, which takes 0.1 ms."""


@contextlib.contextmanager
def errors_held(*, look_through: bool = True) -> Iterator[None]:
    """Put off what handlers of signals raise in the block until its end; the handlers themselves run without delay.

    An interrupt (not an `Exception`: KeyboardInterrupt, SystemExit) that comes a second time is raised at that moment:
    the block may be waiting for storage that does not answer. Without `look_through`, handlers count that were seen
    by an earlier block. Inside another block, that one's end counts. Handlers run in the main thread alone, so in others
    this does nothing. An error of the block itself comes out of it, unless an interrupt does; what was put off is logged then.
    """
    global _hold
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _hold is not None:
        _hold.install(look_through=look_through)
        yield
        return
    hold = _Hold()
    has_failed = True
    try:
        _hold = hold
        hold.install(look_through=look_through)
        yield
        has_failed = False
    finally:
        _hold = None
        hold.restore()
        if has_failed:
            hold.log_errors()
        hold.raise_first()


def raise_held() -> None:
    """Raise what is put off, at a point where nothing is half done."""
    if _hold is not None and threading.current_thread() is threading.main_thread():
        _hold.raise_first()


def wait_for(event: threading.Event, timeout_s: float | None = None) -> bool:
    """Wait for an event; return whether it was set in time. Raises what is put off."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = _LOOK_S if deadline_s is None else min(_LOOK_S, deadline_s - time.monotonic())
        if event.wait(max(0.0, left_s)):
            return True
        raise_held()
        if left_s <= 0:
            return False


def pause(seconds: float) -> None:
    """Sleep; raise what is put off."""
    time.sleep(seconds)
    raise_held()


def unwrapped(handler: Any) -> Any:
    """Return a handler as it was before a block wrapped it."""
    while isinstance(
        handler, _Wrapped
    ):  # two if one was left behind: a handler raised while they were restored
        handler = handler.previous
    return handler


class _Hold:
    """The handlers that are wrapped for one call, and what they have raised."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []
        self._interrupted: set[int] = set()
        self._wrapped: dict[int, _Wrapped] = {}

    def install(self, *, look_through: bool) -> None:
        """Wrap the handlers; one at a time, and each of them works at any moment."""
        if look_through or not _handled:
            _handled[:] = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
        for number in {*_handled, *_often_late()}:
            current = signal.getsignal(number)
            handler = unwrapped(current)
            if callable(handler) and current is not self._wrapped.get(number):
                wrapped = self._wrapped[number] = _Wrapped(handler, self)
                signal.signal(number, wrapped)

    def restore(self) -> None:
        """Put the handlers back that nothing has replaced."""
        for number, wrapped in self._wrapped.items():
            previous = wrapped.previous
            if signal.getsignal(number) is wrapped:
                signal.signal(number, previous)

    def take(self, number: int, error: BaseException) -> None:
        """Keep an error for later. Raises an interrupt that has come before."""
        if not isinstance(error, Exception):
            if number in self._interrupted:
                raise error
            self._interrupted.add(number)
        self._errors.append(error)

    def log_errors(self) -> None:
        """Log what is put off, but interrupts."""
        for error in self._errors:
            if isinstance(error, Exception):
                _logger.warning("a signal's handler has raised in a call that failed: %r", error)
        self._errors = [error for error in self._errors if not isinstance(error, Exception)]

    def raise_first(self) -> None:
        """Raise the first interrupt, or else the first error; once."""
        errors, self._errors = self._errors, []
        interrupts = [error for error in errors if not isinstance(error, Exception)]
        for error in [*interrupts, *errors][:1]:
            raise error


class _Wrapped:
    """A handler whose errors a hold takes, while that is the current one."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any], hold: _Hold) -> None:
        self.previous, self._hold = previous, hold

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.previous(number, frame)
        except BaseException as error:
            if _hold is not self._hold:
                raise
            self._hold.take(number, error)


def _often_late() -> list[int]:
    """List signals whose handlers torch and batch systems' libraries install in the middle of a training."""
    names = ("SIGCHLD", "SIGALRM")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]
