"""Give probes clients of a place to compare: this process, another one, or another mount.

A client has connections and caches of its own. It stops working when its examination is over, and
remembers what it may have written, so that it can be removed.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import threading
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import methodcaller
from pathlib import PurePosixPath
from typing import TypeVar

from ckpt.backends.base import ObjectStat, PutMode, Store, exists, put_bytes, read_bytes
from ckpt.backends.bodies import CheckedBody
from ckpt.child_processes import command_of
from ckpt.consistency import environment
from ckpt.errors import AlreadyExists, CheckpointError, StorageError, StorageUnavailable

_MAX_BYTES = 1 << 20
_LAST_WORD_S = 5.0
_LONGEST_S = 3600.0
CLEANING_LIMIT_S = 30.0

T = TypeVar("T")


class OutOfTime(Exception):
    """The time of this probe is over, or it was interrupted."""


class Client:
    """One client of a place, through a store here. Raises `ckpt.errors` and OutOfTime."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.written: set[str] = set()
        self.deadline = environment.monotonic() + _LONGEST_S

    def put(self, key: str, data: bytes) -> None:
        self._write(key, functools.partial(put_bytes, key=key, data=data))

    def create(self, key: str, data: bytes) -> None:
        """Put "only if absent", without a look before, where the server decides it."""
        self._write(key, functools.partial(_create, key=key, data=data))

    def _write(self, key: str, operation: Callable[[Store], None]) -> None:
        self.written.add(key)
        try:
            self._do(operation)
        except StorageError as error:
            if error.settled and not isinstance(error, AlreadyExists):
                self.written.discard(key)
            raise

    def read(self, key: str) -> bytes:
        return bytes(self._do(functools.partial(read_bytes, key=key, max_bytes=_MAX_BYTES)))

    def stat(self, key: str) -> ObjectStat:
        stat: ObjectStat = self._do(methodcaller("stat", key))
        return stat

    def exists(self, key: str) -> bool:
        return self._do(functools.partial(exists, key=key))

    def names(self, prefix: str) -> list[str]:
        return self._do(functools.partial(_names, prefix=prefix))

    def folders(self, prefix: str) -> list[str]:
        return self._do(functools.partial(_folders, prefix=prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self._do(methodcaller("delete", list(keys)))

    def prepare(self, prefix: str) -> None:
        if prefix:
            self.written.add(f"{prefix}/nothing")  # the folder goes with its objects
        self._do(methodcaller("prepare", prefix))

    def clean(self, keys: Iterable[str]) -> list[str]:
        """Remove objects, uploads and empty directories, in time of its own; return what stays."""
        return self._carry_out(functools.partial(_clean, keys=list(keys)), CLEANING_LIMIT_S)

    def close(self) -> None:
        self.store.close()

    def _do(self, operation: Callable[[Store], T]) -> T:
        left_s = self.deadline - environment.monotonic()
        if left_s <= 0:
            raise OutOfTime
        return self._carry_out(operation, left_s)

    def _carry_out(self, operation: Callable[[Store], T], left_s: float) -> T:
        return operation(self.store)


class ProcessClient(Client):
    """A client in a process of its own, with a copy of `store` that opens its own connections."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, name)
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                command_of(__name__, "serve", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # out of Ctrl-C's reach: it ends when all is cleaned up
            )
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

    def _carry_out(self, operation: Callable[[Store], T], left_s: float) -> T:
        with self._turn:
            try:
                self._connection.send(operation)
                if not self._connection.poll(left_s):
                    self._process.kill()  # its answer would be taken for the next question's
                    raise OutOfTime
                result: T | CheckpointError = self._connection.recv()
            except (OSError, EOFError) as error:
                raise StorageUnavailable(
                    f"the second client's process has ended (status {self._process.poll()})",
                    url=self.store.url,
                ) from error
        if isinstance(result, CheckpointError):
            raise result
        return result


def serve(descriptor: str) -> None:
    """Carry out the operations that come over a socket, until the other side hangs up."""
    with Connection(int(descriptor)) as connection, contextlib.suppress(EOFError, OSError):
        store = connection.recv()
        while True:
            operation = connection.recv()
            try:
                result = operation(store)
            except CheckpointError as error:
                result = error
            connection.send(result)


def _create(store: Store, key: str, data: bytes) -> None:
    raw = store.raw_requests()
    if raw is None or not raw.put(key, CheckedBody(data), create=True):
        put_bytes(store, key, data, mode=PutMode.CREATE)


def _names(store: Store, prefix: str) -> list[str]:
    return [stat.key for stat in store.list(prefix)]


def _folders(store: Store, prefix: str) -> list[str]:
    return list(store.folders(prefix))


def _clean(store: Store, keys: list[str]) -> list[str]:
    problems: list[str] = []
    for action in (lambda: store.delete(keys), store.abandon):
        try:
            action()
        except CheckpointError as error:
            problems.append(str(error))
    with contextlib.suppress(StorageError):
        folders = {*store.folders(), *(str(parent) for key in keys for parent in PurePosixPath(key).parents)}
        for folder in sorted(folders - {"."}, key=len, reverse=True):
            store.remove_empty(folder)
        store.remove_empty()
    try:
        # A listing may lag.
        left = [stat.key for stat in store.list() if exists(store, stat.key)]
    except StorageError:
        left = []
        with contextlib.suppress(StorageError):
            left = [key for key in keys if exists(store, key)]
    return left or (problems if keys else [])
