"""The ranks that save or load together, and what to say when they lose each other."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

__all__ = ["Ranks"]

_COLLECTIVE_TIMEOUT_S = 3600.0
_ROLL_CALL_TIMEOUT_S = 10.0

Purpose = Literal["foreground", "background"]

_own_groups: dict[Purpose, tuple[object, Any]] = {}
_calls = 0


class Ranks:
    """The process group of one save or load. Every rank makes one at the same point of the program.

    Without a group of the caller's, a gloo group of this library's own is used: object collectives over NCCL
    would take GPU memory, and those of a background save must not mix with the trainer's. It can also be
    given up when a rank dies, which frees the others from waiting.
    """

    def __init__(self, process_group: Any, *, no_dist: bool, purpose: Purpose = "foreground") -> None:
        global _calls
        self.no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
        self.group: Any = process_group
        self._purpose: Purpose | None = None
        if not self.no_dist:
            _calls += 1
            if process_group is None and dist.get_world_size() > 1:
                self._purpose = purpose
                self.group = _own_group(purpose)
        self._roll = f"ckpt/roll-call/{_calls}"

    @property
    def rank(self) -> int:
        return 0 if self.no_dist else dist.get_rank(self.group)

    def broadcast(self, value: Any) -> Any:
        """The first rank's `value`, on all ranks."""
        if self.no_dist or dist.get_world_size(self.group) == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def silent(self) -> list[int] | None:
        """After a broken collective: the ranks that do not answer any more; None if nobody can be asked.

        Gives the broken group up first, so that ranks still waiting in it wake up and answer.
        """
        if self._purpose is not None:
            _own_groups.pop(self._purpose, None)
            with contextlib.suppress(Exception):
                dist.destroy_process_group(self.group)
        try:
            store = dist.distributed_c10d._get_default_store()
            members = dist.get_process_group_ranks(self.group if self._purpose is None else None)
            store.set(f"{self._roll}/{dist.get_rank()}", "here")
            missing = set(members)
            deadline = time.monotonic() + _ROLL_CALL_TIMEOUT_S
            while True:
                missing = {rank for rank in missing if not store.check([f"{self._roll}/{rank}"])}
                if not missing or time.monotonic() > deadline:
                    return sorted(missing)
                time.sleep(0.1)
        except Exception:
            return None  # the store went away with the rank that held it


def _own_group(purpose: Purpose) -> Any:
    """This library's gloo group over all ranks, made once for each default group."""
    world = dist.group.WORLD
    known = _own_groups.get(purpose)
    if known is None or known[0] is not world:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S))
        known = _own_groups[purpose] = (world, group)
    return known[1]
