"""How much of what ranks hold together is compared, and which differences are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt.content.replicas import Replicas, differences, differing
from ckpt.save_plans.local import describe


def replicas_of(state: dict[str, Any], ranks: int) -> Replicas:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    structure = describe(planner, lambda items: None)
    return Replicas(structure, planner.state_dict, planner.resolve_data, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 64])
@pytest.mark.parametrize(("count", "most"), [(10, 10), (2048, 2048), (20_000, 2048)])
def test_of_very_many_tensors_some_are_compared(ranks: int, count: int, most: int) -> None:
    state = {f"layers.{number}.weight": torch.full((4,), float(number)) for number in range(count)}
    other = {name: value + 1 for name, value in state.items()}
    here, there = replicas_of(state, ranks), replicas_of(other, ranks)
    keys = differing([here.digests(), there.digests()])
    found = differences([here.details(keys), there.details(keys)])
    assert min(count, 500) < len(found) <= most if count > 10 else len(found) == count
    assert not differing([here.digests(), replicas_of(state, ranks).digests()])


def test_ranks_that_hold_a_few_more_tensors_are_compared_too() -> None:
    """The first of them is beyond a limit that the other has not reached."""
    state = {f"w{number}": torch.ones(2) for number in range(4096)}
    more = {**state, "own": torch.ones(2)}
    assert not differing([replicas_of(state, 2).digests(), replicas_of(more, 2).digests()])
