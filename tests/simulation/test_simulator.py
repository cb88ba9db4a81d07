"""Test that simulated storage keeps the stores' contract, and lies only as its model says."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckpt.backends.base import PutMode, Store, exists, put_bytes, read_bytes
from ckpt.consistency import environment
from ckpt.errors import AlreadyExists, NotFound, StorageError, Truncated
from ckpt.testing import StoreTests
from ckpt.testing.choices import Choices, Exhaustive, Seeded
from ckpt.testing.simulated_objects import Model
from ckpt.testing.simulated_store import SimulatedStore
from ckpt.testing.simulator import FAULTS, Escaped, World
from ckpt.testing.virtual_time import Process, Stuck

_worlds: dict[str, World] = {}


class TestSimulated(StoreTests):
    """Without faults it is a store like any other."""

    model = Model()

    @pytest.fixture(autouse=True)
    def _worlds_are_freed(self) -> Iterator[None]:
        yield
        _worlds.clear()

    def make_store(self) -> Store:
        url = f"simulated://{uuid.uuid4().hex}/root"
        _worlds[url] = World(Seeded(1), self.model)
        return _PicklableStore(_worlds[url], "node", url)

    def raw_get(self, store: Store, key: str) -> bytes | None:
        return _worlds[store.url].truth(f"{store.url.partition('://')[2]}/{key}")

    def raw_put(self, store: Store, key: str, data: bytes) -> None:
        _worlds[store.url].change("outside", f"{store.url.partition('://')[2]}/{key}", data)

    def raw_pending(self, store: Store) -> int:
        return len(_worlds[store.url].uploads)


class TestSimulatedInParts(TestSimulated):
    model = Model(multipart=True, directories=True)


class _PicklableStore(SimulatedStore):
    def __reduce__(self) -> Any:
        return _reopened, (self.url,)


def _reopened(url: str) -> Store:
    return _PicklableStore(_worlds[url], "node", url)


# -- the lies --------------------------------------------------------------------------------------


class Always(Choices):
    """Use up the whole of each bound, send in parts, and bring one fault at the request named."""

    def __init__(self, request: str = "", fault: str = "none", fraction: float = 1.0) -> None:
        self.request, self.fault, self._fraction = request, fault, fraction

    def pick(self, question: str, weights: Sequence[float]) -> int:
        if question == "in parts":
            return 1
        if question != self.request:
            return 0
        self.request = ""
        return FAULTS.index(self.fault)

    def fraction(self, question: str) -> float:
        return self._fraction


def world_of(choices: Choices | None = None, **model: Any) -> tuple[World, SimulatedStore, SimulatedStore]:
    world = World(choices or Always(), Model(**model))
    return world, SimulatedStore(world, "a"), SimulatedStore(world, "b")


def failing(
    request: str, fault: str, act: Callable[[SimulatedStore], None], **model: Any
) -> tuple[World, Process]:
    """Run a process that acts and meets that fault, in a world of its own."""
    world = World(Always(request, fault), Model(faults={fault: 1.0}, late_s=10.0, stall_s=50.0, **model))
    process = world.start("p", "a", lambda: act(SimulatedStore(world, "a")))
    world.run()
    return world, process


def test_others_see_later() -> None:
    world, a, b = world_of(create_lag_s=10.0, overwrite_lag_s=20.0, delete_lag_s=30.0, list_lag_s=40.0)
    put_bytes(a, "k", b"one")
    assert read_bytes(a, "k") == b"one"
    assert not exists(b, "k")
    world.settle(10.0)
    assert read_bytes(b, "k") == b"one"
    assert list(b.list()) == []
    put_bytes(a, "k", b"second")
    world.settle(19.0)
    assert read_bytes(b, "k") == b"one"
    world.settle(1.0)
    assert read_bytes(b, "k") == b"second"
    a.delete(["k"])
    world.settle(29.0)
    assert exists(b, "k")
    world.settle(1.0)
    assert not exists(b, "k")
    assert not b.capabilities.cross_client_visibility


def test_what_was_missed_stays_missing() -> None:
    world, a, b = world_of(negative_cache_s=10.0)
    assert not exists(b, "k")
    put_bytes(a, "k", b"x")
    assert not exists(b, "k")
    world.settle(10.0)
    assert exists(b, "k")


def test_sizes_are_remembered() -> None:
    world, a, b = world_of(attribute_cache_s=10.0)
    put_bytes(a, "k", b"long enough")
    assert b.stat("k").size_bytes == 11
    put_bytes(a, "k", b"short")
    assert b.stat("k").size_bytes == 11
    with pytest.raises(Truncated):
        read_bytes(b, "k")
    world.settle(10.0)
    assert read_bytes(b, "k") == b"short"


def test_a_directory_that_is_not_seen() -> None:
    world, a, b = world_of(directories=True, create_lag_s=10.0)
    a.prepare("d")
    with pytest.raises(NotFound, match="no such directory"):
        b.put_into("d/k", b"x")
    put_bytes(b, "d/k", b"x")  # makes it, in its own view
    world.settle(10.0)
    a.put_into("d/j", b"x")


@pytest.mark.parametrize(
    ("fault", "settled", "now", "later"),
    [
        ("lost request", False, None, None),
        ("lost reply", False, b"x", b"x"),
        ("late", False, None, b"x"),
        ("refused", True, None, None),
    ],
)
def test_requests_that_fail(fault: str, settled: bool, now: bytes | None, later: bytes | None) -> None:
    world, process = failing("put", fault, lambda store: put_bytes(store, "k", b"x"))
    assert isinstance(process.error, StorageError)
    assert process.error.settled is settled
    assert world.truth("place/k") == now
    world.settle(10.0)
    assert world.truth("place/k") == later
    assert world.counts == {fault: 1}


def test_a_create_that_is_sent_twice_finds_its_own_work() -> None:
    world, process = failing(
        "put", "sent twice", lambda store: put_bytes(store, "k", b"x", mode=PutMode.CREATE)
    )
    assert isinstance(process.error, AlreadyExists)
    assert not process.error.settled
    assert world.truth("place/k") == b"x"


@pytest.mark.parametrize(("request_", "left"), [("begin", 0), ("part", 1), ("complete", 1)])
def test_a_crash_leaves_parts_of_an_upload(request_: str, left: int) -> None:
    def put(store: SimulatedStore) -> None:
        put_bytes(store, "k", b"x")

    world, process = failing(request_, "crash", put, multipart=True)
    assert process.crashed
    assert world.truth("place/k") is None
    assert SimulatedStore(world, "b").abandon() == left
    assert not world.uploads


def test_a_killed_process_does_nothing_more() -> None:
    def act(store: SimulatedStore) -> None:
        try:
            put_bytes(store, "k", b"x")
        finally:
            put_bytes(store, "cleaned-up", b"x")

    world, process = failing("put", "crash", act)
    assert process.crashed
    assert process.done
    assert world.versions == {}


def test_a_zombie_wakes_when_others_have_gone_on() -> None:
    world = World(Always("put", "stall"), Model(faults={"stall": 1.0}, stall_s=50.0))
    seen: list[float] = []

    def act(store: SimulatedStore, data: bytes) -> None:
        put_bytes(store, "k", data)
        seen.append(world.now_s)

    world.start("zombie", "a", lambda: act(SimulatedStore(world, "a"), b"old"))
    world.start("new", "b", lambda: act(SimulatedStore(world, "b"), b"new"))
    world.run()
    assert seen[0] < 50.0 < seen[1]
    assert world.truth("place/k") == b"old"


def test_clocks_differ_and_nothing_sleeps() -> None:
    world = World(Seeded(1), Model(clock_skew_s=100.0))
    clocks: dict[str, float] = {}

    def act(node: str) -> None:
        environment.sleep(3600.0)
        clocks[node] = environment.now()

    with environment.replaced(world):
        for node in ("a", "b"):
            world.start("p", node, lambda node=node: act(node))  # type: ignore[misc]
        world.run()
    assert world.now_s == 3600.0
    assert clocks["a"] != clocks["b"]


def test_waiting_for_each_other_is_noticed() -> None:
    world = World(Seeded(1))
    world.start("p", "a", lambda: world.wait_for(lambda: False, float("inf")))
    with pytest.raises(Stuck, match="p on a"):
        world.run()


def test_requests_of_other_threads_are_not_let_through() -> None:
    """They would meet no fault, and their schedule would not be the same twice."""
    world, store, _ = world_of()
    with ThreadPoolExecutor(1) as pool:
        world.start("p", "a", lambda: pool.submit(exists, store, "x").result())
        with pytest.raises(Escaped, match="p on a: stat x"):
            world.run()


def test_exhaustive_means_every_way() -> None:
    ways = {tuple(choices.pick("x", (1, 1, 0, 1)) for _ in range(3)) for choices in Exhaustive.all(2)}
    of_one, of_two = 3 * 2, 3 * 2 * 2
    assert len(ways) == 1 + of_one + of_two
    assert all(sum(pick != 0 for pick in picks) <= 2 for picks in ways)
