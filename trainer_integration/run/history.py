"""Find, remember and remove the checkpoints of a run, on its first rank."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from ckpt.backends.registry import normal_url, open_store
from ckpt.backends.wrapper import folder_of
from ckpt.collective import place_of
from ckpt.errors import (
    CheckpointError,
    CommitConflict,
    NotCommitted,
    NotFound,
    StillReferred,
    StorageError,
)
from ckpt.format.records import read_commit
from ckpt.format.run_record import RunCheckpoint
from ckpt.reading.latest import Candidate, created_at_s, examine, newest_first, steps_by_folder
from ckpt.tools.remove import remove, remove_within
from ckpt.trainer_integration.keeping import Best, KeepRule
from ckpt.trainer_integration.run.shared_record import SharedRecord
from ckpt.words import OLD_VERSIONS

_logger = logging.getLogger(__name__)

_MAX_LOOKS = 16


class History(SharedRecord):
    """Keep the run's record, and complete it from a listing; from any thread.

    Attributes:
        place: the root as texts show it, without credentials.
        referred: steps that no rule keeps, and whose bytes later checkpoints name.
        unusable: folders whose checkpoint is damaged, or another program's, and stays as it is.
        named: folders whose checkpoint is not replaced, as others name its bytes.
    """

    def __init__(self, root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> None:
        self.root = normal_url(root).rstrip("/") or "/"
        self.storage_options = storage_options
        self.place = place_of(self.root)
        super().__init__(self.root, storage_options)
        self._others: set[str] = set()  # folders that hold none of the commits that were removed
        self._told_of_versions = False
        self.unusable: set[str] = set()
        self.named: set[str] = set()
        self.referred: frozenset[int] = frozenset()

    def url(self, path: str) -> str:
        """Return where to save or load; not for texts, as it may hold a password."""
        return f"{self.root.rstrip('/')}/{path}"

    def shown(self, path: str) -> str:
        """Return where a checkpoint is, for texts."""
        return f"{self.place.rstrip('/')}/{path}"

    def path(self, step: int) -> str:
        """Name the folder for a save of `step`: the first one that is neither `unusable` nor `named`."""
        name = f"step-{step:08d}"
        more = (f"{name}.again-{number}" for number in itertools.count(2))
        taken = self.unusable | self.named
        return next(each for each in itertools.chain([name, f"{name}.again"], more) if each not in taken)

    def candidates(self) -> list[tuple[int, str]]:
        """List steps and folders in which a checkpoint may be, the newest first."""
        return newest_first(self._folders(), self._record())

    def steps(self) -> dict[str, int]:
        """Return the steps by folder, also of superseded checkpoints; none if storage does not answer."""
        try:
            return steps_by_folder(self._folders(), self._record())
        except CheckpointError as error:  # the save that follows meets it too
            _logger.warning("the checkpoints of the run cannot be listed: %s", error)
            return {}

    def _folders(self) -> list[str]:
        try:
            return [*self._store.folders(), *self._store.links()]
        except StorageError as error:
            if not self._record().checkpoints:
                raise
            _logger.warning(
                "the checkpoints cannot be listed, only those in the run's record are known: %s", error
            )
            return []

    def newest(self, own: Collection[int] = ()) -> tuple[int, str] | None:
        """Find step and folder of the newest checkpoint that is on record, or can be restored, and is of no step of `own`.

        None without one. Where very many folders hold none, and none is on record, the next folder counts as one.
        """
        recorded = {checkpoint.path for checkpoint in self.durable()}
        looks = 0
        for step, path in self.candidates():
            if step in own:
                continue
            if path in recorded or (looks == _MAX_LOOKS and not recorded):
                return step, path
            if looks < _MAX_LOOKS:
                looks += 1
                with contextlib.suppress(NotFound, NotCommitted, CommitConflict):
                    if self.examine(path).fault is None:
                        return step, path
        return None

    def find_all(self) -> None:
        """Remember the checkpoints that only a listing has, so that they can be given up."""
        self.find({path: step for step, path in self.candidates()})

    def begin_new_run(self) -> None:
        """Give up, with the next checkpoint, those that this process has not saved."""
        self.resumed_at = -1

    def newest_s(self, step: int) -> float:
        """Find when the newest checkpoints from `step` on were made, by the clocks of those who made them."""
        made_s = -math.inf
        for _, path in [each for each in self.candidates() if each[0] >= step][:_MAX_LOOKS]:
            with contextlib.suppress(CheckpointError):
                commit = read_commit(folder_of(self._store, path))
                made_s = max(made_s, (created_at_s(commit.record) if commit else None) or made_s)
        return made_s

    def at(self, step: int) -> list[tuple[int, str]]:
        """List `step` and the folders in which its checkpoint may be, the likeliest first."""
        known = [recorded for recorded in self._record().checkpoints if recorded.step == step]
        known.sort(key=lambda old: (old.superseded, -old.saved_at_s))
        name = f"step-{step:08d}"
        paths = [*(recorded.path for recorded in known), f"{name}.again", name]
        return [(step, path) for path in dict.fromkeys(paths)]

    def best(self, rule: Best) -> list[tuple[int, str]]:
        """List steps and folders, the best first."""
        return [(checkpoint.step, checkpoint.path) for checkpoint in rule.ranked(self.durable())]

    def examine(self, path: str) -> Candidate:
        """Look at a checkpoint. Raises NotFound, NotCommitted or CommitConflict if it is gone."""
        is_folder = self._store.directory is not None  # which may be a link to one elsewhere
        own = open_store(self.url(path), self.storage_options) if is_folder else None
        return examine(own or folder_of(self._store, path))

    def annotate(
        self, step: int, metrics: Mapping[str, float] | None = None, *, pinned: bool | None = None
    ) -> None:
        """Note metrics of a durable checkpoint, or whether it is pinned. Raises NotFound."""
        added = plain_metrics(metrics)
        with self._lock:
            self.look_again()
            # Of these saves: storage may show the change after the run has gone back, and has saved the step again.
            saves = {(old.path, old.saved_at_s) for old in self._record().checkpoints if old.step == step}

            def annotated(old: RunCheckpoint) -> RunCheckpoint:
                if (old.path, old.saved_at_s) not in saves:
                    return old
                is_pinned = old.pinned if pinned is None else pinned
                return msgspec.structs.replace(old, metrics=old.metrics | added, pinned=is_pinned)

            self._write(annotated)
            if not saves:
                raise NotFound(f"the run has no durable checkpoint of step {step}", url=self.place)

    def retire(self, keep: KeepRule, newest: str) -> Iterator[tuple[RunCheckpoint, CheckpointError | None]]:
        """Remove checkpoints that no rule keeps, but not `newest`; yield each, and any error.

        So are superseded ones whose step was saved again, in another folder. Those whose bytes others name
        stay, and are in `referred`, until those others are gone. What was removed before, and has come back by a put
        that storage carried out late, is removed again.
        """
        self._sweep()
        stay = {newest}
        referred = dict[str, int]()
        replaced = self._replaced()
        while True:
            failure: CheckpointError | None = None
            with contextlib.ExitStack() as until_noted:
                until_noted.enter_context(self._lock)  # who pins it meanwhile finds it gone, or keeps it
                kept = self.kept(keep)
                unkept = [old for old in self.given_up() if old.path in replaced and not old.pinned]
                unkept += [old for old in self.durable() if old.step not in kept]
                checkpoint = next((old for old in unkept if old.path not in stay), None)
                if checkpoint is None:
                    self.referred = frozenset(referred.values())
                    return
                try:
                    self._remove(checkpoint, until_noted)
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

    def _replaced(self) -> set[str]:
        """List folders of superseded checkpoints whose step was saved again elsewhere, as others named their bytes.

        Damaged ones stay.
        """
        again = {checkpoint.step for checkpoint in self.durable()}
        found = set[str]()
        for old in self.given_up():
            if old.step not in again or old.path in self.unusable:
                continue
            with contextlib.suppress(CheckpointError):
                commit = read_commit(folder_of(self._store, old.path))
                if commit and commit.record.is_referable and self.examine(old.path).fault is None:
                    found.add(old.path)
        return found

    def close(self) -> None:
        self._store.close()

    def _remove(self, checkpoint: RunCheckpoint, until_noted: contextlib.ExitStack) -> None:
        """Remove a checkpoint, and close `until_noted` when the record says so: its objects may take minutes."""

        def forget(commit_id: str = "") -> None:
            with until_noted, self._lock:
                self._others.discard(checkpoint.path)
                self.drop(checkpoint, commit_id)

        @contextlib.contextmanager
        def going(commit_id: str) -> Iterator[None]:
            # Noted first: a process that carries it, and finds no commit, reads the record next.
            forget(commit_id)
            try:
                yield
            except StorageError:
                self.put_back(checkpoint)  # the next retention tries again
                raise

        try:
            removed = remove_within(self.url(checkpoint.path), going, storage_options=self.storage_options)
            if removed.keeps_versions and not self._told_of_versions:
                self._told_of_versions = True
                _logger.warning("%s: %s", self.place, OLD_VERSIONS)
        except (NotFound, NotCommitted):  # somebody else has removed it, or replaced it by something not ours
            forget()

    def _sweep(self) -> None:
        """Remove again commits that were removed, and that a late put has brought back without their objects."""
        try:
            removed, recorded = self._record().removed, {old.path for old in self._record().checkpoints}
            folders = self.candidates() if removed else []
            unknown = [path for _, path in folders if path not in recorded | self._others]
            for path in unknown[-_MAX_LOOKS:]:
                commit = read_commit(folder_of(self._store, path))
                if commit is not None and commit.record.id in removed:
                    remove(self.url(path), storage_options=self.storage_options)
                elif commit is not None:
                    self._others.add(path)
        except CheckpointError as error:
            _logger.warning("what removed checkpoints may have left cannot be looked for: %s", error)


def plain_metrics(metrics: Mapping[str, float] | None) -> dict[str, float | None]:
    """Convert metrics for JSON: infinities and NaN are None."""
    values = {str(name): float(value) for name, value in (metrics or {}).items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
