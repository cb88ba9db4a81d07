"""Check a run's root before the first step, on all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ckpt.ranks.group import Ranks, RanksFailed
from ckpt.tools.preflight import check_place
from ckpt.trainer_integration.run.in_flight import Saves
from ckpt.trainer_integration.training_state import size_bytes

T = TypeVar("T")


def check_root(state: Mapping[str, Any], ranks: Ranks, saves: Saves) -> None:
    """Write, read and delete below the root, and see whether it has room for `state`.

    A save then fails in the first minute, not in the first night.
    """
    history, needed = saves.history, size_bytes(state)
    began_s = time.monotonic()
    free = agreed(
        ranks,
        "preflight",
        lambda: check_place(history.root, storage_options=history.storage_options, needed_bytes=needed),
    )
    room = "" if free is None or not needed else f"; there is room for {free // needed} checkpoints"
    took_s = time.monotonic() - began_s
    saves.tell("preflight", None, f"{history.url('')} works{room}", size_bytes=needed, took_s=took_s)


def agreed(ranks: Ranks, call: str, work: Callable[[], T]) -> T:
    """Return `work()` if it works on all ranks; else raise this rank's error, or the first."""
    try:
        return ranks.together(call, work)
    except RanksFailed as failed:
        raise failed.failures.get(ranks.rank) or failed.failures[min(failed.failures)] from None
