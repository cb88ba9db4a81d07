"""Take time, chance and threads from one place, so that a simulation can replace them.

Everything that waits for storage or ranks, or names what is stored, goes through here. The
simulator puts virtual time, a seeded source and its own processes in its place.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator


class Environment:
    """The real one."""

    def monotonic(self) -> float:
        """Return seconds that never go back, from an arbitrary start."""
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until `event` is set; return False if it was not in time."""
        return event.wait(timeout_s)

    def start_thread(self, work: Callable[[], object], name: str) -> None:
        """Run `work` in a daemon thread. Raises RuntimeError when Python is ending."""
        threading.Thread(target=work, name=name, daemon=True).start()

    def now(self) -> float:
        """Return seconds since 1970 by this machine's clock, which may be wrong."""
        return time.time()

    def token(self) -> str:
        """Return 16 hexadecimal digits that nobody has drawn before."""
        return secrets.token_hex(8)

    def jitter(self) -> float:
        """Return a number in [0, 1) that keeps clients from acting at the same moment."""
        return random.random()


_current = Environment()


def monotonic() -> float:
    return _current.monotonic()


def sleep(duration_s: float) -> None:
    _current.sleep(duration_s)


def wait(event: threading.Event, timeout_s: float) -> bool:
    return _current.wait(event, timeout_s)


def start_thread(work: Callable[[], object], name: str) -> None:
    _current.start_thread(work, name)


def now() -> float:
    return _current.now()


def token() -> str:
    return _current.token()


def jitter() -> float:
    return _current.jitter()


class Backoff:
    """Pause between attempts, each time longer, until `timeout_s` seconds have passed.

        backoff = Backoff(timeout_s)
        while (result := attempt()) is None and not backoff.is_over:
            backoff.pause()

    A timeout of 0 means one attempt. The last attempt begins when the time is up, not earlier.
    """

    def __init__(self, timeout_s: float, *, first_pause_s: float = 0.1, longest_pause_s: float = 2.0) -> None:
        self._deadline = monotonic() + timeout_s
        self._pause_s, self._longest_pause_s = first_pause_s, longest_pause_s

    @property
    def is_over(self) -> bool:
        return monotonic() >= self._deadline

    def pause(self) -> None:
        """Sleep, but not past the end."""
        pause_s = self._pause_s * (0.5 + jitter())  # so that ranks do not ask all at once
        sleep(max(0.0, min(pause_s, self._deadline - monotonic())))
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)


@contextlib.contextmanager
def replaced(environment: Environment) -> Iterator[None]:
    """Have the whole process live in `environment` meanwhile."""
    global _current
    before, _current = _current, environment
    try:
        yield
    finally:
        _current = before
