"""Compare, without waiting, whether all ranks read the same data by the same settings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ckpt.errors import ConfigurationError
from ckpt.torch_private import default_store

_made = itertools.count()


class Agreement:
    """What one data set of each rank says: the first rank that begins writes it into the process group's store, and the
    others compare. Ranks without a data set are not waited for."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        # One rank alone can have data sets of its own, which the others do not count.
        self._number = next(_made) if world_size > 1 else 0
        self._begun = 0

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if another rank has other settings."""
        self._begun += 1
        if self._world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return
        own = json.dumps(settings, sort_keys=True)
        key = f"ckpt-data/{self._number}/{self._begun}/{self._world_size}/{','.join(sorted(settings['sources']))}"
        store = default_store()
        stored = store.compare_set(key, "", json.dumps([self._rank, own])).decode()
        rank, first = json.loads(stored)
        if first == own:
            return
        theirs = json.loads(first)
        names = [name for name in settings if theirs.get(name) != json.loads(own)[name]]
        shown = "; ".join(
            f"{name}: rank {rank} {theirs.get(name)!r}, rank {self._rank} {settings[name]!r}"
            for name in names
        )
        raise ConfigurationError(f"the ranks do not read the same data by the same settings: {shown[:1000]}")
