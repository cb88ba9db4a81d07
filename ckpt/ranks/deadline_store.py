"""A store whose operations end in time: with an error if they make no progress for too long."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ckpt.backends.base import Condition, ObjectStat, PutMode, RawRequests, Store, UploadNote
from ckpt.backends.bodies import Body, Part
from ckpt.backends.wrapper import WrappedStore
from ckpt.consistency import environment
from ckpt.errors import StorageError, StorageUnavailable
from ckpt.lanes import on_behalf
from ckpt.ranks.progress import Operation, Progress

T = TypeVar("T")

_GRACE = 0.1
"""The part of the limit that each operation gets once it is reached: to clean up, or to look."""

_LAST = 0.02
"""The part that each gets when that is used up too."""

_CLEAN_UP = 0.25
"""The part of the limit that an operation gets after a failure of which this rank saw nothing."""

_PACED_BYTES = 1 << 20
_PAGE_ITEMS = 1000


class DeadlineStore(WrappedStore):
    """Bounds the time of every operation of another store, and reports it to `progress`.

    Operations that do not touch the caller's memory run in a thread of their own. They are given
    up, with StorageUnavailable, after `limit_s` without progress (None: never). A thread that the
    kernel or a server holds ends when it is let go; it then finds that its operation was cancelled,
    and undoes it. A listing is bounded page by page.

    Reads are cancelled after that time, as late bytes would change memory that is in use again.
    Reads of a store that cannot cancel them (`Store.reads`) are not given up.

    Args:
        own_memory: reads fill only memory that nobody else uses: all of them are given up.
    """

    def __init__(
        self, inner: Store, progress: Progress, limit_s: float | None, *, own_memory: bool = False
    ) -> None:
        super().__init__(inner)
        self._progress, self._limit_s, self._own_memory = progress, limit_s, own_memory
        self._given_up: list[threading.Event] = []
        # A mount that hangs can hang even the question of which file system it is.
        self._reads = self.run("opening", "", lambda _: inner.reads)
        if self._reads is not None:
            self._reads.report_to(progress.moved)

    def reporting_to(self, progress: Progress) -> DeadlineStore:
        """Make a store that is bounded alike, by another progress."""
        twin = copy.copy(self)
        twin._progress = progress
        if twin._reads is not None:
            twin._reads.report_to(progress.moved)
        return twin

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        def work(operation: Operation) -> None:
            self._inner.put(key, _ReportingBody(body, operation, self._progress), mode=mode)

        self.run("writing", key, work, body.nbytes)

    def put_resumable(
        self, key: str, body: Body, note: UploadNote, *, mode: PutMode = PutMode.OVERWRITE
    ) -> int:
        def work(operation: Operation) -> int:
            reporting = _ReportingBody(body, operation, self._progress)
            return self._inner.put_resumable(key, reporting, note, mode=mode)

        return self.run("writing", key, work, body.nbytes)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        cancel = None if self._reads is None else self._reads.cancel
        if self._own_memory or cancel is not None:
            self.run("reading", key, lambda _: self._inner.read_into(key, offset, buffers), cancel=cancel)
        else:
            self._raise_if_given_up(key, settled=True)
            with self._progress.operation("reading", key):
                self._inner.read_into(key, offset, buffers)

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        if self._reads is None and not self._own_memory:  # reads of such a store take as long as they take
            return Store.read_whole(self, key, check)
        cancel = None if self._reads is None else self._reads.cancel
        return self.run("reading", key, lambda _: self._inner.read_whole(key, check), cancel=cancel)

    def stat(self, key: str) -> ObjectStat:
        return self.run("looking for", key, lambda _: self._inner.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return self._paged(prefix, self._inner.list)

    def folders(self, prefix: str = "") -> Iterator[str]:
        return self._paged(prefix, self._inner.folders)

    def delete(self, keys: Iterable[str]) -> None:
        keys = [*keys]
        if keys:
            self.run("deleting", keys[0], lambda _: self._inner.delete(keys))

    def prepare(self, prefix: str) -> None:
        self.run("making the directory", prefix, lambda _: self._inner.prepare(prefix))

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        def work(operation: Operation) -> int:
            def report(stat: ObjectStat) -> bool:
                operation.check()
                self._progress.moved()
                return choose is None or choose(stat)

            return self._inner.abandon(prefix, choose=report)

        return self.run("aborting unfinished puts", prefix, work)

    def root_is_object(self) -> bool:
        return self.run("looking for", "", lambda _: self._inner.root_is_object())

    def links(self, prefix: str = "") -> Iterator[str]:
        return self._paged(prefix, self._inner.links)

    def open_link(self, path: str) -> Store | None:
        opened = self.run("opening", path, lambda _: self._inner.open_link(path))
        return None if opened is None else self.around(opened)

    def root_is_link(self) -> bool:
        return self.run("looking for", "", lambda _: self._inner.root_is_link())

    def unlink_root(self) -> None:
        self.run("removing", "", lambda _: self._inner.unlink_root())

    def remove_empty(self, prefix: str = "") -> None:
        self.run("removing empty directories", prefix, lambda _: self._inner.remove_empty(prefix))

    def free_bytes(self) -> int | None:
        return self.run("asking for free space", "", lambda _: self._inner.free_bytes())

    def raw_requests(self) -> RawRequests | None:
        inner = self.run("connecting", "", lambda _: self._inner.raw_requests())
        return None if inner is None else _BoundedRequests(inner, self)

    def parent(self) -> Store:
        return self.around(self.run("opening the parent folder", "", lambda _: self._inner.parent()))

    def around(self, inner: Store) -> Store:
        return DeadlineStore(inner, self._progress, self._limit_s, own_memory=self._own_memory)

    def close(self) -> None:
        is_blocked = not all(done.is_set() for done in self._given_up)
        self._given_up = []
        if is_blocked:  # closing would wait
            environment.start_thread(self._inner.close, "ckpt-store")
        else:
            self._inner.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given_up": []}

    def _paged(self, prefix: str, list_items: Callable[[str], Iterator[T]]) -> Iterator[T]:
        items = itertools.chain.from_iterable(map(list_items, [prefix]))  # begun with the first page
        size = 1  # most listings are for their first item

        def page(operation: Operation) -> Sequence[T]:
            taken = []
            for item in itertools.islice(items, size):
                operation.check()
                self._progress.moved()
                taken.append(item)
            return taken

        while taken := self.run("listing", prefix, page):
            yield from taken
            size = min(2 * size, _PAGE_ITEMS)

    def run(
        self,
        action: str,
        key: str,
        work: Callable[[Operation], T],
        size_bytes: int = 0,
        *,
        cancel: Callable[[], None] | None = None,
    ) -> T:
        """Carry out `work` and return its result; give up, and call `cancel`, without progress.

        `action`, `key` and `size_bytes` describe the operation in errors. Raises StorageUnavailable
        if it was given up, StorageError if this save or load has failed elsewhere.
        """
        self._raise_if_given_up(key, settled=True)
        with self._progress.operation(action, key, size_bytes) as operation:
            if self._limit_s is None:
                return work(operation)
            outcome: Future[T] = Future()
            done = threading.Event()
            outcome.add_done_callback(lambda _: done.set())

            def carry_out() -> None:
                try:
                    outcome.set_result(work(operation))
                except BaseException as error:
                    outcome.set_exception(error)

            try:
                try:
                    environment.start_thread(on_behalf(carry_out), "ckpt-store")
                except RuntimeError:  # Python starts no thread any more once it is ending
                    carry_out()
                while not environment.wait(done, min(self._limit_s / 20, 1.0)):
                    self._raise_if_given_up(key, settled=False)
                    self._raise_if_stalled(operation, self._limit_s)
            except BaseException as error:
                operation.cancelled = True
                self._given_up.append(done)
                if cancel is not None:
                    cancel()
                if not isinstance(error, Exception):  # an interrupt: the store itself works
                    environment.wait(done, _GRACE * self._limit_s)
                raise
            try:
                return outcome.result()
            finally:
                outcome = Future()  # the other and its error would keep what all calling frames hold

    def _raise_if_given_up(self, key: str, *, settled: bool) -> None:
        if self._progress.refusal is not None:
            text = f"not carried out: {self._progress.refusal}"
            raise StorageError(text, url=self.url, key=key, settled=settled)

    def _raise_if_stalled(self, operation: Operation, limit_s: float) -> None:
        idle_s, age_s = self._progress.idle_s, environment.monotonic() - operation.began_at_s
        grace = _GRACE if idle_s < (1 + _GRACE) * limit_s else _LAST
        is_stalled = idle_s >= limit_s and age_s >= grace * limit_s
        if is_stalled or (self._progress.is_ending and age_s >= _CLEAN_UP * limit_s):
            message = f"given up after {idle_s:.0f} s without progress: {operation}"
            raise StorageUnavailable(message, url=self.url, key=operation.key)


class _BoundedRequests:
    """Raw requests that are given up as the operations of `store` are."""

    def __init__(self, inner: RawRequests, store: DeadlineStore) -> None:
        self._inner, self._run, self.bucket_url = inner, store.run, inner.bucket_url

    @property
    def checksum(self) -> str:
        return self._inner.checksum

    def put(self, key: str, body: Body, *, create: bool = False, part_size_bytes: int | None = None) -> bool:
        def work(_: Operation) -> bool:
            return self._inner.put(key, body, create=create, part_size_bytes=part_size_bytes)

        return self._run("trying to create", key, work)

    def learn(self, condition: Condition | None) -> None:
        self._inner.learn(condition)

    def begin(self, key: str) -> str:
        return self._run("beginning an upload of", key, lambda _: self._inner.begin(key))

    def send_part(self, key: str, upload_id: str, number: int, body: Body) -> None:
        self._run("writing", key, lambda _: self._inner.send_part(key, upload_id, number, body), body.nbytes)

    def uploads(self, key: str) -> list[str]:
        return self._run("listing uploads of", key, lambda _: self._inner.uploads(key))

    def abort(self, key: str, upload_id: str) -> None:
        self._run("aborting an upload of", key, lambda _: self._inner.abort(key, upload_id))

    def setting(self, name: str) -> Mapping[str, Any]:
        return self._run("reading settings", "", lambda _: self._inner.setting(name))

    def name_of(self, key: str) -> str:
        return self._inner.name_of(key)


class _ReportingBody:
    """A body that reports what is sent of it, and has nothing more for a cancelled operation."""

    def __init__(self, body: Body, operation: Operation, progress: Progress) -> None:
        self._body, self._operation, self._progress = body, operation, progress
        self.nbytes, self.has_checksums = body.nbytes, body.has_checksums

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        self._operation.check()
        with self._body.part(start, stop) as part:
            self._progress.moved()
            yield part if part.pace is None else Part(part.buffers, part.crc64nvme, self._pace(part.pace))
        self._operation.sent_bytes += stop - start
        self._progress.moved()

    def crc64nvme(self) -> int | None:
        self._operation.check()
        return self._body.crc64nvme()

    def _pace(self, pace: Callable[[int], None]) -> Callable[[int], None]:
        """Count sending slowly on purpose as progress too."""

        def paced(nbytes: int) -> None:
            for start in range(0, nbytes, _PACED_BYTES):
                self._operation.check()
                pace(min(_PACED_BYTES, nbytes - start))
                self._progress.moved()

        return paced
