"""Call again while storage gives no answer, for a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from ckpt.consistency import environment
from ckpt.errors import AccessDenied, NotFound, StorageError, StorageFull

_logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_FINAL = (AccessDenied, NotFound, StorageFull)
"""Errors of storage that do not pass by themselves."""

T = TypeVar("T")


def patiently(
    call: Callable[[], T],
    *,
    outage_s: float,
    stop: threading.Event,
    first_pause_s: float = _FIRST_PAUSE_S,
    is_over: Callable[[], bool] = lambda: False,
    passing: tuple[type[Exception], ...] = (StorageError,),
    final: tuple[type[Exception], ...] = _FINAL,
) -> T:
    """Return what `call` returns; call again after errors of storage, for `outage_s` seconds at most.

    Args:
        stop: set to have it end with the last error.
        is_over: asked after each error; True ends it too.
        passing, final: errors after which to call again, and those of them that are raised at once.
    """
    failing_since_s: float | None = None
    pause_s = first_pause_s
    while True:
        try:
            return call()
        except final:
            raise
        except passing as error:
            now_s = environment.monotonic()
            if failing_since_s is None:
                failing_since_s = now_s
                _logger.warning("trying again for %.0f s at most: %s", outage_s, error)
            if now_s - failing_since_s >= outage_s or is_over():
                raise
            if environment.wait(stop, pause_s):
                raise
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
