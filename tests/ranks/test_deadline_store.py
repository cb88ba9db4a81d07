"""Every operation of a store is bounded by the deadline, or named here as one that is not."""

from __future__ import annotations

import ast
import gc
import inspect
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.backends import memory
from ckpt.backends.base import ObjectStat, RawRequests, Store, put_bytes, read_bytes
from ckpt.backends.bodies import BytesBody
from ckpt.backends.cancellable_reads import Reads
from ckpt.backends.memory import MemoryStore
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore, WrappedStore
from ckpt.consistency import environment
from ckpt.consistency.environment import Environment
from ckpt.draining.unfinished import NoNote
from ckpt.errors import ConfigurationError, StorageError, StorageUnavailable
from ckpt.ranks.deadline_store import DeadlineStore
from ckpt.ranks.progress import Progress

LIMIT_S = 0.2

BOUNDED: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("k", BytesBody(b"x")),
    "put_resumable": lambda store: store.put_resumable("k", BytesBody(b"x"), NoNote()),
    "read_into": lambda store: store.read_into("k", 0, [memoryview(bytearray(1))]),
    "read_version": lambda store: store.read_version(ObjectStat("k", 1), 0, [memoryview(bytearray(1))]),
    "read_whole": lambda store: store.read_whole("k", lambda size: None),
    "stat": lambda store: store.stat("k"),
    "list": lambda store: list(store.list()),
    "folders": lambda store: list(store.folders()),
    "delete": lambda store: store.delete(["k"]),
    "prepare": lambda store: store.prepare("d"),
    "abandon": lambda store: store.abandon(),
    "remove_empty": lambda store: store.remove_empty(),
    "root_is_object": lambda store: store.root_is_object(),
    "links": lambda store: list(store.links()),
    "open_link": lambda store: store.open_link("k"),
    "root_is_link": lambda store: store.root_is_link(),
    "unlink_root": lambda store: store.unlink_root(),
    "free_bytes": lambda store: store.free_bytes(),
    "raw_requests": lambda store: store.raw_requests(),
    "parent": lambda store: store.parent(),
}
BOUNDED_REQUESTS: dict[str, Callable[[RawRequests], object]] = {
    "put": lambda raw: raw.put("k", BytesBody(b"x")),
    "begin": lambda raw: raw.begin("k"),
    "send_part": lambda raw: raw.send_part("k", "id", 1, BytesBody(b"x")),
    "uploads": lambda raw: raw.uploads("k"),
    "abort": lambda raw: raw.abort("k", "id"),
    "setting": lambda raw: raw.setting("lifecycle"),
}
NOT_BOUNDED = {
    "capabilities": "known without asking the storage",
    "reads": "a list in memory; whether there is one is asked once, when the store is wrapped",
    "retries": "a counter in memory",
    "keeps_versions": "a flag in memory",
    "close": "waits for running operations, but not for those that were given up",
}


def operations_of(contract: type) -> set[str]:
    """List the methods and properties of a contract that are not private."""
    return {name for name in vars(contract) if not name.startswith("_") and name not in DATA}


DATA = {"url", "threads", "directory", "part_size_bytes", "bucket_url", "open_parent"}


class Hung:
    """A store and a server; no operation returns until it is freed."""

    def __init__(self, freed: threading.Event) -> None:
        self.url, self.threads, self.directory, self.bucket_url = "hung://", 1, None, "hung"
        self.reads, self.retries, self.freed = Reads(), 0, freed

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        def wait(*_: Any, **__: Any) -> Any:
            self.freed.wait()
            return []

        return wait


@pytest.fixture
def hung() -> Iterator[DeadlineStore]:
    freed = threading.Event()
    yield DeadlineStore(Hung(freed), Progress(), LIMIT_S)  # type: ignore[arg-type]
    freed.set()


def test_every_operation_is_bounded_or_named() -> None:
    assert operations_of(Store) == BOUNDED.keys() | NOT_BOUNDED.keys()
    assert operations_of(RawRequests) == BOUNDED_REQUESTS.keys() | {"learn", "name_of", "checksum"}, (
        "these send nothing"
    )


@pytest.mark.parametrize("operation", BOUNDED)
def test_an_operation_that_hangs_is_given_up(operation: str, hung: DeadlineStore) -> None:
    with pytest.raises(StorageUnavailable, match="given up after 0 s without progress"):
        BOUNDED[operation](hung)
    hung.close()


@pytest.mark.parametrize("operation", BOUNDED_REQUESTS)
def test_a_raw_request_that_hangs_is_given_up(operation: str, hung: DeadlineStore) -> None:
    inner: Any = hung._inner
    inner.raw_requests = lambda: inner
    raw = hung.raw_requests()
    assert raw is not None
    with pytest.raises(StorageUnavailable, match="given up after 0 s without progress"):
        BOUNDED_REQUESTS[operation](raw)


@pytest.mark.parametrize("operation", BOUNDED)
def test_nothing_is_carried_out_after_a_failure_elsewhere(operation: str, hung: DeadlineStore) -> None:
    hung._progress.given_up = "rank 1 says: no"
    with pytest.raises(StorageError, match="not carried out: rank 1 says: no") as caught:
        BOUNDED[operation](hung)
    assert caught.value.settled


def test_a_mount_that_hangs_when_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    monkeypatch.setattr(os.path, "realpath", lambda path: freed.wait() and path)
    with pytest.raises(StorageUnavailable, match="without progress: opening"):
        DeadlineStore(PosixStore(str(tmp_path)), Progress(), LIMIT_S)
    freed.set()


def test_an_interrupt_while_the_thread_starts_waits_for_the_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cleans up after the interrupt shall not meet an operation that still writes."""

    def interrupted(work: Callable[[], object], name: str) -> None:
        start_thread(work, name)
        raise KeyboardInterrupt

    store = DeadlineStore(MemoryStore("memory://interrupted"), Progress(), 60)
    start_thread = environment.start_thread
    monkeypatch.setattr(environment, "start_thread", interrupted)
    freed = threading.Event()
    written = []

    def write(_: object) -> None:
        freed.wait()
        written.append("k")

    with pytest.raises(KeyboardInterrupt):
        store.run("writing", "k", write, cancel=freed.set)
    freed.set()
    assert written == ["k"]


class Clock(Environment):
    """Time that passes when an operation takes it, not while this machine is busy with others."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with environment.replaced(clock):
        yield clock


class Slow(MemoryStore):
    """Takes its time for each object it lists, and counts them."""

    clock: Clock
    listed = 0

    def list(self, prefix: str = "") -> Iterator[Any]:
        for stat in super().list(prefix):
            self.clock.now_s += LIMIT_S / 4
            self.listed += 1
            yield stat


@pytest.fixture
def slow(clock: Clock) -> Iterator[Slow]:
    store = Slow("memory://slow")
    store.clock = clock
    for number in range(9):
        put_bytes(store, f"{number}/k", b"x")
    yield store
    memory.clear("memory://slow")


def test_a_slow_listing_is_progress(slow: Slow) -> None:
    store = DeadlineStore(slow, Progress(), LIMIT_S)
    assert [stat.key for stat in store.list()] == [f"{number}/k" for number in range(9)]
    assert list(store.folders()) == [str(number) for number in range(9)]


def test_a_listing_stays_lazy(slow: Slow) -> None:
    store = DeadlineStore(slow, Progress(), LIMIT_S)
    listing = store.list()
    assert slow.listed == 0
    assert next(listing).key == "0/k"
    assert slow.listed == 1


def test_a_read_that_cannot_be_cancelled_takes_as_long_as_it_takes() -> None:
    """Also that of a whole object: a large index from a slow place is no storage that hangs."""

    class Reading(MemoryStore):
        def read_into(self, key: str, offset: int, buffers: Any) -> None:
            time.sleep(3 * LIMIT_S)
            super().read_into(key, offset, buffers)

    store = DeadlineStore(Reading("memory://reading"), Progress(), LIMIT_S)
    assert store.reads is None
    put_bytes(store, "k", b"x")
    assert read_bytes(store, "k") == b"x"
    memory.clear("memory://reading")


def test_choosing_what_to_abandon_is_progress(clock: Clock) -> None:
    asked: list[str] = []

    class Unfinished(MemoryStore):
        def abandon(self, prefix: str = "", *, choose: Any = None) -> int:
            def slowly() -> Iterator[bool]:
                for stat in self.list(prefix):
                    clock.now_s += LIMIT_S / 4
                    yield choose(stat)

            return sum(slowly())

    inner = Unfinished("memory://unfinished")
    for number in range(8):
        put_bytes(inner, str(number), b"x")
    store = DeadlineStore(inner, Progress(), LIMIT_S)
    assert store.abandon(choose=lambda stat: not asked.append(stat.key)) == 8  # type: ignore[func-returns-value]
    assert len(asked) == store.abandon() == 8
    memory.clear("memory://unfinished")


# -- wrappers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_that_looks_at_reads_looks_at_those_of_whole_objects_too() -> None:
    roots, found = (Path(ckpt.__file__).parent, Path(memory.__file__).parent), 0
    for path in itertools.chain.from_iterable(root.rglob("*.py") for root in roots):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "WrappedStore" in {
                ast.unparse(base) for base in node.bases
            }:
                names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                assert ("read_into" in names) == ("read_whole" in names), f"{path}: {node.name}"
                found += 1
    assert found >= 5


def test_no_wrapper_forgets_an_operation() -> None:
    assert operations_of(Store) <= vars(WrappedStore).keys()
    for wrapper in (PrefixStore, DeadlineStore):
        assert issubclass(wrapper, WrappedStore)
        for name in operations_of(Store):
            method = getattr(wrapper, name)
            if callable(method):
                assert inspect.signature(method) == inspect.signature(getattr(Store, name)), name


class Recording:
    """Notes each call, with its arguments."""

    url, threads, directory, reads, retries = "record://root/", 3, "/root", None, 7
    part_size_bytes = 5

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, *(each for each in arguments if not isinstance(each, NoNote))))
            return iter(())

        return note


def test_the_parent_is_bounded_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    parent = DeadlineStore(open_store(tmp_path / "a"), Progress(), LIMIT_S, own_memory=True).parent()
    assert isinstance(parent, DeadlineStore)
    put_bytes(parent, "b/k", b"x")
    assert (tmp_path / "b" / "k").read_bytes() == b"x"
    with pytest.raises(ConfigurationError):
        PosixStore(str(tmp_path)).parent()  # nobody has said how


def test_the_parent_of_a_prefix() -> None:
    inner = open_store("memory://parents/runs")
    put_bytes(inner, "run/a/k", b"x")
    one = PrefixStore(inner, "run/a").parent()
    assert read_bytes(PrefixStore(one, "a"), "k") == b"x"
    assert one.parent().url == "memory://parents/runs"
    assert one.parent().parent().url == "memory://parents"
    assert PrefixStore(inner, "").parent().url == "memory://parents"
    with pytest.raises(ConfigurationError, match="no folder"):
        one.parent().parent().parent()
    memory.clear("memory://parents")


def test_a_prefix_is_put_before_every_key() -> None:
    inner = Recording()
    store = PrefixStore(inner, "a/b")  # type: ignore[arg-type]
    assert (store.url, store.directory, store.retries) == ("record://root/a/b", "/root/a/b", 7)
    assert (store.threads, store.part_size_bytes) == (3, 5)
    body, buffers = BytesBody(b"x"), [memoryview(bytearray(1))]
    store.put("k", body)
    store.put_resumable("k", body, NoNote())
    store.read_into("k", 5, buffers)
    with pytest.raises(TypeError):  # the answer is not an ObjectStat
        store.stat("k")
    assert [*store.list("p"), *store.folders("p/")] == []
    store.delete([])
    store.prepare("")
    store.prepare("p")
    store.abandon("p")
    store.remove_empty()
    store.close()
    assert store.raw_requests() is None
    assert [call for call in inner.calls if call[0] != "delete"] == [
        ("put", "a/b/k", body),
        ("put_resumable", "a/b/k", body),
        ("read_into", "a/b/k", 5, buffers),
        ("stat", "a/b/k"),
        ("list", "a/b/p"),
        ("folders", "a/b/p/"),
        ("prepare", "a/b"),
        ("prepare", "a/b/p"),
        ("abandon", "a/b/p"),
        ("remove_empty", "a/b"),
    ]


def test_an_error_keeps_nothing_that_its_callers_hold() -> None:
    store, held = DeadlineStore(MemoryStore("memory://errors"), Progress(), 60.0), threading.Event()
    gone = weakref.ref(held)

    def look(held: threading.Event) -> None:
        try:
            store.stat("missing")
        except StorageError:
            return
        pytest.fail(f"nothing was missing; {held}")

    gc.disable()
    try:
        look(held)
        del held
        assert gone() is None
    finally:
        gc.enable()
        store.close()
