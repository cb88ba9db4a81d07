"""A store over the S3 protocol; `s3` and `cos` differ only in how they build their clients.

Bytes are not copied, and go from the socket straight into the destination; checksums are computed
by the caller, and payloads not signed. That costs a fifth of TransferManager or `StreamingBody`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from ckpt.backends.base import (
    MIB,
    Capabilities,
    Condition,
    ObjectStat,
    PutMode,
    RawRequests,
    Store,
    UploadNote,
    check_key,
    delete_in_batches,
    holds,
    is_key,
    other_version,
    part_size_bytes,
    refuse_existing,
)
from ckpt.backends.bodies import Body, remaining, showing
from ckpt.backends.cancellable_reads import Read, Reads
from ckpt.backends.fsspec_listings import forget_listings
from ckpt.backends.options import scrub
from ckpt.backends.s3_protocol.errors import Conflict, NotImplementedByServer, Replaced, UploadGone, text_of
from ckpt.backends.s3_protocol.multipart import begin_upload, put_object
from ckpt.backends.s3_protocol.options import MAX_PART_SIZE_BYTES
from ckpt.backends.s3_protocol.requests import S3Requests, folder_of, stat_of
from ckpt.backends.s3_protocol.resumed_uploads import drop
from ckpt.errors import AlreadyExists, NotFound, StorageError, StorageUnavailable, Truncated

_DELETE_BATCH = 1000
_DELETE_THREADS = 4
"""Of batches: each counts as a thousand writes of the 3,500 a second that S3 takes."""
_PUT_ATTEMPTS = 4
_BODY_ATTEMPTS = 6
_WHOLE_ATTEMPTS = 4
_WHOLE_BYTES = MIB
"""An object that has no more comes with the first request for it."""


class S3ApiStore(Store):
    """Objects under one prefix of one bucket."""

    def __init__(self, s3: S3Requests) -> None:
        self.url, self.threads = s3.url, s3.threads
        self._s3 = s3
        self._reads = Reads()

    @property
    def reads(self) -> Reads:
        return self._reads

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            conditional_create=self._s3.condition is Condition.HONOURED,
            atomic_replace=True,
            cross_client_visibility=True,
            visible_is_durable=True,
            parallel_parts=True,
            resumes_uploads=True,
            max_object_size_bytes=5 << 40,
            min_part_size_bytes=5 << 20,
            max_part_size_bytes=MAX_PART_SIZE_BYTES,
        )

    @property
    def retries(self) -> int:
        return self._s3.retries.count

    @property
    def keeps_versions(self) -> bool:
        return self._s3.keeps_versions

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        self._put_any(key, body, mode, None)

    def put_resumable(
        self, key: str, body: Body, note: UploadNote, *, mode: PutMode = PutMode.OVERWRITE
    ) -> int:
        try:
            return self._put_any(key, body, mode, note)
        except AlreadyExists:
            drop(self._s3, key, note)
            raise

    def _put_any(self, key: str, body: Body, mode: PutMode, note: UploadNote | None) -> int:
        create, s3 = mode is PutMode.CREATE, self._s3
        size = part_size_bytes(body.nbytes, s3.options["part_size_bytes"], self.capabilities)
        if create and not (s3.condition is Condition.HONOURED and body.nbytes <= size):
            # The condition is sent all the same, but some servers ignore it, at least for parts.
            refuse_existing(self, key)
        try:
            return self._put(key, body, size, create and s3.condition is not Condition.REFUSED, note)
        except NotImplementedByServer:
            # Then look, and write without. Not atomic, and the capabilities say so.
            s3.condition = Condition.REFUSED
            refuse_existing(self, key)
            return self._put(key, body, size, False, note)
        finally:
            forget_listings(self.url, [key])

    def _put(self, key: str, body: Body, size: int, create: bool, note: UploadNote | None) -> int:
        parts_of = size if body.nbytes > size else None
        compare = functools.partial(holds, self, key, body)
        for attempt in itertools.count(1):
            try:
                return put_object(self._s3, key, body, parts_of, create=create, note=note, holds=compare)
            except (UploadGone, Conflict) as error:
                # The server forgot the upload, as some do in a restart; or another conditional
                # write of this key was in flight, and S3 wants ours begun anew. Either way nothing
                # of it is left.
                if attempt == _PUT_ATTEMPTS:
                    text = f"cannot put: refused {_PUT_ATTEMPTS} times: {error}"
                    raise StorageUnavailable(text, url=self.url, key=key) from None
                self._s3.retries.note(str(error))
            time.sleep(0.2 * 2**attempt * random.random())
        raise AssertionError

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        try:
            self._fill(key, offset, buffers, "")
        except Replaced:
            raise _replaced(self.url, key) from None

    def read_version(self, stat: ObjectStat, offset: int, buffers: Sequence[memoryview]) -> None:
        if stat.version is None or stat.version.startswith("W/"):
            super().read_version(stat, offset, buffers)
            return
        try:
            self._fill(stat.key, offset, buffers, f'"{stat.version}"')
        except (Replaced, Truncated):
            raise other_version(self.url, stat.key) from None

    def _fill(self, key: str, offset: int, buffers: Sequence[memoryview], etag: str) -> None:
        pending = [buffer for buffer in buffers if buffer.nbytes]
        if not pending:
            self.stat(key)
            return
        with showing(buffers) as came, self._reads.begin() as read:
            self._read(key, offset, pending, read, came, etag)

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        """Read a whole object: by one request, without asking for its size before, if it is small."""
        for _ in range(_WHOLE_ATTEMPTS):
            with contextlib.suppress(Replaced):  # then all of another version
                return self._read_whole(key, check)
        raise _replaced(self.url, key)

    def _read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        with self._reads.begin() as read:
            first = self._s3.get_first(key, _WHOLE_BYTES)
            if first is None:
                return super().read_whole(key, check)
            body, size, etag = first
            try:
                read.check()
                check(size)
                data = memoryview(bytearray(min(size, _WHOLE_BYTES)))
                got, _ = body.read_into([data], read, _ignore)
            finally:
                body.close()
            if got < data.nbytes:
                self._s3.retries.note("a reply ended early")
            if got < size:
                data = memoryview(bytearray(size))
                self._read(key, 0, [data], read, _ignore, etag)
        return data.obj  # type: ignore[return-value]

    def _read(
        self,
        key: str,
        offset: int,
        pending: Sequence[memoryview],
        read: Read,
        came: Callable[[int], None],
        etag: str = "",
    ) -> None:
        """Read an object, with this ETag if one is given; raises Replaced if it is not the same to the end."""
        position = offset
        stop = offset + sum(buffer.nbytes for buffer in pending)
        for attempt in itertools.count(1):
            read.check()
            body, etag = self._s3.get(key, position, stop, etag)
            try:
                got, failure = body.read_into(pending, read, came)
            finally:
                body.close()
            position += got
            if position == stop:
                return
            pending = remaining(pending, got)
            if attempt >= _BODY_ATTEMPTS + (position - offset) // MIB:
                reason = scrub(text_of(failure), self._s3.secrets()) if failure else "the reply ended early"
                raise StorageUnavailable(
                    f"cannot read: {reason}", url=self.url, key=key, start=position, stop=stop
                ) from None
            self._s3.retries.note("a reply ended early")
            time.sleep(0.05 * 2 ** min(attempt, 7) * random.random())

    def stat(self, key: str) -> ObjectStat:
        return self._s3.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        # For a part of a name: the objects of its folder, and not all that is below.
        arguments = {} if prefix == folder_of(prefix) else {"Delimiter": "/"}
        for page in self._s3.pages("list_objects_v2", prefix, "list", **arguments):
            for entry in page.get("Contents", ()):
                key = str(entry["Key"]).removeprefix(self._s3.prefix)
                # Else a "directory", or a name that this library could not have written.
                if key.startswith(prefix) and is_key(key):
                    yield stat_of(key, entry, entry["Size"])
            for entry in page.get("CommonPrefixes", ()):
                folder = str(entry["Prefix"]).removeprefix(self._s3.prefix)
                if folder.startswith(prefix):
                    yield from self.list(folder)

    def folders(self, prefix: str = "") -> Iterator[str]:
        start = self._s3.prefix + prefix
        for page in self._s3.pages("list_objects_v2", prefix, "list", Delimiter="/"):
            for entry in page.get("CommonPrefixes", ()):
                name = str(entry["Prefix"]).removeprefix(start).rstrip("/")
                if is_key(name):
                    yield name

    def root_is_object(self) -> bool:
        return self._s3.prefix_is_object()

    def delete(self, keys: Iterable[str]) -> None:
        checked = [check_key(key) for key in keys]
        try:
            # Not in the threads of the connection: a batch may be deleted there key by key.
            delete_in_batches(checked, self._delete_batch, batch=_DELETE_BATCH, threads=_DELETE_THREADS)
        finally:
            forget_listings(self.url, checked)

    def _delete_batch(self, batch: Sequence[str]) -> None:
        if len(batch) == 1 or not self._s3.delete_batch(batch):
            futures = [self._s3.submit(key, self._s3.delete, key) for key in batch]
            wait(futures)
            for future in futures:
                future.result()

    def prepare(self, prefix: str) -> None:
        """Do nothing: an object store has no directories."""

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        uploads = self._s3.uploads(prefix)
        chosen = [(stat, upload_id) for stat, upload_id in uploads if choose is None or choose(stat)]
        for stat, upload_id in chosen:
            with contextlib.suppress(UploadGone):
                self._s3.abort_upload(stat.key, upload_id, UploadGone)
        return len(chosen)

    def raw_requests(self) -> RawRequests:
        return _RawRequests(self._s3)

    def parent(self) -> Store:
        parent = copy.copy(self)
        S3ApiStore.__init__(parent, self._s3.parent())
        return parent

    def close(self) -> None:
        self._s3.close()


class _RawRequests:
    """Single requests to an S3 server, for probes, sent as the store sends them."""

    def __init__(self, s3: S3Requests) -> None:
        self._s3 = s3
        self.bucket_url = s3.bucket_url

    @property
    def checksum(self) -> str:
        return self._s3.checksums.kind

    def put(self, key: str, body: Body, *, create: bool = False, part_size_bytes: int | None = None) -> bool:
        try:
            with self._upload_found(key):
                put_object(self._s3, key, body, part_size_bytes, create=create)
            return True
        except NotImplementedByServer:
            return False
        except Conflict as error:
            raise AlreadyExists(str(error), url=self._s3.url, key=key) from None

    def learn(self, condition: Condition | None) -> None:
        self._s3.condition = condition

    def begin(self, key: str) -> str:
        return begin_upload(self._s3, key, checksums=False)

    def send_part(self, key: str, upload_id: str, number: int, body: Body) -> None:
        with self._upload_found(key), body.part(0, body.nbytes) as part:
            self._s3.send_part(key, part, upload_id, number)

    def uploads(self, key: str) -> list[str]:
        return [upload_id for stat, upload_id in self._s3.uploads(check_key(key)) if stat.key == key]

    def abort(self, key: str, upload_id: str) -> None:
        self._s3.abort_upload(key, upload_id)

    def setting(self, name: str) -> Mapping[str, Any]:
        return self._s3.setting(name)

    def name_of(self, key: str) -> str:
        return self._s3.prefix + key

    @contextlib.contextmanager
    def _upload_found(self, key: str) -> Iterator[None]:
        try:
            yield
        except UploadGone as error:
            raise NotFound(str(error), url=self._s3.url, key=key) from None


def _replaced(url: str, key: str) -> StorageError:
    return StorageError("was replaced while it was being read", url=url, key=key)


def _ignore(_: int) -> None:
    pass
