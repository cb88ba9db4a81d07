"""Test that a put of a large object can be gone on with, or leaves nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from ckpt.backends.base import MIB, PutMode, Store
from ckpt.backends.bodies import CheckedBody, Part
from ckpt.errors import AlreadyExists, IntegrityError, StorageUnavailable
from ckpt.testing.store_contract import StoreUnderTest, noise

__all__ = ["ResumeTests"]

_QUIET_S = 0.5


class _Note:
    """Remembers in memory."""

    data: bytes | None = None

    def read(self) -> bytes | None:
        return self.data

    def write(self, data: bytes) -> None:
        self.data = data

    def clear(self) -> None:
        self.data = None


class _Counting(CheckedBody):
    """Counts the parts that were opened, and fails after `good_bytes`, once the others are through."""

    def __init__(self, data: bytes, good_bytes: int | None = None, error: Exception | None = None) -> None:
        super().__init__(data)
        self._good_bytes, self._error = good_bytes, error
        self._lock, self._open, self._moved_s = threading.Lock(), 0, time.monotonic()
        self.opened_bytes = 0

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        if self._good_bytes is not None and stop > self._good_bytes:
            assert self._error is not None
            while self._open or time.monotonic() < self._moved_s + _QUIET_S:
                time.sleep(0.02)
            raise self._error
        self._count(1, stop - start)
        try:
            with super().part(start, stop) as part:
                yield part
        finally:
            self._count(-1, 0)

    def _count(self, opened: int, nbytes: int) -> None:
        with self._lock:
            self._open += opened
            self.opened_bytes += nbytes
            self._moved_s = time.monotonic()


class ResumeTests(StoreUnderTest):
    """`put_resumable`: on a store that does not resume uploads, a put."""

    good_bytes = 11 * MIB
    """Reached by the parts that are sent before a failure."""

    def test_a_resumable_put_is_a_put(self, store: Store) -> None:
        data, note = noise(self.large_bytes), _Note()
        assert store.put_resumable("k", CheckedBody(data), note) == 0
        assert (self.raw_get(store, "k"), note.data, self.raw_pending(store)) == (data, None, 0)
        with pytest.raises(AlreadyExists):
            store.put_resumable("k", CheckedBody(b"x"), note, mode=PutMode.CREATE)

    def test_a_put_goes_on_where_it_failed(self, store: Store) -> None:
        data, note = noise(self.large_bytes), _Note()
        self._break_off(store, data, note)
        assert self.raw_get(store, "k") is None
        if not store.capabilities.resumes_uploads:
            assert (note.data, self.raw_pending(store)) == (None, 0)
        there_bytes = store.put_resumable("k", _Counting(data), note, mode=PutMode.CREATE)
        assert (self.raw_get(store, "k"), note.data, self.raw_pending(store)) == (data, None, 0)
        assert (there_bytes > 0) == store.capabilities.resumes_uploads

    def test_parts_of_other_bytes_are_not_used(self, store: Store) -> None:
        data, note = noise(self.large_bytes), _Note()
        self._break_off(store, data, note)
        other = bytes([data[0] ^ 1]) + data[1:]
        assert store.put_resumable("k", _Counting(other), note) == 0
        assert (self.raw_get(store, "k"), note.data, self.raw_pending(store)) == (other, None, 0)

    def test_a_note_that_is_damaged_is_none(self, store: Store) -> None:
        for damage in (b"", b"{}", b"\xff", None):
            data, note = noise(self.large_bytes), _Note()
            self._break_off(store, data, note)
            note.data = damage
            assert store.put_resumable("k", _Counting(data), note) == 0
            assert self.raw_get(store, "k") == data

    def test_a_failure_that_does_not_pass_leaves_nothing(self, store: Store) -> None:
        note = _Note()
        body = _Counting(noise(self.large_bytes), self.good_bytes, IntegrityError("damaged"))
        with pytest.raises(IntegrityError):
            store.put_resumable("k", body, note)
        assert (self.raw_get(store, "k"), note.data, self.raw_pending(store)) == (None, None, 0)

    def _break_off(self, store: Store, data: bytes, note: _Note) -> None:
        body = _Counting(data, self.good_bytes, StorageUnavailable("no answer"))
        with pytest.raises(StorageUnavailable):
            store.put_resumable("k", body, note)
