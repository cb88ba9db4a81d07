"""What a background save does to the training steps that run meanwhile."""

from __future__ import annotations

import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.contenders import as_trained
from benchmarks.task import Task

__all__ = ["steps"]

_SIDE = 768
_ALONE_S = 3.0


def steps(task: Task) -> dict[str, float]:
    """Step times on one core, another being free for the save: `mode` 0 without one, 1 a thread's, 2 a process's.

    A step is a matrix product, and Python around it, as a trainer has: it feels a save that holds the interpreter.
    """
    mode = task.parameters["mode"]
    torch.set_num_threads(1)
    _join_alone()
    contender: Any = task.make_contender()
    state = task.state.filled()
    factors = torch.randn(2, _SIDE, _SIDE)
    if mode:
        _begin(task, contender, state, "first", mode).result()
    for _ in range(20):
        _step(factors)
    future = _begin(task, contender, state, "second", mode) if mode else None
    took_s = []
    began_s = time.perf_counter()
    while (not future.done()) if future is not None else time.perf_counter() - began_s < _ALONE_S:
        took_s.append(_step(factors))
    if future is not None:
        future.result()
    took_s.sort()
    return {
        "step_ms": 1e3 * statistics.median(took_s),
        "mean_step_ms": 1e3 * statistics.fmean(took_s),
        "slow_step_ms": 1e3 * took_s[int(0.99 * len(took_s))],
        "steps": float(len(took_s)),
    }


def _step(factors: torch.Tensor) -> float:
    began_s = time.perf_counter()
    product = factors[0] @ factors[1]
    sum({str(number): number for number in range(2000)}.values())
    product.sum().item()
    return time.perf_counter() - began_s


def _begin(task: Task, contender: Any, state: dict[str, torch.Tensor], name: str, mode: int) -> Any:
    import ckpt

    place = f"{task.place}-{name}"
    if mode == 1:
        return contender.async_save(state, place)
    return dcp.async_save(
        as_trained(state),
        storage_writer=contender.writer(place),
        async_stager=ckpt.Stager(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )


def _join_alone() -> None:
    """DCP's process mode wants a process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
