"""A store in this process's memory: the reference, and the one whose faults tests can choose.

All stores of one process that name the same place share its objects, as clients of one bucket do.
Each may see the others' changes with a lag, and a place may be given faults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt.backends.base import (
    WRITE_SIZE_BYTES,
    Capabilities,
    ObjectStat,
    PutMode,
    Store,
    check_key,
    is_key,
    part_size_bytes,
)
from ckpt.backends.bodies import Body
from ckpt.backends.options import take_options
from ckpt.errors import AlreadyExists, ConfigurationError, NotFound, Truncated

__all__ = ["Fault", "MemoryStore", "clear", "inject"]

Fault = Callable[[str, str, Literal["before", "after"]], None]
"""Called as `fault(operation, key, "before" | "after")`; raise to fail. "after" loses the reply."""


@dataclass(frozen=True)
class _Version:
    data: bytes | None  # None: deleted
    number: int
    written_at_s: float
    writer: MemoryStore


@dataclass
class _Place:
    """The objects of a name: oldest version first. Pickled, it is the name."""

    name: str
    objects: dict[str, list[_Version]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    writes: int = 0

    def __reduce__(self) -> tuple[Callable[[str], _Place], tuple[str]]:
        return _place, (self.name,)


_places: dict[str, _Place] = {}
_places_lock = threading.Lock()


def inject(url: str, fault: Fault) -> None:
    """Add a fault to the place that `url` names."""
    name, _ = _split(url)
    _place(name).faults.append(fault)


def clear(url: str) -> None:
    """Forget all objects and faults of the place that `url` names."""
    name, _ = _split(url)
    with _places_lock:
        _places.pop(name, None)


class MemoryStore(Store):
    """`memory://place/prefix`.

    Options:
        visibility_lag_s: until this client sees changes by other clients of the place (default 0).
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 4) -> None:
        settings = take_options("memory", options or {}, {"visibility_lag_s": 0.0})
        self._lag_s = float(settings["visibility_lag_s"])
        self.url, self.threads = url.rstrip("/"), threads
        name, self._prefix = _split(url)
        self._place = _place(name)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            conditional_create=True,
            atomic_replace=True,
            list_after_write=not self._lag_s,
            cross_client_visibility=not self._lag_s,
            visible_is_durable=True,
        )

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        name = self._name(key)
        self._fault("put", key, "before")
        data = bytearray()
        size = part_size_bytes(body.nbytes, WRITE_SIZE_BYTES, self.capabilities)
        for start in range(0, body.nbytes, size):
            with body.part(start, min(start + size, body.nbytes)) as part:
                if part.pace is not None:
                    part.pace(part.nbytes)
                for buffer in part.buffers:
                    data += buffer
        with self._place.lock:
            versions = self._place.objects.setdefault(name, [])
            if mode is PutMode.CREATE and versions and versions[-1].data is not None:
                raise AlreadyExists("exists already", url=self.url, key=key, settled=True)
            self._add(versions, bytes(data))
        self._fault("put", key, "after")

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._fault("read", key, "before")
        data = self._see(key).data or b""
        for buffer in buffers:
            stop = offset + buffer.nbytes
            if stop > len(data):
                raise Truncated(f"ends at byte {len(data)}", url=self.url, key=key, start=offset, stop=stop)
            buffer[:] = data[offset:stop]
            offset = stop
        self._fault("read", key, "after")

    def stat(self, key: str) -> ObjectStat:
        self._fault("stat", key, "before")
        return _stat(key, self._see(key))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        self._fault("list", prefix, "before")
        with self._place.lock:
            names = [name for name in self._place.objects if name.startswith(self._prefix + prefix)]
        for name in names:
            version, key = self._visible(name), name.removeprefix(self._prefix)
            if version is not None and is_key(key):
                yield _stat(key, version)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._fault("delete", key, "before")
            with self._place.lock:
                versions = self._place.objects.get(self._name(key))
                if versions and versions[-1].data is not None:
                    self._add(versions, None)
            self._fault("delete", key, "after")

    def prepare(self, prefix: str) -> None:
        self._fault("prepare", prefix, "before")

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        return 0  # a put is one step here: none is ever unfinished

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _add(self, versions: MutableSequence[_Version], data: bytes | None) -> None:
        self._place.writes += 1
        versions.append(_Version(data, self._place.writes, time.monotonic(), self))

    def _visible(self, name: str) -> _Version | None:
        now = time.monotonic()
        with self._place.lock:
            for version in reversed(self._place.objects.get(name, [])):
                if version.writer is self or now - version.written_at_s >= self._lag_s:
                    return version if version.data is not None else None
        return None

    def _see(self, key: str) -> _Version:
        version = self._visible(self._name(key))
        if version is None:
            raise NotFound("no such object", url=self.url, key=key)
        return version

    def _fault(self, operation: str, key: str, when: Literal["before", "after"]) -> None:
        for fault in list(self._place.faults):
            fault(operation, key, when)


def _stat(key: str, version: _Version) -> ObjectStat:
    return ObjectStat(key, len(version.data or b""), str(version.number))


def _split(url: str) -> tuple[str, str]:
    """Split `memory://name/prefix` into name and key prefix (empty, or ending in `/`)."""
    name, _, prefix = url.removeprefix("memory://").strip("/").partition("/")
    if not name:
        raise ConfigurationError(f"{url!r}: write memory://name/prefix")
    return name, f"{prefix}/" if prefix else ""


def _place(name: str) -> _Place:
    with _places_lock:
        return _places.setdefault(name, _Place(name))
