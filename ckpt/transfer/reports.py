"""Report how far work has come."""

from __future__ import annotations

from collections.abc import Callable

ReportBytes = Callable[[int, int], None]
"""Called with the bytes done so far and those in all."""


def no_report(done: int, total: int) -> None:
    """Report to nobody."""
