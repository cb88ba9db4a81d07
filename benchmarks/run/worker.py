"""Take one measurement: `python -m benchmarks.run.worker TASK.json OUTCOME.json`.

With `--serve` it takes many, each in a process forked from this one: see
`benchmarks.run.fork_server`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

from benchmarks.contenders import versions
from benchmarks.run.task import Outcome, Task

__all__ = ["JOBS", "carry_out"]

JOBS = {
    "prepare": "benchmarks.jobs.transfer:prepare",
    "save": "benchmarks.jobs.transfer:save",
    "load": "benchmarks.jobs.transfer:load",
    "load_cold": "benchmarks.jobs.transfer:load_cold",
    "load_damaged": "benchmarks.jobs.transfer:load_damaged",
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
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        answer(*sys.argv[1:3])


def answer(asked: str, answered: str) -> None:
    outcome = carry_out(Task.from_json(Path(asked).read_text()))
    Path(answered).write_text(outcome.to_json())


def serve() -> None:
    """Carry out the requests on standard input, line by line; print the exit status of each."""
    importlib.import_module("torch.distributed.checkpoint")
    for line in sys.stdin:
        asked, answered, errors, environment = json.loads(line)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            os.environ.clear()
            os.environ.update(environment)
            answer(asked, answered)
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
