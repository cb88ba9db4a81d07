"""A folder of a store as a store of its own, over the same connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ckpt.backends.base import Capabilities, ObjectStat, PutMode, Store
from ckpt.backends.bodies import Body
from ckpt.errors import CheckpointError

__all__ = ["SubStore"]

T = TypeVar("T")


class SubStore(Store):
    """The part of `store` below `path` (empty: all of it). Errors name keys relative to it.

    It borrows the store: closing it does nothing.
    """

    def __init__(self, store: Store, path: str) -> None:
        self.path = path
        self._store = store
        self._prefix = f"{path}/" if path else ""
        self.url = f"{store.url.rstrip('/')}/{path}" if path else store.url
        self.threads = store.threads

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    @property
    def retries(self) -> int:
        return self._store.retries

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        self._named(key, lambda: self._store.put(self._prefix + key, body, mode=mode))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._named(key, lambda: self._store.read_into(self._prefix + key, offset, buffers))

    def stat(self, key: str) -> ObjectStat:
        return replace(self._named(key, lambda: self._store.stat(self._prefix + key)), key=key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        for found in self._store.list(self._prefix + prefix):
            yield self._own(found)

    def delete(self, keys: Iterable[str]) -> None:
        self._store.delete(self._prefix + key for key in keys)

    def prepare(self, prefix: str) -> None:
        self._store.prepare(self._prefix + prefix if prefix else self.path)

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        chosen = None if choose is None else lambda found: choose(self._own(found))
        return self._store.abandon(self._prefix + prefix, choose=chosen)

    def folders(self, prefix: str = "") -> Iterator[str]:
        return self._store.folders(self._prefix + prefix)

    def remove_empty(self, prefix: str = "") -> None:
        self._store.remove_empty(self._prefix + prefix if prefix else self.path)

    def free_bytes(self) -> int | None:
        return self._store.free_bytes()

    def _own(self, found: ObjectStat) -> ObjectStat:
        return replace(found, key=found.key.removeprefix(self._prefix))

    def _named(self, key: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except CheckpointError as error:
            if error.key == self._prefix + key:
                error.url, error.key = self.url, key
            raise
