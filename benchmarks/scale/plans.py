"""Measure what agreeing on a plan costs the busiest rank, for the states of large models on any number of ranks.

    python -m benchmarks.scale.plans --model gpt-1t --layout tp8pp64dp32 --layout fsdp --ranks 16384

Rank 0 plans for itself as in a job, with DTensors on a mesh of that size. What the other ranks send is made by the
product's code from what differs between them, their coordinates. Everything that rank 0 does then is the product's:
decoding, checking, choosing who writes, the answers; of the network only the bytes are counted. What follows after
all have written, and loads, are simulated by `benchmarks.scale.simulate`.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt.acceptance.models import MODELS, Parameter
from ckpt.gc_pause import no_gc
from ckpt.ranks.tree import FAN
from ckpt.save_plans.exchange import Local, Plans, agree
from ckpt.save_plans.local import Structure, set_up_in_one_pass

T = TypeVar("T")

_LATER_SAVES = 9
_OPTIMIZER = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Layout:
    """A mesh of stages x replicas x shards x tensor-parallel ranks; `zero`: only the optimizer is sharded."""

    stages: int
    replicas: int
    shards: int
    tp: int
    zero: bool

    @property
    def size(self) -> int:
        return self.stages * self.replicas * self.shards * self.tp

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.replicas, self.shards, self.tp


def parse_layout(text: str, ranks: int) -> Layout:
    """Parse `fsdp`, `hsdp128` (128 shards, the rest replicas) or `tp8pp64dp32`, whose optimizer is sharded."""
    if text == "fsdp":
        return Layout(1, 1, ranks, 1, False)
    if match := re.fullmatch(r"hsdp(\d+)", text):
        return Layout(1, ranks // int(match[1]), int(match[1]), 1, False)
    if match := re.fullmatch(r"tp(\d+)pp(\d+)dp(\d+)", text):
        tp, stages, shards = map(int, match.groups())
        return Layout(stages, 1, shards, tp, True)
    raise SystemExit(f"{text!r} is no layout: write fsdp, hsdp128 or tp8pp64dp32")


def placements(parameter: Parameter, layout: Layout, *, of_optimizer: bool) -> tuple[Any, ...]:
    """Say how torch places a tensor: tensor parallelism first, then FSDP along dimension 0."""
    by_tp = None if layout.tp == 1 else parameter.tp_dim
    is_sharded = of_optimizer or not layout.zero
    fsdp: Any = Replicate()
    if is_sharded:
        fsdp = _StridedShard(0, split_factor=layout.tp) if by_tp == 0 else Shard(0)
    return Replicate(), fsdp, Replicate() if by_tp is None else Shard(by_tp)


def state_of(parameters: Sequence[Parameter], layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
    """Make the state of a stage as rank 0 of it holds it, without memory for values."""
    state: dict[str, Any] = {"model": {}, "optimizer": {name: {} for name in _OPTIMIZER}}
    for parameter in parameters:
        for of_optimizer, groups in ((False, [state["model"]]), (True, list(state["optimizer"].values()))):
            places = placements(parameter, layout, of_optimizer=of_optimizer)
            sizes, _ = compute_local_shape_and_global_offset(torch.Size(parameter.shape), mesh, places)
            local = torch.zeros(()).expand(sizes)
            for group in groups:
                group[parameter.fqn] = DTensor.from_local(
                    local,
                    mesh,
                    places,
                    run_check=False,
                    shape=torch.Size(parameter.shape),
                    stride=_strides(parameter),
                )
    return state


def stages_of(parameters: Sequence[Parameter], stages: int) -> list[list[Parameter]]:
    """Give each parameter a stage, by the number of its layer."""
    numbers = [int(match[1]) if (match := re.search(r"\.(\d+)\.", each.fqn)) else 0 for each in parameters]
    made: list[list[Parameter]] = [[] for _ in range(stages)]
    for parameter, number in zip(parameters, numbers, strict=True):
        made[number * stages // (1 + max(numbers))].append(parameter)
    return made


def _strides(parameter: Parameter) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(parameter.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class Meter:
    """CPU seconds and memory of this process, phase by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._before_kib = _peak_kib()

    def run(self, phase: str, work: Callable[[], T]) -> T:
        begun = time.process_time()
        result = work()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - begun
        return result

    @property
    def memory_mib(self) -> float:
        """How much the peak has grown."""
        return (_peak_kib() - self._before_kib) / 1024


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class AllRanks:
    """Stand in for the other ranks: they answer what rank 0 asks, and count what is sent."""

    rank = 0

    def __init__(
        self, structures: Sequence[Structure], messages: Callable[[], Iterator[bytes]], size: int
    ) -> None:
        self.size, self._structures, self._messages = size, structures, messages
        self.head = -1
        self.received: dict[str, int] = {}
        self.sent_bytes = 0
        self.answers: list[bytes] = []
        self.waiting_s = 0.0

    def decide(self, number: int, join: Callable[[int, int], int], decide: Callable[[int], int]) -> int:
        children = min(FAN, self.size - 1)
        self.received["numbers"] = 8 * children
        return decide(functools.reduce(join, [number, *[self.head] * children]))

    def join(self, value: T, join: Callable[[T, T], T]) -> T:
        return value

    def first_number(self, number: int) -> int:
        return number

    def gather_bytes(self, data: bytes) -> list[bytes]:
        begun = time.process_time()
        if "messages" in self.received:
            told = [data, *self._contents()]
            self.received["sections"] = sum(map(len, told))
        else:
            told = [data, *self._messages()]
            self.received["messages"] = sum(map(len, told))
        self.waiting_s += time.process_time() - begun
        return told

    def _contents(self) -> Iterator[bytes]:
        known = {digest: content for each in self._structures for digest, content in each.contents.items()}
        for wanted in self.answers[1:]:
            digests = [wanted[at : at + 16] for at in range(0, len(wanted), 16)]
            yield msgspec.msgpack.encode([known[digest] for digest in digests]) if wanted else b""

    def scatter_bytes(self, values: Sequence[bytes]) -> bytes:
        self.answers = list(values)
        self.sent_bytes += sum(map(len, values))
        return values[0]

    def broadcast(self, value: Any) -> Any:
        return value


def measure(model: str, text: str, ranks: int) -> dict[str, Any]:
    """Measure one model on one layout."""
    parameters = list(MODELS[model]())
    layout = parse_layout(text, ranks)
    stage_size = layout.size // layout.stages
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=stage_size)
    mesh = init_device_mesh("cpu", layout.mesh)
    states = [state_of(stage, layout, mesh) for stage in stages_of(parameters, layout.stages)]
    others = Plans()
    structures = [others.memory.keep(structure_of(Plans(), state)) for state in states]
    coordinates = np.stack(np.unravel_index(np.arange(stage_size), layout.mesh), axis=1).tolist()

    def messages() -> Iterator[bytes]:
        for rank in range(1, layout.size):
            message = structures[rank // stage_size].message
            places = [tuple(coordinates[rank % stage_size]) for _ in message.coordinates]
            yield msgspec.msgpack.encode(msgspec.structs.replace(message, coordinates=places))

    all_ranks, meter, plans = AllRanks(structures, messages, layout.size), Meter(), Plans()
    structure = meter.run("first: describe", lambda: structure_of(plans, states[0]))
    agreed = meter.run("first: agree", lambda: agree(all_ranks, plans, Local(structure, b"")))  # type: ignore[arg-type]
    assert agreed is not None
    assert agreed.plan is not None
    meter.seconds["first: agree"] -= all_ranks.waiting_s
    memory_mib, first_bytes, plan = meter.memory_mib, dict(all_ranks.received), agreed.plan
    all_ranks.head, all_ranks.received = plan.number, {}
    later = [_later(plans, states[0], all_ranks) for _ in range(_LATER_SAVES)]
    for phase in later[0]:
        meter.seconds[f"later: {phase}"] = statistics.median(each[phase] for each in later)
    result = {
        "model": model,
        "layout": text,
        "ranks": layout.size,
        "tensors": len(plan.entries),
        "items": sum(len(g.ranks) * sum(len(s.section.names) for s in g.sections) for g in plan.groups),
        "rows": plan.rows,
        "later_ms": [round(1000 * sum(each.values()), 1) for each in later],
        "cpu_s": {phase: round(seconds, 4) for phase, seconds in meter.seconds.items()},
        "first_mib": round(memory_mib, 1),
        "received_bytes": first_bytes,
        "answered_bytes": all_ranks.sent_bytes,
        "later_bytes_of_a_message": 8,
        "later_bytes_to_rank_0": all_ranks.received["numbers"],
        "most_bytes_of_a_rank": int(plan.loads.max()),
        "mean_bytes_of_a_rank": float(plan.loads.mean()),
    }
    dist.destroy_process_group()
    return result


def _later(plans: Plans, state: dict[str, Any], all_ranks: AllRanks) -> dict[str, float]:
    """Plan a save of a state that is as before; return CPU seconds."""
    meter = Meter()
    structure = meter.run("describe", lambda: structure_of(plans, state))
    meter.run("agree", lambda: agree(all_ranks, plans, Local(structure, b"")))  # type: ignore[arg-type]
    return meter.seconds


def structure_of(plans: Plans, state: dict[str, Any]) -> Structure:
    planner = DefaultSavePlanner()
    with no_gc():  # as `save_columns` does
        with set_up_in_one_pass(planner):
            planner.set_up_planner(state, is_coordinator=True)
        return plans.memory.structure(planner, lambda items: None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt-1t", choices=sorted(MODELS))
    parser.add_argument("--layout", action="append", default=None)
    parser.add_argument("--ranks", type=int, default=16384)
    arguments = parser.parse_args()
    for layout in arguments.layout or ["fsdp"]:
        result = measure(arguments.model, layout, arguments.ranks)
        json.dump(result, sys.stdout, indent=1)
        print(flush=True)


if __name__ == "__main__":
    main()
