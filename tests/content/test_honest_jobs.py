"""Honest saves of jobs of every kind, drawn from seeds: none is refused, and none is warned of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.logs import warnings_of_ckpt
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import ckpt
from ckpt.errors import SaveFailed
from ckpt.options import SaveOptions
from ckpt.state import training_state
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource

SAVES = 10
"""By each job; after the fifth it goes back to its third."""

Parts = dict[str, Any]
Job = Callable[[int, random.Random], tuple[Parts, Callable[[], None]]]
"""Makes what a rank saves, and what trains it for a step; the draws are the same on all ranks."""


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.bn, self.down = (
            nn.Linear(width, 2 * width),
            nn.BatchNorm1d(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.bn(self.up(x))))
        return out


def net(draw: random.Random) -> Net:
    torch.manual_seed(draw.randrange(1000))
    # Both below and above the size from which on replicas are compared by samples.
    return Net(draw.choice([8, 24, 24, 400]))


def optimizer_of(model: nn.Module, draw: random.Random) -> Optimizer:
    named = [*model.named_parameters()]
    groups = [
        {"params": [each for name, each in named if ("bias" in name) is is_bias]} for is_bias in (True, False)
    ]
    parameters: Any = draw.choice([groups, [*model.parameters()]])
    makes: list[Callable[[], Optimizer]] = [
        lambda: SGD(parameters, lr=0.01),
        lambda: SGD(parameters, lr=0.01, momentum=0.9),
        lambda: AdamW(parameters, lr=1e-3),
        lambda: Adagrad(parameters, lr=0.01),
    ]
    return draw.choice(makes)()


def trained(model: nn.Module, optimizer: Optimizer, width: int, seed: int) -> Callable[[], None]:
    """Return what trains a model on random data: on each rank others, if the seeds are."""
    generator = torch.Generator().manual_seed(seed)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, width, generator=generator)).pow(2).mean().backward()
        optimizer.step()

    return step


def plain(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    """Train the same on each rank, with a schedule."""
    model = net(draw)
    optimizer = optimizer_of(model, draw)
    schedule = CosineAnnealingLR(optimizer, T_max=50)
    step = trained(model, optimizer, model.up.in_features, 1)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}

    def both() -> None:
        step()
        schedule.step()

    return parts, both


def ddp(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    """Keep the running averages of batch normalisation on each rank."""
    own = net(draw)
    model = DistributedDataParallel(own, broadcast_buffers=False)
    optimizer = optimizer_of(model, draw)
    return {"model": model, "optimizer": optimizer}, trained(model, optimizer, own.up.in_features, rank)


def ddp_as_dicts(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    """Save what `state_dict` returns, in place of the model."""
    parts, step = ddp(rank, draw)
    return {"as dicts": parts}, step


def _fully_sharded(rank: int, draw: random.Random, mesh: DeviceMesh) -> tuple[Parts, Callable[[], None]]:
    model = net(draw)
    width = model.up.in_features
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, draw)
    return {"model": model, "optimizer": optimizer}, trained(model, optimizer, width, rank)


def fsdp2(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    return _fully_sharded(rank, draw, init_device_mesh("cpu", (2,)))


def hsdp(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _fully_sharded(rank, draw, mesh)


def tensor_parallel(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    torch.manual_seed(draw.randrange(1000))
    width = draw.choice([8, 24])
    model = nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)})
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    chain = nn.Sequential(model["up"], nn.ReLU(), model["down"])
    optimizer = optimizer_of(model, draw)
    return {"model": model, "optimizer": optimizer}, trained(chain, optimizer, width, 1)


def pipeline(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    """Give each stage layers of its own, and an optimizer with another rate."""
    width = draw.choice([8, 24])
    torch.manual_seed(rank)
    stage = nn.ModuleDict({f"layer{2 * rank + number}": nn.Linear(width, width) for number in range(2)})
    optimizer = optimizer_of(stage, draw)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (rank + 1)
    step = trained(nn.Sequential(*stage.values()), optimizer, width, rank)
    return {"model": stage, "optimizer": optimizer}, step


def experts(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    """Cut the experts of each group over a mesh of its own, under their numbers in the model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("groups", "fsdp"))["fsdp"]
    torch.manual_seed(rank)
    count = draw.choice([1, 3])
    model = nn.ModuleDict()
    for number in range(count * (rank // 2), count * (rank // 2 + 1)):
        cut = DTensor.from_local(torch.randn(3, 5), mesh, [Shard(0)], run_check=False)
        model[f"expert{number}"] = nn.ParameterDict({"up": nn.Parameter(cut)})
    optimizer = optimizer_of(model, draw)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


class Position:
    """A loader of this rank's own: batches of other lengths on each rank."""

    def __init__(self, rank: int) -> None:
        self._rank, self._state = rank, {"position": 0, "buffer": [rank]}

    def advance(self) -> None:
        position: Any = self._state["position"]
        self._state = {"position": position + 1 + self._rank, "buffer": [self._rank, position]}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


def per_rank(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    """Save positions, metrics and random states that are each rank's own."""
    parts, step = draw.choice([plain, ddp])(rank, draw)
    loader = Position(rank)
    parts |= {
        "loader": ckpt.per_rank(loader),
        "metrics": ckpt.per_rank({"loss": 1.5 + rank, "at": torch.ones(rank + 1)}),
    }

    def both() -> None:
        step()
        loader.advance()

    return parts, both


def rescalable(rank: int, draw: random.Random) -> tuple[Parts, Callable[[], None]]:
    """Read another part of the data on each rank, with names that say which."""
    parts, step = draw.choice([plain, ddp])(rank, draw)
    documents = [np.arange(60 * number, 60 * number + 60) for number in range(24)]
    dataset = ShardedDataset(MapSource(documents), sequence_length=10, shards=draw.choice([4, 8]), seed=1)
    loader = RescalableLoader(dataset, batch_size=draw.choice([1, 3]))

    def both() -> None:
        step()
        next(iter(loader))

    return {**parts, "loader": loader}, both


JOBS: dict[int, list[Job]] = {
    2: [plain, ddp, ddp_as_dicts, fsdp2, tensor_parallel, pipeline, per_rank, rescalable],
    4: [hsdp, experts],
}


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        pytest.param(2, range(1), marks=pytest.mark.smoke),
        (4, range(1)),
        *(pytest.param(ranks, range(6), marks=pytest.mark.long) for ranks in JOBS),
    ],
)
def test_no_honest_save_is_refused_or_warned_of(ranks: int, seeds: range, tmp_path: Path) -> None:
    """With six seeds ten jobs make 600 saves."""
    for found in run_ranks(ranks, _run_jobs, ranks, seeds, str(tmp_path), timeout_s=600):
        assert found == []


def _run_jobs(rank: int, ranks: int, seeds: range, root: str) -> list[str]:
    found: list[str] = []
    for job in JOBS[ranks]:
        for seed in seeds:
            name = f"{job.__name__}-{seed}"
            found += [f"{name}: {each}" for each in _saves(rank, job, random.Random(name), f"{root}/{name}")]
    return found


def _saves(rank: int, job: Job, draw: random.Random, root: str) -> Iterator[str]:
    """Train and save; yield each warning, and the refusal if one comes."""
    parts, step = job(rank, draw)
    for number in range(1, SAVES + 1):
        for _ in range(draw.choice([1, 1, 3])):
            step()
        with warnings_of_ckpt() as warned:
            try:
                # The first is planned back, as a manager does it.
                saved: Any = ckpt.save(
                    _state(parts), f"{root}/step-{number}", options=SaveOptions(resume_check=number == 1)
                )
            except SaveFailed as error:
                yield f"save {number} was refused: {error}"
                return
        yield from (f"save {number}: {each}" for each in [*warned, *saved.storage_meta.warnings])
        if number == 5:
            ckpt.load(_state(parts), f"{root}/step-3")


def _state(parts: Parts) -> dict[str, Any]:
    if "as dicts" in parts:
        return {name: part.state_dict() for name, part in parts["as dicts"].items()}
    return training_state(**parts, rng=True)
