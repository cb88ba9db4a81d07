"""Optimizers with hooks and loaders of their own, and groups that were made otherwise: each gets what was its own."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

import ckpt
from ckpt.state import training_state
from ckpt.state.stored import StoredPart, StoredValue


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()


class Windowed(torch.optim.SGD):
    """Keeps a window of losses, which its state dict has as a list."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        entries = {key: {**own, "losses": [*own["losses"]]} for key, own in state["state"].items()}
        return {**state, "state": entries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for own in self.state.values():
            own["losses"] = deque(own["losses"], maxlen=2)


def saved_as_double(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    entries = {key: {**own, "exp_avg": own["exp_avg"].double()} for key, own in state["state"].items()}
    return {**state, "state": entries}


def loaded_as_float(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    entries = {key: {**own, "exp_avg": own["exp_avg"].float()} for key, own in state["state"].items()}
    return {**state, "state": entries}


def test_a_loader_of_its_own_makes_what_it_needs(tmp_path: Path) -> None:
    model = net()
    optimizer = Windowed(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    for own in optimizer.state.values():
        own["losses"] = deque([1.0, 2.0], maxlen=2)
    ckpt.save(training_state(model=model, optimizer=optimizer), tmp_path / "a")
    fresh = net(1)
    again = Windowed(fresh.parameters(), lr=0.1, momentum=0.9)
    ckpt.load(training_state(model=fresh, optimizer=again), tmp_path / "a")
    for own in again.state.values():
        assert own["losses"] == deque([1.0, 2.0], maxlen=2)
        assert own["losses"].maxlen == 2


def test_hooks_that_convert_moments(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_state_dict_post_hook(saved_as_double)
    step(model, optimizer, 2)
    ckpt.save(training_state(model=model, optimizer=optimizer), tmp_path / "a")
    fresh = net(1)
    again = torch.optim.Adam(fresh.parameters())
    again.register_state_dict_post_hook(saved_as_double)
    again.register_load_state_dict_pre_hook(loaded_as_float)
    ckpt.load(training_state(model=fresh, optimizer=again), tmp_path / "a")
    step(model, optimizer)
    step(fresh, again)
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(old, new)
        assert again.state[new]["exp_avg"].dtype == torch.float32


def test_a_parameter_without_a_state_takes_no_other_ones(tmp_path: Path) -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)
            self.weight = nn.Parameter(torch.zeros(2, 2))

    model = Wrapping()
    optimizer = torch.optim.Adam(model.parameters())
    model.module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    listed = nn.ParameterList([torch.ones(1), torch.ones(1)])
    numbered = torch.optim.Adam([listed[1], listed[0]])
    listed[1].grad = torch.ones(1)
    numbered.step()
    for number, (module, kept) in enumerate([(model, optimizer), (listed, numbered)]):
        ckpt.save(training_state(model=module, optimizer=kept), tmp_path / str(number))
    fresh = Wrapping()
    again = torch.optim.Adam(fresh.parameters())
    ckpt.load(training_state(model=fresh, optimizer=again), tmp_path / "0")
    assert [*again.state] == [fresh.module.weight]
    others = nn.ParameterList([torch.ones(1), torch.ones(1)])
    adam = torch.optim.Adam([others[1], others[0]])
    ckpt.load(training_state(model=others, optimizer=adam), tmp_path / "1")
    assert [*adam.state] == [others[1]]


def test_names_of_parameters_follow_the_groups(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    ckpt.save(training_state(model=model, optimizer=optimizer), tmp_path / "a")
    fresh = net(1)
    named = [*fresh.named_parameters()]
    again = torch.optim.SGD([{"params": named[3:0:-1]}, {"params": named[:1]}], lr=0.5)
    ckpt.load(training_state(model=fresh, optimizer=again), tmp_path / "a")
    assert [group["param_names"] for group in again.param_groups] == [
        ["1.bias", "1.weight", "0.bias"],
        ["0.weight"],
    ]
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.1]


def test_names_of_parameters_of_a_state_by_number(tmp_path: Path) -> None:
    model = net()
    named = [*model.named_parameters()]
    optimizer = torch.optim.SGD([{"params": named[:2]}, {"params": named[2:]}], lr=0.1)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    fresh = net(1)
    own = [*fresh.named_parameters()]
    again = torch.optim.SGD([{"params": own[:2]}, {"params": own[2:]}], lr=0.5)
    ckpt.load(training_state(model=fresh, optimizer=again, rng=False), tmp_path / "a")
    assert [group["param_names"] for group in again.param_groups] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.1]


def test_each_empty_group_gets_its_options(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rate in (0.2, 0.3):
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [], "lr": rate})
    ckpt.save(training_state(model=model, optimizer=optimizer), tmp_path / "a")
    fresh = net(1)
    again = torch.optim.SGD(fresh.parameters(), lr=0.9)
    for _ in range(2):
        again.param_groups.append({**again.param_groups[0], "params": []})
    ckpt.load(training_state(model=fresh, optimizer=again), tmp_path / "a")
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.2, 0.3]


def test_groups_that_were_one_share_no_tensor(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    ckpt.save(training_state(model=model, optimizer=optimizer), tmp_path / "a")
    fresh = net(1)
    groups = [{"params": [*layer.parameters()]} for layer in fresh.children()]
    again = torch.optim.Adam(groups, lr=torch.tensor(0.5), foreach=False)
    ckpt.load(training_state(model=fresh, optimizer=again), tmp_path / "a")
    first, second = (group["lr"] for group in again.param_groups)
    assert first == second == 0.1
    assert first is not second


class Counted(torch.optim.SGD):
    """Has a counter of its own in the state dict."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.count = state["count"]


def test_what_stands_beside_groups_is_found_by_any_parameter(tmp_path: Path) -> None:
    model = net()
    optimizer = Counted(model.parameters(), lr=0.1)
    optimizer.count = 7
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    fresh = net(1)
    again = Counted([*fresh.parameters()][::-1], lr=0.1)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        restored = manager.restore(model=fresh, optimizer=again)
    assert restored is not None
    assert restored.certificate.is_exact
    assert again.count == 7


def test_a_checkpoint_without_the_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.save(1, model=model)
    optimizer = torch.optim.Adam(model.parameters())
    with (
        ckpt.CheckpointManager(tmp_path, save=1) as manager,
        pytest.raises(ckpt.errors.LoadFailed, match=r"the checkpoint lacks 1 key\(s\): optimizer"),
    ):
        manager.restore(model=model, optimizer=optimizer)
    options = ckpt.options.LoadOptions(strict=False)
    with (
        caplog.at_level(logging.WARNING),
        ckpt.CheckpointManager(tmp_path, save=1) as manager,
    ):
        assert manager.restore(model=model, optimizer=optimizer, options=options)
    assert "the checkpoint lacks 1 key(s): optimizer" in caplog.text


def test_a_certificate_looks_at_the_groups(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(
        [
            {"params": [*layer.parameters()], "lr": rate}
            for layer, rate in zip(model.children(), (0.1, 0.2), strict=True)
        ]
    )
    step(model, optimizer)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.save(1, model=model, optimizer=optimizer)

    def findings(change: Any) -> Any:
        fresh = net(1)
        again = torch.optim.AdamW([{"params": [*layer.parameters()]} for layer in fresh.children()])
        with ckpt.CheckpointManager(tmp_path, save=1) as manager:
            restored = manager.restore(model=fresh, optimizer=again)
        assert restored is not None
        change(again)
        found = restored.certificate
        state = training_state(model=fresh, optimizer=again, rng=False)
        read_again = ckpt.ops.certify(state, tmp_path / "step-00000001")
        assert (read_again.different, read_again.missing) == (found.different, found.missing)
        return {*found.different, *found.missing}

    name = "optimizer.param_groups"
    assert findings(lambda _: None) == set()
    assert findings(lambda own: own.param_groups[1].update(lr=0.1)) == {f"{name}.1.lr"}
    assert findings(lambda own: own.param_groups[0].update(betas=(0.0, 0.0))) >= {f"{name}.0.betas"}
    assert findings(lambda own: own.param_groups[0].update(more=1)) == {f"{name}.0.more"}
    first = "optimizer.state.0.weight"
    assert findings(lambda own: own.state[own.param_groups[0]["params"][0]].update(more=torch.ones(1))) == {
        f"{first}.more"
    }


def _rank_without_state(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            nn.Linear(1, 1, bias=False), use_orig_params=True, device_id=torch.device("cpu")
        )
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 1 - rank, "rank 1 holds no element"
    ckpt.save(training_state(model=model, optimizer=optimizer), f"{folder}/a", timeout_s=30)
    fresh, again = make()
    ckpt.load(training_state(model=fresh, optimizer=again), f"{folder}/a", timeout_s=30)
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(old, new)
        assert rank == 1 or torch.equal(optimizer.state[old]["exp_avg"], again.state[new]["exp_avg"])


def test_fsdp1_whose_rank_holds_no_state(tmp_path: Path) -> None:
    run_ranks(2, _rank_without_state, str(tmp_path))


def test_time_grows_with_the_parameters() -> None:
    """Each parameter is looked up by itself: all are not gone through for each."""
    values: dict[tuple[str | int, ...], StoredValue] = {
        ("state", f"p{number}", key): StoredValue(f"{number}.{key}") for number in range(3000) for key in "ab"
    }
    part = StoredPart("optimizer", values)
    looked = part._value_paths["state", "p7"]
    assert looked == [("state", "p7", "a"), ("state", "p7", "b")]
    assert part.below(("state", "p7")) == {
        ("a",): values["state", "p7", "a"],
        ("b",): values["state", "p7", "b"],
    }
