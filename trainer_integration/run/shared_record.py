"""Keep the record of a run, which other processes write too."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError, FormatError, IntegrityError
from ckpt.format.run_record import RunCheckpoint, RunRecord, RunStart, read_run, write_run

_logger = logging.getLogger(__name__)

_MAX_STARTS = 1000
_MAX_WRITES = 3
"""How often to write a change that storage does not show: another process has just written too, or it lags."""
_MAX_REMOVED = 64
_PRIOR_S = 86_400.0

Change = Callable[[RunCheckpoint], RunCheckpoint | None]
"""Return a checkpoint of the record as it shall be, None without it; twice is the same as once."""


@dataclass(frozen=True)
class _Forget:
    """The change that takes one save of a folder off the record."""

    path: str
    saved_at_s: float

    def __call__(self, old: RunCheckpoint) -> RunCheckpoint | None:
        return None if (old.path, old.saved_at_s) == (self.path, self.saved_at_s) else old


class SharedRecord:
    """Keep a run's record; from any thread.

    Other processes write the record too. So a change is made to what is stored now, and written until
    storage shows it; what this process has saved is put back whenever it is missing.
    """

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None) -> None:
        self._store = open_store(root, storage_options)
        self._lock = threading.RLock()
        self._known: RunRecord | None = None
        self._changes: list[Change] = []  # that storage has not shown yet
        self._has_failed = False
        self._started_s = time.time()
        self.resumed_at = math.inf
        self._durable_at_s: float | None = None
        self._own: dict[str, RunCheckpoint] = {}
        self._found: dict[str, RunCheckpoint] = {}
        self._run, self._is_leading = "", False
        self._removed: list[str] = []  # ids of commits

    def look_again(self) -> None:
        """Read the record anew when it is next needed: another process may have written it."""
        with self._lock:
            self._known = None

    def durable(self) -> list[RunCheckpoint]:
        """List the checkpoints that were committed and are not given up, by the record."""
        return [checkpoint for checkpoint in self._record().checkpoints if not checkpoint.superseded]

    def given_up(self) -> list[RunCheckpoint]:
        """List those that were given up, by the record."""
        return [checkpoint for checkpoint in self._record().checkpoints if checkpoint.superseded]

    def known(self) -> list[RunCheckpoint]:
        """List the same, but read no storage."""
        return [old for old in (self._known or RunRecord()).checkpoints if not old.superseded]

    @property
    def run(self) -> str:
        """The id of the run, as far as the record was read; empty if it has none. It reads no storage."""
        recorded = "" if self._known is None else self._known.run
        return self._run or recorded if self._is_leading else recorded or self._run

    def stored_run(self) -> str:
        """Return the id of the run, and read the record if it was not; empty if it has none, or cannot be read."""
        if not self.is_read:
            with contextlib.suppress(CheckpointError):
                self._record()
        return self.run

    @property
    def removed(self) -> frozenset[str]:
        """The ids of the last commits that were removed, by the record. It reads no storage."""
        return frozenset(() if self._known is None else self._known.removed)

    @property
    def is_read(self) -> bool:
        """Tell whether storage has said what is on record."""
        return self._known is not None

    def belong_to(self, run: str, *, anew: bool = False) -> None:
        """Note, with the next change, the id of the run where there is none; `anew` begins a record of another one anew."""
        # Without the lock: who reads the record holds it, for as long as storage gives no answer.
        self._run, self._is_leading = run or self._run, anew

    def go_on_from(self, step: int) -> None:
        """Give up, with the next checkpoint, those that were saved after `step`."""
        self.resumed_at = step
        self._own.clear()

    def add(self, checkpoint: RunCheckpoint, *, is_own: bool = True) -> None:
        """Remember a checkpoint that has been committed; one of an earlier process if it is not on record."""
        with self._lock:
            (self._own if is_own else self._found)[checkpoint.path] = checkpoint
            self._durable_at_s = time.time()
            self._write()

    def find(self, steps: Mapping[str, int]) -> None:
        """Note, with the next change, checkpoints of earlier processes, by folder, that are not on record."""
        with self._lock:
            recorded = {checkpoint.path for checkpoint in self._record().checkpoints}
            for path in steps.keys() - recorded:
                self._found[path] = RunCheckpoint(step=steps[path], path=path, saved_at_s=0.0)

    def drop(self, checkpoint: RunCheckpoint, commit_id: str = "") -> None:
        """Forget a checkpoint that is removed next, and remember the id of its commit. Raises CheckpointError."""
        with self._lock:
            self._removed += [commit_id] if commit_id else []
            try:
                self._write(_Forget(checkpoint.path, checkpoint.saved_at_s))
            except CheckpointError:
                self.put_back(checkpoint)
                raise

    def put_back(self, checkpoint: RunCheckpoint) -> None:
        """Put it on record again: it could not be removed. What fails is tried again with the next change."""
        with self._lock:
            forgotten = _Forget(checkpoint.path, checkpoint.saved_at_s)
            self._changes = [change for change in self._changes if change != forgotten]
            self._found.setdefault(checkpoint.path, checkpoint)
            with contextlib.suppress(CheckpointError):
                self._write()

    def change(self, change: Change) -> None:
        """Change what is on record of the checkpoints."""
        with self._lock:
            self._write(change)

    def mtbf_s(self) -> float:
        """Estimate the mean time between failures: by this run's starts, and one assumed a day.

        One rank asks, while the others wait for what it decides, so this raises nothing.
        """
        known = self._known  # without the lock: a save that is being recorded must not hold up training
        if known is None and not self._has_failed:
            try:
                known = self._record()
            except CheckpointError as error:
                self._has_failed = True  # once is enough: at every step it would hold up training
                _logger.warning("the run's record cannot be read, failures are not counted: %s", error)
        return _mtbf_s([] if known is None else known.starts, self._started_s)

    def _record(self) -> RunRecord:
        with self._lock:
            if self._known is None:
                try:
                    stored = self._read()
                except FormatError as error:
                    _warn_of_unusable(error)
                    stored = None
                self._known = self._with_own(stored or RunRecord())
            return self._known

    def _read(self) -> RunRecord | None:
        """Read the record; None without one, or if it is damaged. Raises FormatError, StorageError."""
        try:
            return read_run(self._store)
        except IntegrityError as error:
            _warn_of_unusable(error)
            return None

    def _write(self, change: Change | None = None) -> None:
        """Write what this process has changed, with what others have written meanwhile.

        Raises FormatError, and writes nothing, if a newer version of this library wrote the record.
        """
        if change is not None:
            self._changes.append(change)
        if self._known is not None:
            self._known = self._with_own(self._known)  # also if storage fails; the next write has it too
        for _ in range(_MAX_WRITES):
            stored = self._read()
            self._known = self._with_own(stored or self._known or RunRecord())
            if self._known == (stored or RunRecord()):
                self._changes.clear()
                return
            write_run(self._store, self._known)

    def _with_own(self, record: RunRecord) -> RunRecord:
        """Put what this process has saved, given up and changed into a record."""
        if self._is_leading and self._run and record.run not in ("", self._run):
            record = RunRecord()
        known = {**self._found, **{old.path: old for old in record.checkpoints}}
        by_path = {path: self._as_past(old) for path, old in known.items()}
        by_path |= {path: own for path, own in self._own.items() if _is_newest(own, by_path.get(path))}
        for change in self._changes:
            changed = map(change, by_path.values())
            by_path = {new.path: new for new in changed if new is not None}
        self._own = {path: by_path[path] for path in self._own if path in by_path}
        self._found = {path: by_path[path] for path in self._found if path in by_path}
        starts = record.starts
        if self._durable_at_s is not None:
            own_start = RunStart(at_s=self._started_s, durable_at_s=self._durable_at_s)
            starts = [start for start in starts if start.at_s != self._started_s] + [own_start]
        return RunRecord(
            checkpoints=sorted(by_path.values(), key=lambda old: (old.step, old.path)),
            starts=sorted(starts, key=lambda start: start.at_s)[-_MAX_STARTS:],
            run=record.run or self._run,
            removed=[*dict.fromkeys([*record.removed, *self._removed])][-_MAX_REMOVED:],
        )

    def _as_past(self, checkpoint: RunCheckpoint) -> RunCheckpoint:
        given_up = self._own and checkpoint.step > self.resumed_at and checkpoint.path not in self._own
        return msgspec.structs.replace(checkpoint, superseded=True) if given_up else checkpoint


def _is_newest(own: RunCheckpoint, old: RunCheckpoint | None) -> bool:
    """Tell whether a save of this process takes the place of what is on record of its folder."""
    # A later entry is that of another process, which has saved the same step. But clocks go back: one that was given
    # up, and is another save, is of the past.
    if old is None or old.saved_at_s < own.saved_at_s:
        return True
    return old.superseded and old.saved_at_s != own.saved_at_s


def _warn_of_unusable(error: CheckpointError) -> None:
    _logger.warning("the run's record cannot be used, its checkpoints are listed: %s", error)


def _mtbf_s(starts: Sequence[RunStart], started_s: float) -> float:
    """Estimate the mean time between failures from a run's starts, this one too."""
    ran_s = sum(max(0.0, start.durable_at_s - start.at_s) for start in starts)
    failures = sum(start.at_s != started_s for start in starts)
    return (_PRIOR_S + ran_s) / (1 + failures)
