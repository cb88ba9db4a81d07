"""Run real jobs that save and load what a simulation does, and count the same things on rank 0."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

import ckpt
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Endpoint, sink
from benchmarks.scale.case import with_zeros
from benchmarks.scale.counting import Counts, Phases, watched
from benchmarks.scale.network import CountingStore, Requests
from benchmarks.scale.plans import parse_layout, stages_of, state_of
from benchmarks.scale.simulated_job import Tokens
from ckpt import dcp_storage
from ckpt.acceptance.models import Parameter
from ckpt.backends.base import Store, exists, put_bytes
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.writing.column_save import LAYOUTS, PLANS

_KINDS = {
    "GetObject": "GET", "HeadObject": "GET", "ListObjectsV2": "LIST", "DeleteObject": "DELETE",
    "DeleteObjects": "DELETE",
}  # fmt: skip
_PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "ckpt.api", "boto3", __name__]

_TRIALS = 200
_LONGEST_S = 600.0


@dataclass(frozen=True)
class Measured:
    """A save or a load: counts of rank 0 by phase, and requests and bytes of all ranks at the server."""

    phases: dict[str, Counts]
    requests: Counter[str]
    own_requests: dict[str, Counter[str]]


@dataclass(frozen=True)
class Costs:
    """CPU seconds that a simulation does not spend.

    Attributes:
        message_s, request_s: of a message between ranks, and of a request to storage.
        client_s: of a store that is opened, with its connection.
    """

    message_s: float
    request_s: float
    client_s: float


def run_job(
    parameters: list[Parameter], text: str, ranks: int, rounds: int
) -> tuple[dict[str, Measured], Costs]:
    """Run a job of real ranks: first saves, later ones, and loads; CPU seconds are medians of `rounds`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with sink(keep=True) as endpoint:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        receiver, sender = context.Pipe(duplex=False)
        job = parameters, text, ranks, rounds, store.port, endpoint, sender
        processes = [context.Process(target=_rank, args=(rank, *job)) for rank in range(ranks)]
        patience_s = 0.0
        try:
            for process in processes:
                process.start()
            sender.close()
            if not receiver.poll(_LONGEST_S):
                raise RuntimeError(f"a job of {ranks} ranks did not end in {_LONGEST_S:g} s")
            told: tuple[dict[str, Measured], Costs] = receiver.recv()
            patience_s = 10.0
            return told
        except EOFError:
            raise RuntimeError("the job failed; see its messages above") from None
        finally:
            for process in processes:
                process.join(patience_s)
                process.kill()


def _rank(
    rank: int, parameters: list[Parameter], text: str, ranks: int, rounds: int, port: int, endpoint: Endpoint,
    pipe: Any,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    environment._current = Tokens(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    layout = parse_layout(text, ranks)
    mesh = init_device_mesh("cpu", (layout.stages, *layout.mesh), mesh_dim_names=("pp", "dp", "fsdp", "tp"))
    stage = rank // (ranks // layout.stages)
    of_stage = state_of(stages_of(parameters, layout.stages)[stage], layout, mesh["dp", "fsdp", "tp"])
    state = tree_map(with_zeros, of_stage)
    options = {"endpoint_url": endpoint.url, "key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION}
    phases = Phases()
    requests = Requests(lambda: phases.name)
    seen: dict[str, list[Measured]] = {"first save": [], "later save": [], "load": []}

    def measure(name: str, place: str) -> None:
        dist.barrier()
        if rank == 0:
            endpoint.reset()
            phases.reset()
            requests.reset()
        dist.barrier()
        url = f"s3://{BUCKET}/job/{place}"  # as long a name as that of the place where a simulation saves
        if name == "load":
            ckpt.load(state, url, storage_options=options)
        else:
            ckpt.save(state, url, storage_options=options, checks="off")  # as in the simulation
        dist.barrier()
        if rank == 0:
            seen[name].append(Measured(dict(phases.counts), _requests(endpoint), requests.counts))

    costs = _costs(rank, f"s3://{BUCKET}/costs", options)
    with _counted(phases, requests) if rank == 0 else contextlib.nullcontext():
        measure("first save", "warmup")
        measure("load", "warmup")
        for each in seen.values():
            each.clear()
        for number in range(rounds):
            PLANS.memory.clear()
            PLANS.central.clear()
            LAYOUTS.clear()
            measure("first save", f"first{number}")
            measure("later save", f"later{number}")
            measure("load", f"later{number}")
    if rank == 0:
        pipe.send(({name: _median(rounds_of) for name, rounds_of in seen.items()}, costs))
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def _counted(phases: Phases, requests: Requests) -> Iterator[None]:
    """Count what this rank does, and what it asks of the store."""

    def open_counted(*args: Any, **kwargs: Any) -> Store:
        return CountingStore(open_store(*args, **kwargs), requests, 1 << 40, keeps_data=True)

    with mock.patch.object(dcp_storage, "open_store", open_counted), watched(phases):
        yield


def _costs(rank: int, url: str, options: dict[str, Any]) -> Costs:
    """Measure what a message and a request cost this process, ranks 0 and 1 alone."""
    message, seconds = torch.zeros(1024, dtype=torch.uint8), [0.0, 0.0, 0.0]
    for _ in range(3):  # the first makes connections, and loads what is loaded late
        began_s = time.process_time()
        for _ in range(_TRIALS if rank < 2 else 0):
            work = dist.irecv(message, 1) if rank == 0 else dist.isend(message, 0)
            assert work is not None
            work.wait()
        seconds[0] = (time.process_time() - began_s) / _TRIALS
        if rank == 0:
            began_s = time.process_time()
            with contextlib.closing(open_store(url, options)) as store:
                store.stat("x") if exists(store, "x") else put_bytes(store, "x", b"x")
                opened_s = time.process_time()
                for _ in range(_TRIALS // 4):
                    put_bytes(store, "x", b"x" * 1024)
                    store.stat("x")
                seconds[1] = (time.process_time() - opened_s) / (_TRIALS // 2)
            seconds[2] = opened_s - began_s - 2 * seconds[1]
    return Costs(*seconds)


def _requests(endpoint: Endpoint) -> Counter[str]:
    report = endpoint.report()
    requests: Counter[str] = Counter()
    for operation, number in report["requests"].items():
        requests[_KINDS.get(operation, "PUT")] += number
    requests["sent_bytes"] = report["received_bytes"]
    requests["read_bytes"] = report["sent_bytes"]
    return requests


def _median(rounds: list[Measured]) -> Measured:
    last = rounds[-1]
    phases = {
        name: replace(counts, cpu_s=statistics.median(each.phases[name].cpu_s for each in rounds))
        for name, counts in last.phases.items()
    }
    return Measured(phases, last.requests, last.own_requests)
