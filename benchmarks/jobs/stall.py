"""Measure how long `async_save` keeps the trainer waiting: the first save, and the second, when buffers may exist."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.contenders import as_trained
from benchmarks.jobs.transfer import figures_of
from benchmarks.run.meter import metered
from benchmarks.run.states import WARM_UP
from benchmarks.run.task import Task

__all__ = ["async_save", "copy"]


def async_save(task: Task) -> dict[str, float]:
    """Measure the stall of the second save, and how long that of the first was (`first_s`), after a small one.

    The small one pays for imports and the begin of a run, as in the other jobs. `read back` proves that later changes did
    not reach the checkpoint.
    """
    contender: Any = _asynchronous(task)
    contender.async_save(WARM_UP.filled(), f"{task.place}-warm").result()
    state = task.state.filled()
    with metered() as first:
        future = contender.async_save(state, f"{task.place}-first")
    future.result()
    with metered() as reading:
        future = contender.async_save(state, f"{task.place}-second")
    for tensor in state.values():
        tensor.fill_(0.0)
    future.result()
    loaded = task.state.blank()
    contender.load(loaded, f"{task.place}-second")
    task.state.verify(loaded)
    if hasattr(contender, "close"):
        contender.close()
    return {**figures_of(reading, task.state.nbytes), "first_s": first.wall_s}


def copy(task: Task) -> dict[str, float]:
    """Measure the floor: a copy of the state, into the same memory (`parameters["warm"]`) or into
    fresh.
    """
    state = task.state.filled()
    copies = {name: tensor.clone() for name, tensor in state.items()} if task.parameters["warm"] else {}
    with metered() as reading:
        for name, tensor in state.items():
            if task.parameters["warm"]:
                copies[name].copy_(tensor)
            else:
                copies[name] = tensor.clone()
    return figures_of(reading, task.state.nbytes)


def _asynchronous(task: Task) -> Any:
    contender = task.make_contender()
    if hasattr(contender, "async_save"):
        return contender
    return _DcpAsync(contender, keep_stager=task.options.get("keep_stager", False))


class _DcpAsync:
    """A DCP peer, through `dcp.async_save`; with `keep_stager`, one stager for all saves, which
    keeps its buffers.
    """

    def __init__(self, contender: Any, *, keep_stager: bool) -> None:
        self._contender = contender
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if keep_stager else None

    def async_save(self, state: dict[str, torch.Tensor], place: str) -> Any:
        return dcp.async_save(
            as_trained(state),
            storage_writer=self._contender.writer(place),
            async_stager=self._stager,
            no_dist=True,
        )

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        self._contender.load(state, place)
