"""Find, remember and remove the checkpoints of a run, on its first rank."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError, FormatError, IntegrityError, NotCommitted, NotFound, StorageError
from ckpt.format.run_record import RunCheckpoint, RunRecord, RunStart, read_run, write_run
from ckpt.tools.remove import remove
from ckpt.tools.verify import verify
from ckpt.trainer_integration.keeping import Best, KeepRule

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{1,18})(?:\.again)?")
_MAX_STARTS = 1000
_PRIOR_S = 86_400.0


class History:
    """Keep the run's record, and add from a listing what the record lacks.

    Methods may be called from any thread.

    Attributes:
        unusable: folders whose checkpoint is damaged, or another program's. They are left as they
            are.
    """

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None) -> None:
        self._root, self._options = root.rstrip("/") or "/", storage_options
        self._store = open_store(root, storage_options)
        self._lock = threading.RLock()
        self._known: RunRecord | None = None
        self._started_s = time.time()
        self._resumed_at: int | None = None
        self._own: set[str] = set()
        self.unusable: set[str] = set()

    def url(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def path(self, step: int) -> str:
        """Name the folder for a save of `step`."""
        name = f"step-{step:08d}"
        return f"{name}.again" if name in self.unusable else name

    def candidates(self) -> Iterator[tuple[int, str]]:
        """List steps and folders in which a checkpoint may be, the newest first."""
        steps = dict(self._listed())
        for checkpoint in self._record().checkpoints:
            if checkpoint.superseded:
                steps.pop(checkpoint.path, None)
            else:
                steps[checkpoint.path] = checkpoint.step
        yield from sorted(((step, path) for path, step in steps.items()), reverse=True)

    def at(self, step: int) -> list[str]:
        """List folders in which the checkpoint of `step` may be, the likeliest first."""
        known = [recorded.path for recorded in self._record().checkpoints if recorded.step == step]
        name = f"step-{step:08d}"
        return [*dict.fromkeys([*known, f"{name}.again", name])]

    def best(self, rule: Best) -> list[tuple[int, str]]:
        """List steps and folders, the best first."""
        return [(checkpoint.step, checkpoint.path) for checkpoint in rule.ranked(self._alive())]

    def why_not(self, path: str) -> tuple[str | None, bool]:
        """Check the records of one folder.

        Returns:
            (reason it cannot be loaded or None, whether it is a damaged or foreign checkpoint
            rather than none).

        Raises:
            StorageError: the storage refused, or could not be reached.
        """
        try:
            verification = verify(self.url(path), storage_options=self._options, quick=True)
        except (NotFound, NotCommitted) as error:
            return error.message, False
        if verification.format == "stock":
            return "it was not written by this library; load it with ckpt.load", True
        if verification.ok:
            return None, False
        damage = verification.damages[0]
        return f"damaged: {damage.key}: {damage.message}", True

    def go_on_from(self, step: int) -> None:
        """Give up, with the next checkpoint, those that were saved after `step`."""
        self._resumed_at = step
        self._own.clear()

    def add(self, checkpoint: RunCheckpoint) -> None:
        """Remember a checkpoint that has been committed."""
        with self._lock:
            record = self._record()
            self._own.add(checkpoint.path)
            checkpoints = [self._as_past(old) for old in record.checkpoints if old.path != checkpoint.path]
            checkpoints.append(checkpoint)
            starts = [start for start in record.starts if start.at_s != self._started_s]
            starts.append(RunStart(at_s=self._started_s, durable_at_s=time.time()))
            checkpoints.sort(key=lambda old: (old.step, old.path))
            self._write(RunRecord(checkpoints=checkpoints, starts=starts[-_MAX_STARTS:]))

    def annotate(
        self, step: int, metrics: Mapping[str, float] | None = None, *, pinned: bool | None = None
    ) -> None:
        """Note metrics of a durable checkpoint, or whether it is pinned.

        Raises:
            NotFound: the run has no such checkpoint.
        """
        with self._lock:
            checkpoints = [*self._record().checkpoints]
            numbers = [number for number, old in enumerate(checkpoints) if old.step == step]
            if not numbers:
                raise NotFound(f"the run has no durable checkpoint of step {step}", url=self._root)
            for number in numbers:
                old = checkpoints[number]
                checkpoints[number] = msgspec.structs.replace(
                    old,
                    metrics=old.metrics | plain_metrics(metrics),
                    pinned=old.pinned if pinned is None else pinned,
                )
            self._write_checkpoints(checkpoints)

    def retire(
        self, keep: KeepRule, busy: Collection[str]
    ) -> Iterator[tuple[RunCheckpoint, CheckpointError | None]]:
        """Remove the checkpoints that no rule keeps and whose folder is not `busy`.

        Yields:
            each one, and None if it was removed, else the error.
        """
        stay = {*busy}
        while True:
            with self._lock:  # a pin that comes meanwhile finds the checkpoint gone, or keeps it
                kept = self.kept(keep)
                going = [old for old in self._alive() if old.step not in kept and old.path not in stay]
                if not going:
                    return
                failure: CheckpointError | None = None
                try:
                    self._remove(going[0])
                except CheckpointError as error:
                    failure = error
                    stay.add(going[0].path)
            yield going[0], failure

    def kept(self, keep: KeepRule) -> dict[int, str]:
        """List the steps that stay, and the rule that keeps each, or that it is pinned."""
        alive = self._alive()
        pinned = {checkpoint.step: "pinned" for checkpoint in alive if checkpoint.pinned}
        return pinned | keep.keeps(alive, time.time())

    def _alive(self) -> list[RunCheckpoint]:
        return [checkpoint for checkpoint in self._record().checkpoints if not checkpoint.superseded]

    def close(self) -> None:
        """Close connections."""
        self._store.close()

    def mtbf_s(self) -> float:
        """Estimate the mean time between failures: by this run's starts, and one assumed a day."""
        starts = self._record().starts
        ran_s = sum(max(0.0, start.durable_at_s - start.at_s) for start in starts)
        failures = sum(start.at_s != self._started_s for start in starts)
        return (_PRIOR_S + ran_s) / (1 + failures)

    def _as_past(self, checkpoint: RunCheckpoint) -> RunCheckpoint:
        given_up = self._resumed_at is not None and checkpoint.step > self._resumed_at
        if not given_up or checkpoint.path in self._own:
            return checkpoint
        return msgspec.structs.replace(checkpoint, superseded=True)

    def _remove(self, checkpoint: RunCheckpoint) -> None:
        # Somebody else may have removed it, or replaced it by something that is not ours.
        with contextlib.suppress(NotFound, NotCommitted):
            remove(self.url(checkpoint.path), storage_options=self._options)
        self._write_checkpoints([old for old in self._record().checkpoints if old.path != checkpoint.path])

    def _record(self) -> RunRecord:
        with self._lock:
            if self._known is None:
                try:
                    self._known = read_run(self._store) or RunRecord()
                except (IntegrityError, FormatError) as error:
                    _logger.warning("the run's record cannot be used, its checkpoints are listed: %s", error)
                    self._known = RunRecord()
            return self._known

    def _write(self, record: RunRecord) -> None:
        self._known = record  # also where this write fails: the next one writes all of it
        write_run(self._store, record)

    def _write_checkpoints(self, checkpoints: list[RunCheckpoint]) -> None:
        self._write(msgspec.structs.replace(self._record(), checkpoints=checkpoints))

    def _listed(self) -> Iterator[tuple[str, int]]:
        try:
            for name in self._store.folders():
                if match := _NAME.fullmatch(name):
                    yield name, int(match[1])
        except StorageError as error:
            if not self._record().checkpoints:
                raise
            _logger.warning(
                "the checkpoints cannot be listed, only those in the run's record are known: %s", error
            )


def plain_metrics(metrics: Mapping[str, float] | None) -> dict[str, float | None]:
    """Convert metrics for JSON: infinities and NaN are None."""
    values = {str(name): float(value) for name, value in (metrics or {}).items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
