"""`manager.save(step, model=..., optimizer=...)` for every way to shard a model, and loading onto
any other.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.states import digest
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ckpt
from ckpt.errors import ConfigurationError, LoadFailed
from ckpt.state import OptimizerState, RandomState, size_bytes, training_state
from ckpt.trainer_integration import saving

WIDTH = 8
OPTIONS: dict[str, Any] = {
    "save": saving.every_steps(1),
    "preflight": False,
    "storage_options": {"fsync": False},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = hidden + self.scale * self.down(torch.relu(self.up(hidden)))
        return output


class Net(nn.Module):
    """With tied weights, a frozen parameter of eight bits, and one of another dtype."""

    def __init__(self, seed: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(12, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        frozen = torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn)
        self.frozen = nn.Parameter(frozen, requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.gain.float()
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def plain(net: Net) -> nn.Module:
    return net


def compiled(net: Net) -> nn.Module:
    for number, block in enumerate(net.blocks):
        net.blocks[number] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


def ddp(net: Net) -> nn.Module:
    # DDP broadcasts parameters, and gloo does not know this dtype.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["frozen"])  # type: ignore[no-untyped-call]
    return DistributedDataParallel(net)


def fsdp1(net: Net, **options: Any) -> nn.Module:
    # FSDP1 flattens parameters of one dtype only.
    odd = [net.gain, net.frozen]
    return FullyShardedDataParallel(
        net,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        ignored_states=odd,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        **options,
    )


def fsdp1_hybrid(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fsdp1(net, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def fsdp2(net: Net) -> nn.Module:
    return _sharded(net, init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(net: Net) -> nn.Module:
    return _sharded(
        net, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    )


def tp_fsdp(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _sharded(net, mesh["dp"])


def ddp_compiled(net: Net) -> nn.Module:
    return torch.compile(ddp(net), backend="eager")  # type: ignore[return-value]


def fsdp1_compiled(net: Net) -> nn.Module:
    return torch.compile(fsdp1(net), backend="eager")  # type: ignore[return-value]


def fsdp2_compiled(net: Net) -> nn.Module:
    return torch.compile(fsdp2(net), backend="eager")  # type: ignore[return-value]


def _sharded(net: Net, mesh: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    ignored = {net.gain, net.frozen}
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, ignored_params=ignored)
    return net


Wrap = Callable[[Net], nn.Module]
WAYS: dict[str, tuple[int, Wrap]] = {
    "plain": (1, plain),
    "compiled": (1, compiled),
    "ddp": (2, ddp),
    "ddp_compiled": (2, ddp_compiled),
    "fsdp1": (2, fsdp1),
    "fsdp1_compiled": (3, fsdp1_compiled),
    "fsdp1_hybrid": (4, fsdp1_hybrid),
    "fsdp2": (3, fsdp2),
    "fsdp2_compiled": (2, fsdp2_compiled),
    "hsdp": (4, hsdp),
    "tp_fsdp": (4, tp_fsdp),
}
BEFORE = dict(zip(WAYS, ["plain", *WAYS], strict=False))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    tokens = torch.randint(0, 12, (2, 4), generator=generator)
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def trained(wrap: Wrap, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(Net(seed))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": parameters[:1], "lr": 1e-2}, {"params": parameters[1:], "lr": 1e-3}]
    )
    # How modules are wrapped matters here, not what they compile to. To ask for that takes seconds of imports.
    is_compiled = "compiled" in wrap.__name__
    with torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext():
        for step in range(steps):
            train_step(model, optimizer, torch.Generator().manual_seed(step))
    return model, optimizer


def save_ways(rank: int, ways: list[str], root: str) -> None:
    for way in ways:
        model, optimizer = trained(WAYS[way][1], seed=1, steps=2)
        with ckpt.CheckpointManager(f"{root}/{way}", **OPTIONS) as manager:
            manager.save(5, model=model, optimizer=optimizer)


def load_ways(rank: int, others: dict[str, str], root: str) -> None:
    """Load, under each way of sharding, what another one saved into another model; and save that
    too.
    """
    for way, other in others.items():
        model, optimizer = trained(WAYS[way][1], seed=2, steps=0)
        with ckpt.CheckpointManager(f"{root}/{other}", **OPTIONS) as manager:
            restored = manager.restore(model=model, optimizer=optimizer)
            assert restored is not None
            assert restored.step == 5
        state = training_state(model=model, optimizer=optimizer)
        ckpt.save(state, f"{root}/{way}-loaded-{other}", storage_options={"fsync": False})


@pytest.fixture(scope="module")
def saved_by_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every way saves, and also loads what the one before it saved: one job of ranks for each
    number of them.
    """
    root = tmp_path_factory.mktemp("ways")
    by_size = {size: [way for way, (ranks, _) in WAYS.items() if ranks == size] for size in (1, 2, 3, 4)}
    for size, ways in by_size.items():
        run_ranks(size, save_ways, ways, str(root))
    for size, ways in by_size.items():
        run_ranks(size, load_ways, {way: BEFORE[way] for way in ways}, str(root))
    return root


def check_names(way: str, root: Path) -> None:
    names, expected = (set(content(root / each / "step-00000005")) for each in (way, "plain"))
    assert names == expected
    assert not [name for name in names if "_orig_mod" in name or "module" in name]
    assert {"model.frozen", "model.head.weight", "optimizer.state.blocks.1.up.weight.exp_avg"} <= names


def check_values(way: str, other: str, root: Path) -> None:
    assert content(root / f"{way}-loaded-{other}") == content(root / other / "step-00000005")


@pytest.mark.long
@pytest.mark.smoke
def test_two_ways_load_what_the_other_saved(tmp_path: Path) -> None:
    """The two that differ most, a plain model among them: all others have a tier of their own."""
    save_ways(0, ["plain"], str(tmp_path))
    run_ranks(2, save_ways, ["fsdp2", "ddp"], str(tmp_path))
    run_ranks(2, load_ways, {"ddp": "fsdp2", "fsdp2": "plain"}, str(tmp_path))
    load_ways(0, {"plain": "ddp"}, str(tmp_path))
    for way, other in (("ddp", "fsdp2"), ("fsdp2", "plain"), ("plain", "ddp")):
        check_names(way, tmp_path)
        check_values(way, other, tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_names_are_the_same_however_the_model_is_wrapped(way: str, saved_by_all: Path) -> None:
    check_names(way, saved_by_all)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_loads_what_another_saved(way: str, saved_by_all: Path) -> None:
    """Bit for bit, model and optimizer, on another number of ranks and another mesh."""
    check_values(way, BEFORE[way], saved_by_all)


def content(place: Path) -> dict[str, Any]:
    """Whole tensors as hashes, and objects, by name; without random states."""
    metadata = ckpt.CheckpointReader(place).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(description.size, dtype=description.properties.dtype)
        if isinstance(description, TensorStorageMetadata)
        else None
        for name, description in metadata.items()
        if not name.startswith("rng.")
    }
    ckpt.load(state, place, no_dist=True)
    # In which order an optimizer lists the parameters of a group depends on how the model is wrapped.
    state |= {name: sorted(value) for name, value in state.items() if name.endswith(".params")}
    return dict(digest(state))


def test_partial_and_strict(tmp_path: Path) -> None:
    model, optimizer = trained(plain, seed=1, steps=1)
    state = training_state(model=model, optimizer=optimizer)
    ckpt.save(state, tmp_path / "step-00000001")
    larger = Net(2)
    larger.extra = nn.Linear(2, 2)
    del larger.frozen
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager:
        with pytest.raises(LoadFailed, match=r"lacks 2 key\(s\): model.extra.bias, model.extra.weight;"):
            manager.restore(model=larger)
        del larger.extra
        with pytest.raises(
            LoadFailed,
            match=r"the program has no place for 1 key\(s\): model.frozen, which the checkpoint has",
        ):
            manager.restore(model=larger)
        larger.extra = nn.Linear(2, 2)
        before = digest(larger.extra.state_dict())
        restored = manager.restore(model=larger, strict=False)
        assert restored is not None
        assert restored.missing == ("model.extra.bias", "model.extra.weight")
    assert digest(larger.extra.state_dict()) == before
    assert torch.equal(larger.embed.weight, model.get_parameter("embed.weight"))


def partial_and_strict_in_shards(rank: int, root: str) -> tuple[str, tuple[str, ...]]:
    model, optimizer = trained(fsdp2, seed=1, steps=1)
    with ckpt.CheckpointManager(root, **OPTIONS) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    larger = Net(2)
    larger.extra = nn.Linear(WIDTH, WIDTH)
    larger = fsdp2(larger)  # type: ignore[assignment]
    before = digest(larger.get_parameter("extra.weight").to_local())  # type: ignore[attr-defined]
    with ckpt.CheckpointManager(root, **OPTIONS) as manager:
        with pytest.raises(LoadFailed) as caught:
            manager.restore(model=larger)
        restored = manager.restore(model=larger, strict=False)
    assert restored is not None
    assert digest(larger.get_parameter("extra.weight").to_local()) == before  # type: ignore[attr-defined]
    expected, loaded = (m.get_parameter("blocks.1.up.weight").to_local() for m in (model, larger))  # type: ignore[attr-defined]
    assert torch.equal(loaded, expected)
    return str(caught.value), restored.missing


def test_partial_and_strict_in_shards(tmp_path: Path) -> None:
    for text, missing in run_ranks(2, partial_and_strict_in_shards, str(tmp_path)):
        assert "lacks 2 key(s): model.extra.bias, model.extra.weight;" in text
        assert missing == ("model.extra.bias", "model.extra.weight")


def test_a_model_alone_loads_from_a_checkpoint_that_has_more(tmp_path: Path) -> None:
    model, optimizer = trained(plain, seed=1, steps=1)
    ckpt.save(training_state(model=model, optimizer=optimizer, extra=3), tmp_path / "step-00000001")
    other = Net(2)
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager:
        assert manager.restore(model=other, rng=False) is not None
    assert digest(other.state_dict()) == digest(model.state_dict())


def _net_with_two_optimizers(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    adam = torch.optim.AdamW(net[0].parameters(), lr=0.1)
    sgd = torch.optim.SGD(net[1].parameters(), lr=0.2, momentum=0.9)
    schedulers = {
        "adam": torch.optim.lr_scheduler.StepLR(adam, 1),
        "sgd": torch.optim.lr_scheduler.StepLR(sgd, 1),
    }
    return {"model": net, "optimizers": [adam, sgd], "schedulers": schedulers}


@pytest.mark.parametrize("way", ["manager", "load"])
def test_members_of_lists_and_dicts_are_parts(way: str, tmp_path: Path) -> None:
    saved = _net_with_two_optimizers(0)
    saved["model"](torch.ones(4)).sum().backward()
    for stepped in (*saved["optimizers"], *saved["schedulers"].values()):
        stepped.step()
    fresh = _net_with_two_optimizers(1)
    if way == "manager":
        with ckpt.CheckpointManager(tmp_path / "run", **OPTIONS) as manager:
            manager.save(1, **saved)
        with ckpt.CheckpointManager(tmp_path / "run", **OPTIONS) as manager:
            restored = manager.restore(**fresh)
        assert restored is not None
        assert restored.certificate.is_exact
    else:
        ckpt.save(saved, tmp_path / "one", no_dist=True)
        ckpt.load(fresh, tmp_path / "one", no_dist=True)
    assert digest(fresh["model"].state_dict()) == digest(saved["model"].state_dict())
    for number in (0, 1):
        expected = saved["optimizers"][number].state_dict()
        assert digest(fresh["optimizers"][number].state_dict()) == digest(expected)
    for name, scheduler in saved["schedulers"].items():
        assert fresh["schedulers"][name].state_dict() == scheduler.state_dict()


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (
            {"model": nn.Linear(2, 2).state_dict()},
            "not OrderedDict: give the model itself, not its state_dict()",
        ),
        ({"model": {"w": torch.ones(2)}}, "not dict: give the model itself"),
        ({"model": {"net": nn.Linear(2, 2)}}, "not dict: give a list of its values"),
        (
            {"model": nn.Linear(2, 2), "optimizer": {"state": {}, "param_groups": []}},
            "not dict: give the optimizer itself",
        ),
    ],
)
def test_other_values_than_models_and_optimizers_say_what_is_meant(
    given: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager:
        for call in (
            lambda: manager.step(1, **given),
            lambda: manager.save(1, **given),
            lambda: manager.restore(**given),
        ):
            with pytest.raises(ConfigurationError, match=re.escape(advice)):
                call()


def test_a_member_and_a_part_of_one_name_are_refused(tmp_path: Path) -> None:
    state = _net_with_two_optimizers(0)
    (optimizer, _) = state["optimizers"]
    for given, name in (
        ({"o": [optimizer]}, "o.0"),
        ({"o": [[optimizer]]}, "o.0.0"),
        ({"o": {1: optimizer}}, "o.1"),
    ):
        for both in ({**given, name: torch.ones(1)}, {name: torch.ones(1), **given}):
            with pytest.raises(ConfigurationError, match=f"two parts have the name '{name}'"):
                ckpt.save(both, tmp_path / "one", no_dist=True)


def test_an_optimizer_that_has_not_stepped_is_not_stepped(tmp_path: Path) -> None:
    """torch steps an optimizer to find out what its state looks like; the run must not notice."""

    def weights(saved_first: bool) -> Any:
        model, optimizer = trained(plain, seed=1, steps=0)
        if saved_first:
            ckpt.save(training_state(model=model, optimizer=optimizer), tmp_path / "c")
        train_step(model, optimizer, torch.Generator().manual_seed(0))
        return digest(model.state_dict())

    assert weights(True) == weights(False)
    with pytest.raises(ConfigurationError, match="needs model="):
        training_state(optimizer=torch.optim.SGD([torch.zeros(1)]))


def test_random_states_come_back() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item(), random.gauss(0, 1)]

    random.gauss(0, 1)  # leaves half of a pair behind
    state = RandomState().state_dict()
    first = draw()
    RandomState().load_state_dict(state)
    assert draw() == first
    second = draw()
    RandomState().load_state_dict({**state, "ranks": 2})  # of another number of ranks: left alone
    assert second != first
    assert draw() != first


def random_draws(rank: int, root: str, load: bool) -> float:
    torch.manual_seed(100 + rank)
    with ckpt.CheckpointManager(root, save=saving.every_steps(1)) as manager:
        if load:
            torch.manual_seed(0)
            manager.restore(number=0)
        else:
            manager.save(1, number=1)
    return torch.rand(()).item()


def test_random_states_are_each_rank_s_own(tmp_path: Path) -> None:
    first = run_ranks(2, random_draws, str(tmp_path), False)
    assert first[0] != first[1]
    assert run_ranks(2, random_draws, str(tmp_path), True) == first
    (alone,) = run_ranks(1, random_draws, str(tmp_path), True)
    assert alone not in first


def test_projected_size(tmp_path: Path) -> None:
    model, optimizer = trained(plain, seed=1, steps=0)
    projected = size_bytes(training_state(model=model, optimizer=optimizer))
    _, optimizer = trained(plain, seed=1, steps=1)
    moments = OptimizerState(model, optimizer).size_bytes()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert projected == pytest.approx(parameters + moments, rel=0.05)


def sizes(rank: int, *ways: str) -> list[int]:
    states = (trained(WAYS[way][1], seed=1, steps=1) for way in ways)
    return [size_bytes(training_state(model=model, optimizer=optimizer)) for model, optimizer in states]


def test_projected_size_is_that_of_all_ranks(tmp_path: Path) -> None:
    (whole,) = sizes(0, "plain")
    for of_rank in run_ranks(2, sizes, "fsdp1", "fsdp2"):
        assert of_rank == pytest.approx([whole, whole], rel=0.2)


class Odd(nn.Module):
    """What optimizers and shards meet beside the usual."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.idle = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first.bias.requires_grad_(False)
        for dtype in EIGHT_BITS:
            frozen = nn.Parameter(torch.rand(WIDTH, 4).to(dtype), requires_grad=False)
            self.register_parameter(f"frozen_{_short(dtype)}", frozen)
            self.register_buffer(f"buffer_{_short(dtype)}", torch.rand(3).to(dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(hidden))
        return output


EIGHT_BITS = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return str(dtype).rpartition("_")[2]


def odd(seed: int, steps: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Sharded where there are ranks; two optimizers, one of which also has a frozen parameter and
    one without gradients.
    """
    model = Odd(seed)
    if dist.is_initialized():
        fully_shard(model)
    idle = [*model.first.parameters(), *model.idle.parameters()]
    optimizers = [
        torch.optim.AdamW(idle, lr=1e-2),
        torch.optim.SGD(model.second.parameters(), lr=1e-2, momentum=0.9),
    ]
    for step in range(steps):
        odd_step(model, optimizers, step)
    return model, optimizers


def odd_step(model: Any, optimizers: list[torch.optim.Optimizer], seed: int, *, idle: bool = False) -> None:
    hidden = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
    output = model(hidden).sum()
    (output + sum(p.sum() for p in model.idle.parameters()) if idle else output).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def save_odd(rank: int, root: str) -> None:
    model, optimizers = odd(seed=1, steps=2)
    with ckpt.CheckpointManager(root, **OPTIONS) as manager:
        manager.save(2, model=model, optimizer=optimizers)
    odd_step(model, optimizers, 2, idle=True)
    ckpt.save(training_state(model=model, optimizer=optimizers), f"{root}/went-on")


def load_odd(rank: int, root: str, name: str, steps: int) -> None:
    """Into a model that is fresh, or one that has also trained what was idle; then the step that
    follows.
    """
    model, optimizers = odd(seed=2, steps=0)
    for step in range(steps):
        odd_step(model, optimizers, step, idle=True)
    with ckpt.CheckpointManager(root, **OPTIONS) as manager:
        restored = manager.restore(model=model, optimizer=optimizers)
    assert restored is not None
    assert restored.missing == ()
    assert not [p for p in model.get_submodule("idle").parameters() if optimizers[0].state.get(p)]
    odd_step(model, optimizers, 2, idle=True)
    ckpt.save(training_state(model=model, optimizer=optimizers), f"{root}/{name}")


def test_several_optimizers_with_parameters_frozen_and_idle_in_eight_bits(tmp_path: Path) -> None:
    """Bit for bit, with what an optimizer has nothing to save for: such a run can be resumed."""
    run_ranks(2, save_odd, str(tmp_path))
    run_ranks(2, load_odd, str(tmp_path), "fresh", 0)
    run_ranks(1, load_odd, str(tmp_path), "used", 2)
    saved, expected = content(tmp_path / "step-00000002"), content(tmp_path / "went-on")
    for name in ("fresh", "used"):
        assert content(tmp_path / name) == expected
    assert not [
        name for name in saved if name.startswith(("optimizer.state.idle", "optimizer.state.first.bias"))
    ]
    assert "optimizer.state.second.weight.momentum_buffer" in saved
    assert {f"model.frozen_{_short(dtype)}" for dtype in EIGHT_BITS} <= set(saved)


class LargestSent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The size of the largest tensor in any collective of this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            for value in tree_leaves((args, result)):
                if isinstance(value, torch.Tensor):
                    self.size_bytes = max(self.size_bytes, value.numel() * value.element_size())
        return result


def largest_sent(rank: int, ways: list[str], root: str) -> list[tuple[int, int, int]]:
    """Of each way: when saving, when loading, and, to know that it would show, when gathering on
    purpose.
    """
    return [_largest_sent(way, f"{root}/{way}") for way in ways]


def _largest_sent(way: str, place: str) -> tuple[int, int, int]:
    sent = []
    model = WAYS[way][1](Net(1, width=256))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    state = training_state(model=model, optimizer=optimizer)
    gather = StateDictOptions(full_state_dict=True)
    for work in (
        lambda: ckpt.save(state, place),
        lambda: ckpt.load(state, place),
        lambda: get_model_state_dict(model, options=gather),
    ):
        with LargestSent() as largest:
            work()
        sent.append(largest.size_bytes)
    return sent[0], sent[1], sent[2]


@pytest.mark.parametrize("ways", [["fsdp1", "fsdp2_compiled"], ["fsdp2"], ["hsdp", "tp_fsdp"]])
def test_no_tensor_is_gathered(ways: list[str], tmp_path: Path) -> None:
    """FSDP1, where torch gathers unit by unit, is the exception: never more than one of them."""
    shard_bytes = 256 * 512 * 4 // 4  # of the largest tensor, among four ranks
    unit_bytes = (2 * 256 * 512 + 256 + 512) * 4
    for of_rank in run_ranks(WAYS[ways[0]][0], largest_sent, ways, str(tmp_path)):
        for way, (saving_bytes, loading_bytes, gathering_bytes) in zip(ways, of_rank, strict=True):
            assert gathering_bytes >= 2 * shard_bytes
            limit_bytes = unit_bytes + 64 if way == "fsdp1" else shard_bytes // 2
            assert max(saving_bytes, loading_bytes) <= limit_bytes, way
