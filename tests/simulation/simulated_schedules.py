"""Draw what jobs do on simulated storage from a seed, run it to the end, and judge it."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError
from ckpt.testing.choices import Choices, Exhaustive, Seeded
from ckpt.testing.simulated_objects import Model
from ckpt.testing.simulator import FAULTS, World
from ckpt.testing.virtual_time import Process
from simulation.simulated_history import Guard, History, Violation
from simulation.simulated_jobs import Content, Group, Ours, Protocol, simulated, this_process

RESTART_S = 30.0
"""How long after a rank was lost its job is started again. What has stalled may still be asleep."""

PROMPT = Model()
MOUNT = Model(
    create_lag_s=15.0,
    overwrite_lag_s=15.0,
    delete_lag_s=15.0,
    list_lag_s=60.0,
    negative_cache_s=15.0,
    attribute_cache_s=15.0,
    clock_skew_s=600.0,
    conditional_create=False,
    directories=True,
)
OLD_S3 = Model(overwrite_lag_s=30.0, delete_lag_s=30.0, list_lag_s=60.0, negative_cache_s=20.0)


def with_faults(model: Model, *faults: str) -> Model:
    return replace(model, faults=dict.fromkeys(faults, 1.0), late_s=100.0)


@dataclass
class Plan:
    """A job: `attempts` after each other, of `size` ranks; each attempt goes through `steps`."""

    size: int
    attempts: int
    steps: list[tuple[str, str]]
    """("save" | "load" | "delete" | "abandon", url)"""


@dataclass
class Tally:
    schedules: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    deletes: int = 0
    commits: int = 0
    loads: int = 0
    verified: int = 0
    losses: int = 0

    def add(self, other: Tally) -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


class Simulation:
    """One world, its jobs, and the judgement on them."""

    def __init__(self, choices: Choices, model: Model, protocol: Protocol | None = None) -> None:
        self.protocol = protocol or Ours()
        self.guard = Guard() if self.protocol.keeps_records else None
        self.world = World(choices, model, self.guard)
        self.history = History(self.world, self.protocol)
        self._values = 0

    def put_foreign(self, name: str, data: bytes = b"not ours") -> None:
        """Have another program have left an object long ago."""
        self.world.change("outside", name, data)
        self.world.settle(self.world.model.visibility_s)

    def start_job(self, name: str, plan: Plan, *, after: tuple[Process, float] | None = None) -> Process:
        """Start a job, and again when it lost a rank; `after` another job and a delay."""

        def run() -> None:
            if after is not None:
                first, delay_s = after
                self.world.wait_for(lambda: first.done, 1e9)
                self.world.sleep(delay_s)
            self._attempts(name, plan)

        return self.world.start(f"{name} agent", f"{name}-agent", run)

    def start_reader(self, node: str, urls: list[str], *, pause_s: float) -> Process:
        """Start somebody who looks at the checkpoints from time to time."""

        def run() -> None:
            for number in range(3):
                self.world.sleep(pause_s)
                self.history.load(urls[number % len(urls)])

        return self.world.start("evaluation", node, run)

    def run(self) -> None:
        """Run all to the end, and judge."""
        with simulated(self.world):
            self.finish()

    def finish(self) -> None:
        """Run what is left; look at every place once more, from old nodes and a new one; judge."""
        try:
            self.world.run()
            self._look_again()
            for process in self.world.processes:
                if process.error is not None and not isinstance(process.error, CheckpointError):
                    raise process.error
            self.history.judge()
        finally:
            self.world.end()

    def _look_again(self) -> None:
        model = self.world.model
        self.world.settle(model.late_s + model.echo_s + model.visibility_s + 1.0)
        self.world.adopt(replace(model, faults={}, echo_s=0.0))
        nodes = sorted({process.node for process in self.world.processes if "agent" not in process.name})
        for number, url in enumerate(sorted({write.url for write in self.history.writes})):
            node = [*nodes, "new"][number % (len(nodes) + 1)]
            self.world.start(f"reader{number}", node, functools.partial(self.history.load, url))
        self.world.run()

    def tally(self) -> Tally:
        writes, loads = self.history.writes, self.history.loads
        return Tally(
            schedules=1,
            faults=Counter(self.world.counts),
            saves=Counter(write.outcome for write in writes if write.content is not None),
            deletes=sum(write.content is None for write in writes),
            commits=self.guard.commits if self.guard else 0,
            loads=len(loads),
            verified=sum(load.content is not None for load in loads),
        )

    def content(self, size: int) -> Content:
        self._values += 1
        return tuple(100 * self._values + rank for rank in range(size))

    def _attempts(self, name: str, plan: Plan) -> None:
        for attempt in range(plan.attempts):
            group = Group(self.world, plan.size)
            contents = [self.content(plan.size) for _ in plan.steps]
            for rank in range(plan.size):
                program = functools.partial(self._run_steps, plan, group, rank, contents)
                member = self.world.start(f"{name}.{attempt} rank {rank}", f"{name}-{rank}", program)
                group.members.append(member)
            self.world.wait_for(group.is_over, 3600.0)
            if all(member.done and not member.crashed for member in group.members):
                return
            self.world.wait_for(group.is_done, RESTART_S)

    def _run_steps(self, plan: Plan, group: Group, rank: int, contents: list[Content]) -> None:
        for number, (step, url) in enumerate(plan.steps):
            if step == "save":
                if not self.history.save(url, group, rank, number, contents[number]):
                    return
            elif rank == 0 and step == "load":
                self.history.load(url)
            elif rank == 0 and step == "delete":
                this_process().name += " delete"
                self.history.delete(url)
            elif rank == 0 and step == "abandon":
                self.history.abandoned.add(url)
                open_store(url).abandon()


def draw(seed: int, protocol: Protocol | None = None) -> Simulation:
    """Draw the schedule of a seed: a model, faults, jobs."""
    choices = Seeded(seed)
    chance = choices.random
    model = chance.choice((PROMPT, PROMPT, MOUNT, OLD_S3))
    faults = {
        fault: chance.choice((0.01, 0.05, 0.2))
        for fault in chance.sample(FAULTS[1:], chance.randint(1, 3) if chance.random() < 0.8 else 0)
    }
    model = replace(
        model,
        faults=faults,
        multipart=chance.random() < 0.3,
        late_s=chance.choice((1.0, 100.0)),
        stall_s=chance.choice((5.0, 100.0, 1000.0)),
    )
    simulation = Simulation(choices, model, protocol)
    places = ["simulated://step-1", "simulated://step-2"][: chance.randint(1, 2)]
    if chance.random() < 0.3:
        simulation.put_foreign("step-1/notes.txt")
        simulation.put_foreign("step-1/rank-00000/0123456789abcdef-0.distcp")
    if chance.random() < 0.03:
        simulation.put_foreign("step-1/.metadata", b"stock")
        simulation.history.spoilt.add("simulated://step-1")
    first = simulation.start_job("a", _plan(chance, places))
    second = chance.choices(("none", "at the same time", "afterwards"), (6, 2, 2))[0]
    if second != "none":
        after = first, 2 * model.visibility_s * chance.random()
        plan = _plan(chance, places)
        simulation.start_job("b", plan, after=after if second == "afterwards" else None)
    if chance.random() < 0.12:
        simulation.start_reader(f"{chance.choice('ab')}-0", places, pause_s=chance.choice((0.3, 20.0)))
    return simulation


def _plan(chance: random.Random, places: list[str]) -> Plan:
    steps = [("save", chance.choice(places))]
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        step = chance.choices(("save", "load", "delete", "abandon"), (5, 3, 1, 1))[0]
        steps.append((step, chance.choice(places)))
    return Plan(chance.choices((1, 2, 3), (4, 5, 1))[0], chance.randint(1, 3), steps)


def simulate(seed: int, protocol: Protocol | None = None) -> Tally:
    """Run the schedule of `seed`. Raises Violation, naming the seed."""
    simulation = draw(seed, protocol)
    try:
        simulation.run()
    except Violation as error:
        replay = f"PYTHONPATH=tests python -m simulation.simulate --seed {seed} --trace"
        raise Violation(f"seed {seed}: {error}\nreplay: {replay}") from error
    return simulation.tally()


def explore(
    model: Model, plan: Plan, deviations: int, protocol: type[Protocol] = Ours, *, lag: float = 0.0
) -> Iterator[Simulation]:
    """Run and judge every schedule of one job with at most `deviations` from the ordinary.

    Deviations are: another process than the last goes on; a fault of the model; a lag, or a time of
    remembering, that is not `lag` (0 none, 1 as long as the model allows) but the other extreme.

    Raises:
        Violation: with the decisions that lead there.
    """
    for number, choices in enumerate(Exhaustive.all(deviations, usual_fraction=lag)):
        simulation = Simulation(choices, model, protocol())
        simulation.start_job("a", plan)
        try:
            simulation.run()
        except Violation as error:
            raise Violation(f"schedule {number}, decisions {choices.path}: {error}") from error
        yield simulation
