"""Real ranks for the tests: processes that talk over gloo."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PRELOADED = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "ckpt.api", "boto3", "pytest"]


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    killed: Collection[int] = (),
    timeout_s: float = 120,
) -> list[Any]:
    """`function(rank, *args)` in `world_size` processes with a default gloo group; returns what each returned.

    A rank in `killed` is expected to die of SIGKILL and its result is None. The rendezvous store is held by
    this process, as torchrun's agent holds it.
    """
    context = _context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(sender, rank, world_size, store.port, function, args))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        deadline = time.monotonic() + timeout_s
        results = [_result(rank, pipes[rank], deadline) for rank in range(world_size) if rank not in killed]
        for rank in killed:
            processes[rank].join(max(0.1, deadline - time.monotonic()))
            assert processes[rank].exitcode == -9, (
                f"rank {rank} ended with {processes[rank].exitcode}, not of SIGKILL"
            )
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    iterator = iter(results)
    return [None if rank in killed else next(iterator) for rank in range(world_size)]


def start(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a process of its own."""
    process = _context().Process(target=function, args=args)
    process.start()
    return process


def _context() -> Any:
    # A server that has imported everything forks the processes: a fresh interpreter would take seconds each.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _result(rank: int, pipe: multiprocessing.connection.Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"rank {rank} did not finish in time")
    try:
        worked, value = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died") from None
    if not worked:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def _rank(
    pipe: multiprocessing.connection.Connection,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        pipe.send((True, function(rank, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Destructors of process groups can wait for ranks that are gone.
    pipe.close()
    os._exit(0)
