"""The conformance suite of `ckpt.backends.base.Store`, for pytest: what this library relies on, executable.

A store's author subclasses it and runs it:

    class TestMyStore(ckpt.testing.StoreTests):
        def make_store(self, **options):
            return MyStore(fresh_url(), options, threads=4)

        def raw_get(self, store, key):
            ...  # the object's bytes or None, read without going through the store

        def raw_put(self, store, key, data):
            ...

`raw_get` and `raw_put` go around the store under test, so that two errors of it cannot cancel out.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from ckpt.backends.base import MIB, PutMode, Store, exists, put_bytes, read_bytes
from ckpt.backends.bodies import BytesBody, CheckedBody, Part
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    IntegrityError,
    NotFound,
    Truncated,
)

__all__ = ["CheckedBody", "StoreTests"]


T = TypeVar("T")


class _BodyBroke(Exception):
    pass


# What a planner, a full disk or a dying collective raises is not the store's to interpret.
_BODY_ERRORS = [
    _BodyBroke("planner"),
    OSError(errno.ENOSPC, "No space left on device"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    TimeoutError("a collective"),
]


class _BreakingBody(BytesBody):
    """Fails when a part that reaches past `good_bytes` is asked for, as a planner or a full disk would."""

    def __init__(self, data: bytes, good_bytes: int, error: Exception) -> None:
        super().__init__(data)
        self._good_bytes = good_bytes
        self._error = error

    def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
        if stop > self._good_bytes:
            raise self._error
        return super().part(start, stop)


class _ScatteredBody(BytesBody):
    """Hands out many buffers of odd sizes, as the writer does."""

    def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
        return contextlib.nullcontext(Part(list(_pieces(self._view[start:stop]))))


def _pieces(view: memoryview) -> Iterator[memoryview]:
    size, start = 1, 0
    while start < view.nbytes:
        yield view[start : start + size]
        start, size = start + size, min(size * 3 + 1, 5 * MIB)


class StoreTests(ABC):
    """Subclass, implement the three methods, and let pytest collect it."""

    large_bytes = 21 * MIB + 12345
    """Long enough for several parts of the store under test."""

    visibility_timeout_s = 0.0
    """How long this store may take to show in a listing, or to other clients, what was put or deleted."""

    secret_values: Sequence[str] = ()
    """Credentials given to the store, which must appear nowhere."""

    @abstractmethod
    def make_store(self) -> Store:
        """A store with an empty root of its own."""

    @abstractmethod
    def raw_get(self, store: Store, key: str) -> bytes | None:
        """The object's bytes, or None, without going through the store."""

    @abstractmethod
    def raw_put(self, store: Store, key: str, data: bytes) -> None:
        """Create an object without going through the store."""

    def raw_pending(self, store: Store) -> int:
        """How many unfinished uploads or temporary files there are below the root."""
        return 0

    def creates_atomically(self, store: Store) -> bool:
        """Whether one of many creators must win; override it where the store cannot know what its server does."""
        return store.capabilities.conditional_create

    def eventually(self, condition: Callable[[], bool]) -> None:
        """Assert that `condition` holds, at the latest after `visibility_timeout_s`."""
        deadline = time.monotonic() + self.visibility_timeout_s
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = self.make_store()
        yield store
        store.close()

    # -- put -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 1000, MIB, MIB + 1])
    def test_put_stores_exactly_the_bytes(self, store: Store, size: int) -> None:
        data = secrets.token_bytes(size)
        put_bytes(store, "a/b.bin", data)
        assert self.raw_get(store, "a/b.bin") == data

    def test_put_of_many_parts_and_buffers(self, store: Store) -> None:
        data = secrets.token_bytes(self.large_bytes)
        store.put("large", _ScatteredBody(data))
        assert self.raw_get(store, "large") == data
        assert self.raw_pending(store) == 0

    @pytest.mark.parametrize("mode", list(PutMode))
    def test_put_with_checksums(self, store: Store, mode: PutMode) -> None:
        for size in (0, 1000, self.large_bytes):
            data = secrets.token_bytes(size)
            store.put(f"checked-{size}", CheckedBody(data), mode=mode)
            assert self.raw_get(store, f"checked-{size}") == data
        assert self.raw_pending(store) == 0

    def test_put_overwrites(self, store: Store) -> None:
        put_bytes(store, "k", b"old and longer")
        put_bytes(store, "k", b"new")
        assert self.raw_get(store, "k") == b"new"

    def test_many_puts_at_once(self, store: Store) -> None:
        contents = {f"d{i % 3}/k{i}": secrets.token_bytes(1000 + i) for i in range(24)}
        _run_all(lambda item: put_bytes(store, *item), list(contents.items()))
        assert {key: self.raw_get(store, key) for key in contents} == contents

    @pytest.mark.parametrize("kind", ["empty", "small", "large"])
    def test_create_refuses_what_exists(self, store: Store, kind: str) -> None:
        data = secrets.token_bytes({"empty": 0, "small": 5, "large": self.large_bytes}[kind])
        put_bytes(store, "k", data, mode=PutMode.CREATE)
        for other in (b"", b"second", data):
            with pytest.raises(AlreadyExists):
                put_bytes(store, "k", other, mode=PutMode.CREATE)
        assert self.raw_get(store, "k") == data
        assert self.raw_pending(store) == 0

    def test_create_has_one_winner(self, store: Store) -> None:
        if not self.creates_atomically(store):
            pytest.skip("this store declares no conditional create")
        won: list[bytes] = []

        def create(data: bytes) -> None:
            with contextlib.suppress(AlreadyExists):
                put_bytes(store, "race", data, mode=PutMode.CREATE)
                won.append(data)

        _run_all(create, [f"writer {i}".encode() for i in range(8)])
        assert len(won) == 1
        assert self.raw_get(store, "race") == won[0]

    @pytest.mark.parametrize("error", _BODY_ERRORS, ids=lambda error: type(error).__name__)
    @pytest.mark.parametrize("good_bytes", [0, 17 * MIB])
    def test_failed_put_leaves_nothing(self, store: Store, good_bytes: int, error: Exception) -> None:
        body = _BreakingBody(secrets.token_bytes(self.large_bytes), good_bytes, error)
        with pytest.raises(type(error)) as caught:
            store.put("broken", body)
        assert caught.value is error  # unchanged, whatever it is
        assert self.raw_get(store, "broken") is None
        assert self.raw_pending(store) == 0
        assert list(store.list()) == []

    def test_failed_overwrite_keeps_the_old(self, store: Store) -> None:
        put_bytes(store, "k", b"old")
        with pytest.raises(_BodyBroke):
            store.put("k", _BreakingBody(secrets.token_bytes(self.large_bytes), 17 * MIB, _BodyBroke()))
        assert self.raw_get(store, "k") == b"old"
        assert self.raw_pending(store) == 0

    # -- read ------------------------------------------------------------------------------------------

    def test_read_ranges_into_buffers(self, store: Store) -> None:
        data = secrets.token_bytes(3 * MIB + 77)
        self.raw_put(store, "r", data)
        for offset, sizes in [(0, [len(data)]), (5, [1, 0, 70000, MIB]), (len(data) - 3, [1, 2]), (0, [0])]:
            buffers = [bytearray(size) for size in sizes]
            store.read_into("r", offset, [memoryview(buffer) for buffer in buffers])
            assert b"".join(buffers) == data[offset : offset + sum(sizes)]

    def test_read_many_buffers_in_one_call(self, store: Store) -> None:
        data = secrets.token_bytes(300_000)
        self.raw_put(store, "r", data)
        target = bytearray(len(data))
        view = memoryview(target)
        store.read_into("r", 0, [view[i : i + 100] for i in range(0, len(data), 100)])
        assert target == data

    def test_reads_at_once(self, store: Store) -> None:
        data = secrets.token_bytes(2 * MIB)
        self.raw_put(store, "r", data)
        target = bytearray(len(data))
        view = memoryview(target)
        _run_all(lambda i: store.read_into("r", i, [view[i : i + 4096]]), list(range(0, len(data), 4096)))
        assert target == data

    @pytest.mark.parametrize("offset", [0, 6, 10, 1000])
    def test_read_past_the_end_is_truncated(self, store: Store, offset: int) -> None:
        self.raw_put(store, "short", b"0123456789")
        with pytest.raises(Truncated) as caught:
            store.read_into("short", offset, [memoryview(bytearray(11))])
        assert (caught.value.key, caught.value.start, caught.value.stop) == ("short", offset, offset + 11)

    def test_read_of_nothing_is_not_found(self, store: Store) -> None:
        for size in (1, 0):
            with pytest.raises(NotFound):
                store.read_into("missing/key", 0, [memoryview(bytearray(size))])

    def test_stat(self, store: Store) -> None:
        self.raw_put(store, "d/s", b"12345")
        found = store.stat("d/s")
        assert (found.key, found.size_bytes) == ("d/s", 5)
        with pytest.raises(NotFound):
            store.stat("d/t")
        with pytest.raises(NotFound):
            store.stat("d")
        with pytest.raises(NotFound):
            store.read_into("d", 0, [memoryview(bytearray(1))])
        assert exists(store, "d/s")
        assert not exists(store, "d/t")

    def test_read_bytes_checks_the_size(self, store: Store) -> None:
        self.raw_put(store, "s", b"12345")
        assert read_bytes(store, "s", size_bytes=5) == b"12345"
        with pytest.raises(IntegrityError):
            read_bytes(store, "s", size_bytes=6)
        with pytest.raises(IntegrityError):
            read_bytes(store, "s", max_bytes=4)

    # -- list and delete -------------------------------------------------------------------------------

    def test_list_by_prefix(self, store: Store) -> None:
        sizes = {"a/1": 1, "a/2": 2, "ab/3": 3, "b/c/4": 4, "5": 5}
        for key, size in sizes.items():
            self.raw_put(store, key, b"x" * size)
        self.eventually(lambda: _listed(store) == sizes)
        assert _listed(store, "a/") == {"a/1": 1, "a/2": 2}
        assert _listed(store, "a") == {"a/1": 1, "a/2": 2, "ab/3": 3}
        assert _listed(store, "b/c/") == {"b/c/4": 4}
        assert _listed(store, "none/") == {}

    def test_delete(self, store: Store) -> None:
        for key in ("a/1", "a/2", "b"):
            self.raw_put(store, key, b"x")
        store.delete(["a/1", "b", "never/was"])
        store.delete(["a/1"])
        store.delete([])
        self.eventually(lambda: self.raw_get(store, "a/1") is None)
        self.eventually(lambda: self.raw_get(store, "b") is None)
        assert self.raw_get(store, "a/2") == b"x"

    def test_delete_many(self, store: Store) -> None:
        keys = [f"many/{i}" for i in range(30)]
        for key in keys:
            self.raw_put(store, key, b"x")
        store.delete(iter(keys))
        self.eventually(lambda: _listed(store) == {})

    # -- places ----------------------------------------------------------------------------------------

    def test_prepare_tolerates_races(self, store: Store) -> None:
        _run_all(lambda i: store.prepare(f"place/rank-{i % 2}"), list(range(16)))
        put_bytes(store, "place/rank-1/k", b"x")
        assert self.raw_get(store, "place/rank-1/k") == b"x"

    def test_put_needs_no_prepare(self, store: Store) -> None:
        put_bytes(store, "no/one/prepared/this", b"x")
        assert self.raw_get(store, "no/one/prepared/this") == b"x"

    def test_abandon_spares_what_is_finished(self, store: Store) -> None:
        put_bytes(store, "p/k", b"x")
        assert store.abandon("p/") == 0
        assert store.abandon(choose=lambda _: True) == 0
        assert store.abandon() == 0
        assert self.raw_get(store, "p/k") == b"x"

    def test_folders_are_those_directly_below(self, store: Store) -> None:
        for key in ("a/k", "a/b/k", "c/d/e/k", "k", "ab/k"):
            put_bytes(store, key, b"x")
        self.eventually(lambda: sorted(set(store.folders())) == ["a", "ab", "c"])
        assert list(store.folders("a/")) == ["b"]
        assert list(store.folders("c/d/e/")) == []
        assert list(store.folders("nothing/")) == []

    def test_only_empty_directories_are_removed(self, store: Store) -> None:
        store.prepare("p/empty/deep")
        put_bytes(store, "p/full/k", b"x")
        store.remove_empty("p")
        store.remove_empty("nothing")
        assert self.raw_get(store, "p/full/k") == b"x"
        put_bytes(store, "p/empty/deep/k", b"x")
        assert self.raw_get(store, "p/empty/deep/k") == b"x"

    @pytest.mark.parametrize(
        "key",
        [
            *("", "/abs", "a//b", "../up", "a/../../up", "a/.", "a\\b", "a/", "nul\0", "lone\ud800"),
            pytest.param("\u00e9" * 128, id="name of 256 bytes"),
            pytest.param("a/" * 512 + "a", id="1025 bytes"),
        ],
    )
    def test_keys_cannot_leave_the_root(self, store: Store, key: str) -> None:
        for action in (
            lambda: put_bytes(store, key, b"x"),
            lambda: store.read_into(key, 0, [memoryview(bytearray(1))]),
            lambda: store.stat(key),
            lambda: store.delete([key]),
        ):
            with pytest.raises(ConfigurationError):
                action()

    @pytest.mark.parametrize(
        "key", ["with space", "uml\u00e4ut/\u65e5\u672c", "per%cent+plus", "a.b-c_d~e", "q?m#h&x=1"]
    )
    def test_odd_keys(self, store: Store, key: str) -> None:
        put_bytes(store, key, b"odd")
        assert self.raw_get(store, key) == b"odd"
        assert read_bytes(store, key) == b"odd"
        self.eventually(lambda: _listed(store) == {key: 3})
        store.delete([key])
        self.eventually(lambda: self.raw_get(store, key) is None)

    # -- the store itself ------------------------------------------------------------------------------

    def test_pickles(self, store: Store) -> None:
        put_bytes(store, "k", b"x")
        other = pickle.loads(pickle.dumps(store))
        try:
            assert other.url == store.url
            assert other.threads == store.threads
            put_bytes(other, "from/the/copy", b"y")
            assert self.raw_get(store, "from/the/copy") == b"y"
        finally:
            other.close()

    def test_errors_pickle(self, store: Store) -> None:
        with pytest.raises(NotFound) as caught:
            store.stat("missing")
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy), copy.key) == (NotFound, str(caught.value), "missing")
        assert isinstance(copy, CheckpointError)

    def test_secrets_stay_secret(self, store: Store) -> None:
        with pytest.raises(NotFound) as caught:
            store.stat("missing")
        for text in (repr(store), store.url, str(caught.value), repr(caught.value)):
            assert not [value for value in self.secret_values if value in text]

    def test_close_twice(self, store: Store) -> None:
        put_bytes(store, "k", b"x")
        store.close()
        store.close()


def _listed(store: Store, prefix: str = "") -> dict[str, int]:
    return {found.key: found.size_bytes for found in store.list(prefix)}


def _run_all(function: Callable[[T], object], items: Sequence[T], timeout_s: float = 120) -> None:
    """Call `function` for all items at the same moment, one thread each (64 at most); first error raised."""
    errors: list[BaseException] = []
    todo = iter(items)
    lock, barrier = threading.Lock(), threading.Barrier(min(64, len(items)))

    def work() -> None:
        barrier.wait(30)
        try:
            while True:
                with lock:
                    item = next(todo)
                function(item)
        except StopIteration:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(barrier.parties)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    hanging = sum(thread.is_alive() for thread in threads)
    assert not hanging, f"{hanging} of {len(threads)} threads are not done after {timeout_s} s"
