"""A base class for stores that wrap another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ckpt.backends.base import Capabilities, ObjectStat, PutMode, Store
from ckpt.backends.bodies import Body
from ckpt.backends.cancellable_reads import Reads
from ckpt.backends.raw_requests import RawRequests


class WrappedStore(Store):
    """Forwards every operation to `inner`, so that no subclass forgets one."""

    def __init__(self, inner: Store) -> None:
        self.url, self.threads, self.directory = inner.url, inner.threads, inner.directory
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

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        self._inner.put(key, body, mode=mode)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._inner.read_into(key, offset, buffers)

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

    def remove_empty(self, prefix: str = "") -> None:
        self._inner.remove_empty(prefix)

    def raw_requests(self) -> RawRequests | None:
        return self._inner.raw_requests()

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()

    def close(self) -> None:
        self._inner.close()
