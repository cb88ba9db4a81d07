"""A store whose operations end in time: with an error when they make no progress for too long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ckpt.backends.base import ObjectStat, PutMode, Store
from ckpt.backends.bodies import Body, Part
from ckpt.backends.raw_requests import Condition, Trials
from ckpt.backends.wrapper import WrappedStore
from ckpt.consistency import environment
from ckpt.errors import StorageError, StorageUnavailable
from ckpt.ranks.progress import Operation, Progress

__all__ = ["GuardedStore"]

T = TypeVar("T")

_GRACE = 0.1
"""The part of the limit that operations get, when it is reached: to clean up, to look what happened."""

_LAST = 0.02
"""The part that each gets when that is used up too."""

_CLEAN_UP = 0.25
"""The part of the limit that an operation gets after a failure elsewhere, of which this rank has seen nothing."""

_PACED_BYTES = 1 << 20


class GuardedStore(WrappedStore):
    """Another store, whose operations tell `progress` what they do.

    Those that do not touch memory of the caller's run in a thread of their own and are given up, with
    StorageUnavailable, after `limit_s` without progress (None: never). A thread that the kernel or a server
    holds ends when it is let go; it then finds that nobody wants its work any more, and undoes it.

    Reads are broken off then, as what arrives late would change memory that is in use again. Those of a store that
    cannot do so (`Store.reads`) are not given up.

    Args:
        own_memory: nobody but this library reads from the store, into memory that nobody else uses: all reads are
            given up.
    """

    def __init__(
        self, inner: Store, progress: Progress, limit_s: float | None, *, own_memory: bool = False
    ) -> None:
        super().__init__(inner)
        self._progress, self._limit_s, self._own_memory = progress, limit_s, own_memory
        self._given_up: list[threading.Thread] = []
        if inner.reads is not None:
            inner.reads.moved = progress.moved

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        def work(operation: Operation) -> None:
            self._inner.put(key, _GuardedBody(body, operation, self._progress), mode=mode)

        self._run("writing", key, work, body.nbytes)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        def work(_: Operation) -> None:
            self._inner.read_into(key, offset, buffers)

        reads = self._inner.reads
        if self._own_memory or reads is not None:
            self._run("reading", key, work, give_up=None if reads is None else reads.break_off)
        else:
            self._raise_if_given_up(key, settled=True)
            with self._progress.operation("reading", key) as operation:
                work(operation)

    def stat(self, key: str) -> ObjectStat:
        return self._run("looking for", key, lambda _: self._inner.stat(key))

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if keys:
            self._run("deleting", keys[0], lambda _: self._inner.delete(keys))

    def prepare(self, prefix: str) -> None:
        self._run("making the directory", prefix, lambda _: self._inner.prepare(prefix))

    def trials(self) -> Trials | None:
        trials = self._inner.trials()
        return None if trials is None else _GuardedTrials(trials, self)

    def close(self) -> None:
        held = [thread for thread in self._given_up if thread.is_alive()]
        self._given_up = []
        if held:  # closing would wait for them
            threading.Thread(target=self._inner.close, name="ckpt-store", daemon=True).start()
        else:
            self._inner.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given_up": []}

    def _run(
        self,
        action: str,
        key: str,
        work: Callable[[Operation], T],
        size_bytes: int = 0,
        *,
        give_up: Callable[[], None] | None = None,
    ) -> T:
        self._raise_if_given_up(key, settled=True)
        with self._progress.operation(action, key, size_bytes) as operation:
            if self._limit_s is None:
                return work(operation)
            outcome: Future[T] = Future()
            thread = threading.Thread(
                target=_carry_out, args=(work, operation, outcome), name="ckpt-store", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # Python starts no thread any more once it is ending
                return work(operation)
            try:
                while not wait([outcome], timeout=min(self._limit_s / 20, 1.0)).done:
                    self._raise_if_given_up(key, settled=False)
                    self._raise_if_stalled(operation, self._limit_s)
            except BaseException as error:
                operation.abandoned = True
                self._given_up.append(thread)
                if give_up is not None:
                    give_up()
                if not isinstance(error, Exception):  # an interrupt: the store itself works
                    wait([outcome], timeout=_GRACE * self._limit_s)
                raise
            return outcome.result()

    def _raise_if_given_up(self, key: str, *, settled: bool) -> None:
        if self._progress.given_up is not None:
            error = StorageError(f"not carried out: {self._progress.given_up}", url=self.url, key=key)
            error.settled = settled
            raise error

    def _raise_if_stalled(self, operation: Operation, limit_s: float) -> None:
        idle_s, age_s = self._progress.idle_s, environment.monotonic() - operation.began_at_s
        grace = _GRACE if idle_s < (1 + _GRACE) * limit_s else _LAST
        is_stalled = idle_s >= limit_s and age_s >= grace * limit_s
        if is_stalled or (self._progress.is_ending and age_s >= _CLEAN_UP * limit_s):
            raise StorageUnavailable(
                f"given up after {idle_s:.0f} s without progress: {operation}",
                url=self.url,
                key=operation.key,
            )


def _carry_out(work: Callable[[Operation], T], operation: Operation, outcome: Future[T]) -> None:
    try:
        result = work(operation)
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


class _GuardedTrials:
    """A server asked by requests that are given up as those of `store` are."""

    def __init__(self, inner: Trials, store: GuardedStore) -> None:
        self._inner, self._store, self.place = inner, store, inner.place

    def put(self, key: str, body: Body, *, create: bool = False, part_size_bytes: int | None = None) -> bool:
        def work(_: Operation) -> bool:
            return self._inner.put(key, body, create=create, part_size_bytes=part_size_bytes)

        return self._store._run("trying to create", key, work)

    def learn(self, condition: Condition | None) -> None:
        self._inner.learn(condition)

    def begin(self, key: str) -> str:
        return self._store._run("beginning an upload of", key, lambda _: self._inner.begin(key))

    def send_part(self, key: str, upload_id: str, number: int, body: Body) -> None:
        self._store._run(
            "writing", key, lambda _: self._inner.send_part(key, upload_id, number, body), body.nbytes
        )

    def uploads(self, key: str) -> list[str]:
        return self._store._run("listing uploads of", key, lambda _: self._inner.uploads(key))

    def abort(self, key: str, upload_id: str) -> None:
        self._store._run("aborting an upload of", key, lambda _: self._inner.abort(key, upload_id))


class _GuardedBody:
    """A body that notes what is sent of it, and has nothing more for an operation that was abandoned."""

    def __init__(self, body: Body, operation: Operation, progress: Progress) -> None:
        self._body, self._operation, self._progress = body, operation, progress
        self.nbytes, self.has_checksums = body.nbytes, body.has_checksums

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        self._check()
        with self._body.part(start, stop) as part:
            self._progress.moved()
            yield part if part.pace is None else Part(part.buffers, part.crc64nvme, self._pace(part.pace))
        self._operation.sent_bytes += stop - start
        self._progress.moved()

    def crc64nvme(self) -> int | None:
        self._check()
        return self._body.crc64nvme()

    def _check(self) -> None:
        if self._operation.abandoned:
            raise StorageError("given up", key=self._operation.key)

    def _pace(self, pace: Callable[[int], None]) -> Callable[[int], None]:
        """Sending slowly on purpose is progress too."""

        def paced(nbytes: int) -> None:
            for start in range(0, nbytes, _PACED_BYTES):
                self._check()
                pace(min(_PACED_BYTES, nbytes - start))
                self._progress.moved()

        return paced
