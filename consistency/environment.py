"""What a process takes from its surroundings: the time, and chance. One seam, so that a simulation can stand in.

Everything that waits for storage or names what is stored goes through here. The simulator puts virtual time
and a seeded source in its place, and the code that runs is the code that ships.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Iterator

__all__ = ["Backoff", "Environment", "jitter", "monotonic", "now", "replaced", "sleep", "token"]


class Environment:
    """The real one."""

    def monotonic(self) -> float:
        """Seconds that never go back, from an arbitrary start."""
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def now(self) -> float:
        """Seconds since 1970 by this machine's clock, which may be wrong."""
        return time.time()

    def token(self) -> str:
        """16 hexadecimal digits that nobody has drawn before."""
        return secrets.token_hex(8)

    def jitter(self) -> float:
        """A number in [0, 1) that keeps clients from doing things at the same moment."""
        return random.random()


_current = Environment()


def monotonic() -> float:
    return _current.monotonic()


def sleep(duration_s: float) -> None:
    _current.sleep(duration_s)


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

    Without a timeout there is one attempt. The last one begins when the time is up, not earlier.
    """

    def __init__(self, timeout_s: float, *, first_pause_s: float = 0.1, longest_pause_s: float = 2.0) -> None:
        self._deadline = monotonic() + timeout_s
        self._pause_s, self._longest_pause_s = first_pause_s, longest_pause_s

    @property
    def is_over(self) -> bool:
        return monotonic() >= self._deadline

    def pause(self) -> None:
        """Sleep, but not past the end."""
        pause_s = self._pause_s * (0.5 + jitter())  # so that ranks do not all ask at the same moment
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
