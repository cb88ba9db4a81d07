"""Bound what a scrub reads, and choose what it reads of a checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ckpt.consistency import environment
from ckpt.errors import ConfigurationError
from ckpt.format.names import split_path
from ckpt.format.records import FileRecord
from ckpt.transfer.bandwidth import Pacer
from ckpt.transfer.relay_bodies import Range, runs


class Budget:
    """Counts what is read, and paces it.

    Raises ConfigurationError for limits that let nothing through.
    """

    def __init__(
        self, max_bytes: float | None, max_s: float | None, bandwidth_bytes_per_s: float | None
    ) -> None:
        for name, limit in ("max_bytes", max_bytes), ("max_s", max_s):
            if limit is not None and not limit > 0:
                raise ConfigurationError(f"{name} must be above 0, not {limit!r:.100}")
        self._max_bytes = max_bytes
        self._until_s = None if max_s is None else environment.monotonic() + max_s
        self._pacer = None if bandwidth_bytes_per_s is None else Pacer(bandwidth_bytes_per_s)
        self.used_bytes = 0
        self._is_spent = False

    @property
    def is_over(self) -> bool:
        """True if nothing more may be read."""
        is_late = self._until_s is not None and environment.monotonic() >= self._until_s
        return self._is_spent or is_late

    def bound(self, nbytes: int) -> int:
        """Return how much of so many bytes may be read."""
        return nbytes if self._max_bytes is None else min(nbytes, int(self._max_bytes))

    def take(self, nbytes: int) -> bool:
        """Wait until so many bytes may be read, and count them; False if they may not.

        The first ones, a run of blocks, always may be, so that every scrub gets on.
        """
        fits = self._max_bytes is None or self.used_bytes + nbytes <= self._max_bytes
        if self.used_bytes and (self.is_over or not fits):
            self._is_spent = True
            return False
        self.used_bytes += nbytes
        if self._pacer is not None:
            self._pacer.wait(nbytes)
        return True


class Position:
    """Goes through the data files that a check reads in order, from where the last one was cut off.

    Those of other checkpoints that are checked themselves are not among them.

    Attributes:
        at: how many bytes were checked so far.
        is_cut: the budget was over before the end.
    """

    def __init__(self, start: int, budget: Budget, is_covered: Callable[[str], bool]) -> None:
        self.at, self.is_cut = start, False
        self._start, self._budget, self._is_covered = start, budget, is_covered
        self._listed_bytes = 0
        self._handed: deque[int] = deque()

    def ranges(self, file: FileRecord, block_size_bytes: int) -> Iterator[Range]:
        """Choose what to read of the next file."""
        owner = split_path(file.path)[0]
        if owner and self._is_covered(owner):
            return
        begin = self._listed_bytes
        self._listed_bytes += file.size_bytes
        offset = max(0, self._start - begin)
        if offset >= file.size_bytes:
            return  # also if its last block is a short one
        for start, stop in runs(file.size_bytes, block_size_bytes, offset - offset % block_size_bytes):
            if self.is_cut or not self._budget.take(stop - start):
                self.is_cut = True
                return
            self._handed.append(begin + stop)
            yield start, stop

    def passed(self, nbytes: int) -> None:
        """Note that the range that was handed out first has been checked, if it was one."""
        if nbytes:
            self.at = max(self.at, self._handed.popleft())
