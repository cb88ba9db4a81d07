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
from ckpt.local_first import drain_process, holdings, partners, room, saving
from ckpt.local_first.drain_process import STATUS
from ckpt.local_first.loading import load_near
from ckpt.testing.choices import Exhaustive
from ckpt.trainer_integration import keeping
from ckpt.trainer_integration.run import nearest
from simulation.simulated_history import Violation
from simulation.simulated_local_first import RUN, Plan, Simulation, all_schedules, draw, run
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


def test_some_seeded_schedules() -> None:
    total = total_of(range(20))
    assert total["commits: durable"] > 30
    assert total["restored"] > 20


@pytest.mark.long
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


def until_caught(count: int = 400) -> Callable[[], None]:
    def work() -> None:
        for seed in range(count):
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


def _by_clock(self: Any, checkpoints: Sequence[Any], now_s: float) -> dict[int, str]:
    newest = sorted(checkpoints, key=lambda each: each.saved_at_s)[-self.count :]
    return {checkpoint.step: "of the last" for checkpoint in newest}


_make_room, _round = drain._Drainer._make_room, drain._Drainer._round
_look_twice = "if coordinator.previous == commit:"

_SAID = drain_process.DrainState(id="", state="durable")

Change = tuple[object, str, Any]
BROKEN: dict[str, tuple[Sequence[Change], Callable[[], object]]] = {
    "a commit before all ranks wrote": ([(saving, "_save_to", _commits_first)], until_caught()),
    "a manifest is copied before its data": ([(partners, "put_once", _manifest_first)], until_caught()),
    "a file of the right name is taken for whole": (
        [
            (carry.Carrier, "_carry", mutated(
                carry.Carrier._carry, "if sizes.get(file.key) == file.size_bytes:", "if file.key in sizes:"
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
    "retention goes by clocks": ([(keeping._Last, "keeps", _by_clock)], until_caught()),
    "an earlier save replaces a later one": ([(carry, "_check_later", lambda *_: None)], until_caught(1500)),
    "a commit before all objects are there": ([(carry, "missing_object", lambda *_: None)], until_caught()),
    "what another node has committed meanwhile is replaced": (
        [(carry.Carrier, "carry", mutated(carry.Carrier.carry, _look_twice, "if False:"))], until_caught(),
    ),
    "who carries is chosen anew, and not looked at": (
        [(drain_process, "_carry", mutated(drain_process._carry, ' and config.get("share") is None', ""))],
        until_caught(),
    ),
    "the newest is carried first": (
        [(drain._Drainer, "_round", mutated(_round, "key=lambda each: each.order)", "key=lambda each: each.order)[::-1]"))],
        until_caught(),
    ),
    "only the newest is completed": (
        [(nearest.Nearest, "merged", mutated(nearest.Nearest.merged, "is_completed=True)\n            break", "is_completed=True)\n        break"))],
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
