"""Simulate the first save, a later one and a load of one model on one layout, in this process."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

import ckpt
from benchmarks.scale.counting import Counts
from benchmarks.scale.other_ranks import OtherRanks
from benchmarks.scale.plans import parse_layout, stages_of, state_of, structure_of
from benchmarks.scale.simulated_job import Simulation
from ckpt.acceptance.models import Parameter
from ckpt.backends import memory
from ckpt.options import LoadOptions
from ckpt.save_plans.exchange import Plans
from ckpt.writing.column_save import LAYOUTS, PLANS

PART_BYTES = 32 << 20
OPERATIONS = ("first save", "later save", "load")

_PLACE = "memory://bench"


@dataclass(frozen=True)
class Operation:
    """A save or a load.

    Attributes:
        phases: what rank 0 does in each.
        requests: of rank 0 by phase, with the bytes of objects.
        others: requests of all other ranks; of a load None, as their reads are not simulated.
        peak_mib: by how much the memory of rank 0 grew.
    """

    phases: dict[str, Counts]
    requests: dict[str, Counter[str]]
    others: Counter[str] | None
    peak_mib: float


@dataclass(frozen=True)
class Case:
    """A simulated job.

    Attributes:
        most_bytes: of tensors that one rank writes.
        files: manifests that the ranks read when they load what they saved; each is read once.
    """

    ranks: int
    operations: dict[str, Operation]
    data_bytes: int
    most_bytes: int
    files: int


def simulate(
    parameters: Sequence[Parameter], text: str, ranks: int, *, keeps_data: bool = False, rounds: int = 1
) -> Case:
    """Simulate a job.

    Args:
        text: the layout, as `benchmarks.scale.plans.parse_layout` takes it.
        keeps_data: write and read files, for small jobs.
        rounds: after one to get warm; CPU seconds are medians.
    """
    layout = parse_layout(text, ranks)
    if layout.size != ranks:
        raise SystemExit(f"the layout {text} has {layout.size:,} ranks, not {ranks:,}")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        names = "pp", "dp", "fsdp", "tp"
        mesh = init_device_mesh("cpu", (layout.stages, *layout.mesh), mesh_dim_names=names)[names[1:]]
        states = [state_of(stage, layout, mesh) for stage in stages_of(parameters, layout.stages)]
        kept = Plans()
        structures = [kept.memory.keep(structure_of(Plans(), state)) for state in states]
        job = Simulation(OtherRanks(structures, layout.mesh), part_bytes=PART_BYTES, keeps_data=keeps_data)
        state = tree_map(with_zeros if keeps_data else _untouched, states[0])
        seen: dict[str, list[Operation]] = {name: [] for name in OPERATIONS}
        with job.running():
            for number in range(rounds + keeps_data):
                _round(job, state, number, seen)
        plan = next(reversed(PLANS.central.values()))
        operations = {name: _median(each[-rounds:]) for name, each in seen.items()}
        files = len({path for wanted in job.wanted for path in wanted})
        return Case(ranks, operations, int(plan.loads.sum()), int(plan.loads.max()), files)
    finally:
        dist.destroy_process_group()


def _round(job: Simulation, state: dict[str, Any], number: int, seen: dict[str, list[Operation]]) -> None:
    PLANS.memory.clear()
    PLANS.central.clear()
    LAYOUTS.clear()
    memory.clear(_PLACE)
    job.requests.sizes.clear()
    for name, place in zip(OPERATIONS, ("first", "later", "later"), strict=True):
        url = f"{_PLACE}/{place}{number}"
        job.begin(url)
        if name == "load":
            # The ranks of other stages are not there to ask for what this one leaves.
            ckpt.load(dict(state), url, options=LoadOptions(strict=False))
        else:
            ckpt.save(dict(state), url, checks="off")  # the zeros of a simulated job are no content
        requests = dict(job.requests.counts)
        others = requests.pop("", Counter())
        seen[name].append(
            Operation(job.phases.counts, requests, None if name == "load" else others, job.phases.peak_mib)
        )


def _median(rounds: Sequence[Operation]) -> Operation:
    last = rounds[-1]
    phases = {
        name: replace(counts, cpu_s=statistics.median(each.phases[name].cpu_s for each in rounds))
        for name, counts in last.phases.items()
    }
    return replace(last, phases=phases)


def with_zeros(tensor: DTensor) -> DTensor:
    """Give a tensor memory of its own."""
    return _with(tensor, torch.zeros(tensor.to_local().shape, dtype=tensor.dtype))


def _untouched(tensor: DTensor) -> DTensor:
    """Give a tensor an address range of its own; memory it takes only when it is touched."""
    return _with(tensor, torch.empty(tensor.to_local().shape, dtype=tensor.dtype))


def _with(tensor: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
