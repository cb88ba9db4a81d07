"""Find, remember and remove the checkpoints of a run, on its first rank."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ckpt.api import place_of
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    StillReferred,
    StorageError,
)
from ckpt.format.run_record import RunCheckpoint, RunRecord, RunStart, read_run, write_run
from ckpt.reading.latest import Candidate, examine, newest_first
from ckpt.tools.remove import remove_and_tell
from ckpt.trainer_integration.keeping import Best, KeepRule

_logger = logging.getLogger(__name__)

_MAX_STARTS = 1000
_MAX_WRITES = 3
"""How often to write a change that storage does not show: another process has just written too, or it lags."""
_PRIOR_S = 86_400.0

Change = Callable[[RunCheckpoint], RunCheckpoint | None]
"""Return a checkpoint of the record as it shall be, None without it; twice is the same as once."""


class History:
    """Keep the run's record, and complete it from a listing; from any thread.

    Other processes write the record too. So a change is made to what is stored now, and written until
    storage shows it; what this process has saved is put back whenever it is missing.

    Attributes:
        place: the root as texts show it, without credentials.
        referred: steps that no rule keeps, and whose bytes later checkpoints name.
        unusable: folders whose checkpoint is damaged, or another program's, and stays as it is.
    """

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None) -> None:
        self.root, self.storage_options = root.rstrip("/") or "/", storage_options
        self.place = place_of(self.root)
        self._store = open_store(root, storage_options)
        self._lock = threading.RLock()
        self._known: RunRecord | None = None
        self._changes: list[Change] = []  # that storage has not shown yet
        self._has_failed = False
        self._started_s, self._resumed_at = time.time(), math.inf
        self._durable_at_s: float | None = None
        self._own: dict[str, RunCheckpoint] = {}
        self._found: dict[str, RunCheckpoint] = {}
        self.unusable: set[str] = set()
        self.referred: frozenset[int] = frozenset()

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

    def at(self, step: int) -> list[tuple[int, str]]:
        """List `step` and the folders in which its checkpoint may be, the likeliest first."""
        known = [recorded.path for recorded in self._record().checkpoints if recorded.step == step]
        name = f"step-{step:08d}"
        return [(step, path) for path in dict.fromkeys([*known, f"{name}.again", name])]

    def best(self, rule: Best) -> list[tuple[int, str]]:
        """List steps and folders, the best first."""
        return [(checkpoint.step, checkpoint.path) for checkpoint in rule.ranked(self.durable())]

    def examine(self, path: str) -> Candidate:
        """Look at a checkpoint. Raises NotFound, NotCommitted or CommitConflict if it is gone."""
        is_folder = self._store.directory is not None  # which may be a link to one elsewhere
        own = open_store(self.url(path), self.storage_options) if is_folder else None
        return examine(own or PrefixStore(self._store, path))

    def go_on_from(self, step: int) -> None:
        """Give up, with the next checkpoint, those that were saved after `step`."""
        self._resumed_at = step
        self._own.clear()

    def add(self, checkpoint: RunCheckpoint, *, is_own: bool = True) -> None:
        """Remember a checkpoint that has been committed; one of an earlier process if it is not on record."""
        with self._lock:
            (self._own if is_own else self._found)[checkpoint.path] = checkpoint
            self._durable_at_s = time.time()
            self._write()

    def change(self, change: Change) -> None:
        """Change what is on record of the checkpoints."""
        with self._lock:
            self._write(change)

    def annotate(
        self, step: int, metrics: Mapping[str, float] | None = None, *, pinned: bool | None = None
    ) -> None:
        """Note metrics of a durable checkpoint, or whether it is pinned. Raises NotFound."""
        added = plain_metrics(metrics)

        def annotated(old: RunCheckpoint) -> RunCheckpoint:
            if old.step != step:
                return old
            is_pinned = old.pinned if pinned is None else pinned
            return msgspec.structs.replace(old, metrics=old.metrics | added, pinned=is_pinned)

        with self._lock:
            self._write(annotated)
            if step not in {old.step for old in self._record().checkpoints}:
                raise NotFound(f"the run has no durable checkpoint of step {step}", url=self.place)

    def retire(self, keep: KeepRule, newest: str) -> Iterator[tuple[RunCheckpoint, CheckpointError | None]]:
        """Remove checkpoints that no rule keeps, but not `newest`; yield each, and any error.

        Those whose bytes others name stay, and are in `referred`, until those others are gone.
        """
        stay, referred = {newest}, dict[str, int]()
        while True:
            failure: CheckpointError | None = None
            with contextlib.ExitStack() as until_gone:
                until_gone.enter_context(self._lock)  # who pins it meanwhile finds it gone, or keeps it
                kept = self.kept(keep)
                unkept = (old for old in self.durable() if old.step not in kept and old.path not in stay)
                checkpoint = next(unkept, None)
                if checkpoint is None:
                    self.referred = frozenset(referred.values())
                    return
                try:
                    self._remove(checkpoint, until_gone)
                    stay -= referred.keys()  # it may have been what refers to them
                    referred.clear()
                except StillReferred:
                    stay.add(checkpoint.path)
                    referred[checkpoint.path] = checkpoint.step
                    continue
                except CheckpointError as error:
                    failure = error
                    stay.add(checkpoint.path)
            yield checkpoint, failure

    def kept(self, keep: KeepRule) -> dict[int, str]:
        """List the steps that stay, and the rule that keeps each, or that it is pinned."""
        alive = self.durable()
        pinned = {checkpoint.step: "pinned" for checkpoint in alive if checkpoint.pinned}
        return pinned | keep.keeps(alive, time.time())

    def close(self) -> None:
        self._store.close()

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

    def _remove(self, checkpoint: RunCheckpoint, until_gone: contextlib.ExitStack) -> None:
        """Remove a checkpoint, and close `until_gone` when it is one no more: its objects may take minutes."""
        failures: list[CheckpointError] = []

        def forget() -> None:
            with until_gone, self._lock:
                try:
                    gone = (checkpoint.path, checkpoint.saved_at_s)
                    self._write(lambda old: None if (old.path, old.saved_at_s) == gone else old)
                except CheckpointError as error:  # the next write tries again
                    failures.append(error)

        try:
            url = self.url(checkpoint.path)
            remove_and_tell(url, forget, storage_options=self.storage_options)
        except (NotFound, NotCommitted):  # somebody else has removed it, or replaced it by something not ours
            forget()
        if failures:
            raise failures[0]

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
        )

    def _as_past(self, checkpoint: RunCheckpoint) -> RunCheckpoint:
        given_up = self._own and checkpoint.step > self._resumed_at and checkpoint.path not in self._own
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


def plain_metrics(metrics: Mapping[str, float] | None) -> dict[str, float | None]:
    """Convert metrics for JSON: infinities and NaN are None."""
    values = {str(name): float(value) for name, value in (metrics or {}).items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
