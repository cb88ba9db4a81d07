"""The requests of the S3 protocol, one method each; their errors are ours, or signals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt.backends.base import ObjectStat
from ckpt.backends.bodies import Part
from ckpt.backends.raw_requests import Condition
from ckpt.backends.s3_protocol.connection import S3Connection
from ckpt.backends.s3_protocol.errors import (
    Malformed,
    NotImplementedByServer,
    RangeRefused,
    Replaced,
    Signal,
    UploadGone,
)
from ckpt.backends.s3_protocol.http_bodies import PartReader, RawBody, content_range, encode_crc, etag_of
from ckpt.errors import (
    AccessDenied,
    CheckpointError,
    NotFound,
    StorageError,
    StorageUnavailable,
    Truncated,
)


class S3Requests(S3Connection):
    """Requests for one bucket and prefix. Keys are relative to the prefix.

    Attributes:
        condition: how the server treats "only if absent", once that is known.
        lists_checksums: False once the server refused a list of parts with checksums.
    """

    condition: Condition | None = None
    lists_checksums = True

    @property
    def sends_checksums(self) -> bool:
        return bool(self.options["checksum"] == "crc64nvme")

    def put(self, key: str, part: Part, *, create: bool) -> None:
        """Put an object in one request."""
        with self.writing(key, "put", "PutObject", create) as extra:
            self.client.put_object(
                **self.object(key),
                Body=PartReader(part),
                ContentLength=part.nbytes,
                **self._checksum(part),
                **self.options["s3_additional_kwargs"],
                **extra,
            )

    def start_upload(self, key: str, *, checksums: bool) -> Mapping[str, Any]:
        """Start a multipart upload; returns a reply with an `UploadId`."""
        with self.translated(key, "start a multipart upload", harmless=True):
            reply = self.client.create_multipart_upload(
                **self.object(key),
                **({"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if checksums else {}),
                **self.options["s3_additional_kwargs"],
            )
            return {**reply, "UploadId": str(reply["UploadId"])}

    def send_part(self, key: str, part: Part, upload_id: str, number: int) -> dict[str, Any]:
        """Send a part; returns its entry for the list of parts."""
        checksum = self._checksum(part)
        with self.translated(key, f"upload part {number}", UploadGone, harmless=True):
            reply = self.client.upload_part(
                **self.object(key),
                UploadId=upload_id,
                PartNumber=number,
                Body=PartReader(part),
                ContentLength=part.nbytes,
                **checksum,
            )
            return {"PartNumber": number, "ETag": reply["ETag"], **checksum}

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[Mapping[str, Any]], crc: int | None, *, create: bool
    ) -> None:
        """Complete a multipart upload; `crc` is the checksum of the whole object, if any."""
        checksum: dict[str, str] = {}
        signals: list[type[Signal]] = [UploadGone]
        if crc is not None:
            checksum = {"ChecksumCRC64NVME": encode_crc(crc), "ChecksumType": "FULL_OBJECT"}
        if crc is not None and self.lists_checksums:
            signals.append(Malformed)
        else:
            parts = [{name: part[name] for name in ("PartNumber", "ETag")} for part in parts]
        action = "complete the upload"
        with self.writing(key, action, "CompleteMultipartUpload", create, *signals) as extra:
            self.client.complete_multipart_upload(
                **self.object(key),
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
                **checksum,
                **extra,
            )

    def abort_upload(self, key: str, upload_id: str, *signals: type[Signal]) -> None:
        """Abort a multipart upload."""
        with self.translated(key, "abort the upload", *signals):
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=self.prefix + key, UploadId=upload_id)

    def upload_pages(self, prefix: str, *, best_effort: bool = False) -> Iterator[Any]:
        """List unfinished uploads."""
        # rclone answers NoSuchUpload if there is none.
        with contextlib.suppress(UploadGone, *([StorageError] if best_effort else [])):
            yield from self.pages("list_multipart_uploads", prefix, "list uploads", UploadGone)

    def pages(
        self, operation: str, prefix: str, action: str, *signals: type[Signal], **arguments: Any
    ) -> Iterator[Any]:
        """Yield the pages of a listing of `prefix`."""
        arguments |= {"Bucket": self.bucket, "Prefix": self.prefix + prefix}
        with self.translated(prefix, action, *signals):
            pages = iter(self.client.get_paginator(operation).paginate(**arguments))
        while True:
            with self.translated(prefix, action, *signals):
                page = next(pages, None)
            if page is None:
                return
            yield page

    def get(self, key: str, start: int, stop: int, etag: str) -> tuple[RawBody, str]:
        """Get bytes `[start, stop)`; returns the body of the reply, and its ETag.

        `etag`: that of the reply to continue; empty for the first.
        """
        where: dict[str, Any] = {"url": self.url, "key": key, "start": start, "stop": stop}
        # A weak ETag never matches a condition.
        condition = {"IfMatch": etag} if etag and not etag.startswith("W/") else {}
        try:
            with self.translated(key, "read", RangeRefused, Replaced):
                reply = self.client.get_object(
                    **self.object(key), Range=f"bytes={start}-{stop - 1}", **condition
                )
                new_etag = str(reply.get("ETag") or "")
                body = RawBody(reply["Body"])
        except RangeRefused as error:
            raise Truncated(f"ends before byte {stop}", **where) from error
        except Replaced as error:
            raise StorageError("was replaced while it was being read", **where) from error
        problem = _range_problem(reply, start, stop)
        if problem is None and etag and new_etag and new_etag != etag:
            problem = StorageError("was replaced while it was being read")
        if problem is not None:
            body.close()
            raise type(problem)(problem.message, **where)
        return body, etag or new_etag

    def head(self, key: str, **arguments: Any) -> Mapping[str, Any]:
        """Ask for the facts about an object."""
        with self.translated(key, "stat"):
            reply: Mapping[str, Any] = self.client.head_object(**self.object(key), **arguments)
            return reply

    def stat(self, key: str) -> ObjectStat:
        """Return the facts about an object."""
        with self.translated(key, "stat"):
            reply = self.head(key)
            return stat_of(key, reply, reply["ContentLength"])

    def delete(self, key: str) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(NotFound), self.translated(key, "delete"):
            self.client.delete_object(**self.object(key))

    def delete_batch(self, keys: Sequence[str]) -> bool:
        """Delete objects in one request. Returns False if the server cannot, or not for all."""
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

    def _checksum(self, part: Part) -> dict[str, str]:
        if not self.sends_checksums or part.crc64nvme is None:
            return {}
        return {"ChecksumCRC64NVME": encode_crc(part.crc64nvme)}


def stat_of(key: str, entry: Mapping[str, Any], size: Any) -> ObjectStat:
    """Read the facts about an object from a reply, or from an entry of a listing."""
    modified = entry.get("LastModified") or entry.get("Initiated")
    return ObjectStat(key, int(size), etag_of(entry), modified.timestamp() if modified else None)


def _range_problem(reply: Mapping[str, Any], start: int, stop: int) -> CheckpointError | None:
    """Find out why a reply is not bytes `[start, stop)` of the object; None if it is.

    Judged by what the reply says about itself, not by its status: some servers answer 200 to a
    range, and caches answer 206 with another one.
    """
    length = int(reply["ContentLength"])
    answered = content_range(reply)
    if answered is None:
        if reply["ResponseMetadata"]["HTTPStatusCode"] == 206:
            return StorageError("the server does not say which bytes it sent")
        if length < stop:
            return Truncated(f"ends at byte {length}")
        # The object as a whole.
        return None if (start, stop) == (0, length) else StorageError("the server ignores byte ranges")
    if answered == (start, stop) and length == stop - start:
        return None
    if answered[0] == start and answered[1] < stop and length == answered[1] - start:
        return Truncated(f"ends at byte {answered[1]}")
    return StorageError(f"the server sent bytes {answered[0]}-{answered[1]} ({length} in all) instead")
