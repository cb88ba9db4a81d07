"""Compare saves with plans as columns to saves with DCP's plans, in turns, on a few real ranks.

    python -m benchmarks.scale.small_jobs [--ranks 4] [--tensors 400] [--rounds 15]

Each rank holds shards of tensors of 16 KiB, so that planning counts. `first` saves find nothing remembered.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.writing.column_save import PLANS


class PlansItself(DefaultSavePlanner):
    """A planner that keeps DCP's path."""

    def create_local_plan(self) -> Any:
        return super().create_local_plan()


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
    took: dict[str, list[tuple[float, float]]] = {"dcp": [], "columns first": [], "columns later": []}
    for turn in range(arguments.rounds + 1):
        for kind, seconds in took.items():
            if kind == "columns first":
                PLANS.memory.clear()
            dist.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            ckpt.save(dict(state), f"{folder}/{kind[:3]}", planner=PlansItself() if kind == "dcp" else None)
            if turn:
                seconds.append((time.perf_counter() - begun, time.process_time() - cpu))
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
