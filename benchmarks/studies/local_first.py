"""Measure what saves to the nodes' disks cost the steps while the store is slow or dead, and what a restore reads.

    python -m benchmarks.studies.local_first [--megabytes 64] [--dead-s 120] [--rounds 3]

1. Steps: a trainer saves every 20 steps to `local=`, and 5 MB/s are carried behind it; then the server gives no
   answer for some time (its process is stopped), then goes on. Steps per second with saves against those without,
   in turns; resident memory after a local write; which checkpoints became durable, in which order.
2. Restore: four ranks with a folder each as their node's disk, against the same checkpoint from a server that sends
   200 MB/s, and against one folder that all ranks read. In turns, medians. The same with copies on another node,
   and one node lost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Endpoint, sink
from ckpt.trainer_integration.events import Event

_NODES = 4
_PLACES = ("node", "neighbours", "durable")
_STEP_S = 0.05
_SAVE_EVERY = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64, help="of the state")
    parser.add_argument("--dead-s", type=float, default=120.0, help="for which the store gives no answer")
    parser.add_argument("--rounds", type=int, default=3, help="of the restores")
    parser.add_argument("--only", choices=("steps", "restore"))
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp()
    try:
        if arguments.only != "restore":
            with sink(keep=True) as endpoint:
                _steps(arguments, f"{folder}/steps", endpoint)
        if arguments.only != "steps":
            with sink(keep=True, bytes_per_s=200_000_000) as endpoint:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                job = (arguments, f"{folder}/restore", store.port, endpoint)
                mp.spawn(_rank, job, nprocs=_NODES)  # type: ignore[no-untyped-call]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _options(endpoint: Endpoint) -> dict[str, Any]:
    return {"endpoint_url": endpoint.url, "key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION}


# -- steps -------------------------------------------------------------------------------------------------


def _steps(arguments: argparse.Namespace, folder: str, endpoint: Endpoint) -> None:
    torch.set_num_threads(1)
    events: list[Event] = []
    state = {f"layer.{n}": torch.rand(arguments.megabytes * 250_000 // 8) for n in range(8)}
    with ckpt.CheckpointManager(
        f"s3://{BUCKET}/run",
        save=_SAVE_EVERY,
        keep=3,
        local=ckpt.LocalTier(folder, drain_timeout_s=600),
        storage_options=_options(endpoint),
        max_bandwidth_bytes_per_s=5_000_000,
        events=[events.append],
    ) as manager:
        step = 0
        for name, duration_s, dead in (
            ("5 MB/s", 30.0, False),
            ("no answer", arguments.dead_s, True),
            ("5 MB/s", 30.0, False),
        ):
            with _stopped(endpoint.pid) if dead else contextlib.nullcontext():
                step = _phase(name, duration_s, step, state, manager, events)
        began_s = time.perf_counter()
        manager.wait_durable()
        print(f"all durable {time.perf_counter() - began_s:.1f} s after the last step")
    durable = [event.step for event in events if event.kind == "durable"]
    local = [event.step for event in events if event.kind == "local"]
    print(f"local: {len(local)}; durable, in this order: {durable}; the last local ones: {local[-3:]}")
    print(f"in order: {durable == sorted(durable, key=lambda each: each or 0)}")
    copied = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        for name, tensor in state.items():
            copied[name].copy_(tensor)
        times.append(time.perf_counter() - began_s)
    stalls = [event.values["stall_s"] for event in events if event.kind == "staged"]
    ratio = statistics.median(stalls[1:]) / statistics.median(times)
    print(f"a save stops the steps for {statistics.median(stalls[1:]) * 1e3:.1f} ms, {ratio:.2f} x memcpy")


def _phase(
    name: str, duration_s: float, step: int, state: dict[str, Any], manager: Any, events: list[Event]
) -> int:
    """Train with saves and without, in turns of 20 steps."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    resident: list[float] = []
    until_s = time.perf_counter() + duration_s
    while time.perf_counter() < until_s:
        for saves in (True, False):
            began_s = time.perf_counter()
            for _ in range(_SAVE_EVERY):
                step += 1
                _step()
                if saves:
                    manager.step(step, state)
            seconds[saves].append(time.perf_counter() - began_s)
        resident.append(_resident_megabytes())
    speeds = {saves: _SAVE_EVERY / statistics.median(each) for saves, each in seconds.items()}
    ratio = sum(seconds[False]) / sum(seconds[True])
    print(
        f"{name:>10}, {duration_s:.0f} s: {speeds[True]:.2f} steps/s with saves, {speeds[False]:.2f} without; "
        f"all steps {ratio:.3f} x; {len(seconds[True])} saves; resident {min(resident):.0f} to {max(resident):.0f} MB",
        flush=True,
    )
    return step


def _step() -> None:
    """Compute for a while, as a trainer does, and wait as for a device."""
    weights = torch.ones(256, 256)
    for _ in range(10):
        weights = weights @ weights / 256
    time.sleep(_STEP_S)


def _resident_megabytes() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# -- restore -----------------------------------------------------------------------------------------------


def _rank(rank: int, arguments: argparse.Namespace, folder: str, port: int, endpoint: Endpoint) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_NODES)
    more: dict[str, Any] = {"storage_options": _options(endpoint), "preflight": False, "save": 1}
    root, near = f"s3://{BUCKET}/nodes", f"{folder}/node{rank}"
    saves: list[Event] = []
    for step, copies in enumerate((0, 1, 0, 1, 0, 1), 1):
        tier = ckpt.LocalTier(near, copies=copies)
        with ckpt.CheckpointManager(root, local=tier, events=[saves.append], **more) as manager:
            manager.step(step, _sharded(arguments))
            manager.wait_durable()
    ckpt.save(_sharded(arguments), f"{folder}/shared/step-1")
    seconds: dict[str, list[float]] = {
        "nearest": [],
        "one node lost": [],
        "shared folder": [],
        "200 MB/s": [],
    }
    read: dict[str, dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for name, each in seconds.items():
            state, events = _sharded(arguments), list[Event]()
            dist.barrier()
            began_s = time.perf_counter()
            if name == "shared folder":
                ckpt.load(state, f"{folder}/shared/step-1")
            else:
                local = {"nearest": near, "one node lost": _lost(near, rank)}.get(name)
                with ckpt.CheckpointManager(root, events=[events.append], local=local, **more) as manager:
                    began_s = time.perf_counter()
                    manager.restore(state)
                    each.append(time.perf_counter() - began_s)
                read.update((name, dict(event.values)) for event in events if "node_bytes" in event.values)
                continue
            each.append(time.perf_counter() - began_s)
    if rank == 0:
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        text = ", ".join(f"{name} {median:.3f} s" for name, median in medians.items())
        print(f"restore of {arguments.megabytes} MB by {_NODES} ranks: {text}")
        print(
            f"nearest: {medians['200 MB/s'] / medians['nearest']:.1f} x faster than 200 MB/s, "
            f"{medians['shared folder'] / medians['nearest']:.2f} x a folder that all read"
        )
        for name, values in read.items():
            places = ", ".join(f"{place} {values[f'{place}_bytes'] / 1e6:.1f} MB" for place in _PLACES)
            print(f"{name}: {places}")
        near_saves = [event.values for event in saves if event.kind == "local"]
        write_s = statistics.median(values["local_s"] for values in near_saves if "copy_s" not in values)
        copy_s = statistics.median(values["copy_s"] for values in near_saves if "copy_s" in values)
        print(f"a local save {write_s:.2f} s, its copies {copy_s:.2f} s")
    dist.destroy_process_group()


def _lost(near: str, rank: int) -> str:
    """Return a folder in which the second node has lost all that it had."""
    return f"{near}-empty" if rank == 1 else near


def _sharded(arguments: argparse.Namespace) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (_NODES,))
    rows = _NODES * (arguments.megabytes * 1_000_000 // 16 // 4096 // _NODES)
    return {
        f"layers.{number}": distribute_tensor(
            torch.full((rows, 1024), float(number)), mesh, [Shard(0)], src_data_rank=None
        )
        for number in range(16)
    } | {"step": torch.tensor(1)}


if __name__ == "__main__":
    main()
