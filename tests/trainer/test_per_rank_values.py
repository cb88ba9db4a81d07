"""Values that are each rank's own: they keep their structure, and are kept apart from dicts that look like them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn, optim

import ckpt
from ckpt.errors import CheckpointError, ConfigurationError, LoadFailed
from ckpt.options import LoadOptions, ManagerOptions, SaveOptions
from ckpt.state import training_state
from ckpt.state.per_rank import own_part, ranks_of
from ckpt.state.stored import StoredPart, StoredState, StoredValue
from ckpt.state.targets import Targets


class Part:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.calls = 0

    def state_dict(self) -> Any:
        self.calls += 1
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def test_patterns_on_two_ranks(tmp_path: Path) -> None:
    for found in run_ranks(2, _patterns, str(tmp_path)):
        assert found == []


def _patterns(rank: int, root: str) -> list[str]:
    wrong: list[str] = []

    def check(what: str, found: Any, expected: Any) -> None:
        if found != expected:
            wrong.append(f"{what}: {found}, not {expected}")

    own = {rank: 10 + rank, "none": {}, "deep": {"x": {rank: 1}}}
    part = Part(own)
    plain = {"m": {rank: 5}, "n": {1: 2}}
    options = SaveOptions(per_rank=["part", "plain.m"], resume_check=True)
    ckpt.save({"part": part, "plain": plain}, f"{root}/keys", options=options)
    again = Part({})
    into = dict[str, Any]()
    ckpt.load({"part": again, "plain": into}, f"{root}/keys")
    check("keys of a part", again.value, own)
    check("keys of a dict", into, plain)
    check("calls of state_dict", part.calls, 1)

    metrics = {"x": rank, "y": {rank: 1}}
    of_saves = ManagerOptions(save_options=SaveOptions(per_rank=["metrics.*"]))
    with ckpt.CheckpointManager(f"{root}/manager", save=1, options=of_saves, preflight=False) as manager:
        manager.save(1, {"metrics": Part(metrics), "position": ckpt.per_rank(5 + rank)})
        again = Part({})
        restored = manager.restore({"metrics": again, "position": ckpt.per_rank(0)})
    assert restored is not None
    check("the manager", again.value, metrics)
    check("a value", restored.state["position"], 5 + rank)

    model = nn.Linear(2, 2)
    optimizer = optim.Adam(model.parameters(), lr=1 + rank)
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    optimizer.step()
    every = SaveOptions(per_rank=["*"], resume_check=True)
    ckpt.save(training_state(model=model, optimizer=optimizer), f"{root}/all", options=every)
    other = nn.Linear(2, 2)
    optimizer_2 = optim.Adam(other.parameters())
    ckpt.load(training_state(model=other, optimizer=optimizer_2), f"{root}/all")
    check("a model", torch.equal(model.weight, other.weight), True)
    check("options", optimizer_2.param_groups[0]["lr"], 1 + rank)
    moments = [
        state["exp_avg"].tolist() for each in (optimizer, optimizer_2) for state in each.state.values()
    ]
    check("moments", moments[:2], moments[2:])

    ckpt.save({"loader": Part({"at": 3})}, f"{root}/plain")
    ckpt.load({"loader": ckpt.per_rank(again)}, f"{root}/plain")
    check("a plain loader", again.value, {"at": 3})
    ckpt.save({"loader": ckpt.per_rank(Part({"at": rank}))}, f"{root}/twice", options=every)
    ckpt.load({"loader": ckpt.per_rank(again)}, f"{root}/twice")
    check("a part that is marked twice", again.value, {"at": rank})
    return wrong


def test_plain_dicts_are_compared_by_their_names(tmp_path: Path) -> None:
    for seen in run_ranks(2, _named_dicts, str(tmp_path)):
        assert seen == ["model", "optimizer", "loader", "saved", "refused"]


def _named_dicts(rank: int, root: str) -> list[str]:
    seen = []
    model = nn.Linear(1, 1)
    norm = nn.BatchNorm1d(2)
    nn.init.constant_(model.weight, rank)
    norm.state_dict()["running_mean"] += rank
    optimizer = optim.SGD(model.parameters(), lr=0.1 + rank)
    states: list[dict[str, Any]] = [
        {"model": model.state_dict()},
        {"optimizer": optimizer.state_dict()},
        {"loader": {"position": rank}},
        {"model": norm.state_dict() | {"mask": torch.tensor(rank)}},
    ]
    for number, state in enumerate(states):
        try:
            ckpt.save(state, f"{root}/{number}")
            seen.append("saved")
        except CheckpointError as error:
            seen.append(next(name for name in state if f"{name}." in str(error)))
    nn.init.constant_(model.weight, 1)
    nn.init.constant_(model.bias, 1)
    if rank == 1:
        optimizer.param_groups[0]["function"] = lambda: 1
    with pytest.raises(CheckpointError, match="the groups of 'optimizer' hold an option that cannot be sent"):
        ckpt.save(training_state(model=model, optimizer=optimizer), f"{root}/groups", timeout_s=60)
    return [*seen, "refused"]


def test_dicts_that_look_like_each_ranks_own(tmp_path: Path) -> None:
    stats = {"rank-00000": 1.5, "rank-00001": 2.0}
    ckpt.save({"stats": stats}, tmp_path / "1")
    state: dict[str, Any] = {"stats": {}}
    ckpt.load(state, tmp_path / "1")
    assert state["stats"] == stats
    with pytest.raises(CheckpointError, match="'stats' has the keys of values that"):
        ckpt.save({"stats": {"ranks": 2, **stats}}, tmp_path / "2")


def part_with(*keys: str) -> StoredPart:
    return StoredPart("loader", {(key,): StoredValue(f"loader.{key}") for key in keys})


@pytest.mark.parametrize("last", ["rank-00002", "rank-99999", "rank-4000000000"])
def test_all_ranks_must_be_there(last: str) -> None:
    part = part_with("ranks", "rank-00000", last)
    marked = ckpt.per_rank(Part({}), merge=lambda states, rank, size: states[0])
    for plan in (marked.plan, own_part):
        targets = Targets(LoadOptions(), StoredState([], {}))
        plan(part, targets)
        assert "lacks loader.rank-00001" in targets.faults[0]


@pytest.mark.parametrize("key", ["rank-000000", "rank-99999999999", "rank-" + "9" * 5000, "position"])
def test_other_keys_are_no_ranks(key: str) -> None:
    assert ranks_of(part_with("ranks", "rank-00000", key)) is None


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: SaveOptions(per_rank=None),  # type: ignore[arg-type]
    "a dict": lambda: SaveOptions(per_rank={"a": 1}),
    "a word": lambda: SaveOptions(resume_check="first"),  # type: ignore[arg-type]
    "a dict of options": lambda: ManagerOptions(save_options={"per_rank": ["x"]}),  # type: ignore[arg-type]
    "numbers": lambda: LoadOptions(rename={1: 2}),  # type: ignore[dict-item]
    "a save": lambda: ckpt.save({"x": 1}, "memory://a", options={"strict": False}),  # type: ignore[arg-type]
    "a load": lambda: ckpt.load({"x": 1}, "memory://a", options={"strict": False}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_options(kind: str) -> None:
    with pytest.raises(ConfigurationError):
        WRONG[kind]()


def test_names_of_a_generator_are_kept() -> None:
    assert SaveOptions(per_rank=(name for name in ["a", "b"])).per_rank == ("a", "b")  # type: ignore[arg-type]


def test_a_merge_of_very_many_ranks_is_linear() -> None:
    ranks = 20_000
    part = part_with("ranks", *(f"rank-{rank:05d}" for rank in range(ranks)))
    by_rank = ranks_of(part)
    assert by_rank is not None
    assert [*by_rank] == [*range(ranks)]


def test_a_fault_of_another_number_of_ranks(tmp_path: Path) -> None:
    part = part_with("ranks", "rank-00000", "rank-00001")
    targets = Targets(LoadOptions(), StoredState([], {}))
    own_part(part, targets)
    assert "2 ranks saved it, and 1 load" in targets.faults[0]
    ckpt.save({"loader": ckpt.per_rank(1)}, tmp_path)
    with pytest.raises(LoadFailed, match="lacks 1 key"):
        ckpt.load({"sampler": ckpt.per_rank(1)}, tmp_path)
