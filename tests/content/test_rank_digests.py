"""Digests by which ranks compare what they hold: equal values have equal ones, and each difference shows."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.logs import warnings_of_ckpt
from support.ranks import run_ranks
from support.states import SAVABLE_DTYPES, random_tensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW

import ckpt
from ckpt.errors import CheckpointError, SaveFailed
from ckpt.options import SaveOptions
from ckpt.state import training_state
from ckpt.state.rank_agreement import _merged
from ckpt.state.rank_digests import RankDigests, digest
from ckpt.transfer.tensor_memory import memory_of


def digests_of(state: dict[str, Any], turn: int = 2, *, is_whole: bool = False) -> RankDigests:
    found = RankDigests(turn, is_whole=is_whole)
    for part, value in state.items():
        found.add(part, value, "value", set())
    return found


def state_of_all_dtypes() -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for dtype in SAVABLE_DTYPES:
        for shape in [(), (3,), (2, 5), (0,), (40, 40), (200, 200)]:
            tensors[f"{dtype}{shape}"] = random_tensor(*shape, dtype=dtype)
    return {"part": {"tensors": tensors, "more": [torch.ones(2), {"x": 1, "y": [2, "z"]}]}}


def spread(value: Any) -> Any:
    """Copy a state with gaps in the memory of its tensors."""
    if isinstance(value, dict):
        return {key: spread(item) for key, item in value.items()}
    if isinstance(value, list):
        return [spread(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    wide = torch.empty(*value.shape, 2, dtype=value.dtype)
    memory_of(wide)[:] = bytes(wide.nbytes)
    wide[..., 0] = value
    return wide[..., 0]


def test_digests_depend_on_values_alone() -> None:
    state = state_of_all_dtypes()
    one, other = digests_of(state), digests_of(spread(state))
    assert one.digests() == other.digests()
    assert one.details({("value", 0, 0)}) == other.details({("value", 0, 0)})


@pytest.mark.slow
def test_each_value_shows_in_the_digest_and_by_its_name() -> None:
    state = state_of_all_dtypes()
    digests, names = digests_of(state).details({("value", 0, 0)})
    for name, tensor in state["part"]["tensors"].items():
        if tensor.numel() == 0:
            continue
        changed = copy.deepcopy(state)
        with torch.no_grad():
            element = changed["part"]["tensors"][name].view(-1)[-1:].view(torch.uint8)
            element[:1] ^= 1
        found = digests_of(changed)
        assert found.digests() != digests_of(state).digests(), name
        other, _ = found.details({("value", 0, 0)})
        assert [names[number] for number in digests if digests[number] != other[number]] == [
            (f"part.tensors.{name}", "value")
        ]


def test_names_shapes_and_dtypes_show() -> None:
    states: list[dict[str, Any]] = [
        {"a": {"x": torch.zeros(4)}},
        {"a": {"y": torch.zeros(4)}},
        {"a": {"x": torch.zeros(2, 2)}},
        {"a": {"x": torch.zeros(4, dtype=torch.int32)}},
        {"a": {"x": torch.zeros(4, device="meta")}},
        {"a": {"x": [0.0] * 4}},
    ]
    assert len({digest(sorted(digests_of(state).digests().items())) for state in states}) == len(states)


def test_samples_of_large_tensors_see_all_places_in_turn() -> None:
    """A difference as long as the distance of two pieces is seen in each save, a single one in some."""
    tensor = torch.zeros((1 << 20) + 37, dtype=torch.uint8)
    same = digests_of({"w": {"x": tensor}}).digests()
    seen = 0
    for place in (0, len(tensor) // 2, len(tensor) - 1):
        other = tensor.clone()
        other[place] = 1
        hits = [digests_of({"w": {"x": other}}, turn).digests() != same for turn in range(2, 400)]
        seen += any(hits)
        assert not all(hits)
        assert (
            digests_of({"w": {"x": other}}, is_whole=True).digests()
            != digests_of({"w": {"x": tensor}}, is_whole=True).digests()
        )
    assert seen == 3
    long = tensor.clone()
    long[300_000 : 300_000 + len(tensor) // 32] = 1
    for turn in range(2, 40):
        assert digests_of({"w": {"x": long}}, turn).digests() != same


def test_the_first_save_after_a_load_compares_large_tensors_whole(tmp_path: Path) -> None:
    run_ranks(2, _load_and_save, str(tmp_path))


def _load_and_save(rank: int, root: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(600, 600)
    state = training_state(model=model, rng=False)
    ckpt.save(state, f"{root}/rank-{rank}", no_dist=True)
    ckpt.load(state, f"{root}/rank-0")
    with torch.no_grad():
        model.weight[200, 300] += rank
    with pytest.raises(SaveFailed, match=r"model\.weight"):
        ckpt.save(state, f"{root}/step-2")


def test_a_parameter_in_several_optimizers_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    first, second = AdamW(model.parameters()), SGD([model.weight], lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointError, match=r"several optimizers have 1 key\(s\): weight.*first=.*second="):
        ckpt.save(training_state(model=model, optimizer=[first, second]), tmp_path / "one")
    ckpt.save(training_state(model=model, first=first, second=second), tmp_path / "two")
    bias = SGD([model.bias], lr=0.1)
    ckpt.save(training_state(model=model, optimizer=[second, bias]), tmp_path / "three")


class Forgetful(nn.Module):
    """Give other names in each state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.calls = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return {f"w{self.calls}": self.w.detach()}


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": torch.ones(2), "c": 1.5}},
        {"a": {1: torch.ones(2), "b": {}}},
        {"a": {1: torch.ones(2), "2": 3}},
        {"a": [torch.ones(2), {"b": None}], "c": ()},
    ],
)
def test_plain_values_are_planned_back_without_a_fault(value: Any, tmp_path: Path) -> None:
    with warnings_of_ckpt() as warned:
        ckpt.save({"part": value}, tmp_path / "step-1", options=SaveOptions(resume_check=True))
    assert not warned
    ckpt.load(loaded := {"part": copy.deepcopy(value)}, tmp_path / "step-1")
    assert str(loaded["part"]) == str(value)


def test_a_model_that_cannot_be_planned_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"could not restore it.*model\.w2"):
        ckpt.save(
            training_state(model=Forgetful(), rng=False),
            tmp_path / "step-1",
            options=SaveOptions(resume_check=True),
        )


def test_objects_that_hold_sets_have_one_digest() -> None:
    """Sets are written in another order in each process."""
    code = (
        "import sys, types; from ckpt.state.rank_digests import digest; m = types.ModuleType('m'); sys.modules['m'] = m\n"
        "exec('class C: pass', m.__dict__); c = m.C(); c.seen = {'a', 'b', 'c', 'd'}; c.more = [frozenset('xyz'), {'k': {'e', 'f'}}]\n"
        "print(digest(c), digest([c]))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert len(seen) == 1


class _Ranks:
    rank = 0


def test_groups_of_very_many_ranks_are_united() -> None:
    """In one look at each: with a list of all names for each rank 20,000 would take minutes."""
    groups = [[{"lr": 0.1, "params": [f"e{rank}.{i}" for i in range(3)]}] for rank in range(5000)]
    groups += [[{"lr": float(rank), "params": [f"own{rank}"]}] for rank in range(1, 5000)]
    (common, *others) = _merged("optimizer", groups, "u", _Ranks())  # type: ignore[arg-type]
    assert len(common["params"]) == 15_000
    assert len(others) == 4999


def test_ranks_on_meshes_of_their_own_send_no_list_of_digests(tmp_path: Path) -> None:
    for rank, seen in enumerate(run_ranks(4, _meshes, str(tmp_path))):
        assert seen == {"alike": 0, "names": 0, "tied": 1, "other": "refused"}, rank


def _meshes(rank: int, root: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "fsdp"))
    counts: list[int] = []

    def details(self: RankDigests, *keys: Any) -> Any:
        found = original(self, *keys)
        counts.append(len(found[0]))
        return found

    original = RankDigests.details

    def weight(value: float) -> DTensor:
        return DTensor.from_local(torch.full((2, 3), value), mesh["fsdp"], [Shard(0)], run_check=False)

    stage = rank // 2
    seen = dict[str, Any]()
    states = {
        "alike": {"e": {"w": weight(1), "v": weight(2)}},
        "names": {"e": {f"w{stage}.{number}": weight(stage) for number in range(9)}},
        "tied": {"e": {f"w{stage}": weight(stage), "tied": weight(5)}},
        "other": {"e": {f"w{stage}": weight(stage), "tied": weight(5 + stage)}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankDigests, "details", details)
        for name, state in states.items():
            counts.clear()
            try:
                ckpt.save(state, f"{root}/{name}")
                seen[name] = max(counts, default=0)
            except CheckpointError as error:
                seen[name] = "refused" if "'e.tied'" in str(error) else str(error)
    return seen


def test_groups_of_numbered_parameters_are_united(tmp_path: Path) -> None:
    assert run_ranks(2, _numbered, str(tmp_path)) == [1, 2]


def _numbered(rank: int, root: str) -> int:
    """A rank has a group more; keys that are numbers have one note for all."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0)
        parameter.grad = torch.ones_like(parameter)
    groups = [{"params": [*layer.parameters()], "more": {}} for layer in model][: rank + 1]
    optimizer = AdamW(groups, lr=0.1)
    optimizer.step()
    ckpt.save({"optimizer": optimizer}, root)
    again = AdamW(groups, lr=0.5)
    ckpt.load({"optimizer": again}, root)
    assert all(group["lr"] == 0.1 and group["more"] == {} for group in again.param_groups)
    return len(again.state) // 2
