"""Run DCP's planner alone: the cost of a save before any storage is asked."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from benchmarks.contenders import as_trained
from benchmarks.jobs.transfer import figures_of
from benchmarks.run.meter import metered
from benchmarks.run.states import WARM_UP
from benchmarks.run.task import Task

__all__ = ["plan_save"]


def plan_save(task: Task) -> dict[str, float]:
    """Measure all that `dcp.save` asks of its planner."""
    _plan(WARM_UP.filled())
    state = task.state.filled()
    with metered() as reading:
        _plan(state)
    return figures_of(reading, 0)


def _plan(state: dict[str, torch.Tensor]) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner(as_trained(state), None, is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    plan = planner.finish_plan(plans[0])
    for item in plan.items:
        planner.resolve_data(item)
