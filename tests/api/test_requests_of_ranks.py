"""How many requests the ranks of a job send: lists are as many at any number of ranks, and small puts are few for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.strict_s3 import Request, StrictS3
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckpt
from ckpt.backends.base import put_bytes
from ckpt.backends.registry import open_store


def _state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 2 * dist.get_world_size()
    return {
        "w": DTensor.from_local(
            torch.ones(2, 3), mesh, [Shard(0)], shape=torch.Size([rows, 3]), stride=(3, 1)
        ),
        "r": DTensor.from_local(torch.ones(5), mesh, [Replicate()]),
        "step": 3,
    }


def _job(rank: int, url: str, options: dict[str, Any]) -> None:
    state = _state()

    def begin(step: str) -> None:
        """Let the server know, in the midst of its requests, that all ranks are here."""
        dist.barrier()
        if rank == 0:
            store = open_store(f"{url}/marks", options)
            put_bytes(store, step, b"")
            store.close()
        dist.barrier()

    begin("save")
    ckpt.save(state, f"{url}/alone", storage_options=options)
    begin("load")
    ckpt.load(state, f"{url}/alone", storage_options=options)
    begin("manager")
    with ckpt.CheckpointManager(
        f"{url}/run", storage_options=options, save=1, keep=1, preflight=False
    ) as manager:
        for step in (1, 2):
            manager.save(step, state)
        manager.wait_durable()
        begin("restore")
        manager.restore(state)
    begin("end")


def _requests(server: StrictS3) -> dict[str, list[Request]]:
    steps: dict[str, list[Request]] = {}
    step = "before"
    for request in server.requests:
        if "/marks/" in request.name:
            step = request.name.rpartition("/")[2] if request.method == "PUT" else step
        else:
            steps.setdefault(step, []).append(request)
    return steps


def _lists(requests: Sequence[Request]) -> int:
    return sum(request.operation == "GetObject" and not request.name for request in requests)


def _count(server: StrictS3, ranks: int) -> Counter[str]:
    server.requests.clear()
    server.objects.clear()
    run_ranks(ranks, _job, "s3://bucket/j", server.options, timeout_s=400)
    steps = _requests(server)
    lists = Counter(save=_lists(steps["save"]), load=_lists(steps["load"]))
    # What a manager removes, it removes behind the next call.
    lists["run"] = _lists(steps["manager"]) + _lists(steps["restore"])
    for step, saves in (("save", 1), ("manager", 2)):
        puts = [request for request in steps[step] if request.operation == "PutObject"]
        by_rank = Counter(request.name.split("rank-")[1][:5] for request in puts if "rank-" in request.name)
        assert len(by_rank) == ranks
        # Its data and its manifest; the first rank's index, and probes and pins of a first commit.
        assert all(by_rank[f"{rank:05}"] == 2 * saves for rank in range(1, ranks))
        assert len(puts) <= saves * (2 * ranks + 8)
    return lists


def test_lists_are_as_many_with_more_ranks(server: StrictS3) -> None:
    assert _count(server, 2) == _count(server, 8)


@pytest.mark.long
def test_lists_are_as_many_with_32_ranks(server: StrictS3) -> None:
    assert _count(server, 2) == _count(server, 32)
