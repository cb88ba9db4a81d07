"""Go on with an upload in parts that a process before this one has begun, and did not complete."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckpt.backends.base import MIB, UploadNote
from ckpt.backends.bodies import Body
from ckpt.backends.s3_protocol.errors import NotImplementedByServer, UploadGone
from ckpt.backends.s3_protocol.request_arguments import hides_digests
from ckpt.backends.s3_protocol.requests import S3Requests, etag_of
from ckpt.backends.s3_protocol.sent_checksums import encode_crc
from ckpt.errors import StorageError, StorageUnavailable

_logger = logging.getLogger(__name__)

_MD5 = re.compile("[0-9a-f]{32}")


class _Noted(msgspec.Struct, frozen=True, kw_only=True):
    """What the next process has to know of an upload."""

    version: int = 1
    place: str
    upload_id: str
    size_bytes: int
    part_size_bytes: int
    checksums: bool


class _Differs(Exception):
    """A part that the server has is not that of the body."""


_decoder = msgspec.json.Decoder(_Noted)  # made once, before there are threads


@dataclass(frozen=True)
class Upload:
    """An upload in parts.

    Attributes:
        parts: those that are there, by number, as entries for the list that completes it.
        there_bytes: of them.
    """

    id: str
    part_size_bytes: int
    checksums: bool
    parts: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    there_bytes: int = 0

    def noted(self, s3: S3Requests, key: str, body: Body) -> bytes:
        """Encode it for a note."""
        noted = _Noted(
            place=_place(s3, key),
            upload_id=self.id,
            size_bytes=body.nbytes,
            part_size_bytes=self.part_size_bytes,
            checksums=self.checksums,
        )
        return msgspec.json.encode(noted)


def may_pass(error: BaseException) -> bool:
    """Tell whether to go on with an upload after this error: one of storage that may pass, or an interrupt."""
    return type(error) in (StorageUnavailable, StorageError) or not isinstance(error, Exception)


def try_to_abort(s3: S3Requests, key: str, upload_id: str) -> None:
    """Abort an upload after an error, which is the one to report; `abandon` finds the rest."""
    with contextlib.suppress(StorageError, UploadGone):
        s3.abort_upload(key, upload_id, UploadGone)


def take_up(s3: S3Requests, key: str, body: Body, note: UploadNote, *, checksums: bool) -> Upload | None:
    """Return the upload that a note remembers, with the parts that are there and are those of `body`.

    None without one, or if it does not fit: then it is aborted, and the note empty. Raises StorageUnavailable, and
    what the body raises.
    """
    noted = _decoded(note.read())
    if noted is None or noted.place != _place(s3, key):
        return None
    upload: Upload | None = None
    try:
        if (noted.size_bytes, noted.checksums) == (body.nbytes, checksums) and _is_size(
            noted.part_size_bytes
        ):
            upload = _checked(s3, key, body, noted)
    except BaseException as error:
        if not may_pass(error):
            try_to_abort(s3, key, noted.upload_id)
            note.clear()
        raise
    if upload is None:
        _logger.info("%s/%s: an unfinished upload does not fit, it is begun anew", s3.url, key)
        try_to_abort(s3, key, noted.upload_id)
        note.clear()
    return upload


def drop(s3: S3Requests, key: str, note: UploadNote) -> None:
    """Abort the upload that a note remembers: its object is there already."""
    noted = _decoded(note.read())
    if noted is not None and noted.place == _place(s3, key):
        try_to_abort(s3, key, noted.upload_id)
    note.clear()


def _checked(s3: S3Requests, key: str, body: Body, noted: _Noted) -> Upload | None:
    """Compare the parts that the server has with those of `body`; None if one of them is another."""
    size = noted.part_size_bytes
    try:
        listed = {int(part["PartNumber"]): part for part in s3.parts(key, noted.upload_id)}
    except StorageUnavailable:
        raise
    except (UploadGone, NotImplementedByServer, StorageError) as error:
        _logger.info("%s/%s: its unfinished upload cannot be used: %s", s3.url, key, error)
        return None
    if any(not 0 <= (number - 1) * size < body.nbytes for number in listed):
        return None
    futures: list[Future[dict[str, Any] | None]] = []
    try:
        for number, part in listed.items():
            futures.append(s3.submit(key, _entry, s3, body, (number - 1) * size, noted, part))
        wait(futures)
        entries = [future.result() for future in futures]
    except _Differs:
        return None
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    there = {entry["PartNumber"]: entry for entry in entries if entry is not None}
    return Upload(
        noted.upload_id, size, noted.checksums, there, sum(int(listed[number]["Size"]) for number in there)
    )


def _entry(
    s3: S3Requests, body: Body, start: int, noted: _Noted, listed: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the entry of a part that the server has; None if it says too little of it. Raises _Differs."""
    stop = min(start + noted.part_size_bytes, body.nbytes)
    if int(listed.get("Size") or -1) != stop - start:
        raise _Differs
    crc, etag = listed.get("ChecksumCRC64NVME"), etag_of(listed) or ""
    entry = {"PartNumber": int(listed["PartNumber"]), "ETag": listed.get("ETag")}
    with body.part(start, stop) as part:
        own = None if part.crc64nvme is None else encode_crc(part.crc64nvme)
        if noted.checksums:
            entry["ChecksumCRC64NVME"] = own
        if crc is not None and own is not None:
            is_same = crc == own
        elif _MD5.fullmatch(etag) and not hides_digests(s3.options):
            digest = hashlib.md5(usedforsecurity=False)
            for buffer in part.buffers:
                digest.update(buffer)
            is_same = digest.hexdigest() == etag
        else:
            return None
    if not is_same:
        raise _Differs
    return entry


def _is_size(part_size_bytes: int) -> bool:
    return part_size_bytes > 0 and part_size_bytes % MIB == 0


def _decoded(data: bytes | None) -> _Noted | None:
    with contextlib.suppress(ValueError):
        if data is not None and (noted := _decoder.decode(data)).version == 1:
            return noted
    return None


def _place(s3: S3Requests, key: str) -> str:
    return f"{s3.bucket}/{s3.prefix}{key}"
