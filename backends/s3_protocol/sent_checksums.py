"""The checksum that goes with bytes to a server, which refuses them if they were damaged on their way."""

from __future__ import annotations

import base64
import hashlib
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from awscrt.checksums import crc64nvme

from ckpt.backends.bodies import Part
from ckpt.backends.s3_protocol.errors import ChecksumRefused, Conflict, Signal, UploadGone
from ckpt.errors import AlreadyExists, StorageError, StorageUnavailable

_logger = logging.getLogger(__name__)
_without_crc: set[str] = set()
"""Endpoints and buckets, in this process, that refuse CRC64NVME and take Content-MD5."""
_learning = threading.Lock()

T = TypeVar("T")


class SentChecksums:
    """The kind of checksum that one store sends; which one its server takes is found out if `kind` is "crc64nvme".

    Attributes:
        kind: what goes with bytes for the server to verify: "crc64nvme", "md5" or "none".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._is_taken = False

    def signals(self, *others: type[Signal]) -> tuple[type[Signal], ...]:
        """Return the signals of a request that carries a checksum, of which `others` have another cause."""
        is_open = self.kind == "crc64nvme" and not self._is_taken
        return (ChecksumRefused, *others) if is_open else others

    def carry_out(self, bucket_url: str, put: Callable[[], T]) -> T:
        """Carry out a put; if the server refuses CRC64NVME, once more with Content-MD5, and then so from now on.

        Both have the server refuse bytes that were damaged on their way. `bucket_url` is the endpoint and the bucket.
        """
        if self.kind == "crc64nvme" and bucket_url in _without_crc:
            self.kind = "md5"
        try:
            done = put()
            self._is_taken = True
            return done
        except ChecksumRefused as error:
            refused = error
        with _learning:
            if self.kind == "md5" or bucket_url in _without_crc:  # another thread has found out
                self.kind = "md5"
                return put()
            self.kind = "md5"
            is_taken = False
            try:
                done = put()
                is_taken = True
                return done
            except (AlreadyExists, Conflict, UploadGone):  # of a request whose headers the server took
                is_taken = True
                raise
            except StorageUnavailable:
                raise
            except (StorageError, Signal):
                raise refused.original from refused.original.__cause__
            finally:
                self.kind = "md5" if is_taken else "crc64nvme"
                if is_taken:
                    _note_md5(bucket_url, refused)


def _note_md5(bucket_url: str, refused: ChecksumRefused) -> None:
    _without_crc.add(bucket_url)
    _logger.warning(
        "%s: the server takes no CRC64NVME (%s). Content-MD5 goes with all bytes instead; the storage option "
        'checksum="md5" sends it from the first request on',
        bucket_url,
        refused,
    )


def checksum_of(part: Part, kind: str) -> dict[str, str]:
    """Make the argument that sends a part's checksum of this kind (`SentChecksums.kind`), if the part has one.

    Raises StorageError if the bytes no longer have their CRC64NVME, which the server cannot find with another kind.
    """
    if kind == "none" or part.crc64nvme is None:
        return {}
    if kind == "crc64nvme":
        return {"ChecksumCRC64NVME": encode_crc(part.crc64nvme)}
    return {"ContentMD5": base64.b64encode(part.md5 or _checked_md5(part)).decode()}


def encode_crc(crc: int) -> str:
    """Encode a CRC64NVME as S3 writes it."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def _checked_md5(part: Part) -> bytes:
    crc = 0
    digest = hashlib.md5(usedforsecurity=False)
    for buffer in part.buffers:
        crc = crc64nvme(buffer, crc)
        digest.update(buffer)
    if crc != part.crc64nvme:
        text = "not sent: the bytes were changed after their checksum was computed"
        raise StorageError(text, settled=True)
    return digest.digest()
