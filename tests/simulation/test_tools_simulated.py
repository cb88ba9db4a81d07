"""Test copy, verify and gc on simulated storage: crashes, lost replies, lags.

A copy that was interrupted is run again; verify never calls a sound checkpoint damaged; gc deletes
nothing that a commit lists or a running save has written, and in the end nothing is left over.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

import ckpt
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.errors import CheckpointError
from ckpt.format.names import is_our_name
from ckpt.testing.choices import Choices, Exhaustive, Seeded
from ckpt.testing.simulated_objects import Model, Version
from ckpt.testing.simulator import FAULTS, World
from ckpt.testing.virtual_time import Process
from ckpt.tools.findings import Verification
from simulation.simulated_history import Guard, Violation
from simulation.simulated_jobs import Content, simulated
from simulation.simulated_schedules import MOUNT, OLD_S3, PROMPT, Plan, Simulation, draw, with_faults

SOURCE, COPY = "simulated://step-1", "simulated://step-2"
ONE_SAVE = Plan(1, 1, [("save", SOURCE)])
GRACE_S = 3 * 3600.0
"""Longer than any save here takes."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class ToolGuard(Guard):
    """Watch gc too: it may delete the leftovers of others, but nothing live."""

    def __init__(self) -> None:
        super().__init__()
        self.collected = 0

    def changed(self, world: World, name: str, before: Version | None, after: Version) -> None:
        place, _, key = name.partition("/")
        if key.endswith(".probe") and not world.model.conditional_create:
            return  # two copies can both find the name free
        is_committed = world.truth(f"{place}/{COMMIT_KEY}") is not None
        if is_committed and key == STOCK_METADATA_KEY and _is_gc(after) and after.data is None:
            raise Violation(f"{after.process} deleted {name} of a checkpoint")
        super().changed(world, name, before, after)

    def _check_permission(self, name: str, key: str, before: Version, after: Version) -> None:
        if not (_is_gc(after) and after.data is None):
            super()._check_permission(name, key, before, after)
            return
        if before.process is after.process:
            return  # by which it told the time
        if isinstance(before.process, Process) and not before.process.done:
            raise Violation(f"{after.process} deleted {name}, which {before.process} has just written")
        if key != STOCK_METADATA_KEY and not is_our_name(key):
            raise Violation(f"{after.process} deleted {name}, which has no name of this library")
        self.collected += 1


def _is_gc(version: Version) -> bool:
    return version.process is not None and version.process.name.startswith("gc")


def watched(simulation: Simulation) -> ToolGuard:
    guard = ToolGuard()
    simulation.guard = simulation.world.watcher = guard
    return guard


def run_alone(world: World, name: str, node: str, model: Model, work: Callable[[], object]) -> Process:
    """Run one process in a world that is like `model` meanwhile."""
    before = world.model
    world.adopt(model)
    process = world.start(name, node, work)
    world.run()
    world.adopt(before)
    return process


def result_of(world: World, name: str, node: str, work: Callable[[], object]) -> object:
    """Return the result of a process where nothing goes wrong."""
    process = run_alone(world, name, node, replace(world.model, faults={}, echo_s=0.0), work)
    if process.error is not None:
        raise process.error
    return process.result


def assert_sound(world: World, url: str) -> None:
    result = result_of(world, "verify", "new", lambda: ckpt.verify(url))
    assert isinstance(result, Verification)
    assert result.ok, result.damages


# -- copy ------------------------------------------------------------------------------------------


def copied(choices: Choices, model: Model, attempts: int) -> Counter[str]:
    """Save without faults, copy with those of `model` until it succeeds, and judge the copy."""
    simulation = Simulation(choices, replace(model, faults={}))
    guard, world, protocol = watched(simulation), simulation.world, simulation.protocol
    outcomes: Counter[str] = Counter()
    with simulated(world):
        simulation.start_job("a", ONE_SAVE)
        world.run()
        world.settle(model.visibility_s)
        for number in range(attempts):
            faulty = model if number < attempts - 1 else replace(model, faults={})
            copying = run_alone(world, f"copy {number}", "c", faulty, lambda: ckpt.copy(SOURCE, COPY))
            if copying.error is not None and not isinstance(copying.error, CheckpointError):
                raise copying.error
            if copying.result is not None:
                outcomes["kept files"] += copying.result.kept_files
                outcomes["already there"] += copying.result.already_there
                break
            outcomes["crashed" if copying.crashed else "failed"] += 1
            world.settle(model.late_s)
        else:
            raise Violation("a copy without faults did not succeed") from copying.error
        world.settle(model.late_s + model.visibility_s)
        contents = [load(simulation, url) for url in (SOURCE, COPY)]
        if contents[0] != contents[1]:
            raise Violation(f"the copy holds {contents[1]}, the source {contents[0]}")
        for url in (SOURCE, COPY):
            assert_sound(world, url)
    assert guard.commits >= 2
    assert protocol.keeps_records
    return outcomes


def load(simulation: Simulation, url: str) -> Content:
    content = result_of(simulation.world, "load", "new", lambda: simulation.protocol.load(url))
    assert isinstance(content, tuple)
    return content


@pytest.mark.parametrize("fault", ["crash", "lost request", "lost reply", "late", "sent twice"])
def test_a_fault_at_every_request_of_a_copy(fault: str) -> None:
    total: Counter[str] = Counter()
    for choices in Exhaustive.all(1):
        total += copied(choices, with_faults(PROMPT, fault), 3)
        total["schedules"] += 1
    assert total["schedules"] > 5
    if fault == "crash":
        assert total["crashed"] == total["schedules"] - 1 > 15
        assert total["kept files"] > 1  # a copy that has put its index is not continued


def test_copies_by_chance() -> None:
    total: Counter[str] = Counter()
    for seed in range(60):
        chance = random.Random(seed)
        faults = {fault: chance.choice((0.02, 0.1)) for fault in chance.sample(FAULTS[1:], 2)}
        base = chance.choice((PROMPT, MOUNT, OLD_S3))
        model = replace(base, faults=faults, multipart=chance.random() < 0.5, late_s=50.0)
        total += copied(Seeded(seed), model, 8)
    assert total["crashed"] > 3
    assert total["failed"] > 10
    assert total["kept files"] > 3


def stalled(choices: Choices, model: Model, *, again: str, before: int) -> Counter[str]:
    """Have a copy stall, be run again, and what that committed be replaced or removed; then it goes on.

    Args:
        again: "save" or "delete", at the destination after the second copy.
        before: how many copies were killed before, with a file sent.
    """
    quiet = replace(model, faults={})
    simulation = Simulation(choices, quiet)
    watched(simulation)
    world = simulation.world

    def copy(name: str) -> Process:
        return world.start(f"copy {name}", name, partial(ckpt.copy, SOURCE, COPY, overwrite=True))

    def data_files() -> int:
        names = [name for name in world.versions if name.startswith("step-2/") and ".distcp" in name]
        return len(names)

    def save(url: str) -> None:
        job = simulation.start_job(f"job{len(world.processes)}", Plan(2, 1, [("save", url)]))
        world.run(until=lambda: job.done)
        world.settle(model.visibility_s)

    with simulated(world):
        save(SOURCE)
        if again == "save":
            save(COPY)
        for number in range(before):
            count, killed = data_files(), copy(f"killed{number}")
            world.run(until=lambda: data_files() > count)  # noqa: B023 (called at once)
            world.crash(killed)
            world.settle(model.visibility_s + model.list_lag_s)
        world.adopt(replace(model, faults={"stall": 0.05}, stall_s=1e5))
        zombie = copy("zombie")
        world.run(until=lambda: zombie.stalled or zombie.done)
        world.adopt(quiet)
        world.settle(model.visibility_s + model.list_lag_s)
        second = copy("second")
        world.run(until=lambda: second.done)
        assert zombie.done or second.result is not None, second.error
        world.settle(model.visibility_s)
        if again == "save":
            save(COPY)
        else:
            removal = world.start("delete", "r", partial(ckpt.remove, COPY))
            world.run(until=lambda: removal.done)
        world.run()
        world.settle(model.visibility_s)
        if world.truth(f"step-2/{COMMIT_KEY}") is not None:
            load(simulation, COPY)
            result = result_of(world, "verify", "new", lambda: ckpt.verify(COPY))
            assert isinstance(result, Verification)
            assert not result.damages
            assert not (result.warnings and model is PROMPT)  # elsewhere it may have looked too early
    kept = 0 if second.result is None else second.result.kept_files
    return Counter(schedules=1, kept=kept, went_on=not zombie.done or zombie.error is None)


@pytest.mark.slow
@pytest.mark.parametrize("again", ["save", "delete"])
@pytest.mark.parametrize("before", [0, 1, pytest.param(2, marks=pytest.mark.long)])
def test_a_copy_that_stalls_commits_nothing_that_is_gone(again: str, before: int) -> None:
    """A later copy may have taken up its files, and committed them."""
    total: Counter[str] = Counter()
    for choices in Exhaustive.all(1):
        total += stalled(choices, PROMPT, again=again, before=before)
    assert total["schedules"] > 10
    assert total["kept"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("model", [MOUNT, OLD_S3])
def test_a_copy_that_stalls_where_storage_lags(model: Model) -> None:
    total: Counter[str] = Counter()
    for seed in range(40):
        chance = random.Random(seed)
        again, before = chance.choice(("save", "delete")), chance.randint(0, 2)
        total += stalled(Seeded(seed), model, again=again, before=before)
    assert total["kept"] > 5


# -- verify ----------------------------------------------------------------------------------------


def test_verify_calls_no_sound_checkpoint_damaged() -> None:
    """It begins right after the save, at a node that sees it late, or had looked too early."""
    for seed in range(60):
        chance = random.Random(seed)
        simulation = Simulation(Seeded(seed), chance.choice((MOUNT, OLD_S3)))
        world = simulation.world
        watched(simulation)
        with simulated(world):
            early = simulation.world.start("early verify", "b", lambda: ckpt.verify(SOURCE))
            job = simulation.start_job("a", Plan(chance.randint(1, 2), 1, [("save", SOURCE)]))
            world.run(until=lambda: job.done)  # noqa: B023 (called at once)
            late = simulation.world.start("late verify", "b", lambda: ckpt.verify(SOURCE, quick=False))
            world.run()
        for process in (early, late):
            if process.result is not None:
                assert process.result.ok, (seed, process, process.result.damages)
        assert late.error is None, (seed, late.error)
        assert late.result.checked_files >= 1
        assert early.error is None or isinstance(early.error, CheckpointError)


def test_verify_finds_a_damage() -> None:
    simulation = Simulation(Seeded(1), MOUNT)
    world = simulation.world
    with simulated(world):
        simulation.start_job("a", ONE_SAVE)
        world.run()
        (name,) = [name for name in world.versions if name.endswith(".distcp")]
        data = world.truth(name)
        assert data is not None
        world.watcher = None
        world.change("outside", name, data[:-1] + bytes([data[-1] ^ 1]))
        world.settle(MOUNT.visibility_s)
        result = result_of(world, "verify", "b", lambda: ckpt.verify(SOURCE))
    assert isinstance(result, Verification)
    assert [damage.kind for damage in result.damages] == ["checksum"]


# -- gc --------------------------------------------------------------------------------------------


def collected(seed: int) -> Counter[str]:
    """Jobs by chance; long after them gc, beside another job; and gc again when all is over."""
    simulation = draw(seed)
    world, chance = simulation.world, random.Random(seed)
    if world.model.stall_s > 100.0 or simulation.history.spoilt:
        return Counter()
    guard = watched(simulation)
    urls = [SOURCE, COPY]
    with simulated(world):
        world.run()
        world.settle(GRACE_S + 1200.0)
        world.adopt(replace(world.model, clock_skew_s=100 * GRACE_S))  # of the nodes that begin now
        simulation.start_job("later", Plan(chance.randint(1, 2), 2, [("save", chance.choice(urls))] * 2))
        for number, url in enumerate(urls):
            world.start(f"gc {number}", "gc", partial(collect_twice, world, url))
        simulation.finish()
        world.settle(GRACE_S + 1200.0)
        for url in urls:
            place = url.partition("://")[2]
            if any(world.truth(name) for name in world.versions if name.startswith(f"{place}/")):
                result_of(world, "gc at the end", "new", partial(ckpt.collect_garbage, url, grace_s=GRACE_S))
                assert_nothing_left(world, place, guard)
                if world.truth(f"{place}/{COMMIT_KEY}") is not None:
                    assert_sound(world, url)
        if world.objection is not None:
            raise world.objection
    return Counter(collected=guard.collected, commits=guard.commits, schedules=1)


def collect_twice(world: World, url: str) -> None:
    for pause_s in (0.0, 20.0):
        world.sleep(pause_s)
        ckpt.collect_garbage(url, grace_s=GRACE_S)


def assert_nothing_left(world: World, place: str, guard: ToolGuard) -> None:
    listed = guard._listed.get(place, {}) if world.truth(f"{place}/{COMMIT_KEY}") is not None else {}
    kept = {*listed, f"{place}/{COMMIT_KEY}", f"{place}/{STOCK_METADATA_KEY}", f"{place}/notes.txt"}
    names = {name for name in world.versions if name.startswith(f"{place}/") and not name.endswith("/")}
    left = {name for name in names if world.truth(name) is not None}
    assert left <= kept, (place, left - kept)


def run_seeds(seeds: Sequence[int]) -> None:
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            total += collected(seed)
        except (AssertionError, CheckpointError) as error:
            raise Violation(f"seed {seed}: {error}") from error
    assert total["collected"] > len(seeds)
    assert total["commits"] > total["schedules"] > len(seeds) / 3


@pytest.mark.slow
def test_gc_deletes_nothing_live() -> None:
    run_seeds(range(120))


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(4))
def test_gc_deletes_nothing_live_in_many_schedules(chunk: int) -> None:
    run_seeds(range(120 + chunk, 1120, 4))


def test_the_guard_sees_a_gc_that_is_too_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard objects to a grace period that is shorter than a save."""
    monkeypatch.setattr("simulation.test_tools_simulated.GRACE_S", -1.0)
    with pytest.raises(Violation, match=r"has just written|took|nothing went wrong.*no such upload"):
        run_seeds(range(200))
