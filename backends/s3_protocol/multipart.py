"""Uploads in parts: begun, sent in parallel, completed or aborted."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from ckpt.backends.base import UploadNote, check_stored
from ckpt.backends.bodies import Body
from ckpt.backends.s3_protocol.errors import Malformed, UploadGone
from ckpt.backends.s3_protocol.requests import S3Requests, etag_of
from ckpt.backends.s3_protocol.resumed_uploads import Upload, may_pass, take_up, try_to_abort
from ckpt.backends.s3_protocol.sent_checksums import encode_crc
from ckpt.errors import StorageError, StorageUnavailable
from ckpt.lanes import run_in_lanes


def put_object(
    s3: S3Requests,
    key: str,
    body: Body,
    part_size_bytes: int | None,
    *,
    create: bool,
    note: UploadNote | None = None,
    holds: Callable[[], bool] = lambda: False,
) -> int:
    """Put an object, in parts if their size is given, with a checksum that the server takes; else as `put_in_parts`."""

    def put() -> int:
        if part_size_bytes is not None:
            return put_in_parts(s3, key, body, part_size_bytes, create=create, note=note, holds=holds)
        with body.part(0, body.nbytes) as part:
            s3.put(key, part, create=create)
        return 0

    return s3.checksums.carry_out(s3.bucket_url, put) if body.has_checksums else put()


def put_in_parts(
    s3: S3Requests,
    key: str,
    body: Body,
    part_size_bytes: int,
    *,
    create: bool,
    note: UploadNote | None = None,
    holds: Callable[[], bool] = lambda: False,
) -> int:
    """Put an object in parts; return the bytes that were there, of an upload that `note` remembers.

    `holds` compares the object at `key` with `body`: whether a completion that got no answer happened. On any failure the
    upload is aborted; with a `note` only on one that does not pass by itself.

    Raises:
        IntegrityError: the store kept another number of bytes.
        UploadGone, Conflict: nothing is left of the upload; begin again.
    """
    checksums = s3.checksums.kind == "crc64nvme" and body.has_checksums
    upload = None if note is None else take_up(s3, key, body, note, checksums=checksums)
    if upload is None:
        upload = Upload(begin_upload(s3, key, checksums=checksums), part_size_bytes, checksums)
        if note is not None:
            note.write(upload.noted(s3, key, body))
    try:
        parts = _send_parts(s3, key, body, upload)
        crc = body.crc64nvme() if checksums else None
        try:
            _complete(s3, key, upload.id, parts, crc, create=create)
        except (UploadGone, StorageError) as error:
            # Any try but the last may have worked with its reply lost: a retry then finds no
            # upload, or (with a condition) the object that it made itself.
            settled = isinstance(error, StorageError) and error.settled
            if settled or not _is_ours(s3, key, body.nbytes, parts, crc, holds):
                raise
        check_stored(functools.partial(s3.stat, key), body.nbytes, url=s3.url, key=key)
    except BaseException as error:
        if note is None or not may_pass(error):
            try_to_abort(s3, key, upload.id)
            if note is not None:
                note.clear()
        raise
    if note is not None:
        note.clear()
    return upload.there_bytes


def _complete(
    s3: S3Requests, key: str, upload_id: str, parts: list[dict[str, Any]], crc: int | None, *, create: bool
) -> None:
    try:
        s3.complete_upload(key, upload_id, parts, crc, create=create)
    except Malformed:
        # Swift's schema of this document is older than these checksums. Nothing was done.
        s3.lists_checksums = False
        s3.complete_upload(key, upload_id, parts, crc, create=create)


def begin_upload(s3: S3Requests, key: str, *, checksums: bool) -> str:
    """Begin an upload, and only one; return its id."""
    began_s = time.monotonic()
    try:
        upload_id, was_retried = s3.start_upload(key, checksums=checksums)
    except StorageUnavailable:
        _abort_twins(s3, key, "", began_s)
        raise
    if was_retried:
        _abort_twins(s3, key, upload_id, began_s)
    return upload_id


def _abort_twins(s3: S3Requests, key: str, upload_id: str, began_s: float) -> None:
    """Abort uploads of `key` but `upload_id` that were begun since `began_s`, and whose replies were lost.

    The server's clock dates the uploads and its reply. Between the two it has advanced by no more than ours has from
    `began_s` to the coming of the reply, however slow any of it was. An older upload is another client's.
    """
    with contextlib.suppress(StorageError):
        for page in s3.upload_pages(key):
            now = _server_time(page)
            passed_s = time.monotonic() - began_s
            if now is None:
                return
            since = now - timedelta(seconds=passed_s + 2)  # both times are whole seconds
            for upload in page.get("Uploads", ()):
                begun = upload.get("Initiated")
                is_twin = upload.get("Key") == s3.prefix + key and upload["UploadId"] != upload_id
                if is_twin and begun is not None and begun >= since:
                    try_to_abort(s3, key, upload["UploadId"])


def _server_time(reply: Mapping[str, Any]) -> datetime | None:
    try:
        sent = parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, TypeError, ValueError):
        return None
    return sent if sent.tzinfo is not None else sent.replace(tzinfo=timezone.utc)


def _send_parts(s3: S3Requests, key: str, body: Body, upload: Upload) -> list[dict[str, Any]]:
    """Send the parts that are not there; return the entries of all."""
    size = upload.part_size_bytes

    def send(missing: tuple[int, int]) -> dict[str, Any]:
        number, start = missing
        with body.part(start, min(start + size, body.nbytes)) as part:
            return s3.send_part(key, part, upload.id, number)

    todo = [item for item in enumerate(range(0, body.nbytes, size), 1) if item[0] not in upload.parts]
    # No part may still be on its way when the upload is completed or aborted: it waits for all.
    entries = run_in_lanes(lambda lane: s3.submit(key, lane), send, todo, most=s3.threads)
    sent = {part["PartNumber"]: part for part in entries}
    return [part for _, part in sorted({**upload.parts, **sent}.items())]


def _is_ours(
    s3: S3Requests,
    key: str,
    nbytes: int,
    parts: list[dict[str, Any]],
    crc: int | None,
    holds: Callable[[], bool],
) -> bool:
    """Tell whether the object at `key` is surely the one whose completion got no answer."""
    try:
        reply = s3.head(key, **({"ChecksumMode": "ENABLED"} if crc is not None else {}))
        if reply.get("ContentLength") != nbytes:
            return False
        kept = reply.get("ChecksumCRC64NVME")
        if crc is not None and kept is not None:
            return bool(kept == encode_crc(crc))
        expected = _composite_etag(parts)
        return (expected is not None and etag_of(reply) == expected) or holds()
    except StorageError:
        return False


def _composite_etag(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the ETag of an object made of these parts; None if their own are not MD5s."""
    try:
        digests = b"".join(bytes.fromhex(etag_of(part) or "-") for part in parts)
    except ValueError:
        return None
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
