"""States that public bug reports name: each comes back as it was, or an error says that it does not."""

from __future__ import annotations

import collections
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler

import ckpt
from ckpt.errors import CheckpointError

OPTIONS: dict[str, Any] = {"save": 1, "preflight": False, "storage_options": {"fsync": False}}
Named = tuple[nn.Module, Optimizer]


def save(root: Path | str, step: int, **parts: Any) -> None:
    with ckpt.CheckpointManager(root, **OPTIONS) as manager:
        assert manager.save(step, **parts)


def restore(root: Path | str, **parts: Any) -> Mapping[str, Any]:
    with ckpt.CheckpointManager(root, **OPTIONS) as manager:
        restored = manager.restore(**parts)
    assert restored is not None
    assert not restored.missing
    return restored.state


def net(seed: int = 0, width: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3, begin: int = 0) -> None:
    width = next(model.parameters()).shape[-1]
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        model(torch.ones(2, width) * (step + 1)).pow(2).mean().backward()
        optimizer.step()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, expected), seen in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, seen), name


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "ckpt")
    return lambda: [record.getMessage() for record in caplog.records]


# Saves and restores touch nothing that they look at.


class Counting(Optimizer):
    """Count in Python, in the state of each parameter and in the group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["steps"] = state.get("steps", 0) + 1
                    parameter.sub_(group["lr"] / state["steps"] * parameter.grad)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "weight decay": lambda each: optim.SGD(each, lr=0.05, momentum=0.9, weight_decay=0.1),
    "dampening": lambda each: optim.SGD(each, lr=0.05, momentum=0.9, dampening=0.5),
    "NAdam": lambda each: optim.NAdam(each, lr=0.01),
    "ASGD": lambda each: optim.ASGD(each, lr=0.01, t0=2),
    "Rprop": lambda each: optim.Rprop(each, lr=0.01),
    "counts": Counting,
    "AdamW": lambda each: optim.AdamW(each, lr=0.01),
    "amsgrad": lambda each: optim.Adam(each, amsgrad=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_save_before_the_first_step_changes_no_training(tmp_path: Path, kind: str) -> None:
    saved, never_saved = net(), net()
    optimizer, other = (OPTIMIZERS[kind](model.parameters()) for model in (saved, never_saved))
    save(tmp_path, 0, model=saved, optimizer=optimizer)
    assert not optimizer.state
    train(saved, optimizer, steps=4)
    train(never_saved, other, steps=4)
    assert_equal(never_saved, saved)


def test_a_save_runs_no_hooks_of_the_optimizer(tmp_path: Path) -> None:
    """As an EMA registers them, with an optimizer that has no state of its own."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(1, 4):
        train(model, optimizer, steps=1)
        save(tmp_path, step, model=model, optimizer=optimizer)
    restore(tmp_path, model=model, optimizer=optimizer)
    assert calls == ["before", "after"] * 3


# Optimizers whose state torch's helpers do not make.


def lbfgs() -> tuple[nn.Module, Optimizer, Callable[[], None]]:
    model = net(width=3)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).pow(2).sum()
        loss.backward()
        return loss

    return model, optimizer, lambda: optimizer.step(closure)  # type: ignore[no-untyped-call]


def sparse() -> tuple[nn.Module, Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = optim.SparseAdam(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).pow(2).sum().backward()
        optimizer.step()  # type: ignore[no-untyped-call]

    return model, optimizer, step


@pytest.mark.parametrize("make", [lbfgs, sparse])
def test_optimizers_that_cannot_take_an_empty_step(tmp_path: Path, make: Callable[[], Any]) -> None:
    model, optimizer, step = make()
    for _ in range(3):
        step()
    save(tmp_path, 3, model=model, optimizer=optimizer)
    again, its_optimizer, its_step = make()
    restore(tmp_path, model=again, optimizer=its_optimizer)
    step()
    its_step()
    assert_equal(model, again)


@pytest.mark.parametrize("kind", ["AdamW", "weight decay"])
def test_an_optimizer_as_it_is_gets_its_state(tmp_path: Path, kind: str) -> None:
    model, again = net(), net(1)
    optimizer, other = (OPTIMIZERS[kind](each.parameters()) for each in (model, again))
    train(model, optimizer)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    ckpt.load({"model": again, "optimizer": other}, tmp_path / "c")
    assert len(other.state) == len(optimizer.state)
    train(model, optimizer, begin=3)
    train(again, other, begin=3)
    assert_equal(model, again)


def test_a_converted_file_of_torch_save_gives_the_optimizer_its_state(tmp_path: Path) -> None:
    """The three lines of docs/guides/from-torch-save.md."""
    model, again = net(), net(1)
    optimizer, other = (optim.AdamW(each.parameters()) for each in (model, again))
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    ckpt.convert(tmp_path / "last.pt", tmp_path / "step-500")
    state = {"optimizer": other.state_dict()}
    ckpt.load(state, tmp_path / "step-500")
    other.load_state_dict(state["optimizer"])
    assert len(other.state) == len(optimizer.state)
    for one, value in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert torch.equal(one["exp_avg_sq"], value["exp_avg_sq"])


def test_a_second_optimizer_is_a_part(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        generator, discriminator = net(), net(1)
        return {
            "model": generator,
            "optimizer": optim.AdamW(generator.parameters()),
            "disc": discriminator,
            "disc_optimizer": optim.AdamW(discriminator.parameters()),
        }

    parts, again = made(), made()
    train(parts["model"], parts["optimizer"])
    train(parts["disc"], parts["disc_optimizer"])
    save(tmp_path, 3, **parts)
    restore(tmp_path, **again)
    train(parts["disc"], parts["disc_optimizer"], begin=3)
    train(again["disc"], again["disc_optimizer"], begin=3)
    assert_equal(parts["disc"], again["disc"])


def test_moments_of_a_frozen_layer_come_back(tmp_path: Path) -> None:
    def made() -> Named:
        model = net()
        return model, optim.AdamW(model.parameters(), lr=0.1)

    def freeze(model: nn.Module) -> None:
        next(model.children()).requires_grad_(False)

    model, optimizer = made()
    train(model, optimizer)
    freeze(model)
    train(model, optimizer, steps=2, begin=3)
    save(tmp_path, 5, model=model, optimizer=optimizer)
    again, other = made()
    freeze(again)
    restore(tmp_path, model=again, optimizer=other)
    assert len(other.state) == len(optimizer.state) == 4
    for one in ((model, optimizer), (again, other)):
        one[0].requires_grad_(True)  # the thaw
        train(*one, begin=5)
    assert_equal(model, again)


# Groups are matched by their parameters.


def by_kind(model: nn.Sequential) -> Optimizer:
    weights = {"params": [layer.weight for layer in model]}
    biases: dict[str, Any] = {"params": [layer.bias for layer in model], "weight_decay": 0.0, "lr": 0.2}
    return optim.AdamW([weights, biases], lr=0.1)


def by_layer(model: nn.Sequential) -> Optimizer:
    return optim.AdamW([{"params": layer.parameters()} for layer in model], lr=0.5)


def in_three(model: nn.Sequential) -> Optimizer:
    groups = [[model[0].weight], [model[1].weight], [model[0].bias, model[1].bias]]
    return optim.AdamW([{"params": group} for group in groups], lr=0.5)


def one_each(model: nn.Sequential) -> Optimizer:
    return optim.AdamW([{"params": [each]} for each in model.parameters()], lr=0.5)


@pytest.mark.parametrize(
    ("make", "representable"), [(by_layer, False), (in_three, True), (one_each, True), (by_kind, True)]
)
def test_groups_that_are_cut_in_another_way(
    tmp_path: Path, make: Callable[[nn.Sequential], Optimizer], representable: bool
) -> None:
    """Each parameter gets its own options back; a group that would need two values is an error."""
    model, again = net(), net(1)
    optimizer = by_kind(model)
    train(model, optimizer)
    save(tmp_path, 3, model=model, optimizer=optimizer)
    other = make(again)
    if not representable:
        with pytest.raises(CheckpointError, match="group"):
            restore(tmp_path, model=again, optimizer=other)
        return
    restore(tmp_path, model=again, optimizer=other)
    names = {parameter: name for name, parameter in again.named_parameters()}
    for group in other.param_groups:
        for parameter in group["params"]:
            assert group["lr"] == (0.2 if names[parameter].endswith("bias") else 0.1), names[parameter]
    train(model, optimizer, begin=3)
    train(again, other, begin=3)
    assert_equal(model, again)


def test_a_scheduler_may_be_made_after_the_restore(tmp_path: Path) -> None:
    model, again = net(), net(1)
    optimizer, other = (optim.AdamW(each.parameters(), lr=0.1) for each in (model, again))
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, steps=1)
    scheduler.step()
    save(tmp_path, 1, model=model, optimizer=optimizer)
    restore(tmp_path, model=again, optimizer=other)
    assert other.param_groups[0]["initial_lr"] == 0.1
    resumed = lr_scheduler.ExponentialLR(other, 0.9, last_epoch=1)
    assert resumed.base_lrs == scheduler.base_lrs


def test_two_empty_groups(tmp_path: Path) -> None:
    def made() -> Named:
        model = net()
        empty: list[dict[str, Any]] = [{"params": []}, {"params": [], "lr": 0.5}]
        return model, optim.AdamW([{"params": model.parameters()}, *empty])

    model, optimizer = made()
    train(model, optimizer)
    save(tmp_path, 3, model=model, optimizer=optimizer)
    again, other = made()
    restore(tmp_path, model=again, optimizer=other)
    assert [group["lr"] for group in other.param_groups] == [1e-3, 1e-3, 0.5]


# Parts: the checkpoint decides which values exist.


class Part:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "n": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


GROWN: dict[str, tuple[Any, Any]] = {
    "a list of dicts": ([], [{"loss": 1.0}]),
    "a longer list of dicts": ([{"a": 1}], [{"a": 1}, {"a": 2}]),
    "a list of tensors": ([], [torch.ones(2)]),
    "None to a dict": (None, {"acc": 0.9}),
    "None to a tensor": (None, torch.ones(3)),
    "None to a number": (None, 3),
    "a longer tensor": (torch.ones(0), torch.ones(3)),
    "a dict with more keys": ({"acc": 0.0}, {"acc": 0.9, "f1": 0.8}),
    "a dict that was empty": ({}, {"acc": {"best": 0.9}}),
    "a dict to None": ({"acc": 0.1}, None),
    "a list of numbers": ([], [1, 2]),
    "a Counter": (collections.Counter(), collections.Counter("aab")),
    "int keys": ({0: 0, 7: 0}, {0: 5, 7: 3}),
    "tuple keys": ({}, {(0, 1): 5, (2, 3): torch.ones(2)}),
}


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("kind", GROWN)
def test_a_part_that_has_grown(tmp_path: Path, kind: str, stateful: bool) -> None:
    fresh, trained = GROWN[kind]
    save(tmp_path, 1, part=Part(trained) if stateful else {"value": trained, "n": 1})
    part = Part(fresh)
    if not stateful and kind == "a longer tensor":
        # It is loaded into the program's tensor: another size may be another model.
        with pytest.raises(CheckpointError, match=r"part\.value.*on_shape"):
            restore(tmp_path, part={"value": fresh, "n": 1})
        return
    state = restore(tmp_path, part=part if stateful else {"value": fresh, "n": 1})
    seen = part.value if stateful else state["part"]["value"]
    assert type(seen) is type(trained)
    assert repr(seen) == repr(trained)


@pytest.mark.parametrize("kind", ["int keys", "a dict that was empty", "a dict with more keys"])
def test_a_plain_dict_is_loaded_as_it_was_saved(tmp_path: Path, kind: str) -> None:
    fresh, trained = GROWN[kind]
    ckpt.save({"seen": trained}, tmp_path / "c")
    state = {"seen": fresh}
    ckpt.load(state, tmp_path / "c")
    assert state["seen"] == trained


class Ema:
    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.shadow = dict(state["shadow"])


def test_parts_that_are_empty_when_a_program_starts(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    model, ema = net(), Ema()
    ema.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}
    best, seen = {"acc": 0.9, "step": 7}, collections.Counter("aab")
    save(tmp_path, 1, model=model, ema=ema, best=best, seen=seen)
    again = Ema()
    state = restore(tmp_path, model=net(1), ema=again, best={}, seen=collections.Counter())
    assert {*again.shadow} == {*ema.shadow}
    assert all(torch.equal(again.shadow[name], value) for name, value in ema.shadow.items())
    assert state["best"] == best
    assert state["seen"] == seen
    assert not warned()


class Scaled(nn.Linear):
    """A layer with scales that are bytes, and exist after the first forward alone."""

    scales = torch.empty(0, dtype=torch.uint8)

    def get_extra_state(self) -> torch.Tensor:
        return self.scales

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scales = state


def test_extra_state_of_another_size(tmp_path: Path) -> None:
    model, again = (nn.Sequential(Scaled(2, 2)) for _ in range(2))
    scales = torch.arange(9, dtype=torch.uint8)
    vars(model[0])["scales"] = scales
    save(tmp_path, 1, model=model)
    restore(tmp_path, model=again)
    assert torch.equal(vars(again[0])["scales"], scales)


def test_a_run_with_milestones_saves_after_each_resume(tmp_path: Path) -> None:
    for run in (1, 2, 3):
        model = net()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        scheduler = lr_scheduler.MultiStepLR(optimizer, [30, 60], gamma=0.1)
        with ckpt.CheckpointManager(tmp_path, **OPTIONS) as manager:
            restored = manager.restore(model=model, optimizer=optimizer, scheduler=scheduler)
            assert (restored.step if restored else 0) == run - 1
            assert scheduler.milestones == {30: 1, 60: 1}
            train(model, optimizer, steps=1)
            scheduler.step()
            manager.save(run, model=model, optimizer=optimizer, scheduler=scheduler)
    assert [each.step for each in ckpt.list_checkpoints(tmp_path)] == [1, 2, 3]


NARROWED = {
    "int32": (torch.tensor([5_000_000_000]), torch.int32),
    "float16": (torch.tensor([1e30]), torch.float16),
    "uint8": (torch.tensor([300]), torch.uint8),
    "NaN": (torch.tensor([float("nan")]), torch.int64),
}


@pytest.mark.parametrize("kind", NARROWED)
def test_a_cast_that_changes_values_is_an_error(tmp_path: Path, kind: str) -> None:
    value, dtype = NARROWED[kind]
    save(tmp_path, 1, counter=value)
    with pytest.raises(CheckpointError, match="counter"):
        restore(tmp_path, counter=torch.zeros(1, dtype=dtype))


def test_a_cast_that_rounds_is_none(tmp_path: Path) -> None:
    save(tmp_path, 1, counter=torch.tensor([1.001]))
    state = restore(tmp_path, counter=torch.zeros(1, dtype=torch.bfloat16))
    assert state["counter"].float().item() == pytest.approx(1.0, abs=0.01)


# Wrappers: a state saved under one is restored under it, and without it.


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def each_layer(model: nn.Sequential, wrap: Callable[[Any], Any]) -> nn.Sequential:
    for number in range(len(model)):
        model[number] = wrap(model[number])
    return model


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "AC(compile)": lambda model: each_layer(model, lambda layer: checkpoint_wrapper(compiled(layer))),
    "compile(AC)": lambda model: each_layer(model, lambda layer: compiled(checkpoint_wrapper(layer))),
    "DDP(AC(compile))": lambda model: DistributedDataParallel(WRAPPERS["AC(compile)"](model)),
}


def _compiled_inside_of_ac(rank: int, root: str) -> None:
    for name, wrap in WRAPPERS.items():
        model, optimizer = wrap(net()), None
        save(f"{root}/{name}", 1, model=model, optimizer=optimizer)
        names = {*ckpt.inspect(f"{root}/{name}/step-00000001").tensors}
        assert {each for each in names if each.startswith("model.")} == {
            f"model.{each}" for each in net().state_dict()
        }, name
        for other in (lambda model: model, *WRAPPERS.values()):
            again = other(net(1))
            restore(f"{root}/{name}", model=again)
            assert_equal(model, again)


def test_names_have_no_prefix_of_compiled_layers_inside_of_ac(tmp_path: Path) -> None:
    run_ranks(1, _compiled_inside_of_ac, str(tmp_path))


class Shared(nn.Module):
    """A layer that is registered twice."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layer = nn.Linear(4, 4)
        self.layers = nn.ModuleList([layer, nn.Linear(4, 4), layer])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def _compiled_twice(model: Shared) -> nn.Module:
    model.layers[0] = compiled(model.layers[0])
    model.layers[2] = model.layers[0]
    return model


SHARING: dict[str, Callable[[Any], nn.Module]] = {
    "plain": lambda model: model,
    "DDP": DistributedDataParallel,
    "compiled": compiled,
    "compiled layers": _compiled_twice,
}


def _shared_module(rank: int, root: str) -> None:
    for name, wrap in SHARING.items():
        model, again = wrap(Shared()), wrap(Shared(1))
        optimizer, other = (optim.AdamW(each.parameters()) for each in (model, again))
        with torch.compiler.set_stance("force_eager"):
            train(model, optimizer)
        save(f"{root}/{name}", 1, model=model, optimizer=optimizer)
        restore(f"{root}/{name}", model=again, optimizer=other)
        assert_equal(model, again)
        assert len(other.state) == len(optimizer.state) == 4, name


def test_a_module_that_is_registered_twice(tmp_path: Path) -> None:
    run_ranks(1, _shared_module, str(tmp_path))


def _meta(rank: int, root: str) -> None:
    model = net()
    save(root, 1, model=model)
    with torch.device("meta"):
        again: Any = fully_shard(net())
    restore(root, model=again)
    for (name, seen), expected in zip(again.named_parameters(), model.parameters(), strict=True):
        assert not seen.is_meta, name
        assert isinstance(seen, DTensor)
        assert torch.equal(seen.full_tensor(), expected), name


def test_a_model_on_meta_gets_its_values(tmp_path: Path) -> None:
    run_ranks(1, _meta, str(tmp_path))


def test_a_model_on_meta_without_a_process_group(tmp_path: Path) -> None:
    model = net()
    save(tmp_path, 1, model=model)
    with torch.device("meta"):
        again = net()
    restore(tmp_path, model=again)
    assert not any(parameter.is_meta for parameter in again.parameters())
    assert_equal(model, again)


# One name, several owners.


def _stage(rank: int) -> Named:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    own = {str(number): layers[number] for number in (2 * rank, 2 * rank + 1)}
    model = nn.ModuleDict({"layers": nn.ModuleDict(own)})
    return model, optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))


def _train_stage(model: Any, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    hidden = torch.ones(2, 4)
    for layer in model["layers"].values():
        hidden = layer(hidden)
    hidden.pow(2).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _pipeline(rank: int, root: str) -> None:
    model, optimizer = _stage(rank)
    _train_stage(model, optimizer)
    save(root, 1, model=model, optimizer=optimizer)
    again, other = _stage(rank)
    other.param_groups[0]["lr"] = 7.0
    restore(root, model=again, optimizer=other)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    _train_stage(model, optimizer)
    _train_stage(again, other)
    assert_equal(model, again)


def test_each_stage_of_a_pipeline_keeps_its_options(tmp_path: Path) -> None:
    run_ranks(2, _pipeline, str(tmp_path))


def _experts(rank: int, root: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))

    def experts(value: float) -> DTensor:
        return DTensor.from_local(torch.full((2, 3), value), mesh["fsdp"], [Shard(0)], run_check=False)

    seen = []
    for way in ("ckpt.save", "manager", "safetensors"):
        state, target = {"experts.weight": experts(float(rank))}, {"experts.weight": experts(-1.0)}
        url = f"{root}/{way}"
        try:
            if way == "manager":
                with ckpt.CheckpointManager(url, **OPTIONS) as manager:
                    manager.save(1, state)
                url += "/step-00000001"
            else:
                ckpt.save(state, url, format="safetensors" if way == "safetensors" else "ckpt")
        except CheckpointError as error:
            seen.append("refused" if "experts.weight" in str(error) else f"unclear: {error}")
            continue
        ckpt.load(target, url)
        seen.append("right" if bool((target["experts.weight"].to_local() == rank).all()) else "lost")
    return seen


def test_experts_that_each_group_of_ranks_shards_for_itself(tmp_path: Path) -> None:
    """Their DTensors look whole under one name, on meshes that differ."""
    for rank, seen in enumerate(run_ranks(4, _experts, str(tmp_path))):
        assert {*seen} <= {"right", "refused"}, f"rank {rank}: {seen}"


def _own_loader(rank: int, root: str) -> str:
    own = {"position": 1000 + rank, "buffer": [rank] * 3}
    try:
        save(root, 1, model=net(), loader=Part(own))
    except CheckpointError as error:
        return "refused" if "loader" in str(error) else f"unclear: {error}"
    again = Part({"position": 0, "buffer": []})
    restore(root, model=net(1), loader=again)
    return "right" if again.value == own else f"{own} became {again.value}"


def test_plain_values_that_differ_between_ranks(tmp_path: Path) -> None:
    assert {*run_ranks(2, _own_loader, str(tmp_path))} <= {"right", "refused"}


# The right run.


def test_a_new_run_in_the_folder_of_an_older_one(tmp_path: Path) -> None:
    """Nothing of either run is removed without a word, and no restart takes the older one's weights."""
    model = nn.Linear(2, 2)

    def run(steps: Iterator[int]) -> None:
        with ckpt.CheckpointManager(tmp_path, **{**OPTIONS, "save": 100}, keep=3) as manager:
            for step in steps:
                nn.init.constant_(model.weight, step)
                manager.step(step, model=model)

    run(iter((500, 600, 700)))
    with pytest.raises(CheckpointError, match="restore"):
        run(iter((100, 200, 300, 400)))
    assert [each.step for each in ckpt.list_checkpoints(tmp_path)] == [500, 600, 700]


TRAIN = textwrap.dedent("""
    import sys, time, torch, ckpt
    from ckpt.trainer_integration import saving
    from ckpt.trainer_integration.dataloader import RescalableLoader
    from ckpt.trainer_integration.dataset import ShardedDataset
    from ckpt.trainer_integration.sources import MapSource

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 100000

        def __getitem__(self, row):
            time.sleep(0.02)
            return torch.full((4,), float(row))

    def loader(kind):
        if kind == "torch":
            return torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2)
        rows = [[(7 * row + column) % 50 + 1 for column in range(40)] for row in range(4000)]
        data = ShardedDataset(MapSource(rows), sequence_length=9, eos_token=0, seed=0, shards=8)
        return RescalableLoader(data, batch_size=2, num_workers=2)

    def main(root, kind):
        torch.set_num_threads(1)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rule = saving.every_steps(10**6) | saving.on_preemption(grace_s=20)
        with ckpt.CheckpointManager(root, save=rule, preflight=False) as manager:
            manager.restore(model=model, optimizer=optimizer)
            for step, batch in enumerate(loader(kind), 1):
                optimizer.zero_grad()
                model(batch[:, :4].float()).mean().backward()
                optimizer.step()
                time.sleep(0.03)
                if step == 5:
                    print("READY", flush=True)
                manager.step(step, model=model, optimizer=optimizer)
                if manager.preempted:
                    print("PREEMPTED", step, flush=True)
                    break

    if __name__ == "__main__":
        main(*sys.argv[1:])
""")


@pytest.mark.long
@pytest.mark.parametrize("trial", range(3))
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_signal_to_all_processes_while_workers_read(tmp_path: Path, kind: str, trial: int) -> None:
    """A batch system that signals the process group: workers die, and the emergency save is made."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run"), kind]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert any("READY" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGTERM)
        text = process.communicate(timeout=60)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, text
    assert "PREEMPTED" in text
    assert len(ckpt.list_checkpoints(tmp_path / "run")) == 1


# Errors that name the object.


class Wrapped:
    """An object with the methods of an optimizer that is none."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class Renaming(nn.Module):
    """A module whose state dict has other names than its parameters: that of an older layout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self._register_state_dict_hook(self._rename)  # type: ignore[no-untyped-call]

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in ("weight", "bias"):
            state[f"{prefix}old.{key}"] = state.pop(f"{prefix}inner.{key}")


def _outside() -> dict[str, Any]:
    model = net()
    own = nn.Parameter(torch.ones(2))
    return {"model": model, "optimizer": optim.AdamW([*model.parameters(), own])}


def _wrapped() -> dict[str, Any]:
    model = net()
    return {"model": model, "optimizer": Wrapped(optim.AdamW(model.parameters()))}


def _by_name() -> dict[str, Any]:
    model = net()
    return {"model": model, "optimizer": {"a": optim.AdamW(model.parameters())}}


MISTAKES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a parameter outside of the model": (_outside, "not in the model"),
    "a wrapper of an optimizer": (_wrapped, "Optimizer"),
    "optimizers in a dict": (_by_name, "Optimizer"),
    "models in a list": (lambda: {"model": [net(), net()]}, "Module"),
    "a hook that renames": (lambda: {"model": Renaming()}, "hook"),
    "a lazy module": (lambda: {"model": nn.LazyLinear(2)}, "model.weight"),
    "a model without state": (lambda: {"model": nn.ReLU()}, "no parameters"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("kind", MISTAKES)
def test_an_error_names_the_object(tmp_path: Path, kind: str) -> None:
    """One may also be saved, if it is restored: each is about this program's own checkpoint."""
    make, word = MISTAKES[kind]
    parts, again = make(), make()
    refused = None
    try:
        save(tmp_path, 1, **parts)
    except CheckpointError as error:
        refused = str(error)
    if refused is None:
        restore(tmp_path, **again)
    else:
        assert word.lower() in refused.lower()
