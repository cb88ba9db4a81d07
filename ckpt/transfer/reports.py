"""Report how far work has come."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

Report = Callable[[int, int], None]
"""Called with what is done so far, and with all that is known to be there: bytes, or an `Amount` of something else."""
ReportBytes = Report
"""Called with the bytes done so far and those in all."""


class Amount(int):
    """Count what is not bytes: a number that says what it counts, for a report of two of them.

    Attributes:
        noun: one of what is counted: `object`.
        size_bytes: the size of all that is counted; None where nobody knows it.
    """

    noun: str
    size_bytes: int | None

    def __new__(cls, number: int, noun: str, size_bytes: int | None = None) -> Self:
        made = super().__new__(cls, number)
        made.noun, made.size_bytes = noun, size_bytes
        return made

    def __reduce__(self) -> tuple[type[Amount], tuple[int, str, int | None]]:
        return Amount, (int(self), self.noun, self.size_bytes)  # a bar may be drawn by another process


def no_report(done: int, total: int) -> None:
    """Report to nobody."""


class Tally:
    """Adds up, from any thread, what there is to do, as that becomes known, and what is done; reports both.

    Bytes; or, with a `noun`, things of that name, each an `Amount` with its size.
    """

    def __init__(self, report: Report, noun: str | None = None) -> None:
        self._report, self._noun = report, noun
        self._lock = threading.Lock()
        self._done, self._total = (0, 0), (0, 0)

    def expect(self, more: int, size_bytes: int = 0) -> None:
        """Say that there is so much more to do."""
        with self._lock:
            self._total = self._total[0] + more, self._total[1] + size_bytes
            self._tell()

    def add(self, more: int, size_bytes: int = 0) -> None:
        """Say that so much more is done; what is done twice is no more than there is."""
        with self._lock:
            number, nbytes = self._total
            self._done = min(self._done[0] + more, number), min(self._done[1] + size_bytes, nbytes)
            self._tell()

    def _tell(self) -> None:
        if self._noun is None:
            self._report(self._done[0], self._total[0])
            return
        (done, done_bytes), (total, total_bytes) = self._done, self._total
        sizes = (done_bytes, total_bytes) if total_bytes else (None, None)
        self._report(Amount(done, self._noun, sizes[0]), Amount(total, self._noun, sizes[1]))


class FileReports:
    """Reports the bytes of files, part by part, while threads send them; a part that is sent again counts once."""

    def __init__(self, report: ReportBytes, total_bytes: int) -> None:
        self._report, self._total_bytes = report, total_bytes
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._parts: defaultdict[str, dict[int, int]] = defaultdict(dict)

    def part(self, key: str, start: int, stop: int) -> None:
        """Count bytes `[start, stop)` of a file that is on its way."""
        with self._lock:
            self._count(stop - start - self._parts[key].get(start, 0))
            self._parts[key][start] = stop - start

    def whole(self, key: str, size_bytes: int) -> None:
        """Count a file that has arrived, or was there."""
        with self._lock:
            self._count(size_bytes - sum(self._parts.pop(key, {}).values()))

    def _count(self, more_bytes: int) -> None:
        self._done_bytes += more_bytes
        self._report(min(self._done_bytes, self._total_bytes), self._total_bytes)
