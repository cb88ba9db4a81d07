"""The record of a run that two processes write, on simulated storage: every order of their requests, crashes, lost
replies, lags.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ckpt.errors import CheckpointError
from ckpt.format.run_record import RunCheckpoint
from ckpt.testing.choices import Choices, Exhaustive, Seeded
from ckpt.testing.simulated_objects import Model
from ckpt.testing.simulator import World
from ckpt.trainer_integration.run.history import History
from simulation.simulated_jobs import simulated_storage
from simulation.simulated_schedules import MOUNT, PROMPT, with_faults

SAVES = 4


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def recorded(choices: Choices, model: Model) -> Counter[str]:
    """Have one process record saves while another one annotates them; count what the record has in the end."""
    world = World(choices, model)
    annotated: set[int] = set()
    histories: list[History] = []

    def save(step: int) -> None:
        with contextlib.suppress(CheckpointError):  # the manager logs it, and goes on
            histories[0].add(RunCheckpoint(step=step, path=f"step-{step:08d}", saved_at_s=float(step)))

    def train() -> None:
        histories.append(History("simulated://run", None))
        for step in range(1, SAVES):
            save(step)

    def evaluate() -> None:
        history = History("simulated://run", None)
        for step in range(1, SAVES):
            with contextlib.suppress(CheckpointError):
                history.annotate(step, {"loss": float(step)})
                annotated.add(step)

    with simulated_storage(world):
        trainer = world.start("trainer", "a", train)
        world.start("evaluator", "b", evaluate)
        world.run()
        world.settle(model.late_s + model.visibility_s)
        world.adopt(replace(model, faults={}, echo_s=0.0))
        if not trainer.crashed:
            world.start("trainer again", "a", lambda: save(SAVES))
            world.run()
        world.settle(model.late_s + model.visibility_s)
        reader = world.start("reader", "c", lambda: History("simulated://run", None)._record().checkpoints)
        world.run()
    if reader.error is not None:
        raise reader.error
    metrics = {checkpoint.step: checkpoint.metrics for checkpoint in reader.result}
    kept = sum(bool(metrics.get(step)) for step in annotated)
    return Counter(
        {
            "schedules": 1,
            "saves missing": 0 if trainer.crashed else SAVES - len(metrics),
            "annotations kept": kept,
            "annotations missing": len(annotated) - kept,
        }
    )


@pytest.mark.parametrize("model", [PROMPT, MOUNT], ids=["prompt", "mount"])
def test_no_save_is_missing_after_the_next_one(model: Model) -> None:
    """An annotation can be: one that was read back before another process put what it had read before."""
    total: Counter[str] = Counter()
    for choices in Exhaustive.all(1):
        total += recorded(choices, model)
    for seed in range(60):
        faults = ("lost request", "lost reply", "crash", "sent twice")
        total += recorded(Seeded(seed), with_faults(model, faults[seed // 2 % 4]) if seed % 2 else model)
    assert total["schedules"] > 60
    assert total["saves missing"] == 0
    assert 0 < total["annotations kept"] > total["annotations missing"]
