"""Keep a run's checkpoints near first: choose where to save, see what became durable, find what is near."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.collective import place_of
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.records import read_commit
from ckpt.format.run_record import RunCheckpoint
from ckpt.local_first.drain_process import DrainState, current_status, read_status
from ckpt.local_first.far_place import FarPlace
from ckpt.local_first.node_tier import NodeTier
from ckpt.local_first.options import LocalTier
from ckpt.local_first.watch import Watch
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.keeping import KeepRule
from ckpt.trainer_integration.run.async_modes import Uploads
from ckpt.trainer_integration.run.history import History

_logger = logging.getLogger(__name__)

Tell = Callable[..., None]
WhenDurable = Callable[[RunCheckpoint, DrainState, bool], None]


class Tier(NodeTier):
    """A tier of a manager's run, which has a record of its checkpoints, and gives up some of them.

    Args, errors: as of `NodeTier`.
    """

    def __init__(
        self,
        options: LocalTier,
        root: str,
        job: str,
        rank: int,
        *,
        is_local: bool,
        config: Mapping[str, Any],
    ) -> None:
        super().__init__(options, root, job, rank, is_local=is_local, config=config)
        self.history = History(self.folder.path, None)
        self.far = FarPlace(place_of(root), options.answer_timeout_s)
        self._seen: dict[str, tuple[str, str]] = {}
        self._resumed_at: float = math.inf
        self.saved: dict[str, RunCheckpoint] = {}
        self._unwanted: list[tuple[str, str]] = []  # folders, and the ids of the commits to remove there

    # -- what became durable -------------------------------------------------------------------------------

    def start(self, ranks: Ranks, when_durable: WhenDurable, tell: Tell) -> None:
        """Choose who keeps copies of whose files, and begin to watch. All ranks call it."""
        if problem := self.share_copies(ranks):
            tell("not_copied", None, f"copies would be lost with what they are copies of: {problem}")
        self.watch(when_durable, tell)

    def watch(self, when_durable: WhenDurable, tell: Tell) -> None:
        """Keep the process running that carries checkpoints; on the first rank follow what becomes of them."""
        if not self.is_leader and self._rank != 0:
            return
        self._watch = Watch(lambda: self._look(when_durable, tell))

    def wait_looked(self, until_s: float) -> None:
        """Wait for the watch to look once more, until a time of `time.monotonic`: a store may hold it up for long."""
        if self._watch is not None:
            self._watch.wait_looked(until_s)

    def _look(self, when_durable: WhenDurable, tell: Tell) -> None:
        unwanted = self._unwanted
        self._unwanted = []
        for path, commit_id in unwanted:
            self.remove_near(path, commit_id)
        if self._process is not None and (self.is_local or _has_folders(self.folder.path)):
            news = self._process.look()
            if news is not None:
                tell("drain_failed", None, news)
        if self._rank != 0:
            return
        for path, state in current_status(self.folder.path).items():
            known = (state.id, state.state + state.reason)
            if self._seen.get(path) != known:
                self._follow(path, state, when_durable, tell)
                self._seen[path] = known

    def _follow(self, path: str, state: DrainState, when_durable: WhenDurable, tell: Tell) -> None:
        own = self.saved.get(path)
        if own is not None and current_status(self.folder.path).get(path) != state:
            return  # it has been saved again since that was said
        self.history.look_again()
        checkpoint = own or next((old for old in self.history.durable() if old.path == path), None)
        if checkpoint is None:
            return
        if state.state == "durable":
            when_durable(checkpoint, state, own is not None)
            self.saved.pop(path, None)
        elif state.state in ("failed", "left out"):
            tell("not_durable", checkpoint.step, f"{path}: {state.reason}")

    def note(self, checkpoint: RunCheckpoint) -> None:
        """Note a checkpoint that this node has; forget those that it has no more. Raises StorageError."""
        self.changed_at_s = time.time()
        if self.is_leader:
            self.own.add(checkpoint.path)
            self.history.add(checkpoint)
            self.history.change(lambda old: old if os.path.isdir(self.folder.url(old.path)) else None)

    def drop(self, paths: Collection[str]) -> None:
        """Give up checkpoints that no rule would keep: those that are in these folders now."""
        for path in paths:
            self.saved.pop(path, None)
        if not paths or not self.is_leader:
            return
        self.own.difference_update(paths)
        with contextlib.suppress(CheckpointError):
            saves = {(old.path, old.saved_at_s) for old in self.history.durable() if old.path in paths}
            self._unwanted += self._commits(paths)
            self.history.change(
                lambda old: (
                    msgspec.structs.replace(old, superseded=True)
                    if (old.path, old.saved_at_s) in saves
                    else old
                )
            )

    def _commits(self, paths: Collection[str]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        with contextlib.closing(open_store(self.folder.path)) as store:
            for path in paths:
                with contextlib.suppress(CheckpointError):
                    if (commit := read_commit(PrefixStore(store, path))) is not None:
                        found.append((path, commit.record.id))
        return found

    def failed_of(self, paths: Collection[str]) -> dict[str, str]:
        """List those of some checkpoints of this node that cannot become durable, by their folders, and why."""
        problem = self.problem()
        return {**(dict.fromkeys(paths, problem) if problem else {}), **self.failed()}

    def undurable(self) -> list[int]:
        """List the steps that this node has, and that can still become durable."""
        try:
            failed = self.failed()
            return sorted(each.step for each in self.waiting() if each.path not in failed)
        except CheckpointError as error:
            _logger.warning("which checkpoints are not durable cannot be found out: %s", error)
            return []

    def waiting(self) -> list[RunCheckpoint]:
        """List the checkpoints that are not durable here or elsewhere. Raises CheckpointError."""
        status = read_status(self.folder.path)
        found: list[RunCheckpoint] = []
        self.history.look_again()
        with contextlib.closing(open_store(self.folder.path)) as store:
            for checkpoint in self.history.durable():
                if checkpoint.step > self._resumed_at and checkpoint.path not in self.saved:
                    continue  # it is given up with the next one, and may lack what a lost node had
                state = status.get(checkpoint.path)
                with contextlib.suppress(CheckpointError):
                    commit = read_commit(PrefixStore(store, checkpoint.path))
                    if commit is not None and not (
                        state is not None
                        and state.id == commit.record.id
                        and state.state in ("durable", "left out")
                    ):
                        found.append(checkpoint)
        return found

    def give_up(
        self, keep: KeepRule | None, durable: Sequence[RunCheckpoint], newest: RunCheckpoint
    ) -> list[str]:
        """Choose, on the first rank, local checkpoints that no rule would keep once they were durable.

        The oldest that waits is never among them: others would take its place for ever.
        """
        if keep is None:
            return []
        status = current_status(self.folder.path)
        self.history.look_again()
        done = {path for path, state in status.items() if state.state != "waiting"}
        waiting = [each for each in self.history.durable() if each.path not in done]
        all_paths = {each.path: each for each in (*durable, *waiting, newest)}
        known = sorted(all_paths.values(), key=lambda each: each.step)
        kept = keep.keeps(known, time.time())
        return [
            each.path
            for each in waiting[1:]
            if each.step not in kept and each.path != newest.path and not each.pinned
        ]

    def given_up(self) -> frozenset[tuple[str, float]]:
        """List the checkpoints that the run had given up when it saved here last: their folders, and when they began."""
        try:
            self.history.look_again()
            return frozenset((old.path, old.saved_at_s) for old in self.history.given_up())
        except CheckpointError as error:
            _logger.warning("what the run has given up cannot be found out: %s", error)
            return frozenset()

    def go_on_from(self, step: int) -> None:
        """Give up, with the next checkpoint, those that were saved after `step`."""
        self.saved.clear()
        self.own.clear()
        self._unwanted = []
        self._resumed_at = step
        self.history.go_on_from(step)

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the folder."""
        self.history.close()
        super().close()


def note_run(tier: Tier, run: str) -> None:
    """Note the id of the run, if it is known, in its folder on this node, before anything is carried from there.

    What is there of another run is not this one's. The marker says it first: it is there when the record is damaged or lost.
    """
    if run and tier.is_leader and run != tier.history.stored_run():
        tier.history.belong_to(run, anew=True)
        with contextlib.suppress(CheckpointError, OSError):  # a full disk: it is noted with the next save
            tier.folder.mark(run)
            tier.history.change(lambda old: old)


def _has_folders(path: str) -> bool:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return any(entry.is_dir(follow_symlinks=False) for entry in entries)
    return False


def tier_of(
    local: str | os.PathLike[str] | LocalTier | None,
    fallback: str | os.PathLike[str] | None,
    history: History,
    job: str,
    uploads: Uploads,
) -> Tier | None:
    """Make the tier of a run; None without one.

    Raises as `Tier`; ConfigurationError also for what does not go together.
    """
    if local is None and fallback is None:
        return None
    if local is not None and fallback is not None:
        raise ConfigurationError("give local= or fallback=: with local= no save waits for the durable place")
    name = "fallback" if local is None else "local"
    if uploads.mode == "process" or uploads.frozen is not None or uploads.tables is not None:
        raise ConfigurationError(
            f"{name}= goes with async_mode='thread' or 'off', and without references= and tables="
        )
    options = local if isinstance(local, LocalTier) else LocalTier(local or fallback or "")
    config = {
        key: uploads.options[key] for key in ("storage_options", "threads", "max_bandwidth_bytes_per_s")
    }
    return Tier(options, history.root, job, uploads.ranks.rank, is_local=local is not None, config=config)
