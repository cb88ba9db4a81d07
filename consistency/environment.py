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

__all__ = ["Environment", "jitter", "monotonic", "now", "replaced", "sleep", "token"]


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


@contextlib.contextmanager
def replaced(environment: Environment) -> Iterator[None]:
    """Have the whole process live in `environment` meanwhile."""
    global _current
    before, _current = _current, environment
    try:
        yield
    finally:
        _current = before
