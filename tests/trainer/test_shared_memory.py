"""Values that share memory in a fresh program, and were apart when they were saved: each comes back as its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import LoadFailed
from ckpt.options import LoadOptions


class Holder:
    """A part that shows and takes one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def shadow_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["average", "zaverage"])
@pytest.mark.parametrize("as_part", [True, False])
def test_an_average_that_begins_as_the_weights(tmp_path: Path, name: str, as_part: bool) -> None:
    model = net()
    shadow = {key: value * 0.5 for key, value in shadow_of(model).items()}
    ckpt.save({"model": model, name: Holder(shadow) if as_part else shadow}, tmp_path / "a")
    fresh = net()
    begun = shadow_of(fresh)
    held = Holder(begun)
    state: dict[str, Any] = {"model": fresh, name: held if as_part else begun}
    ckpt.load(state, tmp_path / "a")
    loaded = held.value if as_part else state[name]
    for key, parameter in model.named_parameters():
        assert torch.equal(dict(fresh.named_parameters())[key], parameter)
        assert torch.equal(loaded[key], shadow[key])


def test_one_tensor_that_stands_for_several(tmp_path: Path) -> None:
    ckpt.save({"part": Holder([torch.full((2,), float(n)) for n in range(3)])}, tmp_path / "a")
    fresh = Holder([torch.zeros(2)] * 3)
    ckpt.load({"part": fresh}, tmp_path / "a")
    assert [each.tolist() for each in fresh.value] == [[0, 0], [1, 1], [2, 2]]
    base = torch.zeros(4)
    overlapping = Holder([base[:2], base[1:3], base[:1].expand(2)])
    ckpt.load({"part": overlapping}, tmp_path / "a")
    assert [each.tolist() for each in overlapping.value] == [[0, 0], [1, 1], [2, 2]]


def test_tensors_of_the_caller_that_are_one(tmp_path: Path) -> None:
    ckpt.save({"a": torch.ones(2), "b": torch.zeros(2), "c": torch.ones(2)}, tmp_path / "a")
    one = torch.full((2,), 7.0)
    state = {"a": one, "b": one, "c": one}
    ckpt.load(state, tmp_path / "a")
    assert state["a"] is one
    assert state["c"] is one, "the same value: it stays one tensor"
    assert {name: value.tolist() for name, value in state.items()} == {"a": [1, 1], "b": [0, 0], "c": [1, 1]}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embedding.weight


def test_weights_that_were_untied_after_the_start(tmp_path: Path) -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embedding.weight.detach() + 1)
    ckpt.save({"model": model}, tmp_path / "a")
    with pytest.raises(
        LoadFailed, match=r"'model.embedding.weight' and 'model.head.weight' are one tensor in the program"
    ):
        ckpt.load({"model": Tied()}, tmp_path / "a")
    equal = Tied()
    saved = copy.deepcopy(dict(equal.state_dict()))  # under both names, as stock programs save it
    ckpt.save({"model": saved}, tmp_path / "b")
    fresh = Tied()
    ckpt.load({"model": fresh}, tmp_path / "b")
    assert fresh.head.weight is fresh.embedding.weight
    assert torch.equal(fresh.head.weight, equal.head.weight)


class Slow(torch.optim.SGD):
    """Keeps slow weights, which begin as the weights themselves."""

    def begin(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach()


def test_a_state_of_an_optimizer_that_begins_as_the_weights(tmp_path: Path) -> None:
    model = net()
    optimizer = Slow(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["slow"] = parameter.detach() + 1
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    fresh = net()
    again = Slow(fresh.parameters(), lr=0.1)
    again.begin()
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        restored = manager.restore(model=fresh, optimizer=again)
    assert restored is not None
    assert restored.certificate.is_exact
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(old, new)
        assert torch.equal(optimizer.state[old]["slow"], again.state[new]["slow"])


def test_what_is_infinite_by_itself_is_no_cast_too_far(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=dtype))
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf], dtype=dtype))

    ckpt.save({"model": Masked(torch.float32)}, tmp_path / "a")
    fresh = Masked(torch.bfloat16)
    ckpt.load({"model": fresh}, tmp_path / "a")
    assert fresh.get_buffer("mask").tolist() == [0.0, -torch.inf]
    ckpt.save({"t": torch.tensor([torch.finfo(torch.float32).max])}, tmp_path / "b")
    with pytest.raises(LoadFailed, match="is infinite as bfloat16"):
        ckpt.load({"t": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "b")


def test_fractions_are_no_integers(tmp_path: Path) -> None:
    ckpt.save({"t": torch.tensor([1.0, 0.7])}, tmp_path / "a")
    with pytest.raises(LoadFailed, match="holds values that int64 cannot hold"):
        ckpt.load({"t": torch.zeros(2, dtype=torch.int64)}, tmp_path / "a")
    taken = {"t": torch.zeros(2, dtype=torch.int64)}
    ckpt.load(taken, tmp_path / "a", options=LoadOptions(allow_casts=True))
    assert taken["t"].tolist() == [1, 0]
