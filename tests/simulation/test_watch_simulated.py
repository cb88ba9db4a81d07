"""`ckpt.watch` on simulated storage: checkpoints that are saved, replaced and removed, a watcher that crashes, lags."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from support.commits import NO_METADATA, commit_record

from ckpt.consistency import environment
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.consistency.seal import seal_json
from ckpt.format.run_record import RUN_KEY, RunCheckpoint, RunRecord
from ckpt.testing.choices import Choices, Exhaustive, Seeded
from ckpt.testing.simulated_objects import Model
from ckpt.testing.simulator import World
from ckpt.watching.watch import watch
from simulation.simulated_jobs import simulated_storage
from simulation.simulated_schedules import MOUNT, OLD_S3, PROMPT, with_faults

LATE_LISTING = Model(list_lag_s=60.0)
"""Records are seen at once, folders in a listing are not."""
LAG_S = 120.0
"""Longer than any model here takes to show all that is there."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@dataclass
class Run:
    """Commit and remove checkpoints as a trainer does, and remember in which order."""

    world: World
    chance: random.Random
    has_record: bool
    commits: list[tuple[str, str]] = field(default_factory=list)
    there: dict[str, str] = field(default_factory=dict)
    saved_at_s: dict[str, float] = field(default_factory=dict)

    def train(self) -> None:
        step = 0
        for _ in range(8):
            environment.sleep(self.chance.choice((1.0, 1.1, 10.0, 40.0)))
            if step > 2 and self.chance.random() < 0.2:
                step -= 2  # and save these steps again
            step += 1
            self._commit(step)
            if len(self.there) > 3 and self.chance.random() < 0.5:
                self._remove(min(self.there))

    def _commit(self, step: int) -> None:
        path, now_s = f"step-{step:08d}", environment.now()
        checkpoint_id = environment.token()
        record = commit_record(step, now_s, checkpoint_id)
        self.world.change("trainer", f"run/{path}/{COMMIT_KEY}", record)
        environment.sleep(self.chance.choice((0.0, 0.1)))
        self.world.change("trainer", f"run/{path}/{STOCK_METADATA_KEY}", NO_METADATA)
        self.commits.append((path, checkpoint_id))
        self.there[path], self.saved_at_s[path] = checkpoint_id, now_s
        self._write_record()

    def _remove(self, path: str) -> None:
        self.world.change("trainer", f"run/{path}/{STOCK_METADATA_KEY}", None)
        self.world.change("trainer", f"run/{path}/{COMMIT_KEY}", None)
        del self.there[path]
        self._write_record()

    def _write_record(self) -> None:
        environment.sleep(self.chance.choice((0.0, 0.1)))
        if self.has_record:
            listed = [
                RunCheckpoint(step=int(path[5:]), path=path, saved_at_s=self.saved_at_s[path])
                for path in sorted(self.there)
            ]
            data = seal_json(msgspec.json.encode(RunRecord(checkpoints=listed)))
            self.world.change("trainer", f"run/{RUN_KEY}", data)


def followed(
    choices: Choices, model: Model, *, seed: int, has_record: bool, lag_s: float | None
) -> Counter[str]:
    """Follow a run with a watcher that is started again when it crashes; judge what it yielded."""
    world = World(choices, model)
    run = Run(world, random.Random(seed), has_record)
    lives: list[list[tuple[str, str]]] = []

    def follow(timeout_s: float) -> None:
        lives.append([])
        cursor = "simulated://cursor/of-this"
        for checkpoint in watch("simulated://run", cursor=cursor, timeout_s=timeout_s, lag_s=lag_s):
            lives[-1].append((checkpoint.path, checkpoint.id))
            environment.sleep(run.chance.choice((0.0, 3.0, 60.0)))

    def keep_following() -> None:
        for _ in range(10):
            watcher = world.start("watcher", "w", lambda: follow(300.0))
            world.wait_for(lambda process=watcher: process.done, 1e9)  # type: ignore[misc]
            if not watcher.crashed and watcher.error is None:
                return

    with simulated_storage(world):
        trainer = world.start("trainer", "trainer", run.train)
        world.start("agent", "agent", keep_following)
        world.run()
        world.settle(LAG_S)
        world.adopt(replace(model, faults={}))
        last = world.start("last watcher", "w", lambda: follow(0.0))
        world.run()
    for process in (trainer, last):
        if process.error is not None:
            raise process.error
    yielded = judge(run, lives)
    return Counter(lives=len(lives), yielded=len(yielded), missed=len(run.commits) - len(yielded))


def judge(run: Run, lives: list[list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return what was yielded, once each."""
    yielded: list[tuple[str, str]] = []
    for life in lives:
        again = bool(life) and life[:1] == yielded[-1:]  # it was not done when the watcher was killed
        yielded += life[again:]
    assert len(set(yielded)) == len(yielded), "one was yielded twice"
    positions = [run.commits.index(name) for name in yielded]
    assert positions == sorted(positions), f"not in the order of the commits: {positions}"
    missing = set(run.there.items()) - set(yielded)
    assert not missing, f"never yielded: {missing}"
    return yielded


MODELS = {
    "prompt": (PROMPT, None, False),
    "prompt, record": (PROMPT, None, True),
    "late listing, record": (LATE_LISTING, None, True),
    "mount": (MOUNT, LAG_S, False),
    "mount, record": (MOUNT, LAG_S, True),
    "old s3": (OLD_S3, LAG_S, False),
}


@pytest.mark.parametrize(("model", "lag_s", "has_record"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("seeds", [3, pytest.param(150, marks=pytest.mark.long)])
def test_each_once_and_in_order(model: Model, lag_s: float | None, has_record: bool, seeds: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(seeds):
        faults = [(), ("crash",), ("lost request",), ("crash", "lost reply"), ("sent twice",)][seed % 5]
        faulty = replace(with_faults(model, *faults), faults=dict.fromkeys(faults, 0.02))
        total += followed(Seeded(seed), faulty, seed=seed, has_record=has_record, lag_s=lag_s)
    assert total["yielded"] > 4 * seeds
    assert total["lives"] > 2 * seeds, "no watcher crashed"


def test_every_order_of_requests() -> None:
    for choices in Exhaustive.all(1):
        followed(choices, PROMPT, seed=3, has_record=False, lag_s=None)


def test_without_patience_the_order_is_lost() -> None:
    """The judge sees it."""

    def follow_some() -> None:
        for seed in range(50):
            followed(Seeded(seed), MOUNT, seed=seed, has_record=False, lag_s=0.0)

    with pytest.raises(AssertionError, match="not in the order"):
        follow_some()
