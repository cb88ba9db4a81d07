"""A store over a simulated storage system: what one of its nodes sees of a place, and may do there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from greenlet import getcurrent

from ckpt.backends.base import Capabilities, ObjectStat, PutMode, Store, check_key, is_key, part_size_bytes
from ckpt.backends.bodies import Body
from ckpt.errors import AlreadyExists, NotFound, StorageError, Truncated
from ckpt.testing.simulated_objects import Upload, Version
from ckpt.testing.simulator import World
from ckpt.testing.virtual_time import Process

__all__ = ["SimulatedStore"]

_PART_SIZE_BYTES = 8 << 20

T = TypeVar("T")


class SimulatedStore(Store):
    """What one node sees of a place in a world. Processes on the same node share its view and its caches."""

    def __init__(self, world: World, node: str, url: str = "simulated://place") -> None:
        self.url = url.rstrip("/")
        self.threads = 1
        self._world, self._node = world, node
        self._prefix = self.url.partition("://")[2] + "/"

    @property
    def capabilities(self) -> Capabilities:
        return self._world.capabilities

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        name = self._name(key)
        if self._world.model.directories:
            self._make_directory(name.rpartition("/")[0])
        if mode is PutMode.CREATE and not self._world.model.conditional_create:
            self._request("look", key, lambda: self._refuse_existing(key, self._world.seen(self._node, name)))
            mode = PutMode.OVERWRITE
        if self._world.model.multipart and self._world.choices.pick("in parts", (0.7, 0.3)):
            self._put_in_parts(key, name, body, mode)
        else:
            data = b"".join(self._parts(body))
            self._request("put", key, lambda: self._store(key, name, data, mode), writes=True)

    def _put_in_parts(self, key: str, name: str, body: Body, mode: PutMode) -> None:
        number = self._world.new_upload()

        def upload() -> Upload:
            if number not in self._world.uploads:
                raise NotFound("no such upload", url=self.url, key=key)
            return self._world.uploads[number]

        def complete() -> None:
            self._store(key, name, b"".join(data for _, data in sorted(upload().parts.items())), mode)
            del self._world.uploads[number]

        self._request("begin", key, lambda: self._world.begin_upload(number, name), writes=True)
        sent: list[bytes] = []
        try:
            for data in self._parts(body):
                part = (len(sent), data)
                self._request("part", key, lambda part=part: upload().parts.__setitem__(*part), writes=True)  # type: ignore[misc]
                sent.append(data)
            try:
                self._request("complete", key, complete, writes=True)
            except StorageError as error:
                if error.settled or not self._is_ours(key, name, b"".join(sent)):
                    raise
        except Exception:
            with contextlib.suppress(StorageError):
                self._request("abort", key, lambda: self._world.uploads.pop(number, None), writes=True)
            raise

    def _is_ours(self, key: str, name: str, data: bytes) -> bool:
        """Whether a completion without answer worked, as the stores of this library find out."""
        try:
            found = self._request("stat", key, lambda: self._world.seen(self._node, name))
        except StorageError:
            return False
        return found is not None and found.data == data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        name = self._name(key)
        data = self._request("read", key, lambda: self._read(key, name))
        for buffer in buffers:
            stop = offset + buffer.nbytes
            if stop > len(data):
                raise Truncated(f"ends at byte {len(data)}", url=self.url, key=key, start=offset, stop=stop)
            buffer[:] = data[offset:stop]
            offset = stop

    def stat(self, key: str) -> ObjectStat:
        name = self._name(key)
        found = self._request("stat", key, lambda: self._world.attributes(self._node, name, key))
        process = getcurrent()
        if isinstance(process, Process):
            process.looked[name] = process.requests, found is not None
        if found is None:
            raise NotFound("no such object", url=self.url, key=key)
        return found

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        found = self._request("list", prefix, lambda: list(self._listed(prefix)))
        yield from found

    def _listed(self, prefix: str) -> Iterator[ObjectStat]:
        for name in sorted(self._world.versions):
            if name.startswith(self._prefix + prefix) and is_key(key := name[len(self._prefix) :]):
                version = self._world.seen_in_listing(self._node, name)
                if version is not None and version.data is not None:
                    yield version.stat(key)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            name = self._name(key)
            self._request("delete", key, lambda name=name: self._change(name, None), writes=True)  # type: ignore[misc]

    def prepare(self, prefix: str) -> None:
        if self._world.model.directories:
            self._make_directory(self._prefix + prefix)

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        def chosen(upload: Upload) -> bool:
            if not upload.name.startswith(self._prefix + prefix):
                return False
            key = upload.name.removeprefix(self._prefix)
            return choose is None or choose(ObjectStat(key, 0, modified_at_s=upload.begun_at_s))

        return self._request("abandon", prefix, lambda: self._world.abort_uploads(chosen), writes=True)

    # -- for protocols that are not ours -------------------------------------------------------------------

    def put_into(self, key: str, data: bytes) -> None:
        """Store `data` where the directory is there already, as this node sees it. Raises NotFound."""
        name = self._name(key)

        def write() -> None:
            directory = name.rpartition("/")[0] + "/"
            if self._world.model.directories and self._world.seen(self._node, directory) is None:
                raise NotFound("no such directory", url=self.url, key=key)
            self._change(name, data)

        self._request("put", key, write, writes=True)

    def _make_directory(self, directory: str) -> None:
        marker = f"{directory}/"
        if self._world.seen(self._node, marker) is None:
            self._request("mkdir", directory, lambda: self._change(marker, b""), writes=True)

    # -- effects -------------------------------------------------------------------------------------------

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
        if mode is PutMode.CREATE and self._world.truth(name) is not None:
            self._refuse(key)
        self._change(name, data)

    def _change(self, name: str, data: bytes | None) -> None:
        self._world.change(self._node, name, data)

    def _refuse_existing(self, key: str, found: Version | None) -> None:
        if found is not None:
            self._refuse(key)

    def _refuse(self, key: str) -> None:
        raise AlreadyExists("exists already", url=self.url, key=key, settled=True)

    def _read(self, key: str, name: str) -> bytes:
        version = self._world.seen(self._node, name)
        process = getcurrent()
        if isinstance(process, Process):
            process.looked[name] = process.requests, version is not None and version.data is not None
            if version is not None:
                process.read[name] = version
        if version is None or version.data is None:
            raise NotFound("no such object", url=self.url, key=key)
        return version.data

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)
