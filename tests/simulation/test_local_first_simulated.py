"""Trainers, carriers and nodes that are killed, lost, damaged, stale: never a wrong restore, nothing durable lost.

`docs/consistency.md` says what is simulated, and how to run more of it.
"""

from __future__ import annotations

import inspect
import logging
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from greenlet import getcurrent

from ckpt.backends.bodies import CheckedBody
from ckpt.backends.wrapper import WrappedStore
from ckpt.draining import carry, drain
from ckpt.errors import CheckpointError
from ckpt.format.run_record import RUN_KEY, RunStamp
from ckpt.local_first import drain_process, holdings, partners, room, saving
from ckpt.local_first.drain_process import STATUS
from ckpt.local_first.loading import load_near
from ckpt.testing.choices import Exhaustive
from ckpt.testing.simulated_objects import Version
from ckpt.testing.simulator import World
from ckpt.trainer_integration.run import history, near_saves, nearest
from simulation.simulated_history import Violation
from simulation.simulated_local_first import RUN, Plan, Simulation, _of_another_job, all_schedules, draw, run
from simulation.simulated_nodes import FAR_NAME

NODES = ("n0", "n1")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def total_of(seeds: Sequence[int]) -> Counter[str]:
    return sum(map(run, seeds), Counter[str]())


# -- every schedule up to a bound --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("copies", [0, 1])
def test_killed_at_every_request(copies: int) -> None:
    """`simulate.py --local-first --deviations 1` tries each kind of kill and the orders, too."""
    total = all_schedules("killed before", copies=copies)  # seconds
    assert total["schedules"] > 100
    assert total["restored"] > 100


# -- by chance -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_some_seeded_schedules() -> None:
    total = total_of(range(20))
    assert total["commits: durable"] > 30
    assert total["restored"] > 20


@pytest.mark.long
@pytest.mark.timeout(900)
def test_seeded_schedules() -> None:
    total = total_of(range(1000, 1600))
    for outcome in (
        "commits: durable",
        "restored",
        "told: passed_over",
        "told: not_local",
        "fate: disk full",
    ):
        assert total[outcome] > 0, outcome


SEEDS_THAT_FAILED = {
    "what another node has committed meanwhile was taken for the checkpoint that is replaced": 36,
    "a node carries what its partner had to carry before, and took it for removed": 4,
    "a file that is too short on another node was no damage, and no older checkpoint was tried": 20460,
    "a checkpoint of another job in the run's folder was restored": 28583,
    "the same, where the run had saved nothing": 37671,
    "a save that was given up replaced the new one of its step": 25114,
    "the newest could not be loaded, and no older one was completed": 29731,
    "a save took the place of a foreign one of its step, and was carried before earlier ones": 27772,
    "a step that was saved again was taken for the earlier one, by a clock that had gone back": 51123,
    "a late put of a commit record brought back one that was removed": 25353,
    "it became durable while it was looked for on the nodes": 68429,
    "a checkpoint was restored whose run no node knew, and the root was silent": 305042,
    "the run's record was damaged before the marker named the run": 309184,
    "the run's record was lost, and a carrier took the run for another one": 302113,
    "damage that a node passed on was blamed on one with an undamaged copy": 500773,
    "an earlier save was committed while a later one was on its way, which was given up": 505469,
    "a carrier did not know what was removed since it began, and committed it again": 506139,
    "a later save, all of which one node carried, was durable first": 507116,
    "the first rank's node had a checkpoint of another job in that folder, and was believed": 1004874,
    "a carrier removed a step from its node that was just saved again": 1006894,
    "nodes that were replaced had a commit record, and did not know its run": 2010927,
    "a step that was saved again while the root was asked about the earlier save was called durable": 3003893,
}


@pytest.mark.parametrize("seed", SEEDS_THAT_FAILED.values(), ids=SEEDS_THAT_FAILED)
def test_seeds_that_failed(seed: int) -> None:
    run(seed)


# -- one scenario each -----------------------------------------------------------------------------------------


def test_ten_minutes_without_an_answer() -> None:
    """Saves go on; afterwards what retention keeps becomes durable, in order."""
    simulation = Simulation(Exhaustive(0), {}, keep=3)
    simulation.world.silences.append((60.0, 660.0))

    def program() -> None:
        simulation.run_job(Plan(NODES, [50.0] * 20))
        simulation.last_job(NODES)

    simulation.run(program)
    steps = [save.step for save in simulation.guard.order]
    assert steps == sorted(steps)
    assert steps[:1] == [1]
    assert {18, 19, 20} <= {*steps}
    assert len(steps) < 20  # what retention would have removed at once was not carried
    assert simulation.outcomes["saved"] == 21
    assert simulation.world.counts["silence"] > 20


def half_sent() -> None:
    """An object in the durable place has its name, and is shorter."""
    simulation = Simulation(Exhaustive(0), {})
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0], waits_s=None))
        world.wait_for(lambda: any(name.endswith(".distcp") for name in world.names(FAR_NAME)), 600.0)
        for carrier in [process for process in world.processes if "carrier" in process.name]:
            world.kill(carrier)
        for name in world.names(FAR_NAME):
            if name.endswith(".distcp"):
                world.change("outside", name, b"short")
        simulation.run_job(Plan(NODES, [], waits_s=600.0))

    simulation.run(program)
    assert not any(save.was_durable for save in simulation.saves)


def test_an_object_that_is_shorter_is_not_taken_for_whole() -> None:
    half_sent()


def test_a_newer_one_that_nobody_completes() -> None:
    """Of two that only some nodes have, the durable place has the rest of the older one."""
    incomplete()


def forget(simulation: Simulation) -> None:
    """Have nothing of what there was become durable."""
    for node in NODES:
        simulation.world.change("outside", f"{node}/{RUN}/{STATUS}", None)
    for save in simulation.saves:
        save.was_durable = simulation.is_durable(save)


def incomplete() -> None:
    simulation = Simulation(Exhaustive(0), {}, keep=9, keep_local=9)
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0] * 3))
        for name in world.names(FAR_NAME):
            step = name.removeprefix(FAR_NAME).partition("/")[0]
            is_of_lost_node = "rank-00001" in name
            if step == "step-00000003" or (step == "step-00000002" and not is_of_lost_node):
                world.change("outside", name, None)
        world.change("outside", f"{FAR_NAME}ckpt-run.json", None)
        forget(simulation)
        world.wipe("n1/")
        simulation.run_job(Plan(NODES, []))
        assert simulation.outcomes["restored"] == 1

    simulation.run(program)


def test_records_that_are_damaged_on_one_node() -> None:
    """Those of another node are the same."""
    simulation = Simulation(Exhaustive(0), {})
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0]))
        world.wipe(FAR_NAME)
        forget(simulation)
        (index,) = (name for name in world.names("n0/") if name.endswith(".index"))
        data = world.truth(index)
        assert data is not None
        world.change("outside", index, data[:-1] + bytes([data[-1] ^ 1]))
        simulation.run_job(Plan(NODES, []))

    simulation.run(program)
    assert simulation.outcomes["restored"] == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "removed"])
@pytest.mark.parametrize("suffix", [".distcp", ".json"])
def test_a_file_that_is_damaged_on_one_node_is_read_from_its_copy(suffix: str, damage: str) -> None:
    simulation = Simulation(Exhaustive(0), {}, copies=1)
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0]))
        world.wipe(FAR_NAME)
        forget(simulation)
        names = [name for name in world.names("n0/") if name.endswith(suffix) and "rank-00000" in name]
        assert names
        for name in names:
            data = world.truth(name)
            assert data is not None
            changed = {"flipped": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "removed": None}
            world.change("outside", name, changed[damage])
        simulation.run_job(Plan(NODES, []))

    simulation.run(program)
    assert simulation.outcomes["restored"] == 1


@pytest.mark.parametrize("order", [("n0", "n1", "n2"), ("n0", "n2", "n1")])
def test_a_damaged_manifest_that_its_node_passes_on(order: Sequence[str]) -> None:
    """It is not blamed on the node that has an undamaged copy, and the index beside it is still read."""
    simulation = Simulation(Exhaustive(0), {}, copies=1)
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(sorted(order), [1.0]))
        world.wipe(FAR_NAME)
        world.change("outside", f"n2/{RUN}/{STATUS}", None)
        forget(simulation)
        (name,) = (n for n in world.names("n0/") if n.endswith(".json") and "/rank-00000/" in n)
        data = world.truth(name)
        assert data is not None
        world.change("outside", name, data[:-1] + bytes([data[-1] ^ 1]))
        simulation.run_job(Plan(order, []))

    simulation.run(program)
    assert simulation.outcomes["restored"] == 1


def test_a_run_that_went_back_and_was_killed_before_that_was_durable() -> None:
    """The nodes know that it went back; the root does not yet."""
    simulation = Simulation(Exhaustive(0), {}, keep=9, keep_local=9)
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0] * 3))
        world.sleep(100.0)
        world.silences.append((world.now_s + 20.0, world.now_s + 5000.0))
        simulation.run_job(Plan(NODES, [30.0], step=1, waits_s=None))
        world.silences.clear()
        simulation.run_job(Plan(NODES, [1.0]))

    simulation.run(program)
    assert [(save.step, save.restored) for save in simulation.saves] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (2, 1),
        (3, 4),
    ]


def two_saves() -> None:
    """A step was saved again, and one node comes back with what it had of the first save."""
    simulation = Simulation(Exhaustive(0), {}, keep=9, keep_local=9)
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0] * 2))
        before = {name: world.truth(name) for name in world.names(f"n1/{RUN}/")}
        simulation.run_job(Plan(NODES, [1.0], step=1))
        world.wipe(f"n1/{RUN}/")
        for name, data in before.items():
            world.change("outside", name, data)
        world.wipe(f"{FAR_NAME}step-00000002/")
        world.change("outside", f"{FAR_NAME}ckpt-run.json", None)
        forget(simulation)
        simulation.run_job(Plan(NODES, [1.0]))

    simulation.run(program)
    assert [(save.step, save.restored) for save in simulation.saves] == [(1, 0), (2, 1), (2, 1), (2, 1)]


def test_two_saves_of_one_step_are_not_mixed() -> None:
    two_saves()


def put_foreign(simulation: Simulation, step: str) -> dict[str, bytes]:
    """Put a checkpoint of another job into the run's folder on each node."""
    files = {
        f"{node}/{RUN}/{name}": data
        for node in NODES
        for name, data in _of_another_job().items()
        if name.startswith(step)
    }
    for name, data in files.items():
        simulation.world.change("outside", name, data)
    return files


@pytest.mark.parametrize("saved_before", [0, 2])
def test_a_checkpoint_of_another_job_is_neither_restored_nor_carried_nor_replaced(saved_before: int) -> None:
    foreign_checkpoint(saved_before)


def foreign_checkpoint(saved_before: int = 2) -> None:
    simulation = Simulation(Exhaustive(0), {}, keep=9)

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0] * saved_before))
        foreign = put_foreign(simulation, "step-00000004")
        simulation.run_job(Plan(NODES, [1.0] * (5 - saved_before)))
        assert {name: simulation.world.truth(name) for name in foreign} == foreign

    simulation.run(program)
    assert [save.step for save in simulation.saves] == [1, 2, 3, 4, 5]
    assert [save.path for save in simulation.saves if save.step == 4] == ["step-00000004.again"]
    assert all(map(simulation.is_durable, simulation.saves))


def test_a_checkpoint_of_any_run_is_not_restored_while_nothing_says_which_run_this_is() -> None:
    run_that_nobody_knows()


def run_that_nobody_knows() -> None:
    """The root gives no answer, and nothing was saved: the restore waits for the root, and then passes it over."""
    simulation = Simulation(Exhaustive(0), {})
    world = simulation.world

    def program() -> None:
        foreign = put_foreign(simulation, "step-00000004")
        world.silences.append((world.now_s, world.now_s + 600.0))
        simulation.run_job(Plan(NODES, [1.0]))
        assert simulation.saves == []
        world.sleep(600.0)
        simulation.run_job(Plan(NODES, [1.0]))
        assert {name: world.truth(name) for name in foreign} == foreign

    simulation.run(program)
    assert [(save.step, save.restored) for save in simulation.saves] == [(1, 0)]
    assert simulation.outcomes["restored"] == 0


def test_a_damaged_record_of_a_run_whose_save_was_broken_off() -> None:
    damaged_record()


def damaged_record() -> None:
    """The job is killed when it has put the run's record; that is damaged then, and the marker says which run it is."""
    simulation = Simulation(Exhaustive(0), {})
    world = simulation.world
    record, killed = f"n0/{RUN}/{RUN_KEY}", list[str]()

    def judge_and_kill(world: World, name: str, before: Version | None, after: Version) -> None:
        judge(world, name, before, after)
        if name == record and not killed:
            killed.append(name)
            for process in [process for process in simulation.world.processes if process.node]:
                simulation.world.kill(process)

    judge = simulation.guard.changed
    simulation.guard.changed = judge_and_kill  # type: ignore[method-assign]

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0]))
        assert simulation.guard.commits["near"] == 0
        world.wipe("n1/")
        data = world.truth(record)
        assert data is not None
        world.change("outside", record, data[:-1])
        foreign = put_foreign(simulation, "step-00000004")
        simulation.run_job(Plan(NODES, [1.0]))
        assert {name: world.truth(name) for name in foreign} == foreign

    simulation.run(program)
    assert simulation.saves[-1].restored == 0


def test_a_clock_that_went_back_keeps_no_save_from_its_place() -> None:
    clock_that_went_back()


def clock_that_went_back() -> None:
    """The disks are full, so the new save goes to the root; then the node comes back that lacks the one given up."""
    simulation = Simulation(Exhaustive(0), {}, keep=9, keep_local=9)
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0] * 2))
        world.silences.append((world.now_s, world.now_s + 400.0))
        simulation.run_job(Plan(NODES, [1.0], waits_s=None))
        for process in [process for process in world.processes if "carrier" in process.name]:
            world.kill(process)
        world.sleep(400.0)
        names = world.names(f"n1/{RUN}/step-00000003/")
        before = {name: world.truth(name) for name in names}
        world.wipe(f"n1/{RUN}/step-00000003/")
        world.skew_s.update(dict.fromkeys(NODES, -7200.0))
        world.room_bytes["n0"] = sum(len(data or b"") for data in before.values())
        simulation.run_job(Plan(NODES, [1.0], step=2))
        world.room_bytes.clear()
        for name, data in before.items():
            world.change("outside", name, data)
        simulation.run_job(Plan(NODES, []))

    simulation.run(program)
    assert [(save.step, save.restored) for save in simulation.saves] == [(1, 0), (2, 1), (3, 2), (3, 2)]
    assert simulation.outcomes["told: not_local"] > 0
    assert simulation.is_durable(simulation.saves[-1])


def test_an_older_one_is_completed_when_the_newest_cannot_be_loaded() -> None:
    simulation = Simulation(Exhaustive(0), {}, keep=9, keep_local=9)
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0] * 3))
        for name in world.names(FAR_NAME):
            if name.endswith(("commit.json", ".metadata", "ckpt-run.json")) or "rank-00000" in name:
                world.change("outside", name, None)  # what is left is the lost node's part
        forget(simulation)
        world.wipe("n1/")
        (damaged,) = (n for n in world.names(f"n0/{RUN}/step-00000003/") if n.endswith("-0.distcp"))
        data = world.truth(damaged)
        assert data is not None
        world.change("outside", damaged, bytes([data[0] ^ 1]) + data[1:])
        simulation.run_job(Plan(NODES, [1.0]))

    simulation.run(program)
    assert [(save.step, save.restored) for save in simulation.saves][3:] == [(3, 2)]


def test_retention_with_clocks_that_went_back() -> None:
    retention_with_clocks()


def retention_with_clocks() -> None:
    simulation = Simulation(Exhaustive(0), {}, keep=2)

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0]))
        simulation.world.skew_s.update(dict.fromkeys(NODES, -7200.0))
        simulation.run_job(Plan(NODES, [1.0, 100.0]))
        simulation.last_job(NODES)

    simulation.run(program)
    assert [save.step for save in simulation.saves] == [1, 2, 3, 4]


def test_nodes_that_come_back_with_an_earlier_save_of_a_step() -> None:
    nodes_with_an_earlier_save()


def nodes_with_an_earlier_save() -> None:
    simulation = Simulation(Exhaustive(0), {}, keep=9, keep_local=9)
    world = simulation.world

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0]))
        world.silences.append((world.now_s, world.now_s + 100.0))
        simulation.run_job(Plan(NODES, [1.0], waits_s=None))
        for process in [process for process in world.processes if "carrier" in process.name]:
            world.kill(process)
        before = {name: world.truth(name) for node in NODES for name in world.names(f"{node}/{RUN}/")}
        world.sleep(100.0)
        simulation.run_job(Plan(NODES, [1.0], step=1))
        for node in NODES:
            world.wipe(f"{node}/{RUN}/")
        for name, data in before.items():
            world.change("outside", name, data)
        simulation.lose()
        simulation.run_job(Plan(NODES, [], waits_s=60.0))

    simulation.run(program)
    assert [(save.step, save.restored) for save in simulation.saves] == [(1, 0), (2, 1), (2, 1)]
    assert simulation.is_durable(simulation.saves[-1])


def test_a_record_that_a_late_put_brought_back_is_removed_again() -> None:
    late_put()


def late_put() -> None:
    simulation = Simulation(Exhaustive(0), {}, keep=1)
    world = simulation.world
    late = f"{FAR_NAME}step-00000001/commit.json"

    def program() -> None:
        simulation.run_job(Plan(NODES, [1.0]))
        record = world.truth(late)
        simulation.run_job(Plan(NODES, [1.0]))
        world.sleep(100.0)
        assert world.names(f"{FAR_NAME}step-00000001/") == []
        world.is_late = True
        world.change("", late, record)
        world.is_late = False
        assert {*simulation.guard.hollow} == {late.rpartition("/")[0]}
        simulation.last_job(NODES)

    simulation.run(program)
    assert [save.restored for save in simulation.saves] == [0, 1, 2]
    assert world.truth(late) is None


# -- these checks can fail -------------------------------------------------------------------------------------


def mutated(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Make a function anew from its text, in which `old` is replaced."""
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(old) == 1, f"{function.__qualname__} does not say {old!r} once any more"
    names: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{text.replace(old, new)}", "mutant", "exec")
    exec(code, function.__globals__, names)  # noqa: S102 (the text is this project's own)
    made: Callable[..., Any] = names[function.__name__]
    return made


def until_caught(count: int = 400, first: int = 0) -> Callable[[], None]:
    def work() -> None:
        for seed in range(first, first + count):
            run(seed)

    return work


class _Later(WrappedStore):
    """Puts everything when it is told to."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.left: list[tuple[str, bytes]] = []

    def put(self, key: str, body: Any, **_: Any) -> None:
        with body.part(0, body.nbytes) as part:
            self.left.append((key, b"".join(part.buffers)))


_save_to, _put_once, _load_near = saving._save_to, carry.put_once, load_near


def _commits_first(place: Any, writer: Any, values: Any, planner: Any, ranks: Any) -> Any:
    if ranks.rank == 0 or not place.on_nodes:
        return _save_to(place, writer, values, planner, ranks)
    inner = writer._store
    writer._store = later = _Later(inner)
    metadata = _save_to(place, writer, values, planner, ranks)
    for key, data in later.left:
        inner.put(key, CheckedBody(data))
    return metadata


_pending: dict[int, list[tuple[Any, str, Any]]] = {}


def _manifest_first(destination: Any, key: str, body: Any) -> None:
    pending = _pending.setdefault(id(getcurrent()), [])
    if not key.endswith(".json"):
        pending.append((destination, key, body))
        return
    _put_once(destination, key, body)
    while pending:
        _put_once(*pending.pop(0))


def _loads_what_is_there(*args: Any, **more: Any) -> Any:
    try:
        return _load_near(*args, **more)
    except CheckpointError:
        return Counter[str]()


def _only_once(completed_by: Callable[..., bool]) -> Callable[..., bool]:
    asked: set[object] = set()

    def asked_first(holding: Any, *args: Any, **more: Any) -> bool:
        asked.add(holding.path)
        return len(asked) == 1 and completed_by(holding, *args, **more)

    return asked_first


_make_room, _round = drain._Drainer._make_room, drain._Drainer._round
_look_twice = "if coordinator.previous == commit:"

_SAID = drain_process.DrainState(id="", state="durable")

Change = tuple[object, str, Any]
BROKEN: dict[str, tuple[Sequence[Change], Callable[[], object]]] = {
    "a commit before all ranks wrote": ([(saving, "_save_to", _commits_first)], until_caught()),
    "a manifest is copied before its data": ([(partners, "put_once", _manifest_first)], until_caught()),
    "a file of the right name is taken for whole": (
        [
            (carry.Carrier, "_send", mutated(
                carry.Carrier._send, "if sizes.get(file.key) == file.size_bytes:", "if file.key in sizes:"
            )),
            (carry, "missing_object", lambda *_: None),
        ],
        half_sent,
    ),
    "what is not durable is dropped": (
        [(drain._Drainer, "_make_room", mutated(_make_room, 'states[number] != "durable" and not', "False and not"))],
        until_caught(),
    ),
    "a full disk drops what is not durable": (
        [(room, "current_status", lambda folder: {f"step-{step:08}": _SAID for step in range(9)})], until_caught(),
    ),
    "a part is restored": (
        [
            (holdings.Holding, "is_whole", property(lambda self: self.owner is not None)),
            (nearest, "load_near", _loads_what_is_there),
        ],
        until_caught(),
    ),
    "two saves of one step are one": (
        [
            (nearest, "holdings", mutated(holdings.holdings, "own[each.path, each.id] =", 'own[each.path, ""] =')),
            (nearest, "load_near", _loads_what_is_there),
        ],
        two_saves,
    ),
    "an earlier save replaces a later one": ([(carry, "_check_later", lambda *_: None)], nodes_with_an_earlier_save),
    "a commit before all objects are there": ([(carry, "missing_object", lambda *_: None)], until_caught()),
    "what another node has committed meanwhile is replaced": (
        [(carry.Carrier, "carry", mutated(carry.Carrier.carry, _look_twice, "if False:"))], until_caught(first=600),
    ),
    "the newest is carried first": (
        [(drain._Drainer, "_round", mutated(_round, "key=lambda each: each.order)", "key=lambda each: each.order)[::-1]"))],
        until_caught(),
    ),
    "a checkpoint of another run counts": (
        [(nearest._Merged, "_is_foreign", lambda *_: False)], foreign_checkpoint,
    ),
    "a save goes by its clock alone": (
        [(near_saves, "RunStamp", lambda run, _: RunStamp(run))], clock_that_went_back,
    ),
    "what was removed is not looked for again": ([(history.History, "_sweep", lambda _: None)], late_put),
    "only the newest is completed": (
        [
            (nearest, "completed_by", _only_once(holdings.completed_by)),
            (nearest._Merged, "_became_durable", lambda *_: None),  # it is carried meanwhile
        ],
        incomplete,
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("changes", "work"), BROKEN.values(), ids=BROKEN)
def test_a_protocol_without_one_of_its_steps_is_caught(
    changes: Sequence[Change], work: Callable[[], object]
) -> None:
    _pending.clear()
    with pytest.MonkeyPatch.context() as patched:
        for where, name, other in changes:
            patched.setattr(where, name, other)
        with pytest.raises(Violation):
            work()


def test_a_seed_is_a_history() -> None:
    traces = []
    for _ in range(2):
        simulation, program = draw(7)
        simulation.world.trace = []
        simulation.run(program)
        traces.append(simulation.world.trace)
    assert traces[0] == traces[1]
    assert traces[0]
