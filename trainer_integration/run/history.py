"""The checkpoints of a run as its first rank knows them: found, remembered, and removed when no rule keeps them."""

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

__all__ = ["History"]

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{1,18})(?:\.again)?")
_MAX_STARTS = 1000
_PRIOR_S = 86_400.0


class History:
    """What is known, without a listing, from the run's record; a listing adds what the record lacks.

    Methods may be called from any thread.
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
        """Folders whose checkpoint was found damaged, or is another program's; they are left as they are."""

    def url(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def path(self, step: int) -> str:
        """The folder for a save of `step`."""
        name = f"step-{step:08d}"
        return f"{name}.again" if name in self.unusable else name

    def candidates(self) -> Iterator[tuple[int, str]]:
        """Steps and folders in which a checkpoint may be, the newest first."""
        record = self._record()
        known = {found.path: found.step for found in record.checkpoints if not found.superseded}
        given_up = {found.path for found in record.checkpoints if found.superseded}
        listed = {name: step for name, step in self._listed() if name not in given_up}
        for path, step in sorted((listed | known).items(), key=lambda item: (item[1], item[0]), reverse=True):
            yield step, path

    def at(self, step: int) -> list[str]:
        """Folders in which the checkpoint of `step` may be, the likeliest first."""
        known = [found.path for found in self._record().checkpoints if found.step == step]
        name = f"step-{step:08d}"
        return [*dict.fromkeys([*known, f"{name}.again", name])]

    def best(self, rule: Best) -> list[tuple[int, str]]:
        """Steps and folders, the best first."""
        return [(found.step, found.path) for found in rule.ranked(self._alive())]

    def why_not(self, path: str) -> tuple[str | None, bool]:
        """Why what is in a folder cannot be loaded, as far as records tell; and whether it is a checkpoint all the same.

        Raises:
            StorageError: the storage refused, or could not be reached.
        """
        try:
            found = verify(self.url(path), storage_options=self._options, quick=True)
        except (NotFound, NotCommitted) as error:
            return error.message, False
        if found.format == "stock":
            return "it was not written by this library; ckpt.load loads it", True
        if found.ok:
            return None, False
        return f"damaged: {found.damages[0].key}: {found.damages[0].message}", True

    def go_on_from(self, step: int) -> None:
        """With the next checkpoint, what was saved after `step` belongs to a past that was given up."""
        self._resumed_at = step
        self._own.clear()

    def add(self, checkpoint: RunCheckpoint) -> None:
        """Remember a checkpoint that has been committed."""
        with self._lock:
            record = self._record()
            self._own.add(checkpoint.path)
            others = [self._as_past(found) for found in record.checkpoints if found.path != checkpoint.path]
            starts = [found for found in record.starts if found.at_s != self._started_s]
            own = RunStart(at_s=self._started_s, durable_at_s=time.time())
            self._write(
                RunRecord(
                    checkpoints=sorted([*others, checkpoint], key=lambda found: (found.step, found.path)),
                    starts=[*starts, own][-_MAX_STARTS:],
                )
            )

    def annotate(
        self, step: int, metrics: Mapping[str, float] | None = None, *, pinned: bool | None = None
    ) -> None:
        """Note metrics of a durable checkpoint, or whether it is pinned.

        Raises:
            NotFound: the run has no such checkpoint.
        """
        with self._lock:
            record = self._record()
            if not any(found.step == step for found in record.checkpoints):
                raise NotFound(f"the run has no durable checkpoint of step {step}", url=self._root)
            changed = [
                msgspec.structs.replace(
                    found,
                    metrics=found.metrics | plain_metrics(metrics),
                    pinned=found.pinned if pinned is None else pinned,
                )
                if found.step == step
                else found
                for found in record.checkpoints
            ]
            self._write(msgspec.structs.replace(record, checkpoints=changed))

    def retire(
        self, keep: KeepRule, busy: Collection[str]
    ) -> Iterator[tuple[RunCheckpoint, CheckpointError | None]]:
        """Remove what no rule keeps and is not in `busy` folders: what was removed, or why it could not be."""
        failed: set[str] = set()
        while True:
            with self._lock:  # whoever pins one meanwhile is answered when it is gone, or for certain stays
                found = self._first_to_go(keep, {*busy, *failed})
                if found is None:
                    return
                failure: CheckpointError | None = None
                try:
                    self._remove(found)
                except CheckpointError as error:
                    failure = error
                    failed.add(found.path)
            yield found, failure

    def _first_to_go(self, keep: KeepRule, stay: Collection[str]) -> RunCheckpoint | None:
        kept = self.kept(keep)
        going = (found for found in self._alive() if found.step not in kept)
        return next((found for found in going if found.path not in stay), None)

    def kept(self, keep: KeepRule) -> dict[int, str]:
        """The steps that stay, and why: a rule keeps them, or they are pinned."""
        alive = self._alive()
        return {found.step: "pinned" for found in alive if found.pinned} | keep.keeps(alive, time.time())

    def _alive(self) -> list[RunCheckpoint]:
        return [found for found in self._record().checkpoints if not found.superseded]

    def close(self) -> None:
        """Let go of connections."""
        self._store.close()

    def mtbf_s(self) -> float:
        """Mean time between failures by the starts of this run, on top of one failure assumed for the first day."""
        starts = self._record().starts
        ran_s = sum(max(0.0, found.durable_at_s - found.at_s) for found in starts)
        failures = sum(found.at_s != self._started_s for found in starts)
        return (_PRIOR_S + ran_s) / (1 + failures)

    def _as_past(self, found: RunCheckpoint) -> RunCheckpoint:
        given_up = self._resumed_at is not None and found.step > self._resumed_at
        if not given_up or found.path in self._own:
            return found
        return msgspec.structs.replace(found, superseded=True)

    def _remove(self, checkpoint: RunCheckpoint) -> None:
        # Somebody else may have removed it, or replaced it by something that is not ours.
        with contextlib.suppress(NotFound, NotCommitted):
            remove(self.url(checkpoint.path), storage_options=self._options)
        record = self._record()
        others = [found for found in record.checkpoints if found.path != checkpoint.path]
        self._write(msgspec.structs.replace(record, checkpoints=others))

    def _record(self) -> RunRecord:
        with self._lock:
            if self._known is None:
                try:
                    self._known = read_run(self._store) or RunRecord()
                except (IntegrityError, FormatError) as error:
                    _logger.warning("the run's record cannot be used, listing has to do: %s", error)
                    self._known = RunRecord()
            return self._known

    def _write(self, record: RunRecord) -> None:
        # What is known here is so, whether or not it can be written down now; the next write does it.
        self._known = record
        write_run(self._store, record)

    def _listed(self) -> Iterator[tuple[str, int]]:
        try:
            for name in self._store.folders():
                if found := _NAME.fullmatch(name):
                    yield name, int(found[1])
        except StorageError as error:
            if not self._record().checkpoints:
                raise
            _logger.warning("the checkpoints cannot be listed, the run's record has to do: %s", error)


def plain_metrics(metrics: Mapping[str, float] | None) -> dict[str, float | None]:
    """Metrics as JSON has them: None for what is no finite number."""
    values = {str(name): float(value) for name, value in (metrics or {}).items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
