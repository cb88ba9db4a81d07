"""Data for loaders under test, and the checkpoint that all their ranks would make."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.sources import MapSource

Merged = dict[str, Any]


class Numbered(MapSource):
    """Documents in which no token appears twice, so that a token shows where it comes from.

    `kind`: of the order in which they are read; lengths are known where it is "global".
    """

    def __init__(
        self, lengths: Sequence[int], *, first: int = 0, cut_every: int = 10**9, kind: str = "global"
    ) -> None:
        ends = [first, *(first + end for end in itertools.accumulate(lengths))]
        super().__init__([np.arange(*pair) for pair in itertools.pairwise(ends)], dtype=np.int64)
        self.all_tokens = range(first, ends[-1])
        self._cut_every = cut_every
        self._counts = kind == "global"

    def cuts(self, start: int, stop: int) -> Sequence[int]:
        return [cut for cut in range(0, stop, self._cut_every) if start < cut < stop]


def merged(loaders: Sequence[RescalableLoader]) -> Merged:
    """Unite the states of all ranks, as a checkpoint does."""
    return merged_states([loader.state_dict() for loader in loaders])


def merged_states(states: Sequence[Merged]) -> Merged:
    """Unite the states of all ranks, as a checkpoint does."""
    assert len({state["settings"] for state in states}) == 1
    united: Merged = {"settings": states[0]["settings"]}
    for state in states:
        if "ranks" in state:
            united.setdefault("ranks", {}).update(state["ranks"])
        for name, of_rank in state.get("positions", {}).items():
            positions = united.setdefault("positions", {}).setdefault(name, {})
            assert not positions.keys() & of_rank.keys(), "a shard has two owners"
            positions |= of_rank
    return united
