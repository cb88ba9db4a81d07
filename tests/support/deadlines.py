"""What the tests of deadlines share: a state in two parts, a planner that acts, the text of a failure."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from ckpt.backends.base import MIB
from ckpt.errors import LoadFailed, SaveFailed
from support.states import random_tensor

TIMEOUT_S = 8.0


def state_of(rank: int, seed: int = 0) -> dict[str, Any]:
    return {
        f"rank{rank}.large": random_tensor(3 * MIB, seed=seed + rank),
        f"rank{rank}.object": {"seed": seed},
    }


class Acting(DefaultSavePlanner):
    """Does something when a tensor's data are asked for."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            self.act()
        return super().resolve_data(write_item)


def failure_of(call: Callable[[], Any]) -> tuple[str, dict[int, str]]:
    """The text of the failure of a save or load, and of each rank's, once they have travelled."""
    with pytest.raises((SaveFailed, LoadFailed)) as caught:
        call()
    failure = pickle.loads(pickle.dumps(caught.value))
    return str(failure), {rank: str(error) for rank, error in failure.failures.items()}


def wait_for_threads() -> list[str]:
    """The threads of a save or load that are left after a while."""
    deadline = time.monotonic() + 10
    while True:
        names = [found.name for found in threading.enumerate()]
        left = [name for name in names if name in ("ckpt-watch", "ckpt-beat", "ckpt-store")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
