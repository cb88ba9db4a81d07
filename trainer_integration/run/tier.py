"""Keep a run's checkpoints near first: choose where to save, see what became durable, find what is near."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ckpt.api import place_of
from ckpt.backends.registry import normal_url, open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.records import read_commit
from ckpt.format.run_record import RunCheckpoint
from ckpt.local_first.drain_process import DrainProcess, DrainState, current_status, read_status
from ckpt.local_first.far_place import FarPlace
from ckpt.local_first.folder import RunFolder
from ckpt.local_first.options import LocalTier
from ckpt.local_first.partners import Node, meet, share_of, shared_domains, sources_of, undurable
from ckpt.local_first.room import has_room
from ckpt.local_first.saving import Place
from ckpt.ranks.group import Ranks
from ckpt.tools.remove import remove
from ckpt.trainer_integration.keeping import KeepRule
from ckpt.trainer_integration.run.async_modes import Uploads
from ckpt.trainer_integration.run.history import History

_logger = logging.getLogger(__name__)

_LOOK_S, _JOIN_S = 0.5, 5.0
_FIRST_LOOK_S = 10.0
"""When to look first, unless a save or the end of a restore is sooner: a restore needs the cores, and the process that
carries takes some when it starts."""

Tell = Callable[..., None]
WhenDurable = Callable[[RunCheckpoint, DrainState, bool], None]


class _Watch:
    """Calls `look` now and then in a thread of its own, and soon when somebody waits for it."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look, self._is_closed, self._asked = look, False, threading.Event()
        self._lock, self._waiting, self._has_begun = threading.Lock(), list[threading.Event](), False
        self._thread = threading.Thread(target=self._run, name="ckpt-tier", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Look now, if it has not looked yet."""
        if not self._has_begun:
            self._asked.set()

    def wait_looked(self, until_s: float) -> None:
        looked = threading.Event()
        with self._lock:
            self._waiting.append(looked)
            self._asked.set()
        looked.wait(max(0.0, min(until_s - time.monotonic(), threading.TIMEOUT_MAX)))

    def close(self) -> None:
        """End it; what a store holds up ends by itself."""
        self._is_closed = True
        self._asked.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        failure = ""
        self._asked.wait(_FIRST_LOOK_S)
        self._has_begun = True
        while True:
            with self._lock:
                self._asked.clear()
                waiting, self._waiting = self._waiting, []
            try:
                self._look()
            except Exception as error:
                if failure != str(error):  # once, and not twice a second
                    _logger.exception("looking after local checkpoints failed")
                failure = str(error)
            for looked in waiting:
                looked.set()
            self._asked.wait(_LOOK_S)
            if self._is_closed:
                return


class Tier:
    """The place where a run's checkpoints are before they are durable: a disk of each node, or another storage.

    Args:
        options: of the folder: on each node's own disk if `is_local`, where every save goes first; else one that all
            nodes see, where a save goes that the durable place refuses.
        root: the run's durable place.
        job: names this job, the same on all ranks.
        config: of `ckpt.drain`.

    Raises as `RunFolder`.
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
        self.is_local, self._rank = is_local, rank
        self.drain_timeout_s = options.drain_timeout_s
        self.folder = RunFolder(options.path, root)
        if is_local:
            self.folder.warn_if_shared()
            self.folder.hold(job)
        self.is_leader = self.folder.is_leader if is_local else rank == 0
        self.history = History(self.folder.path, None)
        self._options = options
        self.sources: tuple[int, ...] | None = None
        self.far = FarPlace(place_of(root), options.answer_timeout_s)
        self._process = (
            DrainProcess(self.folder.path, {"durable": root, "keep_local": options.keep, **config})
            if self.is_leader
            else None
        )
        self._seen: dict[str, tuple[str, str]] = {}
        self._watch: _Watch | None = None
        self._resumed_at: float = math.inf
        self.saved: dict[str, RunCheckpoint] = {}
        self.unwanted: list[str] = []

    @property
    def name(self) -> str:
        """What its state is called: `local` or `fallback`."""
        return "local" if self.is_local else "fallback"

    def places(self, path: str, far_url: str, options: Mapping[str, Any], *, has_room: bool) -> list[Place]:
        """List where to save the checkpoint `path`, the first one first."""
        far = Place(far_url, options)
        of_far = ("storage_options", "max_bandwidth_bytes_per_s")
        near_options = {name: value for name, value in options.items() if name not in of_far}
        near = Place(self.folder.url(path), near_options, self.is_local, self.sources)
        if not self.is_local:
            return [far, near]
        return [near, far] if has_room else [far]

    def has_room(self) -> bool:
        """Tell whether this node has room for one more like the largest that it has; what is durable makes room."""
        try:
            return not (self.is_local and self.is_leader) or has_room(
                self.folder.path, self._options.budget_bytes
            )
        except OSError as error:
            _logger.warning("the folder of this node cannot be used: %s", error)
            return False

    # -- what became durable -------------------------------------------------------------------------------

    def start(self, ranks: Ranks, when_durable: WhenDurable, tell: Tell) -> None:
        """Choose who keeps copies of whose files, and begin to watch. All ranks call it."""
        if self.is_local and self._options.copies:
            self._meet(ranks, tell)
        self.watch(when_durable, tell)

    def _meet(self, ranks: Ranks, tell: Tell) -> None:
        own, folder = Node((ranks.rank,), self._options.failure_domain), self.folder
        if self.is_leader:
            done = {
                path: each.id for path, each in read_status(folder.path).items() if each.state == "durable"
            }
            with contextlib.suppress(CheckpointError):
                own = replace(own, has=undurable(folder.path, done))
        nodes = meet(ranks, folder.holder, own)
        self.sources = sources_of(ranks.rank, nodes)
        if self._process is not None:
            node = next(each for each in nodes if ranks.rank in each.ranks)
            self._process.carry_only(share_of(node, nodes))
        if problem := shared_domains(nodes):
            tell("not_copied", None, f"copies would be lost with what they are copies of: {problem}")

    def watch(self, when_durable: WhenDurable, tell: Tell) -> None:
        """Keep the process running that carries checkpoints; on the first rank follow what becomes of them."""
        if not self.is_leader and self._rank != 0:
            return
        self._watch = _Watch(lambda: self._look(when_durable, tell))

    def begin(self) -> None:
        """Begin to carry now, if that has not begun."""
        if self._watch is not None:
            self._watch.begin()

    def wait_looked(self, until_s: float) -> None:
        """Wait for the watch to look once more, until a time of `time.monotonic`: a store may hold it up for long."""
        if self._watch is not None:
            self._watch.wait_looked(until_s)

    def _look(self, when_durable: WhenDurable, tell: Tell) -> None:
        while self.unwanted:
            with contextlib.suppress(CheckpointError):
                remove(self.folder.url(self.unwanted.pop()))
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
        if self.is_leader:
            self.history.add(checkpoint)
            self.history.change(lambda old: old if os.path.isdir(self.folder.url(old.path)) else None)

    def drop(self, paths: Collection[str]) -> None:
        """Give up checkpoints that no rule would keep."""
        for path in paths:
            self.saved.pop(path, None)
        if paths and self.is_leader:
            with contextlib.suppress(CheckpointError):
                self.history.change(
                    lambda old: msgspec.structs.replace(old, superseded=old.superseded or old.path in paths)
                )
                self.unwanted += paths

    def failed(self) -> dict[str, str]:
        """List checkpoints of this node that cannot become durable, by their folders, and why."""
        states = current_status(self.folder.path).items()
        return {path: state.reason for path, state in states if state.state == "failed"}

    def is_durable(self, path: str) -> bool:
        """Tell whether a checkpoint of this node has become durable, as the process last said."""
        return (state := current_status(self.folder.path).get(path)) is not None and state.state == "durable"

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
        self._resumed_at = step
        self.history.go_on_from(step)

    # -- the end -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let the process carry what is there, and end by itself."""
        if self._watch is not None:
            self._watch.close()
        if self._process is not None:
            self._process.finish()

    def ended(self) -> bool:
        """Tell whether the process of this node has ended, if this rank has started it."""
        return self._process is None or self._process.ended()

    def close(self) -> None:
        """Release the folder."""
        self.history.close()
        self.folder.release()


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
    root = normal_url(history.root)
    root = root if "://" in root else os.path.abspath(root)
    return Tier(options, root, job, uploads.ranks.rank, is_local=local is not None, config=config)
