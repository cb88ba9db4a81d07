"""Measure training steps while a background save runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.run.task import Task

__all__ = ["steps"]

_SIDE = 768
_ALONE_S = 2.0
_SAVES = 3


def steps(task: Task) -> dict[str, float]:
    """Measure step times on one core, another being free for saves: alone and during a save, by
    turns, after a first save.

    A step is a matrix product, and Python around it, as a trainer has: it feels a save that holds
        the interpreter.
    With `saves` 0 there are none: what then differs between the parts is the machine's.
    """
    torch.set_num_threads(1)
    contender: Any = task.make_contender()
    state = task.state.filled()
    factors = torch.randn(2, _SIDE, _SIDE)
    if task.parameters["saves"]:
        contender.async_save(state, f"{task.place}-first").result()
    for _ in range(20):
        _step(factors)
    alone_s, during_s = _for_some_time(factors), []
    for number in range(_SAVES):
        if task.parameters["saves"]:
            saving = contender.async_save(state, f"{task.place}-{number}")
            during_s += _until(saving.done, factors)
            saving.result()
        else:
            during_s += _for_some_time(factors)
        alone_s += _for_some_time(factors)
    if hasattr(contender, "close"):
        contender.close()
    mean_s, mean_alone_s = statistics.fmean(during_s), statistics.fmean(alone_s)
    return {
        "slower_percent": 100 * (mean_s / mean_alone_s - 1),
        "step_ms": 1e3 * statistics.median(during_s),
        "mean_step_ms": 1e3 * mean_s,
        "alone_ms": 1e3 * mean_alone_s,
        "slow_step_ms": 1e3 * sorted(during_s)[int(0.99 * len(during_s))],
        "steps": float(len(during_s)),
    }


def _for_some_time(factors: torch.Tensor) -> list[float]:
    ends_at_s = time.perf_counter() + _ALONE_S
    return _until(lambda: time.perf_counter() >= ends_at_s, factors)


def _until(ended: Callable[[], bool], factors: torch.Tensor) -> list[float]:
    took_s = [_step(factors)]
    while not ended():
        took_s.append(_step(factors))
    return took_s


def _step(factors: torch.Tensor) -> float:
    began_s = time.perf_counter()
    product = factors[0] @ factors[1]
    sum({str(number): number for number in range(2000)}.values())
    product.sum().item()
    return time.perf_counter() - began_s
