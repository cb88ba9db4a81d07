"""Stores that wrap another one: their base class, and a folder of a store as a store of its own."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ckpt.backends.base import Capabilities, ObjectStat, PutMode, RawRequests, Store, UploadNote, exists
from ckpt.backends.bodies import Body
from ckpt.backends.cancellable_reads import Reads
from ckpt.errors import CheckpointError

T = TypeVar("T")


class WrappedStore(Store):
    """Forwards every operation to `inner`, so that no subclass forgets one."""

    def __init__(self, inner: Store) -> None:
        self.url, self.threads, self.directory = inner.url, inner.threads, inner.directory
        self.part_size_bytes = inner.part_size_bytes
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @property
    def reads(self) -> Reads | None:
        return self._inner.reads

    @property
    def retries(self) -> int:
        return self._inner.retries

    @property
    def keeps_versions(self) -> bool:
        return self._inner.keeps_versions

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        self._inner.put(key, body, mode=mode)

    def put_resumable(
        self, key: str, body: Body, note: UploadNote, *, mode: PutMode = PutMode.OVERWRITE
    ) -> int:
        return self._inner.put_resumable(key, body, note, mode=mode)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._inner.read_into(key, offset, buffers)

    def read_version(self, stat: ObjectStat, offset: int, buffers: Sequence[memoryview]) -> None:
        Store.read_version(self, stat, offset, buffers)  # by its own reads, which may be bounded or counted

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        return self._inner.read_whole(key, check)

    def stat(self, key: str) -> ObjectStat:
        return self._inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return self._inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._inner.delete(keys)

    def prepare(self, prefix: str) -> None:
        self._inner.prepare(prefix)

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        return self._inner.abandon(prefix, choose=choose)

    def folders(self, prefix: str = "") -> Iterator[str]:
        return self._inner.folders(prefix)

    def root_is_object(self) -> bool:
        return self._inner.root_is_object()

    def links(self, prefix: str = "") -> Iterator[str]:
        return self._inner.links(prefix)

    def open_link(self, path: str) -> Store | None:
        opened = self._inner.open_link(path)
        return None if opened is None else self.around(opened)

    def root_is_link(self) -> bool:
        return self._inner.root_is_link()

    def unlink_root(self) -> None:
        self._inner.unlink_root()

    def remove_empty(self, prefix: str = "") -> None:
        self._inner.remove_empty(prefix)

    def raw_requests(self) -> RawRequests | None:
        return self._inner.raw_requests()

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()

    def parent(self) -> Store:
        """Open what holds the root of `inner`, wrapped alike."""
        return self.around(self._inner.parent())

    def around(self, inner: Store) -> Store:
        """Wrap another store as this one is wrapped."""
        twin = copy.copy(self)
        WrappedStore.__init__(twin, inner)
        return twin

    def close(self) -> None:
        self._inner.close()


class PrefixStore(WrappedStore):
    """The part of `inner`, borrowed, below `path` (empty: all); errors name keys relative to it."""

    def __init__(self, inner: Store, path: str) -> None:
        super().__init__(inner)
        self.path = path
        self._prefix = f"{path}/" if path else ""
        if path:
            self.url = f"{inner.url.rstrip('/')}/{path}"
            self.directory = None if inner.directory is None else os.path.join(inner.directory, path)

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        self._call(key, lambda name: self._inner.put(name, body, mode=mode))

    def put_resumable(
        self, key: str, body: Body, note: UploadNote, *, mode: PutMode = PutMode.OVERWRITE
    ) -> int:
        return self._call(key, lambda name: self._inner.put_resumable(name, body, note, mode=mode))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._call(key, lambda name: self._inner.read_into(name, offset, buffers))

    def read_version(self, stat: ObjectStat, offset: int, buffers: Sequence[memoryview]) -> None:
        self._call(stat.key, lambda name: self._inner.read_version(replace(stat, key=name), offset, buffers))

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        return self._call(key, lambda name: self._inner.read_whole(name, check))

    def stat(self, key: str) -> ObjectStat:
        return replace(self._call(key, self._inner.stat), key=key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return map(self._relative, self._inner.list(self._prefix + prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self._inner.delete(self._prefix + key for key in keys)

    def prepare(self, prefix: str) -> None:
        self._inner.prepare(self._folder(prefix))

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        chosen = None if choose is None else lambda stat: choose(self._relative(stat))
        return self._inner.abandon(self._prefix + prefix, choose=chosen)

    def folders(self, prefix: str = "") -> Iterator[str]:
        return self._inner.folders(self._prefix + prefix)

    def links(self, prefix: str = "") -> Iterator[str]:
        return self._inner.links(self._prefix + prefix)

    def open_link(self, path: str) -> Store | None:
        return self._inner.open_link(self._prefix + path)

    def root_is_link(self) -> bool:
        return not self.path and self._inner.root_is_link()

    def root_is_object(self) -> bool:
        return exists(self._inner, self.path) if self.path else self._inner.root_is_object()

    def remove_empty(self, prefix: str = "") -> None:
        self._inner.remove_empty(self._folder(prefix))

    def raw_requests(self) -> RawRequests | None:
        return None  # servers are probed at the root of a store

    def parent(self) -> Store:
        return PrefixStore(self._inner, self.path.rpartition("/")[0]) if self.path else self._inner.parent()

    def close(self) -> None:
        pass

    def _folder(self, prefix: str) -> str:
        return self._prefix + prefix if prefix else self.path

    def _relative(self, stat: ObjectStat) -> ObjectStat:
        key = stat.key.removeprefix(self._prefix)
        return ObjectStat(key, stat.size_bytes, stat.version, stat.modified_at_s)

    def _call(self, key: str, operation: Callable[[str], T]) -> T:
        name = self._prefix + key
        try:
            return operation(name)
        except CheckpointError as error:
            if error.key == name:
                error.url, error.key = self.url, key
            raise


class LinkedFolder(PrefixStore):
    """The folder outside of a root to which the link `path` in it leads, borrowed as `linked`."""

    def __init__(self, linked: Store, path: str) -> None:
        super().__init__(linked, "")
        self.path = path

    def parent(self) -> Store:
        return self._inner.parent()

    def root_is_object(self) -> bool:
        return False

    def _folder(self, prefix: str) -> str:
        return prefix


def folder_of(store: Store, path: str) -> PrefixStore:
    """Return the folder `path` of a root; a link to one elsewhere is followed, as by a load from its URL."""
    linked = store.open_link(path) if path else None
    return PrefixStore(store, path) if linked is None else LinkedFolder(linked, path)
