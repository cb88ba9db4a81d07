"""A store over a simulated storage system, as one of its nodes sees it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from greenlet import getcurrent

from ckpt.backends.base import Capabilities, ObjectStat, PutMode, Store, check_key, is_key, part_size_bytes
from ckpt.backends.bodies import Body, fill
from ckpt.errors import AlreadyExists, NotFound, StorageError, Truncated
from ckpt.testing.simulated_objects import Upload, Version
from ckpt.testing.simulator import World
from ckpt.testing.virtual_time import EPOCH_S, Process

__all__ = ["SimulatedStore"]

_PART_SIZE_BYTES = 8 << 20

T = TypeVar("T")


class SimulatedStore(Store):
    """What one node sees of a place in a world. Its processes share its view and its caches."""

    def __init__(self, world: World, node: str, url: str = "simulated://place") -> None:
        self.url = url.rstrip("/")
        self.threads = 1
        self._world, self._node = world, node
        self._prefix = self.url.partition("://")[2] + "/"

    @property
    def capabilities(self) -> Capabilities:
        return self._world.capabilities

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        name, world = self._name(key), self._world
        self._make_directory(name.rpartition("/")[0])
        if mode is PutMode.CREATE and not world.model.conditional_create:
            self._request("look", key, lambda: self._refuse(key, world.seen(self._node, name)))
            mode = PutMode.OVERWRITE
        if world.model.multipart and world.choices.pick("in parts", (0.7, 0.3)):
            self._put_in_parts(key, name, body, mode)
        else:
            data = b"".join(self._parts(body))
            self._request("put", key, lambda: self._store(key, name, data, mode), writes=True)

    def _put_in_parts(self, key: str, name: str, body: Body, mode: PutMode) -> None:
        uploads, upload = self._world.uploads, Upload(name)

        def begin() -> None:
            uploads[upload] = EPOCH_S + self._world.now_s

        def parts() -> dict[int, bytes]:
            if upload not in uploads:
                raise NotFound("no such upload", url=self.url, key=key)
            return upload.parts

        def send(number: int, data: bytes) -> None:
            parts()[number] = data

        def complete() -> None:
            self._store(key, name, b"".join(data for _, data in sorted(parts().items())), mode)
            del uploads[upload]

        self._request("begin", key, begin, writes=True)
        sent: list[bytes] = []
        try:
            for data in self._parts(body):
                self._request("part", key, functools.partial(send, len(sent), data), writes=True)
                sent.append(data)
            try:
                self._request("complete", key, complete, writes=True)
            except StorageError as error:
                if error.settled or not self._is_ours(key, name, b"".join(sent)):
                    raise
        except Exception:
            with contextlib.suppress(StorageError):
                self._request("abort", key, lambda: uploads.pop(upload, None), writes=True)
            raise

    def _is_ours(self, key: str, name: str, data: bytes) -> bool:
        """Look whether a completion without answer worked, as the stores of this library do."""
        try:
            version = self._request("stat", key, lambda: self._world.seen(self._node, name))
        except StorageError:
            return False
        return version is not None and version.data == data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        name = self._name(key)
        data = self._request("read", key, lambda: self._read(key, name))
        fill(buffers, memoryview(data)[offset:])  # a short read leaves buffers half filled
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        if stop > len(data):
            raise Truncated(f"ends at byte {len(data)}", url=self.url, key=key, start=offset, stop=stop)

    def stat(self, key: str) -> ObjectStat:
        name = self._name(key)
        stat = self._request("stat", key, lambda: self._world.attributes(self._node, name, key))
        self._remember_look(name, stat is not None)
        if stat is None:
            raise NotFound("no such object", url=self.url, key=key)
        return stat

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        yield from self._request("list", prefix, lambda: list(self._listed(prefix)))

    def _listed(self, prefix: str) -> Iterator[ObjectStat]:
        for name in sorted(self._world.versions):
            if name.startswith(self._prefix + prefix) and is_key(key := name[len(self._prefix) :]):
                version = self._world.seen_in_listing(self._node, name)
                if version is not None:
                    yield version.stat(key)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            effect = functools.partial(self._world.change, self._node, self._name(key), None)
            self._request("delete", key, effect, writes=True)

    def prepare(self, prefix: str) -> None:
        self._make_directory(self._prefix + prefix)

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        uploads = self._world.uploads

        def is_chosen(upload: Upload, begun_at_s: float) -> bool:
            if not upload.name.startswith(self._prefix + prefix):
                return False
            key = upload.name.removeprefix(self._prefix)
            return choose is None or choose(ObjectStat(key, 0, modified_at_s=begun_at_s))

        # Not in the request: who chooses may send others.
        chosen = [upload for upload, begun_at_s in [*uploads.items()] if is_chosen(upload, begun_at_s)]

        def abort() -> int:
            return sum(uploads.pop(upload, None) is not None for upload in chosen)

        return self._request("abandon", prefix, abort, writes=True)

    # -- for protocols that are not ours -----------------------------------------------------------

    def put_into(self, key: str, data: bytes) -> None:
        """Store `data` in a directory that this node sees already. Raises NotFound."""
        name = self._name(key)

        def write() -> None:
            directory = name.rpartition("/")[0] + "/"
            if self._world.model.directories and self._world.seen(self._node, directory) is None:
                raise NotFound("no such directory", url=self.url, key=key)
            self._world.change(self._node, name, data)

        self._request("put", key, write, writes=True)

    def _make_directory(self, directory: str) -> None:
        marker = f"{directory}/"
        if self._world.model.directories and self._world.seen(self._node, marker) is None:
            effect = functools.partial(self._world.change, self._node, marker, b"")
            self._request("mkdir", directory, effect, writes=True)

    # -- effects -----------------------------------------------------------------------------------

    def _request(self, text: str, key: str, effect: Callable[[], T], *, writes: bool = False) -> T:
        return self._world.request(self._node, text, effect, writes=writes, url=self.url, key=key)

    def _parts(self, body: Body) -> Iterator[bytes]:
        size = part_size_bytes(body.nbytes, _PART_SIZE_BYTES, self.capabilities)
        for start in range(0, body.nbytes, size):
            with body.part(start, min(start + size, body.nbytes)) as part:
                if part.pace is not None:
                    part.pace(part.nbytes)
                yield b"".join(part.buffers)

    def _store(self, key: str, name: str, data: bytes, mode: PutMode) -> None:
        if mode is PutMode.CREATE:
            self._refuse(key, self._world.truth(name))
        self._world.change(self._node, name, data)

    def _refuse(self, key: str, existing: Version | bytes | None) -> None:
        if existing is not None:
            raise AlreadyExists("exists already", url=self.url, key=key, settled=True)

    def _read(self, key: str, name: str) -> bytes:
        version = self._world.seen(self._node, name)
        self._remember_look(name, version is not None)
        if version is None or version.data is None:
            raise NotFound("no such object", url=self.url, key=key)
        process = getcurrent()
        if isinstance(process, Process):
            process.read[name] = version
        return version.data

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _remember_look(self, name: str, exists: bool) -> None:
        process = getcurrent()
        if isinstance(process, Process):
            process.looked[name] = process.requests, exists, self._world.now_s
