"""Check a run's root before the first step, on all ranks together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ckpt.ranks.group import Ranks, RanksFailed
from ckpt.tools.preflight import check_place
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.training_state import size_bytes

T = TypeVar("T")


class RootCheck:
    """Check the root once, so that a save fails in the first minute, not in the first night."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        ranks: Ranks,
        saves: Saves,
        *,
        is_done: bool,
    ) -> None:
        self._root, self._storage_options, self._ranks, self._saves = root, storage_options, ranks, saves
        self._is_done = is_done

    def run(self, state: Mapping[str, Any]) -> None:
        """Write, read and delete below the root, and see whether it has room for `state`.

        Raises:
            CheckpointError: that failed on some rank. It is tried again with the next state.
        """
        if self._is_done:
            return
        needed = size_bytes(state)
        began_s = time.monotonic()
        free = agreed(
            self._ranks,
            "preflight",
            lambda: check_place(self._root, storage_options=self._storage_options, needed_bytes=needed),
        )
        self._is_done = True
        room = "" if free is None or not needed else f"; there is room for {free // needed} checkpoints"
        took_s = time.monotonic() - began_s
        works = f"{self._saves.history.url('')} works{room}"
        self._saves.tell("preflight", None, works, size_bytes=needed, took_s=took_s)


def agreed(ranks: Ranks, call: str, work: Callable[[], T]) -> T:
    """Return `work()` if it works on all ranks; else raise this rank's error, or the first."""
    try:
        return ranks.together(call, work)
    except RanksFailed as failed:
        raise failed.failures.get(ranks.rank) or failed.failures[min(failed.failures)] from None
