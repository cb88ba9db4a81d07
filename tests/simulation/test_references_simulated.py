"""Saves that name bytes of others, removals and gc in every order, with faults and lags.

What a committed checkpoint names is there at every moment; in the end nothing is left that nobody names.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from ckpt.backends.base import Store, put_bytes
from ckpt.backends.wrapper import PrefixStore
from ckpt.errors import BaseGone
from ckpt.format.names import pin_key
from ckpt.format.records import BaseRef, read_commit
from ckpt.testing.choices import Exhaustive
from ckpt.testing.simulated_objects import Model
from ckpt.testing.simulator import FAULTS
from ckpt.tools import gc as gc_module
from ckpt.tools import remove as remove_module
from ckpt.writing.pins import GRACE_S, HeldBases, Pin, PinReader, Referrers
from simulation.simulated_history import Violation
from simulation.simulated_jobs import simulated_storage
from simulation.simulated_references import (
    GC_A,
    LONG_S,
    RACES,
    REMOVE_A,
    REMOVE_B,
    SAVE_A,
    SAVE_B,
    SAVE_C,
    References,
    Step,
    all_schedules,
    run,
)
from simulation.simulated_schedules import MOUNT, OLD_S3, PROMPT, with_faults


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# -- every schedule up to a bound ------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("race", "deviations"), [*((race, 1) for race in RACES), ("a removal", 2), ("a replacement", 2)]
)
def test_every_order(race: str, deviations: int) -> None:
    total = all_schedules(race, PROMPT, deviations)
    assert total["schedules"] > 5


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS[1:])
@pytest.mark.parametrize("race", RACES)
def test_a_fault_at_every_request(race: str, fault: str) -> None:
    assert all_schedules(race, with_faults(PROMPT, fault), 1)["schedules"] > 15


@pytest.mark.long
def test_two_faults() -> None:
    """`simulate.py --references --deviations 2` does this for every race and fault."""
    assert all_schedules("a removal", with_faults(PROMPT, "stall"), 2)["schedules"] > 200


def test_a_crash_or_a_stall_at_every_request() -> None:
    total = sum(
        (all_schedules("a removal", with_faults(PROMPT, fault), 1) for fault in ("crash", "stall")), Counter()
    )
    assert total["save: BaseGone"] > 5
    assert total["remove: StillReferred"] > 5


@pytest.mark.long
@pytest.mark.parametrize("lag", [0.0, 1.0], ids=["some lags", "some no lag"])
@pytest.mark.parametrize("model", [MOUNT, OLD_S3], ids=["mount", "old s3"])
@pytest.mark.parametrize("race", RACES)
def test_every_visibility(race: str, model: Model, lag: float) -> None:
    assert all_schedules(race, model, 1, lag=lag)["schedules"] > 15


# -- processes that stall for longer than a pin counts --------------------------------------------------


def stalled(steps: Sequence[Step], others: Sequence[Step], before: Sequence[Step]) -> tuple[int, set[str]]:
    """Have a process stall at each of its requests, for longer than a pin counts, while others go on.

    Returns the number of schedules, and the requests at which that is too long.
    """
    schedules, too_long = 0, set[str]()
    for choices in Exhaustive.all(1):
        simulation = References(choices, replace(PROMPT, faults={"stall": 1.0}, stall_s=2 * LONG_S))
        world = simulation.world
        with simulated_storage(world):
            try:
                simulation.alone(*before)
                world.settle(LONG_S)
                world.trace = []
                zombie = simulation.start("zombie", *steps)
                world.run(until=lambda: zombie.stalled or zombie.done)  # noqa: B023 (called at once)
                world.adopt(PROMPT)
                request = world.trace[-1].partition(": ")[2]
                if zombie.stalled:
                    world.settle(GRACE_S + 60.0)
                simulation.start("other", *others)
                simulation.judge()
            except Violation:
                too_long.add(request)
            finally:
                world.end()
        schedules += 1
    return schedules, too_long


def test_a_save_that_stalls_for_days_looks_again() -> None:
    """Only while its commit record itself is on its way nothing can be done any more."""
    schedules, too_long = stalled([SAVE_B], [REMOVE_A, GC_A], [SAVE_A])
    assert schedules > 15
    assert too_long == {"put commit.json STALL"}


@pytest.mark.long
def test_a_removal_that_stalls_for_days() -> None:
    assert stalled([REMOVE_A], [SAVE_B, SAVE_C, GC_A], [SAVE_A])[1] == set()
    assert stalled([REMOVE_B], [("save", "c", ("a", "b")), GC_A], [SAVE_A, SAVE_B])[1] == set()


@pytest.mark.long
def test_gc_that_stalls_for_days() -> None:
    assert stalled([GC_A], [SAVE_B, SAVE_A, SAVE_C, REMOVE_A], [SAVE_A])[1] == set()
    assert stalled([GC_A], [SAVE_C, REMOVE_B, REMOVE_A], [SAVE_A, SAVE_B])[1] == set()


def gc_begun_before_all() -> int:
    """Have gc stall at each request; meanwhile a removal looks for pins, a save puts one, and the removal goes on."""
    schedules = 0
    for choices in Exhaustive.all(1):
        simulation = References(choices, replace(PROMPT, faults={"stall": 1.0}, stall_s=200.0))
        world = simulation.world
        with simulated_storage(world):
            simulation.alone(SAVE_A)
            world.settle(LONG_S)
            collector = simulation.start("gc", GC_A)
            world.run(until=lambda: collector.stalled or collector.done)  # noqa: B023 (called at once)
            world.adopt(PROMPT)
            world.trace = []
            removal = simulation.start("removal", REMOVE_A)
            world.run(until=lambda: "delete .metadata" in "".join(world.trace or ()) or removal.done)  # noqa: B023
            removal.wakes_at_s = world.now_s + 50.0
            save = simulation.start("save", SAVE_B)
            world.run(until=lambda: ".pin" in "".join(world.trace or ()) or save.done)  # noqa: B023
            world.step(save)  # it looks
            world.step(save)
            save.wakes_at_s = world.now_s + 400.0
            simulation.judge()
        schedules += 1
    return schedules


@pytest.mark.long
def test_gc_that_began_before_a_removal_and_a_save() -> None:
    assert gc_begun_before_all() > 5


# -- by chance -------------------------------------------------------------------------------------

SCHEDULES = 5_000
CHUNKS = 4


def test_some_seeded_schedules() -> None:
    total = sum(map(run, range(40)), Counter[str]())
    assert total["commits that refer to others"] > 20


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_seeded_schedules(chunk: int) -> None:
    total = sum(map(run, range(chunk, SCHEDULES, CHUNKS)), Counter[str]())
    assert total["commits that refer to others"] > 500
    assert total["faults"] > 500
    for outcome in (
        "removed, objects stay",
        "save: BaseGone",
        "remove: StillReferred",
        "save: StillReferred",
    ):
        assert total[outcome] > 5, outcome


# -- these checks can fail ----------------------------------------------------------------------------


def _pin_after_the_look(self: HeldBases, owner: Store, base: BaseRef, number: int) -> None:
    commit = read_commit(owner)
    if commit is None or commit.record.id != base.id:
        raise BaseGone("gone")
    put_bytes(owner, pin_key(self._record.id, number), self._pin(base.owner))


def _no_look(self: HeldBases, owner: Store, base: BaseRef, number: int) -> None:
    put_bytes(owner, pin_key(self._record.id, number), self._pin(base.owner))


def _by_age(self: PinReader, pin: Pin) -> bool:
    return (pin.modified_at_s or 0.0) >= self._now() - self._grace_s


_unreferred = gc_module._Collector._unreferred


def _only_before(self: gc_module._Collector, store: Store, path: str, stats: Any, found: Any) -> Any:
    return _unreferred(self, store, path, stats, found) if isinstance(store, PrefixStore) else stats


def _chance() -> None:
    for seed in range(300):
        run(seed)


BROKEN: dict[str, tuple[object, str, Any, Callable[[], object]]] = {
    "a removal looks for pins only before": (
        remove_module, "_late_referrers", lambda *_: Referrers(), _chance,
    ),
    "the pin comes after the look": (
        HeldBases, "_hold_one", _pin_after_the_look,
        lambda: all_schedules("a removal", with_faults(PROMPT, "stall"), 1),
    ),
    "a save does not look": (HeldBases, "_hold_one", _no_look, _chance),
    "a save puts no pin": (HeldBases, "_hold_one", lambda *_: None, _chance),
    "a removal does not wait for pins": (remove_module, "wait_for_pins", lambda _: None, _chance),
    "a pin counts only while it is young": (PinReader, "_counts", _by_age, _chance),
    "gc looks for pins only before": (
        gc_module._Collector, "_unreferred", _only_before,
        gc_begun_before_all,
    ),
    "who replaces a checkpoint does not look": (PinReader, "look", lambda *_, **__: Referrers(), _chance),
    "a save that stalls does not look again": (
        HeldBases, "_check", lambda _: None, lambda: stalled_or_raise(),
    ),
}  # fmt: skip


def stalled_or_raise() -> None:
    _, too_long = stalled([SAVE_B], [REMOVE_A, GC_A], [SAVE_A])
    if too_long != {"put commit.json STALL"}:
        raise Violation(f"stalled too long at {too_long}")


@pytest.mark.long
@pytest.mark.parametrize(("where", "name", "other", "work"), BROKEN.values(), ids=BROKEN)
def test_a_protocol_without_one_of_its_steps_is_caught(
    where: object, name: str, other: Any, work: Callable[[], object]
) -> None:
    with mock.patch.object(where, name, other), pytest.raises(Violation):
        work()
