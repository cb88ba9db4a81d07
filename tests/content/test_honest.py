"""Honest trainings: no check finds fault with any of their saves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import ckpt

State = dict[str, Any]
SAVES = 30


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(size),
            nn.Linear(size, 2 * size),
            nn.Linear(2 * size, size),
        )
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.relu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self, size: int = 24, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, size, sparse=sparse)
        self.blocks = nn.ModuleList(Block(size) for _ in range(2))
        self.bn = nn.BatchNorm1d(size)
        self.head = nn.Linear(size, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.bn(x))
        return out


class LoRA(nn.Module):
    """A frozen layer with two small matrices beside it, the second of which begins with zeros."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) / 10)
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + x @ self.a.T @ self.b.T
        return out


def step_of(model: nn.Module, optimizers: list[torch.optim.Optimizer], accumulate: int = 1) -> None:
    for _ in range(accumulate):
        tokens = torch.randint(0, 20, (16,))  # 30 rows of the embedding are never looked up
        F.cross_entropy(model(tokens), (tokens + 1) % 50).backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizers: list[torch.optim.Optimizer], **more: Any) -> State:
    return {"model": model.state_dict(), "optimizer": [each.state_dict() for each in optimizers], **more}


def warm_up() -> Iterator[State]:
    """The first step has a learning rate of zero."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))
    while True:
        step_of(model, [optimizer])
        schedule.step()
        yield state_of(model, [optimizer], schedule=schedule.state_dict(), rng=torch.get_rng_state())


def without_momentum() -> Iterator[State]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    while True:
        step_of(model, [optimizer])
        yield state_of(model, [optimizer])


def frozen_parts() -> Iterator[State]:
    """The encoder is frozen after a while; an average of the weights is kept beside."""
    model = Model()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    for step in range(10**9):
        if step == 10:
            model.embed.requires_grad_(False)
            model.blocks.requires_grad_(False)
        step_of(model, [optimizer])
        average.update_parameters(model)
        parts = {"encoder": model.blocks.state_dict(), "head": model.head.state_dict()}
        yield state_of(model, [optimizer], average=average.state_dict(), **parts)


def accumulated() -> Iterator[State]:
    model = Model().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while True:
        step_of(model, [optimizer], accumulate=3)
        yield state_of(model, [optimizer])


def sparse_gradients() -> Iterator[State]:
    model = Model(sparse=True)
    dense = [value for name, value in model.named_parameters() if not name.startswith("embed")]
    optimizers = [torch.optim.SparseAdam(model.embed.parameters()), torch.optim.Adagrad(dense)]
    while True:
        step_of(model, optimizers)
        yield state_of(model, optimizers)


def adapters() -> Iterator[State]:
    model = Model().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = LoRA(block.up)  # type: ignore[assignment]
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    while True:
        step_of(model, [optimizer])
        small = {name: value for name, value in model.state_dict().items() if name.endswith((".a", ".b"))}
        yield state_of(model, [optimizer], adapter=small)


def two_in_turn() -> Iterator[State]:
    """Two models, one of which is trained in every second save only."""
    models = [Model(), Model()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for save in range(10**9):
        for number in (0, 1):
            if number == 0 or save % 2:
                step_of(models[number], [optimizers[number]])
        yield {
            "generator": models[0].state_dict(),
            "critic": models[1].state_dict(),
            "optimizers": [each.state_dict() for each in optimizers],
        }


def on_cpu_with_float8() -> Iterator[State]:
    """Weights with a copy in float8, scaled, as recipes for training in float8 keep it."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        step_of(model, [optimizer])
        scales = {name: value.abs().amax().clamp(min=1e-12) / 448 for name, value in model.named_parameters()}
        small = {
            name: (value / scales[name]).to(torch.float8_e4m3fn) for name, value in model.named_parameters()
        }
        yield state_of(model, [optimizer], float8=small, scales=scales)


TRAININGS: list[Callable[[], Iterator[State]]] = [
    warm_up, without_momentum, frozen_parts, accumulated, sparse_gradients, adapters, two_in_turn, on_cpu_with_float8,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("look_at", ["sample", "all"])
@pytest.mark.parametrize(
    "training",
    [TRAININGS[0], *(pytest.param(each, marks=pytest.mark.long) for each in TRAININGS[1:])],
    ids=lambda training: training.__name__,
)
def test_no_check_finds_fault(
    training: Callable[[], Iterator[State]], look_at: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run is resumed twice; the second time from an older checkpoint."""
    torch.manual_seed(1)
    caplog.set_level(logging.WARNING)
    states = training()
    state: State = {}
    for step in range(1, SAVES + 1):
        if step in (10, 20):  # into the very tensors that are trained on
            ckpt.load(state, tmp_path / f"step-{step - (1 if step == 10 else 5)}")
        state = next(states)
        saved = ckpt.save(state, tmp_path / f"step-{step}", checks=ckpt.Checks(look_at=look_at))
        assert saved.storage_meta is not None
        assert not saved.storage_meta.warnings  # type: ignore[attr-defined]
    assert not [record for record in caplog.records if record.name.startswith("ckpt.content")]


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("hsdp", marks=pytest.mark.long), "ddp"])
def test_no_check_finds_fault_on_several_ranks(layout: str, tmp_path: Path) -> None:
    for told in run_ranks(4 if layout == "hsdp" else 2, _train, layout, str(tmp_path)):
        assert told == []


def _train(rank: int, layout: str, root: str) -> list[str]:
    torch.manual_seed(1)
    model: nn.Module = Model()
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        shape, names = ((2, 2), ("replicate", "shard")) if layout == "hsdp" else ((2,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)  # each rank has samples of its own
    warnings: list[str] = []
    for step in range(1, SAVES + 1):
        step_of(model, [optimizer])
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        saved = ckpt.save(state, f"{root}/step-{step}")
        warnings += saved.storage_meta.warnings  # type: ignore[union-attr]
    return warnings
