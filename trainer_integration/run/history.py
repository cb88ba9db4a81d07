"""Find, remember and remove the checkpoints of a run, on its first rank."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ckpt.api import place_of
from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError, FormatError, IntegrityError, NotCommitted, NotFound, StorageError
from ckpt.format.run_record import RunCheckpoint, RunRecord, RunStart, read_run, write_run
from ckpt.reading.latest import Candidate, examine, newest_first
from ckpt.tools.remove import remove
from ckpt.trainer_integration.keeping import Best, KeepRule

_logger = logging.getLogger(__name__)

_MAX_STARTS = 1000
_PRIOR_S = 86_400.0


class History:
    """Keep the run's record, and complete it from a listing; from any thread.

    Attributes:
        place: the root as texts show it, without credentials.
        unusable: folders whose checkpoint is damaged, or another program's, and stays as it is.
    """

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None) -> None:
        self.root, self.storage_options = root.rstrip("/") or "/", storage_options
        self.place = place_of(self.root)
        self._store = open_store(root, storage_options)
        self._lock = threading.RLock()
        self._known: RunRecord | None = None
        self._is_written, self._has_failed = True, False
        self._started_s = time.time()
        self._resumed_at = math.inf
        self._own: set[str] = set()
        self.unusable: set[str] = set()

    def url(self, path: str) -> str:
        """Return where to save or load; not for texts, as it may hold a password."""
        return f"{self.root.rstrip('/')}/{path}"

    def shown(self, path: str) -> str:
        """Return where a checkpoint is, for texts."""
        return f"{self.place.rstrip('/')}/{path}"

    def path(self, step: int) -> str:
        """Name the folder for a save of `step`."""
        name = f"step-{step:08d}"
        return f"{name}.again" if name in self.unusable else name

    def candidates(self) -> list[tuple[int, str]]:
        """List steps and folders in which a checkpoint may be, the newest first."""
        names: list[str] = []
        try:
            names += self._store.folders()
        except StorageError as error:
            if not self._record().checkpoints:
                raise
            _logger.warning(
                "the checkpoints cannot be listed, only those in the run's record are known: %s", error
            )
        return newest_first(names, self._record())

    def look_again(self) -> None:
        """Read the record anew when it is next needed: another process may have written it."""
        with self._lock:
            if self._is_written:
                self._known = None

    def durable_steps(self) -> list[int]:
        """List the steps that were committed and are not given up, by the record."""
        return [checkpoint.step for checkpoint in self._alive()]

    def at(self, step: int) -> list[tuple[int, str]]:
        """List `step` and the folders in which its checkpoint may be, the likeliest first."""
        known = [recorded.path for recorded in self._record().checkpoints if recorded.step == step]
        name = f"step-{step:08d}"
        return [(step, path) for path in dict.fromkeys([*known, f"{name}.again", name])]

    def best(self, rule: Best) -> list[tuple[int, str]]:
        """List steps and folders, the best first."""
        return [(checkpoint.step, checkpoint.path) for checkpoint in rule.ranked(self._alive())]

    def examine(self, path: str) -> Candidate:
        """Look at a checkpoint. Raises NotFound, NotCommitted or CommitConflict if it is gone."""
        with contextlib.closing(open_store(self.url(path), self.storage_options)) as store:
            return examine(store)

    def go_on_from(self, step: int) -> None:
        """Give up, with the next checkpoint, those that were saved after `step`."""
        self._resumed_at = step
        self._own.clear()

    def add(self, checkpoint: RunCheckpoint) -> None:
        """Remember a checkpoint that has been committed."""
        with self._lock:
            record = self._record()
            self._own.add(checkpoint.path)
            others = [self._as_past(old) for old in record.checkpoints if old.path != checkpoint.path]
            checkpoints = sorted([*others, checkpoint], key=lambda old: (old.step, old.path))
            starts = [start for start in record.starts if start.at_s != self._started_s]
            starts.append(RunStart(at_s=self._started_s, durable_at_s=time.time()))
            self._write(checkpoints, starts[-_MAX_STARTS:])

    def annotate(
        self, step: int, metrics: Mapping[str, float] | None = None, *, pinned: bool | None = None
    ) -> None:
        """Note metrics of a durable checkpoint, or whether it is pinned. Raises NotFound."""
        with self._lock:
            record = self._record()
            checkpoints = [*record.checkpoints]
            if step not in {old.step for old in checkpoints}:
                raise NotFound(f"the run has no durable checkpoint of step {step}", url=self.place)
            for number, old in enumerate(checkpoints):
                if old.step == step:
                    known = old.metrics | plain_metrics(metrics)
                    is_pinned = old.pinned if pinned is None else pinned
                    checkpoints[number] = msgspec.structs.replace(old, metrics=known, pinned=is_pinned)
            self._write(checkpoints, record.starts)

    def retire(self, keep: KeepRule, newest: str) -> Iterator[tuple[RunCheckpoint, CheckpointError | None]]:
        """Remove checkpoints that no rule keeps, but not `newest`; yield each, and any error."""
        stay = {newest}
        while True:
            failure: CheckpointError | None = None
            with self._lock:  # a pin that comes meanwhile finds the checkpoint gone, or keeps it
                kept = self.kept(keep)
                unkept = (old for old in self._alive() if old.step not in kept and old.path not in stay)
                checkpoint = next(unkept, None)
                if checkpoint is None:
                    return
                try:
                    self._remove(checkpoint)
                except CheckpointError as error:
                    failure = error
                    stay.add(checkpoint.path)
            yield checkpoint, failure

    def kept(self, keep: KeepRule) -> dict[int, str]:
        """List the steps that stay, and the rule that keeps each, or that it is pinned."""
        alive = self._alive()
        pinned = {checkpoint.step: "pinned" for checkpoint in alive if checkpoint.pinned}
        return pinned | keep.keeps(alive, time.time())

    def metrics(self) -> list[str]:
        """List the names of the metrics that checkpoints have."""
        return sorted({name for checkpoint in self._alive() for name in checkpoint.metrics})

    def _alive(self) -> list[RunCheckpoint]:
        return [checkpoint for checkpoint in self._record().checkpoints if not checkpoint.superseded]

    def close(self) -> None:
        self._store.close()

    def mtbf_s(self) -> float:
        """Estimate the mean time between failures: by this run's starts, and one assumed a day.

        One rank asks, while the others wait for what it decides, so this raises nothing.
        """
        starts: list[RunStart] = []
        with self._lock:
            if self._known is not None or not self._has_failed:
                try:
                    starts = self._record().starts
                except CheckpointError as error:
                    self._has_failed = True  # once is enough: at every step it would hold up training
                    _logger.warning("the run's record cannot be read, failures are not counted: %s", error)
        ran_s = sum(max(0.0, start.durable_at_s - start.at_s) for start in starts)
        failures = sum(start.at_s != self._started_s for start in starts)
        return (_PRIOR_S + ran_s) / (1 + failures)

    def _as_past(self, checkpoint: RunCheckpoint) -> RunCheckpoint:
        given_up = checkpoint.step > self._resumed_at and checkpoint.path not in self._own
        return msgspec.structs.replace(checkpoint, superseded=True) if given_up else checkpoint

    def _remove(self, checkpoint: RunCheckpoint) -> None:
        # Somebody else may have removed it, or replaced it by something that is not ours.
        with contextlib.suppress(NotFound, NotCommitted):
            remove(self.url(checkpoint.path), storage_options=self.storage_options)
        record = self._record()
        self._write([old for old in record.checkpoints if old.path != checkpoint.path], record.starts)

    def _record(self) -> RunRecord:
        with self._lock:
            if self._known is None:
                try:
                    self._known = read_run(self._store) or RunRecord()
                except (IntegrityError, FormatError) as error:
                    _logger.warning("the run's record cannot be used, its checkpoints are listed: %s", error)
                    self._known = RunRecord()
            return self._known

    def _write(self, checkpoints: list[RunCheckpoint], starts: list[RunStart]) -> None:
        # Kept also where this write fails: the next one writes all of it.
        self._known, self._is_written = RunRecord(checkpoints=checkpoints, starts=starts), False
        write_run(self._store, self._known)
        self._is_written = True


def plain_metrics(metrics: Mapping[str, float] | None) -> dict[str, float | None]:
    """Convert metrics for JSON: infinities and NaN are None."""
    values = {str(name): float(value) for name, value in (metrics or {}).items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
