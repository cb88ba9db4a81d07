"""Saves in which ranks contradict each other: of experts, geometry, groups, stages, each rank's own values, replicas.

With `test_catalogue.py` these are the 45 faults that `docs/content.md` counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.geometries import Cut, hooked, hooked_in_dtensor
from support.logs import warnings_of_ckpt
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW, Optimizer

import ckpt
from ckpt.errors import SaveFailed
from ckpt.state import training_state

Saves = Iterator[Mapping[str, Any]]
Fault = Callable[[int], Saves]
"""Yields what a rank saves: all but the last are honest, and the last has the fault."""


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "epoch": 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width))


def step(model: nn.Module, optimizer: Optimizer) -> None:
    """Train with gradients that are the same on all ranks."""
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, 0.01 * number)
    optimizer.step()


def saved(model: nn.Module, optimizer: Optimizer | None = None, **parts: Any) -> Mapping[str, Any]:
    return training_state(model=model, optimizer=optimizer, rng=False, **parts)


# -- experts: two groups of two ranks, each with a mesh of its own ------------------------------------------


class Experts(nn.Module):
    """Experts by number, each cut over the ranks of this rank's group."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("groups", "fsdp"))["fsdp"]
        self.experts = nn.ModuleDict()
        for number in numbers:
            local = torch.randn(3, 5, generator=torch.Generator().manual_seed(number))
            cut = DTensor.from_local(local + mesh.get_local_rank(), mesh, [Shard(0)], run_check=False)
            self.experts[str(number)] = nn.ParameterDict({"up": nn.Parameter(cut)})

    def grow(self) -> None:
        for parameter in self.parameters():
            parameter.data.to_local().mul_(1.1)  # type: ignore[attr-defined]


def experts_without_their_numbers(rank: int) -> Saves:
    yield saved(Experts([rank // 2]))
    model = Experts([rank // 2])
    (own,) = model.experts.values()
    model.experts = nn.ModuleDict({"0": own})
    yield saved(model)


def experts_swapped_in_one_group(rank: int) -> Saves:
    model = Experts([0, 1])
    yield saved(model)
    model.grow()
    if rank >= 2:
        model.experts = nn.ModuleDict({"0": model.experts["1"], "1": model.experts["0"]})
    yield saved(model)


def experts_of_one_group_stale(rank: int) -> Saves:
    model = Experts([0, 1])
    yield saved(model)
    if rank < 2:
        model.grow()
    yield saved(model)


# -- geometry: a tensor of 12 rows, 5 of which rank 0 has ---------------------------------------------------


def _cut(make: Callable[[Cut], Any], cut: Cut, seed: int = 1) -> Mapping[str, Any]:
    carried = make(cut)
    carried.local.fill_(float(seed))
    return {"model": {"w": carried.value, "bias": torch.ones(3)}}


def chunks_overlap(rank: int) -> Saves:
    yield _cut(hooked, [(5, 7)] if rank else [(0, 5)])
    yield _cut(hooked, [(4, 8)] if rank else [(0, 5)])


def chunk_missing(rank: int) -> Saves:
    yield _cut(hooked, [(5, 3), (8, 4)] if rank else [(0, 5)])
    yield _cut(hooked, [(5, 3)] if rank else [(0, 5)])


def offsets_moved(rank: int) -> Saves:
    yield _cut(hooked, [(5, 7)] if rank else [(0, 5)])
    yield _cut(hooked, [(6, 7)] if rank else [(0, 5)])


def chunk_of_two_ranks_differs(rank: int) -> Saves:
    yield _cut(hooked_in_dtensor, [(0, 12)])
    yield _cut(hooked_in_dtensor, [(0, 12)], seed=2 + rank)


# -- groups of optimizers -----------------------------------------------------------------------------------


def _groups(model: nn.Module, decayed: Callable[[str], bool]) -> AdamW:
    named = [*model.named_parameters()]
    groups = [
        {"params": [each for name, each in named if decayed(name) is is_decayed], "weight_decay": decay}
        for is_decayed, decay in ((True, 0.1), (False, 0.0))
    ]
    return AdamW(groups, lr=1e-3)


def rate_of_one_rank(rank: int) -> Saves:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer)
    yield saved(model, optimizer)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    yield saved(model, optimizer)


def parameter_in_two_groups(rank: int) -> Saves:
    model = net()
    optimizer = _groups(model, lambda name: name.endswith("weight"))
    step(model, optimizer)
    yield saved(model, optimizer)
    step(model, optimizer)
    if rank:
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    yield saved(model, optimizer)


def group_lost(rank: int) -> Saves:
    model = net()
    optimizer = _groups(model, lambda name: name.endswith("weight"))
    step(model, optimizer)
    yield saved(model, optimizer)
    step(model, optimizer)
    for parameter in optimizer.param_groups.pop()["params"]:
        del optimizer.state[parameter]
    yield saved(model, optimizer)


# -- stages of a pipeline -----------------------------------------------------------------------------------


def _stage(names: Mapping[str, nn.Module], rate: float) -> tuple[nn.Module, Optimizer]:
    model = nn.ModuleDict(names)
    return model, AdamW(model.parameters(), lr=rate)


def names_of_another_stage(rank: int) -> Saves:
    torch.manual_seed(rank)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model, optimizer = _stage(
        {f"layer{2 * rank + number}": layer for number, layer in enumerate(layers)}, 0.1 + rank
    )
    step(model, optimizer)
    yield saved(model, optimizer)
    model, optimizer = _stage({f"layer{number}": layer for number, layer in enumerate(layers)}, 0.1 + rank)
    step(model, optimizer)
    yield saved(model, optimizer)


def tied_embedding_differs(rank: int) -> Saves:
    torch.manual_seed(4)
    embed = nn.Embedding(9, 4)
    torch.manual_seed(rank)
    model, optimizer = _stage({"embed": embed, f"layer{rank}": nn.Linear(4, 4)}, 0.1)
    step(model, optimizer)
    yield saved(model, optimizer)
    if rank:
        step(model, optimizer)  # without the gradients of the other stage
    yield saved(model, optimizer)


# -- each rank's own values ---------------------------------------------------------------------------------


def position_of_a_loader_differs(rank: int) -> Saves:
    model, loader = net(), Loader()
    yield saved(model, loader=loader)
    step(model, SGD(model.parameters(), lr=0.1))
    loader.position = 100 + rank
    yield saved(model, loader=loader)


def counts_of_steps_differ(rank: int) -> Saves:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer)
    yield saved(model, optimizer)
    step(model, optimizer)
    for state in optimizer.state.values():
        state["step"] += rank
    yield saved(model, optimizer)


# -- replicas that are plain tensors, above 1 MiB -----------------------------------------------------------


def one_element_of_the_first_save(rank: int) -> Saves:
    model = net(600)
    with torch.no_grad():
        model.get_parameter("2.weight")[311, 77] += rank
    yield saved(model)


def replica_that_drifted_later(rank: int) -> Saves:
    model = net(600)
    yield saved(model)
    step(model, SGD(model.parameters(), lr=0.1 + 0.001 * rank))
    yield saved(model)


FOUND: dict[int, list[tuple[Fault, str]]] = {
    4: [
        (experts_without_their_numbers, r"'model\.experts\.0\.up'.*mesh of its own"),
        (experts_swapped_in_one_group, r"'model\.experts\.0\.up', 'model\.experts\.1\.up'.*mesh of its own"),
        (experts_of_one_group_stale, r"'model\.experts\.0\.up', 'model\.experts\.1\.up'.*mesh of its own"),
    ],
    2: [
        (one_element_of_the_first_save, r"other values of 'model\.2\.weight',"),
        (replica_that_drifted_later, r"other values of 'model\.0\.bias', 'model\.0\.weight', "),
        (chunks_overlap, r"model\.w"),
        (chunk_missing, r"model\.w"),
        (offsets_moved, r"model\.w"),
        (chunk_of_two_ranks_differs, r"other values of 'model\.w' in the same chunk"),
        (rate_of_one_rank, r"other options for parameter '0\.weight' of 'optimizer'"),
        (parameter_in_two_groups, r"other options for parameter '2\.weight' of 'optimizer'"),
        (names_of_another_stage, r"other values of 'model\.layer0\.bias', 'model\.layer0\.weight'"),
        (tied_embedding_differs, r"other values of 'model\.embed\.weight', 'optimizer\.state\.embed"),
        (position_of_a_loader_differs, r"'loader\.position'.* loader=ckpt\.per_rank"),
        (counts_of_steps_differ, r"other values of 'optimizer\.state\.0\.bias\.step'"),
    ],
}
"""By the number of ranks, and what the error says."""

WARNED: list[tuple[Fault, str]] = [(group_lost, "'optimizer' has .* tensors .* it had")]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.smoke), 4])
def test_faults_of_ranks_are_refused(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, _meet_refused, ranks, str(tmp_path))


def _meet_refused(rank: int, ranks: int, root: str) -> None:
    for fault, text in FOUND[ranks]:
        run = f"{root}/{fault.__name__}"
        error, count = None, 0
        for state in fault(rank):
            assert error is None, (fault.__name__, "an honest save was refused", error)
            try:
                assert not _warnings(state, f"{run}/step-{count}"), fault.__name__
                count += 1
            except SaveFailed as failed:
                error = failed
        assert error is not None, (fault.__name__, "was not found")
        assert re.search(text, str(error)), (fault.__name__, error)
        dist.barrier()
        listed = {record.parent.name for record in Path(run).glob("*/commit.json")}
        assert listed == {f"step-{number}" for number in range(count)}, (fault.__name__, listed)


def test_faults_of_ranks_that_may_be_meant_are_warned_of(tmp_path: Path) -> None:
    run_ranks(2, _meet_warned, str(tmp_path))


def _meet_warned(rank: int, root: str) -> None:
    for fault, text in WARNED:
        *honest, last = [
            _warnings(state, f"{root}/{fault.__name__}/step-{number}")
            for number, state in enumerate(fault(rank))
        ]
        assert not [*chain(*honest)], (fault.__name__, honest)
        assert any(re.search(text, each) for each in last), (fault.__name__, last)


def _warnings(state: Mapping[str, Any], url: str) -> list[str]:
    """Save a state; return the warnings, both those of the log and of the record."""
    with warnings_of_ckpt() as found:
        meta: Any = ckpt.save(dict(state), url).storage_meta
    return [*found, *meta.warnings]
