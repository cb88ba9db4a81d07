"""States to save and to load again, planners that fail, and what a failed save left at its place."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckpt
from ckpt.backends.base import MIB
from ckpt.backends.registry import open_store
from support.states import digest, emptied, random_tensor

Place = tuple[str, dict[str, Any]]
"""The URL of a checkpoint and its storage options."""


def state_of(rank: int, seed: int) -> dict[str, Any]:
    """Different on each rank, so that every rank writes: 26 MiB in all for two ranks, several parts each."""
    return {
        f"rank{rank}.large": random_tensor(3 * MIB, seed=seed + rank),
        f"rank{rank}.small": random_tensor(MIB // 4, seed=seed + rank + 10),
        f"rank{rank}.object": {"seed": seed},
    }


@functools.lru_cache(maxsize=8)
def digest_of(rank: int, seed: int) -> Any:
    return digest(state_of(rank, seed))


def loaded_from(rank: int, url: str, options: dict[str, Any]) -> Any:
    """The digest of what is at a place."""
    loaded = {key: emptied(value) for key, value in _template(rank).items()}
    ckpt.load(loaded, url, storage_options=options, no_dist=not dist.is_initialized())
    return digest(loaded)


@functools.lru_cache(maxsize=1)
def _template(rank: int) -> dict[str, Any]:
    return state_of(rank, 0)


def load_is(seed: int, rank: int, url: str, options: dict[str, Any]) -> bool:
    return bool(loaded_from(rank, url, options) == digest_of(rank, seed))


class FailingPlanner(DefaultSavePlanner):
    """Raises at the n-th time that data are asked for."""

    def __init__(self, at: int, failure: Callable[[], Any]) -> None:
        super().__init__()
        self.left, self.failure = at, failure

    def resolve_data(self, write_item: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            self.failure()
        return super().resolve_data(write_item)


def boom() -> None:
    raise ValueError("boom")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def objects_at(place: Place) -> dict[str, int]:
    return {found.key: found.size_bytes for found in open_store(*place).list()}
