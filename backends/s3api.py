"""The S3 protocol over a boto3-like client; `s3` and `cos` differ only in how they build theirs.

The settings here were measured: bodies that hand out the callers' own buffers, checksums computed by the
caller and sent as headers, unsigned payloads, and reads straight from the socket's response into the
destination cost a fifth of what TransferManager or `StreamingBody.read` do.
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import hashlib
import http.client
import itertools
import random
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from ckpt.backends.base import (
    MIB,
    Body,
    Capabilities,
    ObjectStat,
    Part,
    PutMode,
    Store,
    check_key,
    part_size_bytes,
    redact_url,
)
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    IntegrityError,
    NotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
    Truncated,
)

__all__ = ["S3ApiStore", "TRANSFER_DEFAULTS", "client_settings", "split_bucket_url"]

TRANSFER_DEFAULTS: Mapping[str, Any] = {
    "part_size_bytes": 32 << 20,
    "max_attempts": 8,
    "connect_timeout_s": 10.0,
    "read_timeout_s": 60.0,
    "checksum": "crc64nvme",
    "s3_additional_kwargs": {},
}

_SEND_SIZE_BYTES = 4 << 20
_DELETE_BATCH = 1000
_BODY_ATTEMPTS = 6

_NOT_FOUND = frozenset({"NoSuchKey", "NoSuchBucket", "404", "NotFound"})
_DENIED = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
     "RequestTimeTooSkewed", "401", "403", "Forbidden", "AllAccessDisabled", "AccountProblem"}
)  # fmt: skip
_FULL = frozenset({"QuotaExceeded", "EntityTooLarge", "InsufficientStorage", "507"})
_UNSUPPORTED = frozenset({"NotImplemented", "501", "MethodNotAllowed", "XNotImplemented"})
_UPLOAD_GONE = frozenset({"NoSuchUpload"})
_CREDENTIAL_ERRORS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError",
     "UnauthorizedSSOTokenError", "SSOTokenLoadError", "NoAuthTokenError", "MetadataRetrievalError"}
)  # fmt: skip
_CONNECTION_WORDS = (
    "Connection",
    "Timeout",
    "HTTPClient",
    "SSL",
    "IncompleteRead",
    "ResponseStreaming",
    "Protocol",
)


class S3ApiStore(Store):
    """Objects under one prefix of one bucket."""

    def __init__(self, url: str, options: Mapping[str, Any], *, threads: int) -> None:
        self._bucket, self._prefix = split_bucket_url(url)
        self.url = redact_url(url).rstrip("/")
        self.threads = threads
        self._options = dict(options)
        self._checksums = _checked(self._options)
        self._conditional = True  # until the server refuses a condition as not implemented
        self._lock = threading.Lock()
        self._client_or_none: Any = None
        self._pool_or_none: ThreadPoolExecutor | None = None

    @abstractmethod
    def _make_client(self) -> Any:
        """A new boto3-like client."""

    def _create_condition(self, operation: str) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Makes the requests sent inside ask for "only if absent"; yields the extra arguments for it."""
        return contextlib.nullcontext({"IfNoneMatch": "*"})

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            conditional_create=self._conditional,
            atomic_replace=True,
            list_after_write=self._options.get("endpoint_url") is None,
            cross_client_visibility=True,
            parallel_parts=True,
            verifies_checksums=self._checksums and self._options.get("endpoint_url") is None,
            max_object_size_bytes=5 << 40,
            max_parts=10_000,
            min_part_size_bytes=5 << 20,
            max_part_size_bytes=5 << 30,
        )

    # -- writing ---------------------------------------------------------------------------------------

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        create = mode is PutMode.CREATE
        if create and not self._conditional:
            self._refuse_existing(key)
            create = False
        size = part_size_bytes(body.nbytes, self._options["part_size_bytes"], self.capabilities)
        try:
            self._put(key, body, size, create)
        except _NotImplementedByServer:
            # Remembered: the server has no conditional requests. Look, then write: not atomic, and the
            # capabilities say so from now on.
            self._conditional = False
            self._refuse_existing(key)
            self._put(key, body, size, create=False)

    def _put(self, key: str, body: Body, size: int, create: bool) -> None:
        if body.nbytes <= size:
            with body.part(0, body.nbytes) as part:
                self._put_single(key, part, create)
            return
        try:
            self._put_multipart(key, body, size, create)
        except _UploadGone:
            # The server forgot the upload, as some do in a restart. Its parts are gone with it.
            try:
                self._put_multipart(key, body, size, create)
            except _UploadGone as error:
                raise StorageUnavailable(
                    "the server lost the multipart upload twice", url=self.url, key=key
                ) from error

    def _put_single(self, key: str, part: Part, create: bool) -> None:
        condition = self._create_condition("PutObject") if create else contextlib.nullcontext({})
        with self._translated(key, "put", conditional=create), condition as extra:
            self._client.put_object(
                **self._object(key),
                Body=_PartReader(part.buffers),
                ContentLength=part.nbytes,
                **self._part_checksum(part),
                **self._options["s3_additional_kwargs"],
                **extra,
            )

    def _put_multipart(self, key: str, body: Body, size: int, create: bool) -> None:
        checksums = self._checksums and body.has_checksums
        with self._translated(key, "start a multipart upload"):
            upload_id = self._client.create_multipart_upload(
                **self._object(key),
                **({"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if checksums else {}),
                **self._options["s3_additional_kwargs"],
            )["UploadId"]
        try:
            parts = self._send_parts(key, body, size, upload_id)
            self._complete(key, body, upload_id, parts, checksums, create)
        except BaseException:
            self._abort(key, upload_id)
            raise

    def _send_parts(self, key: str, body: Body, size: int, upload_id: str) -> list[dict[str, Any]]:
        stop = threading.Event()

        def send(number: int) -> dict[str, Any]:
            if stop.is_set():
                raise StorageError("not sent: another part failed", url=self.url, key=key)
            start = (number - 1) * size
            with body.part(start, min(start + size, body.nbytes)) as part:
                return self._send_part(key, part, upload_id, number)

        futures = [self._pool.submit(send, number + 1) for number in range(-(-body.nbytes // size))]
        try:
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
        with self._translated(key, f"upload part {number}", gone=True):
            reply = self._client.upload_part(
                **self._object(key),
                UploadId=upload_id,
                PartNumber=number,
                Body=_PartReader(part.buffers),
                ContentLength=part.nbytes,
                **checksum,
            )
        return {"PartNumber": number, "ETag": reply["ETag"], **checksum}

    def _complete(
        self, key: str, body: Body, upload_id: str, parts: list[dict[str, Any]], checksums: bool, create: bool
    ) -> None:
        whole = body.crc64nvme()
        checksum = {}
        if checksums and whole is not None:
            checksum = {"ChecksumCRC64NVME": _base64(whole), "ChecksumType": "FULL_OBJECT"}
        condition = (
            self._create_condition("CompleteMultipartUpload") if create else contextlib.nullcontext({})
        )
        try:
            with (
                self._translated(key, "complete the upload", gone=True, conditional=create),
                condition as extra,
            ):
                self._client.complete_multipart_upload(
                    **self._object(key),
                    UploadId=upload_id,
                    MultipartUpload={"Parts": parts},
                    **checksum,
                    **extra,
                )
        except _UploadGone:
            # A retry after a lost reply finds no upload: either it was completed, or it is gone.
            if not self._is_ours(key, body.nbytes, parts, whole):
                raise
        found = self.stat(key).size_bytes
        if found != body.nbytes:
            self.delete([key])
            raise IntegrityError(f"the store kept {found} of {body.nbytes} bytes sent", url=self.url, key=key)

    def _is_ours(self, key: str, nbytes: int, parts: list[dict[str, Any]], whole: int | None) -> bool:
        """Whether the object at `key` is surely the one whose completion got no answer."""
        try:
            with self._translated(key, "stat"):
                found = self._client.head_object(**self._object(key), ChecksumMode="ENABLED")
        except NotFound:
            return False
        if found.get("ContentLength") != nbytes:
            return False
        if whole is not None and found.get("ChecksumCRC64NVME") == _base64(whole):
            return True
        return bool(_composite_etag(parts)) and str(found.get("ETag", "")).strip('"') == _composite_etag(
            parts
        )

    def _abort(self, key: str, upload_id: str) -> None:
        # Best effort: the error that brought us here is the one to report, and `abandon` finds the rest.
        with (
            contextlib.suppress(StorageError, _UploadGone),
            self._translated(key, "abort the upload", gone=True),
        ):
            self._client.abort_multipart_upload(**self._object(key), UploadId=upload_id)

    def _refuse_existing(self, key: str) -> None:
        with contextlib.suppress(NotFound):
            self.stat(key)
            raise AlreadyExists("exists already", url=self.url, key=key)

    def _part_checksum(self, part: Part) -> dict[str, str]:
        if not self._checksums or part.crc64nvme is None:
            return {}
        return {"ChecksumCRC64NVME": _base64(part.crc64nvme)}

    # -- reading ---------------------------------------------------------------------------------------

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        pending = [buffer for buffer in buffers if buffer.nbytes]
        stop = offset + sum(buffer.nbytes for buffer in pending)
        if offset == stop:
            self.stat(key)
            return
        position = offset
        for attempt in itertools.count(1):
            body = self._get(key, position, stop)
            try:
                got, failure = _drain(body, pending)
            finally:
                body.close()
            position += got
            if position == stop:
                return
            pending = _after(pending, got)
            if attempt >= _BODY_ATTEMPTS + (position - offset) // MIB:
                reason = failure or "the reply ended early"
                raise StorageUnavailable(
                    f"cannot read: {reason}", url=self.url, key=key, start=position, stop=stop
                ) from failure
            time.sleep(0.05 * 2 ** min(attempt, 7) * random.random())

    def _get(self, key: str, start: int, stop: int) -> _RawBody:
        wanted = stop - start
        try:
            with self._translated(key, "read"):
                reply = self._client.get_object(**self._object(key), Range=f"bytes={start}-{stop - 1}")
        except _RangeRefused as error:
            raise Truncated("ends before that", url=self.url, key=key, start=start, stop=stop) from error
        body = _RawBody(reply["Body"])
        length = reply["ContentLength"]
        partial = reply["ResponseMetadata"]["HTTPStatusCode"] == 206
        if length == wanted and (partial or start == 0):
            return body
        body.close()
        if partial or length < wanted:
            raise Truncated(f"ends at byte {start + length}", url=self.url, key=key, start=start, stop=stop)
        raise StorageError("the server ignores byte ranges", url=self.url, key=key)

    def stat(self, key: str) -> ObjectStat:
        with self._translated(key, "stat"):
            found = self._client.head_object(**self._object(key))
        modified = found.get("LastModified")
        return ObjectStat(
            key,
            int(found["ContentLength"]),
            str(found.get("ETag", "")).strip('"') or None,
            modified.timestamp() if modified else None,
        )

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        pages = iter(
            self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
        )
        while True:
            with self._translated(prefix, "list"):
                page = next(pages, None)
            if page is None:
                return
            for found in page.get("Contents", ()):
                modified = found.get("LastModified")
                yield ObjectStat(
                    found["Key"][len(self._prefix) :],
                    int(found["Size"]),
                    str(found.get("ETag", "")).strip('"') or None,
                    modified.timestamp() if modified else None,
                )

    # -- removing --------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str]) -> None:
        names = [self._prefix + check_key(key) for key in keys]
        for index in range(0, len(names), _DELETE_BATCH):
            batch = names[index : index + _DELETE_BATCH]
            if len(batch) == 1 or not self._delete_batch(batch):
                for _ in self._pool.map(self._delete_one, batch):
                    pass

    def _delete_batch(self, names: Sequence[str]) -> bool:
        """One request for all; False where the server does not offer that."""
        try:
            with self._translated(names[0], "delete"):
                reply = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in names], "Quiet": True}
                )
        except (AccessDenied, StorageUnavailable):
            raise
        except StorageError:
            return False
        return not reply.get("Errors")

    def _delete_one(self, name: str) -> None:
        with contextlib.suppress(NotFound), self._translated(name[len(self._prefix) :], "delete"):
            self._client.delete_object(Bucket=self._bucket, Key=name)

    def prepare(self, prefix: str) -> None:
        """Nothing: an object store has no directories."""

    def abandon(self, prefix: str = "") -> int:
        paginator = self._client.get_paginator("list_multipart_uploads")
        found: list[tuple[str, str]] = []
        with contextlib.suppress(_UploadGone), self._translated(prefix, "list uploads", gone=True):
            for page in paginator.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                found += [(upload["Key"], upload["UploadId"]) for upload in page.get("Uploads", ())]
        # Not every server honours the prefix.
        found = [pair for pair in found if pair[0].startswith(self._prefix + prefix)]
        for name, upload_id in found:
            with contextlib.suppress(_UploadGone), self._translated(name, "abort the upload", gone=True):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload_id)
        return len(found)

    # -- plumbing --------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            pool, self._pool_or_none = self._pool_or_none, None
            client, self._client_or_none = self._client_or_none, None
        if pool is not None:
            pool.shutdown(wait=True)
        if client is not None:
            client.close()

    @property
    def _client(self) -> Any:
        if self._client_or_none is None:
            with self._lock:
                if self._client_or_none is None:
                    self._client_or_none = self._make_client()
        return self._client_or_none

    @property
    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool_or_none is None:
                self._pool_or_none = ThreadPoolExecutor(self.threads, thread_name_prefix="ckpt-s3")
            return self._pool_or_none

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_client_or_none": None, "_pool_or_none": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _translated(
        self, key: str, action: str, *, gone: bool = False, conditional: bool = False
    ) -> Iterator[None]:
        """Turn the SDK's exceptions into ours.

        `gone`: a lost upload is its own signal here. `conditional`: so is a refused condition.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise self._translate(error, key, action, gone, conditional) from error

    def _translate(self, error: Exception, key: str, action: str, gone: bool, conditional: bool) -> Exception:
        code, status, text = _facts(error)
        where: dict[str, Any] = {"url": self.url, "key": key}
        if gone and code in _UPLOAD_GONE:
            return _UploadGone(text)
        if conditional and (status == 501 or code in _UNSUPPORTED):
            return _NotImplementedByServer(text)
        if status == 416:
            return _RangeRefused(text)
        if status in (409, 412) and conditional:
            return AlreadyExists(f"exists already ({code})", **where)
        if code == "NoSuchBucket":
            return NotFound(f"there is no bucket named {self._bucket!r}", **where)
        text = f"cannot {action}: {text}"
        if status == 404 or code in _NOT_FOUND:
            return NotFound(text, **where)
        if status in (401, 403) or code in _DENIED or type(error).__name__ in _CREDENTIAL_ERRORS:
            return AccessDenied(f"{text}; check the credentials and their permissions", **where)
        if status == 507 or code in _FULL:
            return StorageFull(text, **where)
        unavailable = status >= 500 or status == 429 or isinstance(error, OSError)
        if unavailable or any(word in type(error).__name__ for word in _CONNECTION_WORDS):
            return StorageUnavailable(text, **where)
        return StorageError(text, **where)


class _Signal(Exception):
    """Raised and caught inside this module."""


class _UploadGone(_Signal):
    pass


class _NotImplementedByServer(_Signal):
    pass


class _RangeRefused(_Signal):
    pass


class _PartReader:
    """The buffers of a part as the readable, seekable body that boto3 asks for; nothing is copied.

    `read` gives at least as much as is asked for where a buffer has it: the 16 KiB that the HTTP stack
    asks for at a time would cost a system call each.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if buffer.nbytes]
        self._ends = list(itertools.accumulate(buffer.nbytes for buffer in self._buffers))
        self._size = self._ends[-1] if self._ends else 0
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def read(self, size: int | None = -1) -> memoryview | bytes:
        if self._position >= self._size or size == 0:
            return b""
        index = bisect.bisect_right(self._ends, self._position)
        buffer = self._buffers[index]
        start = self._position - (self._ends[index] - buffer.nbytes)
        piece = buffer[start : start + _SEND_SIZE_BYTES]
        self._position += piece.nbytes
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True


class _RawBody:
    """A response body read straight into the destination.

    boto3's StreamingBody and urllib3 read into fresh `bytes` and copy; the `http.client` response below
    them fills our memory. Where that is out of reach, their own `read` serves.
    """

    def __init__(self, body: Any) -> None:
        self._body = body
        self._raw = getattr(body, "_raw_stream", None)
        response = getattr(self._raw, "_fp", None)
        self._response = response if isinstance(response, http.client.HTTPResponse) else None

    def readinto(self, view: memoryview) -> int:
        if self._response is not None:
            return self._response.readinto(view)
        data = self._body.read(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Give the connection back for reuse if the reply was read to its end, else drop it."""
        if self._raw is not None and self._response is not None and self._response.isclosed():
            self._raw.release_conn()
        else:
            self._body.close()


def _drain(body: _RawBody, buffers: Sequence[memoryview]) -> tuple[int, Exception | None]:
    """Fill `buffers`; returns the number of bytes that came and what stopped them, if anything did."""
    total = 0
    try:
        for buffer in buffers:
            filled = 0
            while filled < buffer.nbytes:
                got = body.readinto(buffer[filled:] if filled else buffer)
                if not got:
                    return total, None
                filled += got
                total += got
    except (OSError, http.client.HTTPException, ValueError) as error:
        return total, error
    except Exception as error:
        if any(word in type(error).__name__ for word in _CONNECTION_WORDS):
            return total, error
        raise
    return total, None


def _after(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer[nbytes:], *buffers[index + 1 :]]
        nbytes -= buffer.nbytes
    return []


def _facts(error: Exception) -> tuple[str, int, str]:
    """Error code, HTTP status (0: none) and a text of an SDK's exception; servers leave out any of them."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return "", 0, f"{type(error).__name__}: {redact_url(str(error))}"
    inner = response.get("Error") or {}
    code = str(inner.get("Code") or "")
    status = int((response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
    message = str(inner.get("Message") or "no message")
    return code, status, f"{code or status or type(error).__name__}: {message}"


def _base64(crc64nvme: int) -> str:
    return base64.b64encode(crc64nvme.to_bytes(8, "big")).decode()


def _composite_etag(parts: Sequence[Mapping[str, Any]]) -> str:
    """What S3 calls an object made of these parts, or an empty string where their ETags are not MD5s."""
    try:
        digests = b"".join(bytes.fromhex(str(part["ETag"]).strip('"')) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


def split_bucket_url(url: str) -> tuple[str, str]:
    """Bucket and key prefix (empty, or ending in `/`) of `scheme://bucket/prefix`.

    Raises:
        ConfigurationError: there is no bucket, or the URL carries credentials.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:
        raise ConfigurationError(
            f"{redact_url(url)}: credentials belong into storage_options, not into the URL"
        )
    if not bucket:
        raise ConfigurationError(f"{url!r}: write {scheme}://bucket/prefix")
    prefix = prefix.strip("/")
    return bucket, f"{check_key(prefix)}/" if prefix else ""


def client_settings(options: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Arguments for the SDK's `Config` that both SDKs share."""
    return {
        "connect_timeout": options["connect_timeout_s"],
        "read_timeout": options["read_timeout_s"],
        "retries": {"mode": "standard", "total_max_attempts": options["max_attempts"]},
        "max_pool_connections": threads + 4,
        "tcp_keepalive": True,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"payload_signing_enabled": False},
    }


def _checked(options: Mapping[str, Any]) -> bool:
    """Whether checksums are sent, once the options shared by both SDKs are found to be sane."""
    endpoint = options.get("endpoint_url")
    if endpoint is not None and redact_url(endpoint) != endpoint:
        raise ConfigurationError("endpoint_url must be a plain URL; credentials have options of their own")
    for name in ("part_size_bytes", "max_attempts", "connect_timeout_s", "read_timeout_s"):
        if not options[name] > 0:
            raise ConfigurationError(f"{name} must be positive, not {options[name]}")
    if options["checksum"] not in ("crc64nvme", "none"):
        raise ConfigurationError(f"checksum must be 'crc64nvme' or 'none', not {options['checksum']!r}")
    return bool(options["checksum"] == "crc64nvme")
