"""Say how long a server that cannot be reached is tried again, and hear of requests sent again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Retry:
    """A request that is sent again.

    Attributes:
        url: the store, without credentials.
        reason: why the last try failed, in one line.
        failing_s: seconds since the first of the failures in a row.
        unreachable: no server was reached: the connection was refused, the name not resolved, ...
    """

    url: str
    reason: str
    failing_s: float
    unreachable: bool


@dataclass(frozen=True)
class RetryPolicy:
    """How the stores of a caller try again; `retry_policy` explains it."""

    unreachable_timeout_s: float = math.inf
    on_retry: Callable[[Retry], None] | None = None


_PATIENT = RetryPolicy()
current_policy: ContextVar[RetryPolicy] = ContextVar("ckpt_retry_policy", default=_PATIENT)
"""The policy for a store that is opened here."""


@contextlib.contextmanager
def retry_policy(
    *, unreachable_timeout_s: float = math.inf, on_retry: Callable[[Retry], None] | None = None
) -> Iterator[None]:
    """Set how stores try again that are opened in the block, by this thread.

    The stores for `s3://` and `cos://` go by it, as long as they are open in this process. File
    systems of fsspec try again as they like, and tell nobody.

    Args:
        unreachable_timeout_s: how long a server that cannot be reached is tried again; by default
            as often as `max_attempts` allows, about 35 s. The storage option of the same name goes
            first. Within it no request waits longer than a quarter of it for a connection.
        on_retry: called before a request is sent again, whatever the failure, from any thread, and
            from many at the same time. It must not raise. Without it, the first failure in a row
            to reach a server is logged as a warning.
    """
    token = current_policy.set(RetryPolicy(unreachable_timeout_s, on_retry))
    try:
        yield
    finally:
        current_policy.reset(token)
