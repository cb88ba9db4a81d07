"""A process that takes one measurement: `python -m benchmarks.worker TASK.json OUTCOME.json`."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
import warnings
from pathlib import Path

from benchmarks.contenders import versions
from benchmarks.task import Outcome, Task

__all__ = ["JOBS", "carry_out"]

JOBS = {
    "prepare": "benchmarks.jobs.transfer:prepare",
    "save": "benchmarks.jobs.transfer:save",
    "load": "benchmarks.jobs.transfer:load",
    "plan_save": "benchmarks.jobs.planner:plan_save",
    "async_save": "benchmarks.jobs.stall:async_save",
    "steps": "benchmarks.jobs.steps:steps",
    "copy": "benchmarks.jobs.stall:copy",
    "save_sharded": "benchmarks.jobs.sharded:save",
    "load_sharded": "benchmarks.jobs.sharded:load",
    "commit": "benchmarks.jobs.metadata:commit",
    "open_metadata": "benchmarks.jobs.metadata:open_metadata",
}


def carry_out(task: Task) -> Outcome:
    """Do the task; an error is an outcome too."""
    outcome = Outcome(versions=versions(task.contender))
    module, _, function = JOBS[task.job].partition(":")
    try:
        outcome.figures = getattr(importlib.import_module(module), function)(task)
    except Exception as error:
        traceback.print_exc()
        outcome.error = f"{type(error).__name__}: {error}".strip()
    return outcome


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    asked, answered = map(Path, sys.argv[1:3])
    outcome = carry_out(Task.from_json(asked.read_text()))
    answered.write_text(outcome.to_json())


if __name__ == "__main__":
    main()
