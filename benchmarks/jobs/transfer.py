"""Save or load one state, as a trainer with one rank does."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.contenders import Contender
from benchmarks.run.meter import Reading, metered
from benchmarks.run.servers import Endpoint
from benchmarks.run.states import WARM_UP
from benchmarks.run.task import Task

__all__ = ["counted", "figures_of", "load", "prepare", "save"]


def save(task: Task) -> dict[str, float]:
    """Measure a save, after a small one that pays for imports and first connections."""
    contender = _warm(task)
    state = task.state.filled()
    return _measure(task, lambda: contender.save(state, task.place))


def load(task: Task) -> dict[str, float]:
    """Measure a load of `prepare`'s checkpoint, compared bit for bit once the clock has stopped."""
    contender = _warm(task)
    state = task.state.blank()
    figures = _measure(task, lambda: contender.load(state, task.place))
    task.state.verify(state)
    return figures


def prepare(task: Task) -> dict[str, float]:
    """Save a checkpoint that later processes load."""
    task.make_contender().save(task.state.filled(), task.place)
    return {}


def figures_of(reading: Reading, nbytes: int) -> dict[str, float]:
    """Return the figures that every measurement has; those per GB where there is data."""
    figures = {
        "wall_s": reading.wall_s,
        "cpu_s": reading.cpu_s,
        "peak_mb": reading.peak_bytes / 1e6,
    }
    if nbytes:
        figures["cpu_s_per_gb"] = reading.cpu_s / (nbytes / 1e9)
        figures["gb_per_s"] = nbytes / 1e9 / reading.wall_s
    return figures


@contextmanager
def counted(endpoint: Endpoint | None) -> Iterator[dict[str, float]]:
    """Yield the server's counts of the block, filled in at its end."""
    figures: dict[str, float] = {}
    if endpoint is None or not endpoint.counts:
        yield figures
        return
    endpoint.reset()
    yield figures
    report = endpoint.report()
    figures["requests"] = sum(report["requests"].values())
    figures["sent_mb"] = report["received_bytes"] / 1e6
    figures["read_bytes"] = report["sent_bytes"]
    data = (nbytes for key, nbytes in report["sent_by_key"].items() if key.endswith(".distcp"))
    figures["read_data_bytes"] = sum(data)
    figures["server_cpu_s"] = report["cpu_s"]


def _warm(task: Task) -> Contender:
    contender = task.make_contender()
    place = f"{task.place}-warm-{secrets.token_hex(4)}"
    state: dict[str, torch.Tensor] = WARM_UP.filled()
    contender.save(state, place)
    if task.options.get("checksums", True):  # without them a load would find its metadata damaged
        contender.load(state, place)
        WARM_UP.verify(state)
    if task.endpoint is None:
        os.sync()  # what others left to be written is not what is measured
    return contender


def _measure(task: Task, work: Callable[[], None]) -> dict[str, float]:
    with counted(task.endpoint) as counts, metered() as reading:
        work()
    return {**figures_of(reading, task.state.nbytes), **counts}
