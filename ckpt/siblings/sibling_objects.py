"""Read objects of the checkpoints beside one, under the paths by which its records name them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckpt.backends.base import ObjectStat, Store
from ckpt.backends.wrapper import PrefixStore, WrappedStore
from ckpt.errors import CheckpointError
from ckpt.format.names import split_path

T = TypeVar("T")


class SiblingObjects(WrappedStore):
    """Reads `../NAME/KEY` from the folder NAME beside that of `inner`, and all else from `inner`, borrowed.

    Errors name the checkpoint that needs the object, and the object by that path.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._root: Store | None = None
        self._lock = threading.Lock()

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._call(key, lambda store, name: store.read_into(name, offset, buffers))

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        return self._call(key, lambda store, name: store.read_whole(name, check))

    def stat(self, key: str) -> ObjectStat:
        return self._call(key, lambda store, name: store.stat(name))

    def close(self) -> None:
        """Release what was opened for other folders; `inner` stays open."""
        with self._lock:
            root, self._root = self._root, None
        if root is not None:
            root.close()

    def of(self, owner: str) -> Store:
        """Return the store of a folder beside this one, or of this one for an empty name; open until `close`."""
        if not owner:
            return self._inner
        with self._lock:
            self._root = self._root or self._inner.parent()
            return PrefixStore(self._root, owner)

    def _call(self, path: str, operation: Callable[[Store, str], T]) -> T:
        owner, key = split_path(path)
        if not owner:
            return operation(self._inner, key)
        store = self.of(owner)
        try:
            return operation(store, key)
        except CheckpointError as error:
            error.url, error.key = self.url, path
            raise
