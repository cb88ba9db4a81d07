"""Count the operations on a store, and the bytes through it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpt.backends.base import ObjectStat, PutMode, Store
from ckpt.backends.bodies import Body, Part
from ckpt.backends.wrapper import WrappedStore


@dataclass
class Counts:
    """Operations on a store, and bytes of objects through it. A put of several parts is one put."""

    puts: int = 0
    parts: int = 0
    sent_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    stats: int = 0
    others: int = 0

    def add(self, **more: int) -> None:
        for name, number in more.items():
            setattr(self, name, getattr(self, name) + number)


class CountedStore(WrappedStore):
    """Wrap `store` and count in `counts`; call `moved` with the bytes of each part and read."""

    def __init__(self, store: Store, counts: Counts, moved: Callable[[int], None]) -> None:
        super().__init__(store)
        self._counts, self._moved = counts, moved
        self._lock = threading.Lock()

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        super().put(key, _CountedBody(body, self._sent), mode=mode)
        self._count(puts=1)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        super().read_into(key, offset, buffers)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        self._count(reads=1, read_bytes=nbytes)
        self._moved(nbytes)

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        data = super().read_whole(key, check)
        self._count(reads=1, read_bytes=len(data))
        self._moved(len(data))
        return data

    def stat(self, key: str) -> ObjectStat:
        self._count(stats=1)
        return super().stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        self._count(others=1)
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._count(others=1)
        super().delete(keys)

    def _sent(self, nbytes: int) -> None:
        self._count(parts=1, sent_bytes=nbytes)
        self._moved(nbytes)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.add(**more)


class _CountedBody:
    def __init__(self, body: Body, sent: Callable[[int], None]) -> None:
        self._body, self._sent = body, sent
        self.nbytes, self.has_checksums = body.nbytes, body.has_checksums

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        with self._body.part(start, stop) as part:
            yield part
        self._sent(stop - start)

    def crc64nvme(self) -> int | None:
        return self._body.crc64nvme()
