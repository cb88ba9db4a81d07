"""Draw saves that name bytes of each other, removals and gc on simulated storage, run and judge them.

What is ours runs as it ships: the coordinator with its pins, `ckpt.remove`, `ckpt.collect_garbage`. In
the place of DCP, its planning and the ranks stands `support.references`, which writes one small object.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from support import references

import ckpt
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.errors import CheckpointError, NotCommitted, NotFound, StillReferred
from ckpt.format.pin_record import decode_pin
from ckpt.format.records import decode_commit
from ckpt.testing.choices import Choices, Exhaustive, Seeded
from ckpt.testing.simulated_objects import Model, Version
from ckpt.testing.simulator import FAULTS, World
from ckpt.testing.virtual_time import Process
from simulation.simulated_history import Violation
from simulation.simulated_jobs import simulated_storage
from simulation.simulated_schedules import MOUNT, OLD_S3, PROMPT

PLACES = ("a", "b", "c", "d")
ROOT = "run/"
GRACE_S = 24 * 3600.0
"""That of the library: a pin counts for so long."""
LONG_S = 2 * GRACE_S

Step = tuple[str, str, tuple[str, ...]]
"""("save" | "remove" | "gc", place, bases)"""


SAVE_A: Step = ("save", "a", ())
SAVE_B: Step = ("save", "b", ("a",))
SAVE_C: Step = ("save", "c", ("b",))
REMOVE_A: Step = ("remove", "a", ())
REMOVE_B: Step = ("remove", "b", ())
GC_A: Step = ("gc", "a", ())

RACES: dict[str, tuple[list[Step], list[list[Step]]]] = {
    "a removal": ([SAVE_A], [[SAVE_B], [REMOVE_A]]),
    "a removal and gc": ([SAVE_A], [[SAVE_B], [REMOVE_A], [GC_A]]),
    "a replacement": ([SAVE_A], [[SAVE_B], [SAVE_A]]),
    "a removal of base and owner": ([SAVE_A, SAVE_B], [[SAVE_C], [REMOVE_B, REMOVE_A]]),
    "removals of referrer and base": ([SAVE_A, SAVE_B], [[REMOVE_B, GC_A], [REMOVE_A]]),
    "removed and saved anew": ([SAVE_A], [[SAVE_B], [REMOVE_A, SAVE_A, GC_A]]),
}


class ReferenceGuard:
    """Watch that all objects which a committed checkpoint names are there, and the same, at every moment.

    Attributes:
        named: by place, the objects of its checkpoint, also those of others.
    """

    def __init__(self) -> None:
        self.named: dict[str, dict[str, bytes]] = {}
        self.commits = self.referring = 0

    def changed(self, world: World, name: str, before: Version | None, after: Version) -> None:
        place, _, key = name.removeprefix(ROOT).partition("/")
        if key == COMMIT_KEY:
            self.named.pop(place, None)
            if after.data is not None:
                self._commit(world, place, after)
        for referrer, objects in self.named.items():
            if name.removeprefix(ROOT) in objects and after.data != objects[name.removeprefix(ROOT)]:
                raise Violation(f"{after.process} took {name} away from the checkpoint at {referrer}")

    def _commit(self, world: World, place: str, after: Version) -> None:
        assert after.data is not None
        try:
            self.named[place] = dict(
                references.named_objects(place, after.data, lambda name: world.truth(ROOT + name))
            )
        except AssertionError as error:
            raise Violation(f"{after.process}: {error}") from error
        self.commits += 1
        self.referring += any(not name.startswith(f"{place}/") for name in self.named[place])


class References:
    """One world in which checkpoints refer to each other.

    Attributes:
        outcomes: how often each kind of step ended how.
    """

    def __init__(self, choices: Choices, model: Model) -> None:
        self.guard = ReferenceGuard()
        self.world = World(choices, model, self.guard)
        self.outcomes: Counter[str] = Counter()

    def alone(self, *steps: Step) -> None:
        """Carry out steps where nothing goes wrong, and let them become old."""
        model = self.world.model
        self.world.adopt(replace(model, faults={}, echo_s=0.0))
        process = self.world.start(
            f"alone{len(self.world.processes)}", "alone", partial(self.carry_out, steps)
        )
        self.world.run(until=lambda: process.done)
        if process.error is not None:
            raise process.error
        self.world.adopt(model)
        self.world.settle(model.visibility_s + model.list_lag_s)

    def start(self, name: str, *steps: Step) -> Process:
        return self.world.start(name, name, partial(self.carry_out, steps))

    def carry_out(self, steps: Sequence[Step]) -> None:
        for verb, place, bases in steps:
            url = f"simulated://{ROOT}{place}"
            try:
                if verb == "save":
                    self._save(url, bases)
                elif verb == "remove":
                    removed = ckpt.remove(url)
                    self.outcomes["removed, objects stay"] += bool(removed.kept)
                else:
                    ckpt.collect_garbage(url, grace_s=GRACE_S)
                self.outcomes[f"{verb}: done"] += 1
            except CheckpointError as error:
                self.outcomes[f"{verb}: {type(error).__name__}"] += 1

    def _save(self, url: str, bases: Sequence[str]) -> None:
        try:
            references.save(url, bases)
        except (NotCommitted, NotFound):  # so it writes all
            references.save(url)

    def judge(self) -> None:
        """Run to the end; look that nothing leaks; remove all, and look that nothing at all is left."""
        try:
            self.world.run()
            for process in self.world.processes:
                if process.error is not None:
                    raise process.error
            model = self.world.model
            self.world.adopt(replace(model, faults={}, echo_s=0.0))
            self._collect(model)
            self._assert_no_leak()
            places = sorted(self.guard.named, key=lambda place: self._created(place), reverse=True)
            self.world.start("last", "last", partial(self._remove_all, places))
            self.world.run()
            self._collect(model)
            self._assert_no_leak()
            if self.guard.named:
                raise Violation(f"could not be removed: {sorted(self.guard.named)}")
        finally:
            self.world.end()

    def _created(self, place: str) -> float:
        return self.world.versions[f"{ROOT}{place}/{COMMIT_KEY}"][-1].at_s

    def _remove_all(self, places: Sequence[str]) -> None:
        left = list(places)
        while left:
            before = list(left)
            for place in before:
                try:
                    ckpt.remove(f"simulated://{ROOT}{place}")
                    left.remove(place)
                except StillReferred:
                    pass
            if left == before:
                raise Violation(f"refer to each other, or to what is gone: {left}")

    def _collect(self, model: Model) -> None:
        """Collect twice: what is collected may have held something."""
        for number in range(2):
            self.world.settle(model.late_s + model.visibility_s + model.list_lag_s + LONG_S)
            steps: list[Step] = [("gc", place, ()) for place in PLACES]
            self.world.start(f"gc at the end {number}", "new", partial(self.carry_out, steps))
            self.world.run()

    def _assert_no_leak(self) -> None:
        kept = {f"{place}/{key}" for place in self.guard.named for key in (COMMIT_KEY, ".metadata")}
        ids = {}
        for place, objects in self.guard.named.items():
            kept |= objects.keys()
            data = self.world.truth(f"{ROOT}{place}/{COMMIT_KEY}")
            assert data is not None
            ids[place] = decode_commit(data, url=place, key=COMMIT_KEY).id
        stems = {name.rpartition(".")[0].removesuffix("-0") for name in kept}
        for stored in list(self.world.versions):
            data, name = self.world.truth(stored), stored.removeprefix(ROOT)
            if data is None or name.endswith("/") or name in kept:
                continue
            if name.endswith(".pin"):
                pin = decode_pin(data, url="", key=name)
                if ids.get(pin.name) == pin.id:
                    continue
            if name.rpartition(".")[0].removesuffix("-0") not in stems:  # an index has the stem of a manifest
                raise Violation(f"leaked: {name}")


def draw(seed: int) -> References:
    """Draw what happens from a seed: a model, faults, processes with steps."""
    choices = Seeded(seed)
    chance = choices.random
    base = chance.choice((PROMPT, PROMPT, MOUNT, OLD_S3))
    faults = {
        fault: chance.choice((0.01, 0.03, 0.1))
        for fault in chance.sample(FAULTS[1:], chance.randint(1, 3) if chance.random() < 0.7 else 0)
    }
    model = replace(
        base, faults=faults, late_s=chance.choice((1.0, 100.0)), stall_s=chance.choice((5.0, 1000.0))
    )
    return References(choices, model)


def run(seed: int) -> Counter[str]:
    """Run and judge the schedule of a seed. Raises Violation, naming it."""
    simulation = draw(seed)
    chance = random.Random(seed)
    with simulated_storage(simulation.world):
        try:
            simulation.alone(("save", "a", ()))
            if chance.random() < 0.7:
                simulation.alone(("save", "b", ("a",)))
            if chance.random() < 0.8:
                simulation.world.settle(LONG_S)  # what is there is old
            for number in range(chance.randint(2, 4)):
                simulation.start(f"p{number}", *_steps(chance))
            simulation.judge()
        except Violation as error:
            raise Violation(f"seed {seed}: {error}") from error
    return _counted(simulation)


def _counted(simulation: References) -> Counter[str]:
    total = Counter(simulation.outcomes)
    total["schedules"] += 1
    total["commits"] += simulation.guard.commits
    total["commits that refer to others"] += simulation.guard.referring
    total["faults"] += sum(simulation.world.counts.values())
    return total


def _steps(chance: random.Random) -> Iterator[Step]:
    for _ in range(chance.randint(1, 3)):
        verb = chance.choices(("save", "remove", "gc"), (5, 4, 2))[0]
        place = chance.choice(PLACES)
        others = [other for other in PLACES if other != place]
        bases = tuple(sorted(chance.sample(others, chance.choices((0, 1, 2), (1, 5, 2))[0])))
        yield verb, place, bases if verb == "save" else ()


def raced(choices: Choices, model: Model, *processes: Sequence[Step], before: Sequence[Step]) -> References:
    """Carry out `before`, wait until all is old, let processes race, and judge."""
    simulation = References(choices, model)
    with simulated_storage(simulation.world):
        simulation.alone(*before)
        simulation.world.settle(LONG_S)
        for number, steps in enumerate(processes):
            simulation.start(f"p{number}", *steps)
        simulation.judge()
    return simulation


def all_schedules(race: str, model: Model, deviations: int, *, lag: float = 0.0) -> Counter[str]:
    """Run and judge every schedule of a race with at most `deviations` from the ordinary."""
    before, processes = RACES[race]
    total: Counter[str] = Counter()
    for choices in Exhaustive.all(deviations, usual_fraction=lag):
        try:
            total += raced(choices, model, *processes, before=before).outcomes
        except Violation as error:
            raise Violation(f"decisions {choices.path}: {error}") from error
        total["schedules"] += 1
    return total
