"""Compare saves and loads that plan in this library's way to those of DCP's planners, in turns, on a few real ranks.

    python -m benchmarks.scale.small_jobs [--ranks 4] [--tensors 400] [--rounds 15]

Each rank holds shards of tensors of 16 KiB, so that planning counts. `first` saves find nothing remembered. In a `load`
the ranks ask each other whether they want the same, in a `load alone` not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.writing.column_save import PLANS


class PlansItself(DefaultSavePlanner):
    """A planner that keeps DCP's path."""

    def create_local_plan(self) -> Any:
        return super().create_local_plan()


class LoadPlansItself(DefaultLoadPlanner):
    """A planner that keeps DCP's path."""

    def create_global_plan(self, global_plan: Any) -> Any:
        return super().create_global_plan(global_plan)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(dir="/dev/shm")
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(_rank, (arguments, store.port, folder), nprocs=arguments.ranks)  # type: ignore[no-untyped-call]
    finally:
        shutil.rmtree(folder)


def _rank(rank: int, arguments: argparse.Namespace, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    size = torch.Size([16 * arguments.ranks, 256])
    state = {
        f"layers.{number}.weight": DTensor.from_local(
            torch.ones(16, 256), mesh, [Shard(0)], shape=size, stride=(256, 1)
        )
        for number in range(arguments.tensors)
    }
    calls: dict[str, Callable[[], object]] = {
        "save dcp": lambda: ckpt.save(dict(state), f"{folder}/dcp", planner=PlansItself()),
        "save first": lambda: ckpt.save(dict(state), f"{folder}/columns"),
        "save later": lambda: ckpt.save(dict(state), f"{folder}/columns"),
        "load dcp": lambda: ckpt.load(state, f"{folder}/columns", planner=LoadPlansItself(), read_once=False),
        "load": lambda: ckpt.load(state, f"{folder}/columns"),
        "load alone": lambda: ckpt.load(state, f"{folder}/columns", read_once=False),
    }
    took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in calls}
    for turn in range(arguments.rounds + 1):
        for kind, call in calls.items():
            if kind == "save first":
                PLANS.memory.clear()
            dist.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            call()
            if turn:
                took[kind].append((time.perf_counter() - begun, time.process_time() - cpu))
    if rank == 0:
        medians = {
            kind: {
                "wall_s": statistics.median(s for s, _ in each),
                "cpu_s": statistics.median(c for _, c in each),
            }
            for kind, each in took.items()
        }
        print(
            json.dumps({"ranks": arguments.ranks, "tensors": arguments.tensors, "rank 0": medians}, indent=1)
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
