"""Keep a run's folder on this node, and the process that carries from it: what a manager and `async_save` have in common."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt.draining.drain import remove_save
from ckpt.errors import CheckpointError
from ckpt.local_first.drain_process import DrainProcess, current_status, problem_since, read_status
from ckpt.local_first.folder import RunFolder
from ckpt.local_first.options import LocalTier
from ckpt.local_first.partners import Node, meet, share_of, shared_domains, sources_of, undurable
from ckpt.local_first.room import has_room
from ckpt.local_first.saving import Place
from ckpt.local_first.watch import Watch
from ckpt.ranks.group import Ranks

_logger = logging.getLogger(__name__)


class NodeTier:
    """The place where a run's checkpoints are before they are durable: a disk of each node, or another storage.

    Args:
        options: of the folder: on each node's own disk if `is_local`, where every save goes first; else one that all
            nodes see, where a save goes that the durable place refuses.
        root: the run's durable place.
        job: names this job, the same on all ranks.
        config: of `ckpt.drain`.

    Attributes:
        own: folders of the checkpoints that this process has saved here and not superseded, if it `is_leader`.
        changed_at_s: when it saved the last of them, or was made, since 1970.

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
        elif rank == 0:
            self.folder.hold_if_possible(job)
        self.is_leader = self.folder.is_leader if is_local else rank == 0
        self._options, self._root = options, root
        self.sources: tuple[int, ...] | None = None
        self.own: set[str] = set()
        self.changed_at_s = time.time()
        self._process = self._process_with(config)
        self._watch: Watch | None = None

    @property
    def name(self) -> str:
        """What its state is called: `local` or `fallback`."""
        return "local" if self.is_local else "fallback"

    def _process_with(self, config: Mapping[str, Any]) -> DrainProcess | None:
        if not self.is_leader:
            return None
        arguments = {"durable": self._root, "keep_local": self._options.keep, **config}
        return DrainProcess(self.folder.path, arguments)

    # -- where to save -------------------------------------------------------------------------------------

    def places(self, path: str, far_url: str, options: Mapping[str, Any], *, has_room: bool) -> list[Place]:
        """List where to save the checkpoint `path`, the first one first."""
        far = Place(far_url, options)
        of_far = ("storage_options", "max_bandwidth_bytes_per_s")
        near_options = {name: value for name, value in options.items() if name not in of_far}
        near = Place(self.folder.url(path), near_options, self.is_local, self.is_leader, self.sources)
        if not self.is_local:
            return [far, near]
        return [near, far] if has_room else [far]

    def has_room(self) -> bool:
        """Tell whether this node has room for one more like the largest that it has; what is durable makes room."""
        try:
            return not (self.is_local and self.is_leader) or has_room(
                self.folder.path, self._options.budget_bytes, self.own
            )
        except OSError as error:
            _logger.warning("the folder of this node cannot be used: %s", error)
            return False

    def share_copies(self, ranks: Ranks) -> str:
        """Choose who keeps copies of whose files, if some are wanted. All ranks call it.

        Returns why copies would be lost together with what they are copies of; empty if they are not.
        """
        if not (self.is_local and self._options.copies):
            return ""
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
        return shared_domains(nodes)

    def remove_near(self, path: str, commit_id: str) -> None:
        """Remove a save from this node, unless its folder holds another one by now, or will."""
        with contextlib.suppress(CheckpointError):
            remove_save(self.folder.url(path), commit_id)

    # -- what became of it ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to carry now, if that has not begun, or has ended for want of work."""
        if self._process is not None and self.is_local:
            self._process.wake()
        if self._watch is not None:
            self._watch.begin()

    def failed(self) -> dict[str, str]:
        """List checkpoints of this node that cannot become durable, by their folders, and why."""
        states = current_status(self.folder.path).items()
        return {path: state.reason for path, state in states if state.state == "failed"}

    def problem(self) -> str:
        """Return by which error the process of this node has ended since the last save; empty if it runs, or has none."""
        if self._process is None or not self._process.ended():
            return ""
        return problem_since(self.folder.path, self.changed_at_s)

    def is_durable(self, path: str) -> bool:
        """Tell whether a checkpoint of this node has become durable, as the process last said."""
        return (state := current_status(self.folder.path).get(path)) is not None and state.state == "durable"

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
        self.folder.release()
