"""Collect the warnings that the library logs, also in a rank, which has no fixtures."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_of_ckpt() -> Iterator[list[str]]:
    """Yield a list that each warning or error of the library is added to."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Collect(logging.WARNING), logging.getLogger("ckpt")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
