"""The law of states: a resumed run continues bit for bit, on any number of ranks, or its save was refused.

`make test-law` tries the combinations that have all pairs of values; `make test-ranks` a sample. LAW_SEED draws
others, and LAW_COMBINATIONS=all asks for all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.state_law.combinations import (
    DIMENSIONS,
    INFEASIBLE,
    MIN_COMBINATIONS,
    SAMPLE,
    Combination,
    completed,
    covering,
    feasible_pairs,
    pairs,
    pairs_of,
    reason_against,
    sample,
)
from support.state_law.law import differences, problem
from support.state_law.worlds import WorldFailed, Worlds

FOUND = [
    "plain-several-empty-none-start-1-1-off",  # each optimizer has a group without parameters
    "plain-adam-one-collections-frozen-2-2-installed",  # ranks wrote the members of a dict in turns
    "fsdp1_orig-several-one-none-steps-2-2-off",  # one FSDP1 unit, two optimizers
    "fsdp1_orig-adamax-one-none-steps-2-2-raw",  # a raw optimizer of shards
    "fsdp2-low_bit-one-none-steps-4-2-off",  # shards of a class of their own, cut otherwise
]
"""Combinations that failed once."""

SEED = int(os.environ.get("LAW_SEED", "0"))
DRAWN = covering(SEED) if os.environ.get("LAW_COMBINATIONS") == "all" else sample(SEED)
COMBINATIONS = [*dict.fromkeys([*map(Combination.of, FOUND), *DRAWN])]


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.mark.ranks
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda each: each.text)
def test_a_run_resumes_bit_for_bit(combination: Combination, worlds: Worlds, tmp_path: Path) -> None:
    found = problem(combination, worlds, str(tmp_path))
    assert found is None, (
        f"{found}\n\nAgain: PYTHONPATH=.:tests python -m support.state_law {combination.text}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_combinations_have_all_feasible_pairs(seed: int) -> None:
    drawn = covering(seed)
    assert len({*drawn}) == len(drawn) >= MIN_COMBINATIONS
    assert not [each.text for each in drawn if reason_against(asdict(each))]
    seen = {pair for each in drawn for pair in pairs_of(asdict(each))}
    left = {*pairs()} - seen
    assert not left & feasible_pairs()
    for pair in left:
        assert completed(dict(pair), random.Random(0), set()) is None, f"{sorted(pair)} is feasible"


def test_each_reason_sets_some_combinations_apart() -> None:
    """A rule whose values no longer exist would hide that nothing is left out."""
    for each in INFEASIBLE:
        for name, values in each.values.items():
            known = DIMENSIONS.get(name, ("same", "moved"))
            assert not {*values}.difference(known), f"{each.reason}: {name}"


def test_the_sample_has_every_value() -> None:
    drawn = sample(SEED)
    assert len({*drawn}) == SAMPLE
    for name, values in DIMENSIONS.items():
        assert {asdict(each)[name] for each in drawn} == {*values}


@pytest.mark.slow
def test_seeds_draw_other_combinations() -> None:
    assert covering(1) == covering(1)
    assert {*covering(1)} != {*covering(2)}


def test_a_combination_is_read_from_its_text() -> None:
    for each in sample(3):
        assert Combination.of(each.text) == each
    with pytest.raises(ValueError, match="takes one group"):
        Combination.of("plain-lbfgs-two-none-steps-1-1-off")
    with pytest.raises(ValueError, match="unknown"):
        Combination.of("plain-lbfgs-one-none-never-1-1-off")


def test_differences_are_named_by_their_path() -> None:
    one = {"state": {"a.weight": {"step": 3, "list": ["list", 1, 2]}, "b.weight": 1}}
    other = {"state": {"a.weight": {"step": 4, "list": ["list", 1, 3]}}}
    assert not differences(one, one)
    assert differences(one, other) == [
        "state.a.weight.step: expected 3, seen 4",
        "state.a.weight.list[2]: expected 2, seen 3",
        "state.b.weight: expected 1, seen nothing",
    ]


class ScriptedWorlds(Worlds):
    """Answers as ranks would: with these states of one rank, in the order of the calls."""

    def __init__(self, *states: dict[str, Any]) -> None:
        super().__init__()
        self._states = list(states)

    def call(self, ranks: int, function: Any, *args: Any, timeout_s: float = 0.0) -> list[Any]:
        return [self._states.pop(0)]


def _state(lr: float = 0.1, losses: tuple[str, ...] = ("1", "2")) -> dict[str, Any]:
    return {"losses": list(losses), "optimizers": [{"groups": [{"lr": lr}]}]}


def _saved(**other: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"local": _state(), "whole": _state(), "after the save": _state()}
    return {**state, "after": _state(), **other}


SAME, MOVED = "plain-adam-one-none-steps-1-1-off", "plain-adam-one-none-steps-1-2-off"
LOW_BIT = "plain-low_bit-one-none-steps-1-1-off"
VERDICTS: dict[str, tuple[str, list[dict[str, Any]], str | None]] = {
    "kept": (SAME, [_state(), _saved(), {"local": _state(), "after": _state(losses=("2",))}], None),
    "kept on other ranks": (MOVED, [_state(), _saved(), {"whole": _state()}], None),
    "changed by the save": (
        SAME,
        [_state(), _saved(**{"after the save": _state(lr=0.2)})],
        "right after the save",
    ),
    "changed later": (SAME, [_state(), _saved(after=_state(lr=0.2))], "the save changed the training"),
    "restored otherwise": (
        SAME,
        [_state(), _saved(), {"local": _state(lr=0.2), "after": _state()}],
        "restored another state",
    ),
    "resumed otherwise": (
        SAME,
        [_state(), _saved(), {"local": _state(), "after": _state(losses=("3",))}],
        "differs later",
    ),
    "lost on other ranks": (
        MOVED,
        [_state(), _saved(), {"whole": _state(lr=0.2)}],
        "the restored state differs",
    ),
    "refused": (SAME, [_state(), {"refused": "SaveFailed: no"}], "was refused: SaveFailed: no"),
    "refused as it may": (LOW_BIT, [_state(), {"refused": "SaveFailed: exp_avg is a LowBitTensor"}], None),
    "refused without a name": (LOW_BIT, [_state(), {"refused": "SaveFailed: no"}], "names none of"),
}


@pytest.mark.parametrize("kind", VERDICTS)
def test_a_verdict_names_the_fault(kind: str) -> None:
    text, states, expected = VERDICTS[kind]
    found = problem(Combination.of(text), ScriptedWorlds(*states), "")
    assert found is None if expected is None else expected in (found or "")


def _fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()
    return dist.get_rank()


def test_a_world_that_failed_is_replaced(worlds: Worlds) -> None:
    with pytest.raises(WorldFailed, match="on purpose"):
        worlds.call(2, _fail_on, 1)
    assert worlds.call(2, _fail_on, 2) == [0, 1]
