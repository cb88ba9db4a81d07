"""Test the commit protocol on storage that lies: schedules up to a bound, by chance, by machine.

`docs/consistency.md` names the assumptions and the promises.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.tiers import examples

import ckpt
from ckpt.backends.registry import open_store
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.format.records import StoredCommit
from ckpt.testing.choices import Choices, Exhaustive, Seeded
from ckpt.testing.simulated_objects import Model
from ckpt.testing.simulated_store import SimulatedStore
from ckpt.testing.simulator import FAULTS, World
from ckpt.testing.virtual_time import Process
from ckpt.writing.stock_metadata import stock_metadata_of
from simulation.simulated_failures import (
    FindsByListing,
    RankZeroMakesTheDirectory,
    RenamesAtTheEnd,
    WritesInPlace,
)
from simulation.simulated_history import Violation
from simulation.simulated_jobs import Ours, Protocol, simulated, simulated_storage
from simulation.simulated_schedules import (
    MOUNT,
    PROMPT,
    Plan,
    Simulation,
    Tally,
    draw,
    explore,
    simulate,
    with_faults,
)

URL = "simulated://step-1"
STEPS = st.tuples(
    st.sampled_from(["save", "save", "load", "delete", "abandon"]),
    st.sampled_from([URL, "simulated://step-2"]),
)
TWO_SAVES = Plan(2, 1, [("save", URL), ("save", URL)])
RESTARTED = Plan(2, 2, [("save", URL)])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Log no failed saves."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# -- every schedule up to a bound ------------------------------------------------------------------

# 2 ranks, 2 saves at one place, then a load from another node. `deviations` things are out of the
# ordinary: a fault at a request, a rank overtaking another, a lag. `simulate.py` goes further.


def bounds(least_of_one: int, least_of_two: int) -> pytest.MarkDecorator:
    """Try one deviation, and in the long tier two; `least` schedules are too few."""
    return pytest.mark.parametrize(
        ("deviations", "least"), [(1, least_of_one), pytest.param(2, least_of_two, marks=pytest.mark.long)]
    )


@bounds(30, 300)
@pytest.mark.parametrize("fault", FAULTS[1:])
def test_a_fault_at_every_request(fault: str, deviations: int, least: int) -> None:
    assert all_schedules(with_faults(PROMPT, fault), TWO_SAVES, deviations) > least


@bounds(15, 200)
@pytest.mark.parametrize("fault", ["crash", "stall"])
def test_a_fault_at_every_request_and_a_second_attempt(fault: str, deviations: int, least: int) -> None:
    assert all_schedules(with_faults(PROMPT, fault), RESTARTED, deviations) > least


@bounds(25, 200)
@pytest.mark.parametrize("lag", [0.0, 1.0], ids=["some lags", "some no lag"])
def test_every_visibility(lag: float, deviations: int, least: int) -> None:
    assert all_schedules(MOUNT, TWO_SAVES, deviations, lag=lag) > least


@pytest.mark.parametrize("then", ["save", "delete"])
def test_metadata_is_that_of_the_commit_whoever_stalls(then: str) -> None:
    """A save stalls at each of its requests in turn; at its place another is saved, or it is removed."""
    schedules = late = 0
    for choices in Exhaustive.all(1):
        simulation = Simulation(choices, replace(PROMPT, faults={"stall": 1.0}, stall_s=1e5))
        world = simulation.world
        with simulated(world):
            simulation.start_job("a", Plan(1, 1, [("save", URL)]))
            world.run(until=lambda: any(process.stalled for process in world.processes))  # noqa: B023
            world.adopt(PROMPT)
            late += world.truth("step-1/commit.json") is not None
            simulation.start_job("b", Plan(1, 1, [(then, URL)]))
            world.run()
            commit, metadata = (world.truth(f"step-1/{key}") for key in (COMMIT_KEY, STOCK_METADATA_KEY))
            expected = None
            if commit is not None:
                store = SimulatedStore(world, "new", URL)
                expected = stock_metadata_of(store, StoredCommit(commit, URL).record)
            assert metadata == expected
            simulation.finish()
        schedules += 1
    assert schedules > late > 2


def test_a_save_that_stalls_before_its_metadata_while_it_is_removed() -> None:
    """It goes on after each request of the removal in turn, and is overtaken by it at each of its own."""
    left = []
    for choices in Exhaustive.all(2):
        simulation = Simulation(choices, PROMPT)
        world = simulation.world
        with simulated(world):
            choices.deviations = 0
            simulation.start_job("a", Plan(1, 1, [("save", URL)]))
            world.run(until=lambda: world.truth("step-1/commit.json") is not None)  # noqa: B023
            choices.deviations = 2
            world.start("delete", "r", lambda: ckpt.remove(URL))
            world.run()
            left.append({name for name in world.versions if world.truth(name) is not None})
    assert len(left) > 30
    assert not any(left), left


def all_schedules(
    model: Model, plan: Plan, deviations: int, *, protocol: type[Protocol] = Ours, lag: float = 0.0
) -> int:
    return sum(1 for _ in explore(model, plan, deviations, protocol, lag=lag))


# -- protocols that must fail ----------------------------------------------------------------------

BROKEN = [
    (RankZeroMakesTheDirectory, MOUNT, "failed although nothing went wrong"),
    (RenamesAtTheEnd, with_faults(PROMPT, "crash"), "a load f"),
    (FindsByListing, MOUNT, "a load found"),
    (WritesInPlace, with_faults(PROMPT, "crash"), "a load found"),
]


@pytest.mark.parametrize(("protocol", "model", "finding"), BROKEN)
def test_the_same_checks_catch_other_protocols(protocol: type[Protocol], model: Model, finding: str) -> None:
    wishful = replace(PROMPT, directories=True)
    all_schedules(wishful, TWO_SAVES, 1, protocol=protocol)
    with pytest.raises(Violation, match=finding):
        all_schedules(model, TWO_SAVES, 1, protocol=protocol)
    all_schedules(model, TWO_SAVES, 1)


@pytest.mark.parametrize(("protocol", "model", "finding"), BROKEN)
def test_chance_finds_them_too(protocol: type[Protocol], model: Model, finding: str) -> None:
    with pytest.raises(Violation, match="replay"):
        run_seeds(protocol)


def run_seeds(protocol: type[Protocol]) -> None:
    for seed in range(1000):
        simulate(seed, protocol())


# -- by chance -------------------------------------------------------------------------------------

SCHEDULES = 10_000
CHUNKS = 8


@pytest.mark.slow
def test_a_hundred_seeded_schedules() -> None:
    total = Tally()
    for seed in range(100):
        total.add(simulate(seed))
    assert total.commits > 50
    assert all(total.faults[fault] for fault in FAULTS[1:])


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_seeded_schedules(chunk: int) -> None:
    total = Tally()
    for seed in range(chunk, SCHEDULES, CHUNKS):
        total.add(simulate(seed))
    assert total.commits > 500
    assert total.verified > 500
    assert all(total.faults[fault] > 50 for fault in FAULTS[1:])


# What once failed, by the seeds of today: each fails if its fix is taken away.


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1050, id="a stale size cuts a sound commit, which looks damaged"),
        pytest.param(685, id="a stale size is longer than the commit that is there"),
        pytest.param(1677, id="a stale size makes our metadata look like another program's"),
        pytest.param(745, id="a zombie deletes the metadata of the attempt after it"),
    ],
)
def test_seeds_that_failed(seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize("notes", [("x", ""), ("", "x" * 300)], ids=["shorter", "longer"])
def test_a_size_that_is_remembered(notes: tuple[str, str]) -> None:
    """A node that knows the sizes of one save waits before it loads or replaces the next."""
    world = World(Seeded(1), Model(attribute_cache_s=30.0))
    loaded: list[float] = []

    def save(note: str, value: float) -> None:
        writer = ckpt.CheckpointWriter(URL, threads=1, tags={"note": note}, timeout_s=None)
        dcp.save({"t": torch.tensor([value])}, storage_writer=writer, no_dist=True)

    def remember() -> None:
        for key in (COMMIT_KEY, STOCK_METADATA_KEY):
            open_store(URL).stat(key)

    def load() -> None:
        state = {"t": torch.zeros(1)}
        reader = ckpt.CheckpointReader(URL, threads=1, timeout_s=None)
        dcp.load(state, storage_reader=reader, no_dist=True)
        loaded.append(state["t"].item())

    with simulated_storage(world):
        for node, work in [
            ("a", lambda: save(notes[0], 1.0)),
            ("b", remember),
            ("a", lambda: save(notes[1], 2.0)),
            ("b", load),
            ("c", remember),
            ("a", lambda: save(notes[0], 3.0)),
            ("c", lambda: save(notes[1], 4.0)),
            ("a", load),
        ]:
            process = world.start(f"p{world.now_s}", node, work)
            world.run()
            assert process.error is None, process.error
    assert loaded == [2.0, 4.0]


def test_a_seed_is_a_history() -> None:
    first, second = draw(7), draw(7)
    for simulation in (first, second):
        simulation.world.trace = []
        simulation.run()
    assert first.world.trace == second.world.trace
    assert first.world.trace


def test_worlds_are_freed() -> None:
    """Nothing of a schedule stays, whatever ended it: ten thousand of them must not grow."""
    worlds = []
    for seed in range(12):
        simulation = draw(seed, WritesInPlace() if seed % 3 == 0 else None)
        worlds.append(weakref.ref(simulation.world))
        with contextlib.suppress(Violation):
            simulation.run()
        del simulation
    gc.collect()
    assert not [world for world in worlds if world() is not None]


def test_the_limit() -> None:
    """No put without a condition survives that the network repeats it long after its answer."""
    with pytest.raises(Violation, match="a commit at step-1 lists"):
        run_with_echoes()


def run_with_echoes() -> None:
    for seed in range(200):
        simulation = Simulation(Seeded(seed), replace(PROMPT, echo_s=100.0))
        simulation.start_job("a", Plan(1, 1, [("save", URL)] * 3))
        simulation.run()


# -- state machines --------------------------------------------------------------------------------


class _Commanded(Choices):
    """Decide as commanded; a fault comes once."""

    fault, lag = "none", 0.0

    def pick(self, question: str, weights: Sequence[float]) -> int:
        fault, self.fault = self.fault, "none"
        return FAULTS.index(fault) if len(weights) == len(FAULTS) and weights[FAULTS.index(fault)] else 0

    def fraction(self, question: str) -> float:
        return self.lag


class Training(RuleBasedStateMachine):
    """Run jobs at two places; Hypothesis chooses every request, fault, lag and pause."""

    model = MOUNT

    def __init__(self) -> None:
        super().__init__()
        self.choices = _Commanded()
        self.simulation = Simulation(self.choices, with_faults(self.model, *FAULTS[1:]))
        self.world = self.simulation.world
        self.world.trace = []
        self.jobs = 0
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(simulated(self.world))

    @property
    def ready(self) -> list[Process]:
        processes = (process for process in self.world.processes if not process.done)
        return [process for process in processes if process.ready(self.world.now_s)]

    @precondition(lambda self: self.jobs < 4)
    @rule(size=st.integers(1, 2), attempts=st.integers(1, 2), steps=st.lists(STEPS, min_size=1, max_size=3))
    def start(self, size: int, attempts: int, steps: list[tuple[str, str]]) -> None:
        self.jobs += 1
        self.simulation.start_job("abcd"[self.jobs - 1], Plan(size, attempts, steps))

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), requests=st.integers(1, 20))
    def go_on(self, data: st.DataObject, requests: int) -> None:
        process = data.draw(st.sampled_from(self.ready))
        for _ in range(requests):
            if process in self.ready:
                self.world.step(process)

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), fault=st.sampled_from(FAULTS[1:]))
    def go_wrong(self, data: st.DataObject, fault: str) -> None:
        process = data.draw(st.sampled_from(self.ready))
        self.choices.fault = fault
        self.world.step(process)
        self.choices.fault = "none"

    @precondition(lambda self: self.world.processes)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.world.processes))
        if "agent" not in process.name:
            self.world.crash(process)

    @rule(lag=st.sampled_from([0.0, 0.3, 1.0]))
    def lag(self, lag: float) -> None:
        self.choices.lag = lag

    @rule(duration_s=st.sampled_from([0.1, 5.0, 20.0, 50.0, 200.0]))
    def pass_time(self, duration_s: float) -> None:
        self.world.settle(duration_s)

    @invariant()
    def nothing_is_torn(self) -> None:
        if self.world.objection is not None:
            raise self.world.objection

    def teardown(self) -> None:
        try:
            self.simulation.finish()
        finally:
            self.stack.close()


class TrainingOnPromptStorage(Training):
    model = PROMPT


TestTraining = Training.TestCase
TestTrainingOnPromptStorage = TrainingOnPromptStorage.TestCase
TestTraining.settings = TestTrainingOnPromptStorage.settings = settings(
    max_examples=examples(150), stateful_step_count=60, suppress_health_check=list(HealthCheck)
)
