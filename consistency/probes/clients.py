"""Give probes clients of a place to compare: this process, and perhaps another one, or another mount.

A client has connections and caches of its own. It stops working when its examination is over, and remembers
what it may have written, so that it can be removed.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from ckpt.backends.base import ObjectStat, PutMode, Store, exists, read_bytes
from ckpt.backends.bodies import CheckedBody
from ckpt.backends.raw_requests import raw_requests_of
from ckpt.consistency import environment
from ckpt.errors import AlreadyExists, CheckpointError, StorageError, StorageUnavailable

_MAX_BYTES = 1 << 20
_LAST_WORD_S = 5.0
_LONGEST_S = 3600.0
CLEANING_LIMIT_S = 30.0

_SERVE = """
import sys
sys.path[:] = {path!r}
from ckpt.consistency.probes.second_process import main
main({descriptor})
"""
"""The same modules as here: `python -m` would look for them in the working directory first."""


class OutOfTime(Exception):
    """The time of this probe is over, or it was interrupted."""


class Client:
    """One client of a place, through a store in this process. Raises `ckpt.errors` and OutOfTime."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.written: set[str] = set()
        self.deadline = environment.monotonic() + _LONGEST_S

    def put(self, key: str, data: bytes) -> None:
        self._write("put", key, data)

    def create(self, key: str, data: bytes) -> None:
        """Put "only if absent", without a look before, where the server decides it."""
        self._write("create", key, data)

    def _write(self, operation: str, key: str, data: bytes) -> None:
        self.written.add(key)
        try:
            self._do(operation, key, data)
        except StorageError as error:
            if error.settled and not isinstance(error, AlreadyExists):
                self.written.discard(key)
            raise

    def read(self, key: str) -> bytes:
        data: bytes = self._do("read", key)
        return data

    def stat(self, key: str) -> ObjectStat:
        stat: ObjectStat = self._do("stat", key)
        return stat

    def exists(self, key: str) -> bool:
        return bool(self._do("exists", key))

    def names(self, prefix: str = "") -> list[str]:
        return list(self._do("names", prefix))

    def folders(self, prefix: str) -> list[str]:
        return list(self._do("folders", prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self._do("delete", list(keys))

    def prepare(self, prefix: str) -> None:
        self._do("prepare", prefix)

    def clean(self, keys: Iterable[str]) -> list[str]:
        """Remove these objects, unfinished uploads, and empty directories; return what could not be removed.

        This has time of its own, beside the deadline.
        """
        return list(self._carry_out("clean", [list(keys)], CLEANING_LIMIT_S))

    def close(self) -> None:
        self.store.close()

    def _do(self, operation: str, *arguments: Any) -> Any:
        left_s = self.deadline - environment.monotonic()
        if left_s <= 0:
            raise OutOfTime
        return self._carry_out(operation, arguments, left_s)

    def _carry_out(self, operation: str, arguments: Iterable[Any], left_s: float) -> Any:
        return perform(self.store, operation, arguments)


class ProcessClient(Client):
    """A client in a process of its own, with a copy of `store` that opens its own connections."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, name)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE.format(path=sys.path, descriptor=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # out of Ctrl-C's reach: it ends when all is cleaned up
            )
        self._connection = Connection(ours.detach())
        self._turn = threading.Lock()
        self._connection.send(store)

    def close(self) -> None:
        self._connection.close()  # which ends it
        try:
            self._process.wait(_LAST_WORD_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in a system call that hangs
                self._process.wait(_LAST_WORD_S)

    def _carry_out(self, operation: str, arguments: Iterable[Any], left_s: float) -> Any:
        with self._turn:
            try:
                self._connection.send((operation, arguments))
                if not self._connection.poll(left_s):
                    self._process.kill()  # its answer would be taken for the next question's
                    raise OutOfTime
                worked, result = self._connection.recv()
            except (OSError, EOFError) as error:
                raise StorageUnavailable(
                    f"the second client's process has ended (status {self._process.poll()})",
                    url=self.store.url,
                ) from error
        if not worked:
            raise result
        return result


def perform(store: Store, operation: str, arguments: Iterable[Any]) -> Any:
    """Carry out one of a client's operations."""
    return _OPERATIONS[operation](store, *arguments)


def _create(store: Store, key: str, data: bytes) -> None:
    raw = raw_requests_of(store)
    if raw is None or not raw.put(key, CheckedBody(data), create=True):
        store.put(key, CheckedBody(data), mode=PutMode.CREATE)


def _clean(store: Store, keys: list[str]) -> list[str]:
    problems: list[str] = []
    for action in (lambda: store.delete(keys), lambda: store.abandon()):
        try:
            action()
        except CheckpointError as error:
            problems.append(str(error))
    with contextlib.suppress(StorageError):
        store.remove_empty()
    try:
        # A listing may lag.
        left = [stat.key for stat in store.list() if exists(store, stat.key)]
    except StorageError:
        left = []
        with contextlib.suppress(StorageError):
            left = [key for key in keys if exists(store, key)]
    return left or (problems if keys else [])


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "put": lambda store, key, data: store.put(key, CheckedBody(data)),
    "create": _create,
    "read": lambda store, key: bytes(read_bytes(store, key, max_bytes=_MAX_BYTES)),
    "stat": lambda store, key: store.stat(key),
    "exists": exists,
    "names": lambda store, prefix: [stat.key for stat in store.list(prefix)],
    "folders": lambda store, prefix: list(store.folders(prefix)),
    "delete": lambda store, keys: store.delete(keys),
    "prepare": lambda store, prefix: store.prepare(prefix),
    "clean": _clean,
}
