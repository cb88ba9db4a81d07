"""Keep the endpoint's objects: names and sizes of all, contents of some."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.sink.connection import Body

__all__ = ["Objects", "StoredObject"]


@dataclass(frozen=True)
class StoredObject:
    """An object as a run of bodies: one, or one per part."""

    bodies: tuple[Body, ...]
    etag: str

    @property
    def nbytes(self) -> int:
        return sum(body.nbytes for body in self.bodies)

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return bytes `[start, stop)` where they lie.

        Raises:
            LookupError: they were dropped.
        """
        parts, offset = [], 0
        for body in self.bodies:
            begin, end = max(start - offset, 0), min(stop - offset, body.nbytes)
            if begin < end:
                if body.data is None:
                    raise LookupError("the contents were dropped; start the server with --keep")
                parts.append(body.data[begin:end])
            offset += body.nbytes
        return parts


@dataclass
class Objects:
    """All of a server's objects and unfinished uploads; safe to use from several threads."""

    _objects: dict[str, StoredObject] = field(default_factory=dict)
    _uploads: dict[str, dict[int, Body]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def get(self, key: str) -> StoredObject | None:
        return self._objects.get(key)

    def put(self, key: str, bodies: Iterable[Body], *, only_if_absent: bool = False) -> StoredObject | None:
        """Store an object; None if it exists and must not."""
        with self._lock:
            if only_if_absent and key in self._objects:
                return None
            stored = StoredObject(tuple(bodies), f'"{next(self._numbers):032x}"')
            self._objects[key] = stored
            return stored

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._objects.clear()
            self._uploads.clear()

    def keys(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def start_upload(self) -> str:
        with self._lock:
            upload = f"upload-{next(self._numbers)}"
            self._uploads[upload] = {}
            return upload

    def add_part(self, upload: str, number: int, body: Body) -> bool:
        with self._lock:
            if upload not in self._uploads:
                return False
            self._uploads[upload][number] = body
            return True

    def take_upload(self, upload: str) -> dict[int, Body] | None:
        with self._lock:
            return self._uploads.pop(upload, None)
