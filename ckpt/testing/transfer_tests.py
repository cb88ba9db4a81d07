"""Test that a store's puts and reads move exactly the bytes, or fail cleanly."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable

import pytest

from ckpt.backends.base import MIB, PutMode, Store, exists, put_bytes, read_bytes
from ckpt.backends.bodies import BytesBody, CheckedBody, Part, WatchedBuffers
from ckpt.errors import AlreadyExists, IntegrityError, NotFound, StorageError, Truncated
from ckpt.testing.store_contract import StoreUnderTest, noise, run_all

__all__ = ["TransferTests"]


class _BodyBroke(Exception):
    pass


# What a planner, a full disk or a dying collective raises is not the store's to interpret.
# Made anew for each test: an error keeps the frames that it went through, and all their data.
_BODY_ERRORS: list[Callable[[], Exception]] = [
    lambda: _BodyBroke("planner"),
    lambda: OSError(errno.ENOSPC, "No space left on device"),
    lambda: FileNotFoundError(errno.ENOENT, "No such file or directory"),
    lambda: TimeoutError("a collective"),
]


class _BreakingBody(BytesBody):
    """Fails when a part that reaches past `good_bytes` is asked for, as a planner would."""

    def __init__(self, data: bytes, good_bytes: int, error: Exception) -> None:
        super().__init__(data)
        self._good_bytes, self._error = good_bytes, error

    def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
        if stop > self._good_bytes:
            raise self._error
        return super().part(start, stop)


class _ScatteredBody(BytesBody):
    """Hands out many buffers of odd sizes, as the writer does."""

    def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
        buffers, size = [], 1
        while start < stop:
            buffers.append(self._view[start : min(start + size, stop)])
            start, size = start + size, min(size * 3 + 1, 5 * MIB)
        return contextlib.nullcontext(Part(buffers))


class TransferTests(StoreUnderTest):
    """Put, create, read, stat."""

    # -- put ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 1000, MIB, MIB + 1])
    def test_put_stores_exactly_the_bytes(self, store: Store, size: int) -> None:
        data = noise(size)
        put_bytes(store, "a/b.bin", data)
        assert self.raw_get(store, "a/b.bin") == data

    def test_put_of_many_parts_and_buffers(self, store: Store) -> None:
        data = noise(self.large_bytes)
        store.put("large", _ScatteredBody(data))
        assert self.raw_get(store, "large") == data
        assert self.raw_pending(store) == 0

    @pytest.mark.parametrize("mode", list(PutMode))
    def test_put_with_checksums(self, store: Store, mode: PutMode) -> None:
        for size in (0, 1000, self.large_bytes):
            data = noise(size)
            store.put(f"checked-{size}", CheckedBody(data), mode=mode)
            assert self.raw_get(store, f"checked-{size}") == data
        assert self.raw_pending(store) == 0

    def test_put_overwrites(self, store: Store) -> None:
        put_bytes(store, "k", b"old and longer")
        put_bytes(store, "k", b"new")
        assert self.raw_get(store, "k") == b"new"

    def test_many_puts_at_once(self, store: Store) -> None:
        contents = {f"d{i % 3}/k{i}": noise(1000 + i) for i in range(24)}
        run_all(lambda item: put_bytes(store, *item), list(contents.items()))
        assert {key: self.raw_get(store, key) for key in contents} == contents

    @pytest.mark.parametrize("kind", ["empty", "small", "large"])
    def test_create_refuses_what_exists(self, store: Store, kind: str) -> None:
        data = noise({"empty": 0, "small": 5, "large": self.large_bytes}[kind])
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

        run_all(create, [f"writer {i}".encode() for i in range(8)])
        assert len(won) == 1
        assert self.raw_get(store, "race") == won[0]

    @pytest.mark.parametrize("make_error", _BODY_ERRORS, ids=lambda make_error: type(make_error()).__name__)
    @pytest.mark.parametrize("good_bytes", [0, 17 * MIB])
    def test_failed_put_leaves_nothing(
        self, store: Store, good_bytes: int, make_error: Callable[[], Exception]
    ) -> None:
        error = make_error()
        body = _BreakingBody(noise(self.large_bytes), good_bytes, error)
        with pytest.raises(type(error)) as caught:
            store.put("broken", body)
        assert caught.value is error  # unchanged, whatever it is
        assert self.raw_get(store, "broken") is None
        assert self.raw_pending(store) == 0
        assert list(store.list()) == []

    def test_failed_overwrite_keeps_the_old(self, store: Store) -> None:
        put_bytes(store, "k", b"old")
        with pytest.raises(_BodyBroke):
            store.put("k", _BreakingBody(noise(self.large_bytes), 17 * MIB, _BodyBroke()))
        assert self.raw_get(store, "k") == b"old"
        assert self.raw_pending(store) == 0

    # -- read --------------------------------------------------------------------------------------

    def test_read_ranges_into_buffers(self, store: Store) -> None:
        data = noise(3 * MIB + 77)
        self.raw_put(store, "r", data)
        for offset, sizes in [(0, [len(data)]), (5, [1, 0, 70000, MIB]), (len(data) - 3, [1, 2]), (0, [0])]:
            buffers = [bytearray(size) for size in sizes]
            store.read_into("r", offset, [memoryview(buffer) for buffer in buffers])
            assert b"".join(buffers) == data[offset : offset + sum(sizes)]

    def test_read_many_buffers_in_one_call(self, store: Store) -> None:
        data = noise(300_000)
        self.raw_put(store, "r", data)
        target = bytearray(len(data))
        view = memoryview(target)
        store.read_into("r", 0, [view[i : i + 100] for i in range(0, len(data), 100)])
        assert target == data

    def test_what_has_come_is_shown_in_order(self, store: Store) -> None:
        """If it is shown at all (`ckpt.backends.bodies.showing`), it is in place, and stays as it is."""
        data = noise(3 * MIB + 77)
        self.raw_put(store, "r", data)
        shown = bytearray()

        class Watched(WatchedBuffers):
            def begin(self) -> None:
                shown.clear()

            def came(self, nbytes: int) -> None:
                shown.extend(b"".join(self)[len(shown) : len(shown) + nbytes])

        buffers = Watched(memoryview(bytearray(size)) for size in (70000, 5, len(data) - 70105))
        store.read_into("r", 100, buffers)
        assert b"".join(buffers) == data[100:]
        assert data[100:].startswith(shown)

    def test_reads_at_once(self, store: Store) -> None:
        data = noise(2 * MIB)
        self.raw_put(store, "r", data)
        target = bytearray(len(data))
        view = memoryview(target)
        run_all(lambda i: store.read_into("r", i, [view[i : i + 4096]]), list(range(0, len(data), 4096)))
        assert target == data

    @pytest.mark.parametrize("size", [0, 1, MIB, 3 * MIB + 77])
    def test_read_whole(self, store: Store, size: int) -> None:
        data, sizes = noise(size), list[int]()
        self.raw_put(store, "whole", data)
        assert store.read_whole("whole", sizes.append) == data
        assert sizes == [size]
        error = IntegrityError("of another size", url=store.url, key="whole")

        def refuse(size: int) -> None:
            raise error

        with pytest.raises(IntegrityError) as caught:
            store.read_whole("whole", refuse)
        assert caught.value is error
        with pytest.raises(NotFound):
            store.read_whole("nothing", sizes.append)

    @pytest.mark.parametrize("offset", [0, 6, 10, 1000])
    def test_read_past_the_end_is_truncated(self, store: Store, offset: int) -> None:
        self.raw_put(store, "short", b"0123456789")
        with pytest.raises(Truncated) as caught:
            store.read_into("short", offset, [memoryview(bytearray(11))])
        assert (caught.value.key, caught.value.start, caught.value.stop) == ("short", offset, offset + 11)

    @pytest.mark.parametrize("later", [b"abcdefghij", b"0123", b"0123456789ab", None])
    def test_only_the_version_that_was_opened_is_read(self, store: Store, later: bytes | None) -> None:
        self.raw_put(store, "opened", b"0123456789")
        stat = store.stat("opened")
        data = bytearray(4)
        store.read_version(stat, 2, [memoryview(data)])
        assert data == b"2345"
        if later is None:
            store.delete(["opened"])
        else:
            put_bytes(store, "opened", later)
        if later is not None and store.stat("opened") == stat:
            return  # a store that shows sizes alone
        with pytest.raises(StorageError, match="opened") as caught:
            store.read_version(stat, 2, [memoryview(data)])
        assert isinstance(caught.value, NotFound) == (later is None)

    def test_read_of_nothing_is_not_found(self, store: Store) -> None:
        for size in (1, 0):
            with pytest.raises(NotFound):
                store.read_into("missing/key", 0, [memoryview(bytearray(size))])

    def test_stat(self, store: Store) -> None:
        self.raw_put(store, "d/s", b"12345")
        stat = store.stat("d/s")
        assert (stat.key, stat.size_bytes) == ("d/s", 5)
        for key in ("d/t", "d"):
            with pytest.raises(NotFound):
                store.stat(key)
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
