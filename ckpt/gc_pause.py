"""Python's garbage collector, kept from walking over records while they are being made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["no_gc"]


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """For short work that makes very many small objects which all live on: they would be walked again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
