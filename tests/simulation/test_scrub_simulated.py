"""Mend on simulated storage: crashes, lost replies, puts that come late; removals, saves and other scrubs meanwhile.

Whatever happens, a name gets no bytes but those that it was given first, what was removed does not come back, and the
next scrub ends the work.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

import ckpt
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.errors import CheckpointError
from ckpt.format.names import SCRUB_KEY
from ckpt.testing.choices import Choices, Exhaustive, Seeded
from ckpt.testing.simulated_objects import Model, Version
from ckpt.testing.simulator import FAULTS, World
from simulation.simulated_history import Violation
from simulation.simulated_jobs import simulated
from simulation.simulated_schedules import MOUNT, OLD_S3, PROMPT, Plan, Simulation, with_faults
from simulation.test_tools_simulated import (
    COPY,
    GRACE_S,
    ONE_SAVE,
    SOURCE,
    _quiet,
    assert_sound,
    load,
    result_of,
    run_alone,
)

__all__ = ["_quiet"]

_REPLACED = (COMMIT_KEY, STOCK_METADATA_KEY, SCRUB_KEY)


class MendGuard:
    """Objects to other bytes under a name than those that it was given first."""

    def __init__(self, first: Mapping[str, bytes]) -> None:
        self.first = dict(first)
        self.mended = 0

    def changed(self, world: World, name: str, before: Version | None, after: Version) -> None:
        if after.data is None or name.partition("/")[2] in _REPLACED:
            return
        if self.first.setdefault(name, after.data) != after.data:
            raise Violation(f"{after.process} wrote other bytes under {name}")
        self.mended += before is not None and before.data not in (None, after.data)


def mended(choices: Choices, model: Model, meanwhile: str) -> Counter[str]:
    """Damage a checkpoint that has a copy, and scrub it while something else goes on there."""
    quiet = replace(model, faults={})
    simulation = Simulation(choices, quiet)
    world = simulation.world
    pause_s = model.late_s + model.visibility_s + model.list_lag_s + 100.0
    with simulated(world):
        simulation.start_job("a", ONE_SAVE)
        world.run()
        world.settle(pause_s)
        run_alone(world, "copy", "c", quiet, lambda: ckpt.copy(SOURCE, COPY))
        world.settle(pause_s)
        content = load(simulation, SOURCE)
        truth = {name: world.truth(name) for name in world.versions if not name.endswith("/")}
        guard = MendGuard({name: data for name, data in truth.items() if data is not None})
        world.watcher = None
        victims = [name for name in guard.first if name.startswith("step-1/") and name.endswith(".distcp")]
        for name in victims:
            world.change("outside", name, guard.first[name][:-1] + b"?")
        world.settle(pause_s)
        world.watcher = guard
        world.adopt(model)
        scrub = partial(ckpt.scrub, SOURCE, repair_from=COPY)
        scrubs = [world.start("scrub", "s", scrub)]
        if meanwhile == "remove":
            world.start("remove", "r", partial(ckpt.remove, SOURCE))
        elif meanwhile == "save":
            simulation.start_job("b", Plan(1, 1, [("save", SOURCE)]))
        elif meanwhile == "scrub":
            scrubs.append(world.start("scrub 2", "t", scrub))
        world.run()
        world.adopt(quiet)
        world.settle(pause_s)
        for each in scrubs:
            if each.error is not None and not isinstance(each.error, CheckpointError):
                raise each.error
        is_there = world.truth(f"step-1/{COMMIT_KEY}") is not None
        if is_there:
            again = result_of(world, "scrub again", "new", scrub)
            assert getattr(again, "ok", False), again
            world.settle(pause_s)
            assert_sound(world, SOURCE)
            assert meanwhile == "save" or load(simulation, SOURCE) == content
        world.settle(GRACE_S + 1200.0)
        if any(world.truth(name) for name in world.versions if name.startswith("step-1/")):
            result_of(world, "gc", "new", partial(ckpt.collect_garbage, SOURCE, grace_s=GRACE_S))
            left = [name for name in world.versions if name.startswith("step-1/") and world.truth(name)]
            assert is_there or not left, left
        if world.objection is not None:
            raise world.objection
    return Counter(
        schedules=1, mended=guard.mended, crashed=sum(each.crashed for each in scrubs), there=is_there
    )


@pytest.mark.parametrize("fault", ["crash", "lost reply", "late", "sent twice"])
def test_a_fault_at_every_request_of_a_scrub(fault: str) -> None:
    total: Counter[str] = Counter()
    for choices in Exhaustive.all(1):
        total += mended(choices, with_faults(PROMPT, fault), "nothing")
    assert total["schedules"] > 2  # of most faults only what writes can be the victim
    assert total["mended"] >= total["schedules"] == total["there"]


def run_seeds(seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        chance = random.Random(seed)
        faults = {fault: chance.choice((0.02, 0.1)) for fault in chance.sample(FAULTS[1:], 2)}
        base = chance.choice((PROMPT, MOUNT, OLD_S3))
        model = replace(base, faults=faults, multipart=chance.random() < 0.5, late_s=50.0)
        try:
            total += mended(Seeded(seed), model, chance.choice(("remove", "save", "scrub")))
        except (AssertionError, CheckpointError) as error:
            raise Violation(f"seed {seed}: {error}") from error
    return total


def test_scrubs_by_chance() -> None:
    total = run_seeds(range(30))
    assert total["mended"] > 10
    assert 5 < total["there"] < 30


@pytest.mark.long
def test_scrubs_in_many_schedules() -> None:
    total = run_seeds(range(30, 600))
    assert total["crashed"] > 10


def test_the_guard_sees_other_bytes() -> None:
    guard = MendGuard({"step-1/a": b"first"})
    guard.changed(World(Seeded(0)), "step-1/a", None, Version(b"first", 1, 0.0, "s", None, False))
    with pytest.raises(Violation):
        guard.changed(World(Seeded(0)), "step-1/a", None, Version(b"other", 2, 0.0, "s", None, True))
