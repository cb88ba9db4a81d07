"""Measure what saves to the nodes' disks cost the steps while the store is slow or dead, and what a restore reads.

    python -m benchmarks.studies.local_first [--megabytes 64] [--dead-s 120] [--rounds 3]

1. Steps: a trainer saves every 20 steps to `local=`, and 5 MB/s are carried behind it; then the server gives no
   answer for some time (its process is stopped), then goes on. Steps per second with saves against those without,
   in turns; resident memory after a local write; which checkpoints became durable, in which order. How long a save
   stops the steps, the first too, in turns with a copy of the same state and with saves without `local=`.
2. Restore: four ranks with a folder each as their node's disk, against `ckpt.load` of the same files through one folder
   that all ranks see, and against a server that sends 200 MB/s. In turns, medians; of that the search for the newest
   checkpoint. The same with one node lost, behind 80 ms of latency, and (once) with a server that gives no answer.
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
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from benchmarks.run.link import link
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Endpoint, sink
from ckpt.trainer_integration.events import Event

_NODES = 4
_PLACES = ("node", "neighbours", "durable")
_STEP_S = 0.05
_SAVE_EVERY = 20
_SLOW_ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64, help="of the state")
    parser.add_argument("--dead-s", type=float, default=120.0, help="for which the store gives no answer")
    parser.add_argument("--rounds", type=int, default=3, help="of the restores")
    parser.add_argument(
        "--saves", type=int, default=4, help="before the restores, every second one with copies"
    )
    parser.add_argument("--only", choices=("steps", "stalls", "restore"))
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp()
    try:
        if arguments.only in (None, "stalls"):
            _stalls(arguments, f"{folder}/stalls")
        if arguments.only in (None, "steps"):
            with sink(keep=True) as endpoint:
                _steps(arguments, f"{folder}/steps", endpoint)
        if arguments.only in (None, "restore"):
            with (
                sink(keep=True, bytes_per_s=200_000_000) as endpoint,
                link(urlsplit(endpoint.url).port or 80, latency_s=0.08) as port,
            ):
                far = replace(endpoint, url=f"http://127.0.0.1:{port}")
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                job = (arguments, f"{folder}/restore", store.port, endpoint, far)
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


def _stalls(arguments: argparse.Namespace, folder: str) -> None:
    """Stop the steps for saves, with `local=` and without, and copy the same state, in turns."""
    torch.set_num_threads(1)
    state = {f"layer.{n}": torch.rand(arguments.megabytes * 250_000 // 8) for n in range(8)}
    copied = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    events: dict[str, list[Event]] = {"local=": [], "without": []}
    copies: list[float] = []
    with contextlib.ExitStack() as stack:
        managers = {
            name: stack.enter_context(
                ckpt.CheckpointManager(
                    f"{folder}/{name}/durable",
                    save=1,
                    keep=1,
                    local=f"{folder}/{name}/local" if name == "local=" else None,
                    events=[events[name].append],
                )
            )
            for name in events
        }
        for step in range(1, 3 + 2 * arguments.rounds):
            for manager in managers.values():
                manager.step(step, state)
                manager.wait_durable()
            began_s = time.perf_counter()
            for name, tensor in state.items():
                copied[name].copy_(tensor)
            copies.append(time.perf_counter() - began_s)
    memcpy_s = statistics.median(copies)
    for name, told in events.items():
        first, *others = [event.values["stall_s"] for event in told if event.kind == "staged"]
        ratios = [stall / copy for stall, copy in zip(others, copies[1:], strict=True)]
        print(
            f"{name:>8}: a save of {arguments.megabytes} MB stops the steps for {statistics.median(others) * 1e3:.0f} ms, "
            f"{statistics.median(ratios):.2f} x memcpy ({memcpy_s * 1e3:.0f} ms), of the least {min(others) / min(copies):.2f} x; "
            f"the first {first * 1e3:.0f} ms, {first / memcpy_s:.2f} x"
        )


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


def _rank(
    rank: int, arguments: argparse.Namespace, folder: str, port: int, endpoint: Endpoint, far: Endpoint
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_NODES)
    near, saves = f"{folder}/node{rank}", list[Event]()
    for step in range(1, arguments.saves + 1):
        tier = ckpt.LocalTier(near, copies=1 - step % 2)
        with _manager(endpoint, tier, saves, keep=1) as manager:
            manager.step(step, _sharded(arguments))
            manager.wait_durable()
    same = _linked(near, f"{folder}/same", arguments.saves)
    dist.barrier()
    times: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
    for number in range(arguments.rounds):
        times["same files"].append(_loaded(arguments, same))
        times["nearest"].append(_restored(arguments, endpoint, near))
        times["one node lost"].append(_restored(arguments, endpoint, _lost(near, rank)))
        times["80 ms"].append(_restored(arguments, far, near))
        if number < _SLOW_ROUNDS:
            times["200 MB/s"].append(_restored(arguments, endpoint, None))
        if number == 0:
            times["no answer"].append(_restored(arguments, endpoint, near, dead=True, preflight=True))
    if rank == 0:
        _print(arguments, times, saves)
    dist.destroy_process_group()


def _manager(endpoint: Endpoint, local: Any, events: list[Event], **more: Any) -> ckpt.CheckpointManager:
    options: dict[str, Any] = {"preflight": False, "async_mode": "off", "save": 1, **more}
    options["storage_options"] = _options(endpoint)
    return ckpt.CheckpointManager(f"s3://{BUCKET}/nodes", local=local, events=[events.append], **options)


def _linked(near: str, folder: str, step: int) -> str:
    """Show the same files of all nodes in one folder."""
    (here,) = Path(near).glob(f"*/step-{step:08}")
    there = Path(folder) / here.name
    for path in here.rglob("*"):
        if path.is_file():
            (there / path.relative_to(here)).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(path, there / path.relative_to(here))
    return str(there)


def _loaded(arguments: argparse.Namespace, url: str) -> Mapping[str, float]:
    state = _sharded(arguments)
    dist.barrier()
    began_s = time.perf_counter()
    ckpt.load(state, url)
    return {"total_s": time.perf_counter() - began_s}


def _restored(
    arguments: argparse.Namespace, endpoint: Endpoint, local: str | None, *, dead: bool = False, **more: Any
) -> Mapping[str, float]:
    """Restore from the nearest; return the seconds that it took, and the figures of the event.

    If the server is to be `dead`, it gives no answer meanwhile.
    """
    state, events = _sharded(arguments), list[Event]()
    stopped = _stopped(endpoint.pid) if dead and dist.get_rank() == 0 else contextlib.nullcontext()
    with _manager(endpoint, local, events, **more) as manager, stopped:
        dist.barrier()
        began_s = time.perf_counter()
        manager.restore(state)
        took_s = time.perf_counter() - began_s
    figures = [event.values for event in events if event.kind == "restored"]
    return {**(figures[0] if figures else {}), "total_s": took_s}


def _print(
    arguments: argparse.Namespace, times: Mapping[str, list[Mapping[str, float]]], saves: list[Event]
) -> None:
    print(f"restore of {arguments.megabytes} MB by {_NODES} ranks, medians of {arguments.rounds}:")
    # The least of each is what the machine can do when nobody else uses it.
    least = {name: min(each["total_s"] for each in all) for name, all in times.items()}
    totals = {name: statistics.median(each["total_s"] for each in all) for name, all in times.items()}
    for name, all in times.items():
        text = f"{totals[name]:.3f} s, the least {least[name]:.3f} s"
        if "search_s" in all[0]:
            search_s = statistics.median(each["search_s"] for each in all)
            load_s = statistics.median(each["load_s"] - each["search_s"] for each in all)
            text += f", search {search_s:.3f} s, load {load_s:.3f} s ({totals['same files'] / load_s:.2f} x)"
        if "node_bytes" in all[0]:
            text += "; read " + ", ".join(
                f"{place} {all[0][f'{place}_bytes'] / 1e6:.1f} MB" for place in _PLACES
            )
        print(f"{name:>15}: {text}", flush=True)
    pairs = zip(times["same files"], times["nearest"], strict=True)
    ratio = statistics.median(same["total_s"] / near["total_s"] for same, near in pairs)
    print(
        f"nearest: {totals['200 MB/s'] / totals['nearest']:.1f} x faster than 200 MB/s, "
        f"{totals['same files'] / totals['nearest']:.2f} x loading the same files, in pairs {ratio:.2f} x, "
        f"of the least {least['same files'] / least['nearest']:.2f} x"
    )
    near_saves = [event.values for event in saves if event.kind == "local"]
    write_s = statistics.median(values["local_s"] for values in near_saves)
    copies = [values["copy_s"] for values in near_saves if "copy_s" in values]
    print(
        f"a local save {write_s:.2f} s"
        + (f", its copies {statistics.median(copies):.2f} s" if copies else "")
    )


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
