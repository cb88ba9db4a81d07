"""The S3 protocol over a boto3-like client; `s3` and `cos` differ only in how they build theirs.

The settings here were measured: bodies that hand out the callers' own buffers, checksums computed by the
caller and sent as headers, unsigned payloads, and reads straight from the socket's response into the
destination cost a fifth of what TransferManager or `StreamingBody.read` do.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any

from ckpt.backends.base import MIB, Capabilities, ObjectStat, PutMode, check_key, is_key, part_size_bytes
from ckpt.backends.bodies import Body, Part, remaining
from ckpt.backends.cancellable_reads import Read, Reads
from ckpt.backends.raw_requests import Condition
from ckpt.backends.s3_protocol.connection import S3Connection
from ckpt.backends.s3_protocol.errors import (
    Conflict,
    Malformed,
    NotImplementedByServer,
    RangeRefused,
    Replaced,
    Signal,
    UploadGone,
    text_of,
)
from ckpt.backends.s3_protocol.http_bodies import (
    PartReader,
    RawBody,
    composite_etag,
    content_range,
    drain,
    encode_crc,
    etag_of,
    server_time,
)
from ckpt.backends.s3_protocol.options import MAX_PART_SIZE_BYTES
from ckpt.backends.s3_protocol.raw_requests import S3Trials
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    CheckpointError,
    IntegrityError,
    NotFound,
    StorageError,
    StorageUnavailable,
    Truncated,
)

__all__ = ["S3ApiStore"]

_DELETE_BATCH = 1000
_PUT_ATTEMPTS = 4
_BODY_ATTEMPTS = 6


class S3ApiStore(S3Connection):
    """Objects under one prefix of one bucket."""

    def __init__(self, url: str, options: Mapping[str, Any], *, threads: int) -> None:
        super().__init__(url, options, threads=threads)
        self._checksums = self._options["checksum"] == "crc64nvme"
        # What the server makes of "only if absent", once that is known.
        self._condition: Condition | None = None
        self._reads = Reads()
        self._lists_checksums = True  # until the server does not understand a list of parts with checksums

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            conditional_create=self._condition is Condition.HONOURED,
            atomic_replace=True,
            cross_client_visibility=True,
            parallel_parts=True,
            max_object_size_bytes=5 << 40,
            max_parts=10_000,
            min_part_size_bytes=5 << 20,
            max_part_size_bytes=MAX_PART_SIZE_BYTES,
        )

    @property
    def reads(self) -> Reads:
        return self._reads

    # -- writing ---------------------------------------------------------------------------------------

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        create = mode is PutMode.CREATE
        size = part_size_bytes(body.nbytes, self._options["part_size_bytes"], self.capabilities)
        if create and not (self._condition is Condition.HONOURED and body.nbytes <= size):
            # The condition is sent all the same, but a server may ignore it; some do so for uploads in parts only.
            self._refuse_existing(key)
        try:
            self._put(key, body, size, create and self._condition is not Condition.REFUSED)
        except NotImplementedByServer:
            # The server has no conditional requests: look, then write. Not atomic, and the capabilities say so.
            self._condition = Condition.REFUSED
            self._refuse_existing(key)
            self._put(key, body, size, create=False)

    def _put(self, key: str, body: Body, size: int, create: bool) -> None:
        failure: Signal | None = None
        for attempt in range(_PUT_ATTEMPTS):
            if failure is not None:
                self._note_retry()
                time.sleep(0.2 * 2**attempt * random.random())
            try:
                if body.nbytes > size:
                    self._put_multipart(key, body, size, create)
                    return
                with body.part(0, body.nbytes) as part:
                    self._put_single(key, part, create)
                return
            except (UploadGone, Conflict) as error:
                # The server forgot the upload, as some do in a restart; or another conditional write of this
                # key was in flight, and S3 wants ours begun anew. Either way nothing of it is left.
                failure = error
        raise StorageUnavailable(
            f"cannot put: begun {_PUT_ATTEMPTS} times, each time refused: {failure}", url=self.url, key=key
        ) from failure

    def _put_single(self, key: str, part: Part, create: bool) -> None:
        with self._writing(key, "put", "PutObject", create) as extra:
            self._client.put_object(
                **self._object(key),
                Body=PartReader(part),
                ContentLength=part.nbytes,
                **self._part_checksum(part),
                **self._options["s3_additional_kwargs"],
                **extra,
            )

    def _put_multipart(self, key: str, body: Body, size: int, create: bool) -> None:
        checksums = self._checksums and body.has_checksums
        upload_id = self._start_upload(key, checksums)
        try:
            parts = self._send_parts(key, body, size, upload_id)
            self._complete(key, body, upload_id, parts, checksums, create)
        except BaseException:
            self._abort(key, upload_id)
            raise
        self._check_size(key, body.nbytes)

    def _start_upload(self, key: str, checksums: bool) -> str:
        began = time.monotonic()
        with self._translated(key, "start a multipart upload", harmless=True):
            reply = self._client.create_multipart_upload(
                **self._object(key),
                **({"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if checksums else {}),
                **self._options["s3_additional_kwargs"],
            )
            upload_id = str(reply["UploadId"])
        if reply["ResponseMetadata"].get("RetryAttempts"):
            self._abort_twins(key, upload_id, time.monotonic() - began)
        return upload_id

    def _abort_twins(self, key: str, upload_id: str, took_s: float) -> None:
        """Abort uploads of `key` that tries before this one may have begun, their replies lost.

        Only those begun while the call ran, by the server's clock: an older one is another client's.
        """
        name = self._prefix + key
        for page in self._upload_pages(name, best_effort=True):
            uploads = [found for found in page.get("Uploads", ()) if found.get("Key") == name]
            now = server_time(page)
            if now is None:
                return
            since = now - timedelta(seconds=took_s + 2)  # both times are whole seconds
            for found in uploads:
                begun = found.get("Initiated")
                if found["UploadId"] != upload_id and begun is not None and begun >= since:
                    self._abort(key, found["UploadId"])

    def _send_parts(self, key: str, body: Body, size: int, upload_id: str) -> list[dict[str, Any]]:
        stop = threading.Event()

        def send(number: int) -> dict[str, Any]:
            if stop.is_set():
                raise StorageError("not sent: another part failed", url=self.url, key=key)
            start = (number - 1) * size
            with body.part(start, min(start + size, body.nbytes)) as part:
                return self._send_part(key, part, upload_id, number)

        futures: list[Future[dict[str, Any]]] = []
        try:
            for number in range(1, -(-body.nbytes // size) + 1):
                futures.append(self._submit(key, send, number))
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [error for error in (future.exception() for future in done) if error is not None]
            if failed:
                raise failed[0]
            return [future.result() for future in futures]
        finally:
            # No part may still be on its way when the upload is completed or aborted.
            stop.set()
            for future in futures:
                future.cancel()
            wait(futures)

    def _send_part(self, key: str, part: Part, upload_id: str, number: int) -> dict[str, Any]:
        checksum = self._part_checksum(part)
        with self._translated(key, f"upload part {number}", UploadGone, harmless=True):
            reply = self._client.upload_part(
                **self._object(key),
                UploadId=upload_id,
                PartNumber=number,
                Body=PartReader(part),
                ContentLength=part.nbytes,
                **checksum,
            )
            return {"PartNumber": number, "ETag": reply["ETag"], **checksum}

    def _complete(
        self, key: str, body: Body, upload_id: str, parts: list[dict[str, Any]], checksums: bool, create: bool
    ) -> None:
        whole = body.crc64nvme() if checksums else None
        try:
            try:
                self._request_completion(key, upload_id, parts, whole, create)
            except Malformed:
                # Swift's schema of this document is older than these checksums. Nothing was done.
                self._lists_checksums = False
                self._request_completion(key, upload_id, parts, whole, create)
        except (UploadGone, StorageError) as error:
            # Any try but the last may have worked with its reply lost: a retry then finds no upload, or (with a
            # condition) the object that it made itself.
            settled = isinstance(error, StorageError) and error.settled
            if settled or not self._is_ours(key, body.nbytes, parts, whole):
                raise

    def _request_completion(
        self, key: str, upload_id: str, parts: list[dict[str, Any]], whole: int | None, create: bool
    ) -> None:
        checksum: dict[str, str] = {}
        signals: list[type[Signal]] = [UploadGone]
        if whole is not None:
            checksum = {"ChecksumCRC64NVME": encode_crc(whole), "ChecksumType": "FULL_OBJECT"}
        if whole is not None and self._lists_checksums:
            signals.append(Malformed)
        else:
            parts = [{name: part[name] for name in ("PartNumber", "ETag")} for part in parts]
        action = "complete the upload"
        with self._writing(key, action, "CompleteMultipartUpload", create, *signals) as extra:
            self._client.complete_multipart_upload(
                **self._object(key),
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
                **checksum,
                **extra,
            )

    def _is_ours(self, key: str, nbytes: int, parts: list[dict[str, Any]], whole: int | None) -> bool:
        """Whether the object at `key` is surely the one whose completion got no answer."""
        try:
            with self._translated(key, "stat"):
                found = self._client.head_object(**self._object(key), ChecksumMode="ENABLED")
        except StorageError:
            return False
        if found.get("ContentLength") != nbytes:
            return False
        if whole is not None and found.get("ChecksumCRC64NVME") == encode_crc(whole):
            return True
        expected = composite_etag(parts)
        return bool(expected) and etag_of(found) == expected

    def _check_size(self, key: str, nbytes: int) -> None:
        """Raise IntegrityError unless the store kept all bytes. What is there stays: it may be another writer's."""
        try:
            found = self.stat(key).size_bytes
        except (AccessDenied, StorageUnavailable):
            return  # the put was acknowledged; that nobody may or can look changes nothing
        if found != nbytes:
            raise IntegrityError(f"the store kept {found} of {nbytes} bytes sent", url=self.url, key=key)

    def _abort(self, key: str, upload_id: str) -> None:
        # Best effort: the error that brought us here is the one to report, and `abandon` finds the rest.
        with (
            contextlib.suppress(StorageError, UploadGone),
            self._translated(key, "abort the upload", UploadGone),
        ):
            self._client.abort_multipart_upload(**self._object(key), UploadId=upload_id)

    def _refuse_existing(self, key: str) -> None:
        with contextlib.suppress(NotFound):
            self.stat(key)
            error = AlreadyExists("exists already", url=self.url, key=key)
            error.settled = True
            raise error

    def _part_checksum(self, part: Part) -> dict[str, str]:
        if not self._checksums or part.crc64nvme is None:
            return {}
        return {"ChecksumCRC64NVME": encode_crc(part.crc64nvme)}

    # -- reading ---------------------------------------------------------------------------------------

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        pending = [buffer for buffer in buffers if buffer.nbytes]
        stop = offset + sum(buffer.nbytes for buffer in pending)
        if offset == stop:
            self.stat(key)
            return
        with self._reads.begin() as read:
            self._read(key, offset, stop, pending, read)

    def _read(self, key: str, offset: int, stop: int, pending: Sequence[memoryview], read: Read) -> None:
        position, etag = offset, ""
        for attempt in itertools.count(1):
            read.check()
            body, etag = self._get(key, position, stop, etag)
            try:
                got, failure = drain(body, pending, read)
            finally:
                body.close()
            position += got
            if position == stop:
                return
            pending = remaining(pending, got)
            if attempt >= _BODY_ATTEMPTS + (position - offset) // MIB:
                reason = self._scrubbed(text_of(failure)) if failure else "the reply ended early"
                raise StorageUnavailable(
                    f"cannot read: {reason}", url=self.url, key=key, start=position, stop=stop
                ) from failure
            self._note_retry()
            time.sleep(0.05 * 2 ** min(attempt, 7) * random.random())

    def _get(self, key: str, start: int, stop: int, etag: str) -> tuple[RawBody, str]:
        """The reply that holds just `[start, stop)`, and its ETag.

        `etag`: that of the replies before, of which this is the rest; empty for the first.
        """
        where: dict[str, Any] = {"url": self.url, "key": key, "start": start, "stop": stop}
        # A weak ETag never matches a condition.
        condition = {"IfMatch": etag} if etag and not etag.startswith("W/") else {}
        try:
            with self._translated(key, "read", RangeRefused, Replaced):
                reply = self._client.get_object(
                    **self._object(key), Range=f"bytes={start}-{stop - 1}", **condition
                )
                found = str(reply.get("ETag") or "")
                body = RawBody(reply["Body"])
        except RangeRefused as error:
            raise Truncated("ends before that", **where) from error
        except Replaced as error:
            raise StorageError("was replaced while it was being read", **where) from error
        problem = _range_problem(reply, start, stop)
        if problem is None and etag and found and found != etag:
            problem = StorageError("was replaced while it was being read")
        if problem is not None:
            body.close()
            raise type(problem)(problem.message, **where)
        return body, etag or found

    def stat(self, key: str) -> ObjectStat:
        with self._translated(key, "stat"):
            found = self._client.head_object(**self._object(key))
            return _stat(key, found, found["ContentLength"])

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        pages = self._pages("list_objects_v2", prefix, "list", Prefix=self._prefix + prefix)
        for page in pages:
            for found in page.get("Contents", ()):
                key = str(found["Key"]).removeprefix(self._prefix)
                if is_key(key):  # else a "directory", or nothing that this library could have written
                    yield _stat(key, found, found["Size"])

    def _pages(
        self, operation: str, key: str, action: str, *signals: type[Signal], **arguments: Any
    ) -> Iterator[Any]:
        with self._translated(key, action, *signals):
            pages = iter(self._client.get_paginator(operation).paginate(Bucket=self._bucket, **arguments))
        while True:
            with self._translated(key, action, *signals):
                page = next(pages, None)
            if page is None:
                return
            yield page

    def folders(self, prefix: str = "") -> Iterator[str]:
        start = self._prefix + prefix
        for page in self._pages("list_objects_v2", prefix, "list", Prefix=start, Delimiter="/"):
            for found in page.get("CommonPrefixes", ()):
                name = str(found["Prefix"]).removeprefix(start).rstrip("/")
                if is_key(name):
                    yield name

    # -- removing --------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str]) -> None:
        checked = [check_key(key) for key in keys]
        for index in range(0, len(checked), _DELETE_BATCH):
            batch = checked[index : index + _DELETE_BATCH]
            if len(batch) == 1 or not self._delete_batch(batch):
                futures = [self._submit(key, self._delete_one, key) for key in batch]
                wait(futures)
                for future in futures:
                    future.result()

    def _delete_batch(self, keys: Sequence[str]) -> bool:
        """One request for all; False where the server does not offer that."""
        try:
            with self._translated(keys[0], "delete", NotImplementedByServer):
                reply = self._client.delete_objects(
                    Bucket=self._bucket,
                    Delete={"Objects": [{"Key": self._prefix + key} for key in keys], "Quiet": True},
                )
        except (AccessDenied, StorageUnavailable):
            raise
        except (StorageError, NotImplementedByServer):
            return False
        return not reply.get("Errors")

    def _delete_one(self, key: str) -> None:
        with contextlib.suppress(NotFound), self._translated(key, "delete"):
            self._client.delete_object(**self._object(key))

    def prepare(self, prefix: str) -> None:
        """Nothing: an object store has no directories."""

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        start = self._prefix + prefix
        found = [
            (str(upload["Key"]), str(upload["UploadId"]))
            for page in self._upload_pages(start)
            for upload in page.get("Uploads", ())
            if str(upload["Key"]).startswith(start)  # not every server honours the prefix
            and (choose is None or choose(_begun(str(upload["Key"]).removeprefix(self._prefix), upload)))
        ]
        for name, upload_id in found:
            key = name.removeprefix(self._prefix)
            with contextlib.suppress(UploadGone), self._translated(key, "abort the upload", UploadGone):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload_id)
        return len(found)

    def trials(self) -> S3Trials:
        # The endpoint in use, which may come from the environment or from the SDK's configuration files.
        return S3Trials(self, f"{self._client.meta.endpoint_url}/{self._bucket}")

    def _upload_pages(self, prefix: str, *, best_effort: bool = False) -> Iterator[Any]:
        key = prefix.removeprefix(self._prefix)
        # rclone answers NoSuchUpload where there is none.
        with contextlib.suppress(UploadGone, *([StorageError] if best_effort else [])):
            yield from self._pages("list_multipart_uploads", key, "list uploads", UploadGone, Prefix=prefix)


def _range_problem(reply: Mapping[str, Any], start: int, stop: int) -> CheckpointError | None:
    """What keeps a reply from being bytes `[start, stop)` of the object; None when it is.

    Judged by what the reply says about itself, not by its status: some servers answer 200 to a range, and
    caches answer 206 with another one.
    """
    length = int(reply["ContentLength"])
    said = content_range(reply)
    if said is None:
        if reply["ResponseMetadata"]["HTTPStatusCode"] == 206:
            return StorageError("the server does not say which bytes it sent")
        if length < stop:
            return Truncated(f"ends at byte {length}")
        # The object as a whole.
        return None if (start, stop) == (0, length) else StorageError("the server ignores byte ranges")
    if said == (start, stop) and length == stop - start:
        return None
    if said[0] == start and said[1] < stop and length == said[1] - start:
        return Truncated(f"ends at byte {said[1]}")
    return StorageError(f"the server sent bytes {said[0]}-{said[1]} ({length} in all) instead")


def _stat(key: str, found: Mapping[str, Any], size: Any) -> ObjectStat:
    modified = found.get("LastModified")
    return ObjectStat(key, int(size), etag_of(found), modified.timestamp() if modified else None)


def _begun(key: str, upload: Mapping[str, Any]) -> ObjectStat:
    """An unfinished upload as an object; its size is not known."""
    initiated = upload.get("Initiated")
    return ObjectStat(key, 0, None, initiated.timestamp() if initiated else None)
