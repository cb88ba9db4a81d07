"""Declare what the author of a store gives to its tests, and what the tests share."""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from ckpt.backends.base import MIB, Store

__all__ = ["StoreUnderTest", "noise", "run_all"]

T = TypeVar("T")

_NOISE = secrets.token_bytes(MIB + 7)


def noise(nbytes: int) -> bytes:
    """Return bytes of which no two calls, and no two parts, return the same, for less time than random ones take."""
    return (secrets.token_bytes(32) + _NOISE * (nbytes // len(_NOISE) + 1))[:nbytes]


class StoreUnderTest(ABC):
    """The store, and ways around it."""

    large_bytes = 21 * MIB + 12345
    """Long enough for several parts of the store under test."""

    visibility_timeout_s = 0.0
    """How long this store may take to show in a listing, or to others, what was put or deleted."""

    secret_values: Sequence[str] = ()
    """Credentials given to the store, which must appear nowhere."""

    @abstractmethod
    def make_store(self) -> Store:
        """Make a store with an empty root of its own."""

    @abstractmethod
    def raw_get(self, store: Store, key: str) -> bytes | None:
        """Return the object's bytes, or None, without going through the store."""

    @abstractmethod
    def raw_put(self, store: Store, key: str, data: bytes) -> None:
        """Create an object without going through the store."""

    def raw_pending(self, store: Store) -> int:
        """Count the unfinished uploads or temporary files below the root."""
        return 0

    def creates_atomically(self, store: Store) -> bool:
        """Tell whether one of many creators must win; override it where the server alone knows."""
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


def run_all(function: Callable[[T], object], items: Sequence[T], timeout_s: float = 120) -> None:
    """Call `function` for all items at once, in 64 threads at most; raise the first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(min(64, len(items)))

    def work(share: Sequence[T]) -> None:
        try:
            barrier.wait(30)
            for item in share:
                function(item)
        except BaseException as error:
            errors.append(error)

    shares = [items[first :: barrier.parties] for first in range(barrier.parties)]
    threads = [threading.Thread(target=work, args=(share,), daemon=True) for share in shares]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    hanging = sum(thread.is_alive() for thread in threads)
    assert not hanging, f"{hanging} of {len(threads)} threads are not done after {timeout_s} s"
