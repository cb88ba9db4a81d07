"""The requests of the S3 protocol, one method each; their errors are ours, or signals."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt.backends.base import Condition, ObjectStat, check_stored
from ckpt.backends.bodies import Part
from ckpt.backends.s3_protocol.connection import MakeClient, S3Connection
from ckpt.backends.s3_protocol.errors import (
    Conflict,
    Malformed,
    NoSetting,
    NoSuchObject,
    NotImplementedByServer,
    RangeRefused,
    Replaced,
    Signal,
    UploadGone,
)
from ckpt.backends.s3_protocol.http_bodies import PartReader, RawBody
from ckpt.backends.s3_protocol.sent_checksums import SentChecksums, checksum_of, encode_crc
from ckpt.errors import AccessDenied, CheckpointError, NotFound, StorageError, StorageUnavailable, Truncated

_REFUSALS = (NotImplementedByServer, Conflict)
_SETTINGS = {
    "versioning": ("get_bucket_versioning", b"VersioningConfiguration"),
    "object_lock": ("get_object_lock_configuration", b"ObjectLockConfiguration"),
    "lifecycle": ("get_bucket_lifecycle_configuration", b"LifecycleConfiguration"),
    "encryption": ("get_bucket_encryption", b"ServerSideEncryptionConfiguration"),
    "protection": ("get_bucket_protection_configuration", b"ProtectionConfiguration"),
}
"""The SDK's methods that read a bucket's settings, and the documents that answer; each SDK lacks one."""
NEXT_PAGES = {
    "list_objects_v2": "NextContinuationToken",
    "list_multipart_uploads": "NextKeyMarker",
    "list_parts": "NextPartNumberMarker",
}
"""By method of the SDK, the element of an answer that names the next page."""
_ANSWERED_BY = "CkptDocument"
_MAX_DOCUMENT_START = 500
_MAX_DIGITS = 19
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class S3Requests(S3Connection):
    """Requests for one bucket and prefix. Keys are relative to the prefix.

    Attributes:
        checksums: what goes with bytes for the server to verify.
        condition: how the server treats "only if absent", once that is known.
        lists_checksums: False once the server refused a list of parts with checksums.
        keeps_versions: True once a delete left an old version behind.
    """

    condition: Condition | None = None
    lists_checksums = True
    keeps_versions = False

    def __init__(self, url: str, options: Mapping[str, Any], make_client: MakeClient, threads: int) -> None:
        super().__init__(url, options, make_client, threads)
        self.checksums = SentChecksums(options["checksum"])

    @property
    def bucket_url(self) -> str:
        """Return the endpoint in use, which the environment or the SDK's files may name, and the bucket."""
        return f"{self.client.meta.endpoint_url}/{self.bucket}"

    def put(self, key: str, part: Part, *, create: bool) -> None:
        with self.translated(key, "put", *self.checksums.signals(*(_REFUSALS if create else ()))):
            reply = self.client.put_object(
                **self.object(key),
                Body=PartReader(part),
                ContentLength=part.nbytes,
                **checksum_of(part, self.checksums.kind),
                **_condition(create),
            )
        if not etag_of(reply):  # which S3 servers send: a proxy may have answered
            check_stored(functools.partial(self.stat, key), part.nbytes, url=self.url, key=key)

    def start_upload(self, key: str, *, checksums: bool) -> tuple[str, bool]:
        """Start a multipart upload; return its id, and whether the request was sent again."""
        target = self.object(key)
        with (
            self.translated(key, "start a multipart upload", *self.checksums.signals(), harmless=True),
            self.repeated.learning(target["Key"]),
        ):
            reply = self.client.create_multipart_upload(
                **target,
                **({"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if checksums else {}),
            )
            return str(reply["UploadId"]), bool(reply["ResponseMetadata"].get("RetryAttempts"))

    def send_part(self, key: str, part: Part, upload_id: str, number: int) -> dict[str, Any]:
        """Send a part; return its entry for the list of parts."""
        checksum = checksum_of(part, self.checksums.kind)
        target = self.object(key)
        listed = {name: value for name, value in checksum.items() if name != "ContentMD5"}
        with self.translated(
            key, f"upload part {number}", *self.checksums.signals(UploadGone), harmless=True
        ):
            if listed == checksum:
                crc = checksum.get("ChecksumCRC64NVME")
                if etag := self.repeated.upload_part(target["Key"], part, upload_id, number, crc):
                    return {"PartNumber": number, "ETag": etag, **listed}
            with self.repeated.learning(target["Key"]):
                reply = self.client.upload_part(
                    **target,
                    UploadId=upload_id,
                    PartNumber=number,
                    Body=PartReader(part),
                    ContentLength=part.nbytes,
                    **checksum,
                )
            return {"PartNumber": number, "ETag": reply["ETag"], **listed}

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[Mapping[str, Any]], crc: int | None, *, create: bool
    ) -> None:
        """Complete a multipart upload; `crc` is the checksum of the whole object, if any."""
        checksum: dict[str, str] = {}
        signals: list[type[Signal]] = [UploadGone, *(_REFUSALS if create else ())]
        if crc is not None:
            checksum = {"ChecksumCRC64NVME": encode_crc(crc), "ChecksumType": "FULL_OBJECT"}
        if crc is not None and self.lists_checksums:
            signals.append(Malformed)
        else:
            parts = [{name: part[name] for name in ("PartNumber", "ETag")} for part in parts]
        with self.translated(key, "complete the upload", *signals):
            self.client.complete_multipart_upload(
                **self.object(key),
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
                **checksum,
                **_condition(create),
            )

    def abort_upload(self, key: str, upload_id: str, *signals: type[Signal]) -> None:
        with self.translated(key, "abort the upload", *signals):
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=self.prefix + key, UploadId=upload_id)

    def parts(self, key: str, upload_id: str) -> Iterator[Mapping[str, Any]]:
        """List the parts of an upload that the server has."""
        with self.translated(key, "list the parts", UploadGone, NotImplementedByServer, harmless=True):
            for page in self._paginate("list_parts", **self.object(key), UploadId=upload_id):
                yield from page.get("Parts", ())

    def upload_pages(self, prefix: str) -> Iterator[Any]:
        """Yield the pages of a listing of unfinished uploads."""
        with contextlib.suppress(UploadGone):  # rclone's answer if there is none
            yield from self.pages("list_multipart_uploads", prefix, "list uploads", UploadGone)

    def uploads(self, prefix: str) -> Iterator[tuple[ObjectStat, str]]:
        """List unfinished uploads, as the objects that they would become, and the id of each."""
        for page in self.upload_pages(prefix):
            for upload in page.get("Uploads", ()):
                name = str(upload["Key"])
                if name.startswith(self.prefix + prefix):
                    yield stat_of(name.removeprefix(self.prefix), upload, 0), str(upload["UploadId"])

    def pages(
        self, operation: str, prefix: str, action: str, *signals: type[Signal], **arguments: Any
    ) -> Iterator[Any]:
        """Yield the pages of a listing of the folder that `prefix` begins in: they hold more than `prefix`.

        Directory buckets (S3 Express) refuse a prefix that does not end in a slash.
        """
        arguments |= {"Bucket": self.bucket, "Prefix": self.prefix + folder_of(prefix)}
        with self.translated(prefix, action, *signals):
            yield from self._paginate(operation, **arguments)

    def _paginate(self, operation: str, **arguments: Any) -> Iterator[Any]:
        """Yield the pages of an answer. Raises StorageError if one is cut off and does not name the next."""
        for page in self.client.get_paginator(operation).paginate(**arguments):
            yield page
            if page.get("IsTruncated") and not page.get(NEXT_PAGES[operation]):
                raise StorageError(cut_off(NEXT_PAGES[operation]), url=self.url)

    def get(self, key: str, start: int, stop: int, etag: str) -> tuple[RawBody, str]:
        """Get bytes `[start, stop)` of the object with this ETag (empty: any), and its ETag. Raises Replaced."""
        where: dict[str, Any] = {"url": self.url, "key": key, "start": start, "stop": stop}
        try:
            reply, body = self._get(key, start, stop, etag)
        except RangeRefused as error:
            raise Truncated(f"ends before byte {stop}", **where) from error
        new_etag = str(reply.get("ETag") or "")
        problem: Exception | None = _range_problem(reply, where)
        if problem is None and etag and new_etag and new_etag.strip('"') != etag.strip('"'):
            problem = Replaced()
        if problem is not None:
            body.close()
            raise problem
        return body, etag or new_etag

    def get_first(self, key: str, most: int) -> tuple[RawBody, int, str] | None:
        """Get the first `most` bytes of an object, or all if it has fewer: also its size and ETag.

        None if it is empty, or the server does not tell enough.
        """
        try:
            reply, body = self._get(key, 0, most, "")
        except (RangeRefused, Replaced):
            return None
        size = _whole_size(reply, most)
        if size is None:
            body.close()
            return None
        return body, size, str(reply.get("ETag") or "")

    def _get(self, key: str, start: int, stop: int, etag: str) -> tuple[Mapping[str, Any], RawBody]:
        # A weak ETag never matches a condition.
        condition = {"IfMatch": etag} if etag and not etag.startswith("W/") else {}
        target = self.object(key)
        with self.translated(key, "read", RangeRefused, Replaced):
            try:
                repeated = self.repeated.get(target["Key"], start, stop, condition.get("IfMatch", ""))
            except NoSuchObject:
                text = "cannot read: NoSuchKey: there is no such object"
                raise NotFound(text, url=self.url, key=key, settled=True) from None
            if repeated is not None:
                return repeated
            with self.repeated.learning(target["Key"]):
                reply = self.client.get_object(**target, Range=f"bytes={start}-{stop - 1}", **condition)
            return reply, RawBody.of_sdk(reply["Body"])

    def setting(self, name: str) -> Mapping[str, Any]:
        """Read a setting of the bucket, as S3 describes it; empty if there is none."""
        shown = name.replace("_", " ")
        unknown = StorageError(f"the server, or its SDK, knows no {shown} of buckets", url=self.url)
        method, document = _SETTINGS[name]
        if not hasattr(self.client, method):
            raise unknown
        operation = self.client.meta.method_to_api_mapping[method]
        event = f"after-call.s3.{operation}"
        self.client.meta.events.register(event, _keep_document, unique_id=f"ckpt {operation}")
        try:
            with self.translated("", f"read the bucket's {shown}", NotImplementedByServer, NoSetting):
                reply: dict[str, Any] = getattr(self.client, method)(Bucket=self.bucket)
        except NoSetting:
            return {}
        except NotImplementedByServer:
            raise unknown from None
        # A server that ignores the question answers it with a listing, say.
        if document not in reply.pop(_ANSWERED_BY, b""):
            raise unknown
        return reply

    def head(self, key: str, **arguments: Any) -> Mapping[str, Any]:
        with self.translated(key, "stat"):
            reply: Mapping[str, Any] = self.client.head_object(**self.object(key), **arguments)
            return reply

    def stat(self, key: str) -> ObjectStat:
        with self.translated(key, "stat"):
            reply = self.head(key)
            return stat_of(key, reply, reply["ContentLength"])

    def prefix_is_object(self) -> bool:
        """Tell whether there is an object with the name of the prefix."""
        name = self.prefix.rstrip("/")
        if not name:
            return False
        try:
            with self.translated("", "stat"):
                self.client.head_object(Bucket=self.bucket, Key=name)
        except NotFound:
            return False
        return True

    def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound), self.translated(key, "delete"):
            if self.client.delete_object(**self.object(key)).get("DeleteMarker"):
                self.keeps_versions = True

    def delete_batch(self, keys: Sequence[str]) -> bool:
        """Delete objects in one request; return False if the server cannot, or not for all."""
        try:
            with self.translated(keys[0], "delete", NotImplementedByServer):
                reply = self.client.delete_objects(
                    Bucket=self.bucket,
                    Delete={"Objects": [{"Key": self.prefix + key} for key in keys], "Quiet": True},
                )
        except (AccessDenied, StorageUnavailable):
            raise
        except (StorageError, NotImplementedByServer):
            return False
        return not reply.get("Errors")


def _keep_document(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
    parsed[_ANSWERED_BY] = http_response.content[:_MAX_DOCUMENT_START]


def _condition(create: bool) -> dict[str, str]:
    return {"IfNoneMatch": "*"} if create else {}


def folder_of(prefix: str) -> str:
    """Return a prefix up to its last slash."""
    return prefix[: prefix.rfind("/") + 1]


def cut_off(element: str) -> str:
    """Word the error for a listing that the server cut off."""
    return f"the server says that this listing has more pages but not where they begin ({element}): it is not complete"


def stat_of(key: str, entry: Mapping[str, Any], size: Any) -> ObjectStat:
    """Read the facts about an object from a reply, or from an entry of a listing."""
    modified = entry.get("LastModified") or entry.get("Initiated")
    return ObjectStat(key, int(size), etag_of(entry), modified.timestamp() if modified else None)


def etag_of(reply: Mapping[str, Any]) -> str | None:
    """Return the reply's ETag without quotes; None if it has none."""
    return str(reply.get("ETag") or "").strip('"') or None


def _range_problem(reply: Mapping[str, Any], where: dict[str, Any]) -> CheckpointError | None:
    """Find out why a reply is not bytes `[start, stop)` of the object; None if it is.

    Judged by what the reply says about itself, not by its status: some servers answer 200 to a
    range, and caches answer 206 with another one.
    """
    start, stop = where["start"], where["stop"]
    length = reply.get("ContentLength")
    if not isinstance(length, int):
        return StorageError("the server does not say how many bytes it sent", **where)
    match = _CONTENT_RANGE.fullmatch(str(reply.get("ContentRange") or ""))
    if match is None:
        if reply["ResponseMetadata"]["HTTPStatusCode"] == 206:
            return StorageError("the server does not say which bytes it sent", **where)
        if length < stop:
            return Truncated(f"ends at byte {length}", **where)
        is_whole_object = (start, stop) == (0, length)
        return None if is_whole_object else StorageError("the server ignores byte ranges", **where)
    begin, end = int(match[1]), int(match[2]) + 1
    if (begin, end) == (start, stop) and length == stop - start:
        return None
    if begin == start and end < stop and length == end - start:
        return Truncated(f"ends at byte {end}", **where)
    return StorageError(f"the server sent bytes {begin}-{end} ({length} in all) instead", **where)


def _whole_size(reply: Mapping[str, Any], most: int) -> int | None:
    """Return the size of the object whose first bytes, `most` or all, are in a reply; None if it is something else."""
    length = reply.get("ContentLength")
    if not isinstance(length, int) or length < 0:
        return None
    match = _CONTENT_RANGE.fullmatch(str(reply.get("ContentRange") or ""))
    if match is None:  # all of it, where ranges are ignored
        is_whole = reply["ResponseMetadata"]["HTTPStatusCode"] == 200 and length <= most
        return length if is_whole else None
    if match[3] == "*" or max(map(len, match.groups())) > _MAX_DIGITS:
        return None
    begin, last, size = map(int, match.groups())
    return size if begin == 0 and last + 1 == length == min(most, size) else None
