"""Measure a restore of replicas that read every byte once, against one in which each reads for itself.

    python -m benchmarks.studies.read_once [--ranks 8] [--megabytes 160] [--megabytes-per-s 25] [--rounds 3]

Real ranks load one state from one S3 server, which sends so many bytes a second over all connections:
sharded over a part of the ranks and replicated over the others (HSDP), or replicated on all (DDP). In
turns; medians. `read` is what the server sent, in multiples of the state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Endpoint, sink

_TENSORS = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=160, help="of the state")
    parser.add_argument("--megabytes-per-s", type=float, default=25.0, help="that the server sends")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    replicas = [count for count in (2, 4, 8, 16, 32, 64) if arguments.ranks % count == 0]
    print(f"{'replicas':>8}{'each for itself':>24}{'once':>24}{'faster':>10}", flush=True)
    with sink(keep=True, bytes_per_s=int(arguments.megabytes_per_s * 1e6)) as endpoint:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = (arguments, replicas, store.port, endpoint)
        mp.spawn(_rank, job, nprocs=arguments.ranks)  # type: ignore[no-untyped-call]


def _rank(
    rank: int, arguments: argparse.Namespace, replicas: list[int], port: int, endpoint: Endpoint
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    options = {"endpoint_url": endpoint.url, "key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION}
    for count in replicas:
        url = f"s3://{BUCKET}/{count}"
        ckpt.save(_state(arguments, count), url, storage_options=options)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        read_bytes: dict[bool, int] = {}
        for turn in range(2 * arguments.rounds):
            once = turn % 2 == 1
            state = _state(arguments, count)
            if rank == 0:
                endpoint.reset()
            dist.barrier()
            began_s = time.perf_counter()
            ckpt.load(state, url, storage_options=options, read_once=once)
            dist.barrier()
            seconds[once].append(time.perf_counter() - began_s)
            read_bytes[once] = endpoint.report()["sent_bytes"]
        if rank == 0:
            _print(count, arguments.megabytes * 1e6, seconds, read_bytes)
    dist.destroy_process_group()


def _state(arguments: argparse.Namespace, replicas: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (replicas, arguments.ranks // replicas))
    rows = arguments.ranks * round(arguments.megabytes * 1e6 / _TENSORS / 4 / 1024 / arguments.ranks)
    return {
        f"layers.{number}.weight": distribute_tensor(
            torch.full((rows, 1024), float(number)), mesh, [Replicate(), Shard(0)], src_data_rank=None
        )
        for number in range(_TENSORS)
    }


def _print(
    replicas: int, state_bytes: float, seconds: dict[bool, list[float]], read_bytes: dict[bool, int]
) -> None:
    medians = {once: statistics.median(each) for once, each in seconds.items()}
    figures = [f"{medians[once]:.2f} s, read {read_bytes[once] / state_bytes:.3f}" for once in (False, True)]
    print(f"{replicas:>8}{figures[0]:>24}{figures[1]:>24}{medians[False] / medians[True]:>9.2f}x", flush=True)


if __name__ == "__main__":
    main()
