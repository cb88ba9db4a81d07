"""Seal records with their own checksum, so that a flipped bit is found without a second file.

A sealed JSON record stays JSON: its last member is the CRC64NVME of all before it. A sealed
pickle stays what it was for `pickle.load`, which stops at its end; a line with the CRC follows it.
"""

from __future__ import annotations

import re

from ckpt.consistency.checksums import crc64nvme
from ckpt.errors import IntegrityError

_JSON_SEAL = re.compile(rb',"crc64nvme":"([0-9a-f]{16})"}\n\Z')
JSON_SEAL_BYTES = len(b',"crc64nvme":"0123456789abcdef"}\n')
_PICKLE_SEAL = re.compile(rb"\n# ckpt-storage ([0-9a-f]{16})\n\Z")
PICKLE_SEAL_BYTES = len(b"\n# ckpt-storage 0123456789abcdef\n")


def seal_json(record: bytes) -> bytes:
    """Add its checksum to `record`, a JSON object with at least one member, as the last member."""
    body = record.rstrip()
    if body[-1:] != b"}" or body == b"{}":
        raise ValueError("not a JSON object with members")
    return b'%s,"crc64nvme":"%016x"}\n' % (body[:-1], crc64nvme(body[:-1]))


def is_sealed_json(data: bytes | bytearray) -> bool:
    """Return True if this library sealed `data`, damaged or not."""
    return _JSON_SEAL.search(data, max(0, len(data) - JSON_SEAL_BYTES)) is not None


def unseal_json(data: bytes | bytearray, *, url: str, key: str) -> bytes:
    """Return the record in `data` as it was before it was sealed. Raises IntegrityError."""
    seal = _JSON_SEAL.search(data, max(0, len(data) - JSON_SEAL_BYTES))
    body = bytes(data[:-JSON_SEAL_BYTES])
    if seal is None or int(seal[1], 16) != crc64nvme(body):
        raise IntegrityError("the record's checksum does not fit", url=url, key=key, start=0, stop=len(data))
    return body + b"}"


def seal_pickle(data: bytes) -> bytes:
    """Append its checksum to `data`, a pickle."""
    return b"%s\n# ckpt-storage %016x\n" % (data, crc64nvme(data))


def is_sealed_pickle(tail: bytes | bytearray) -> bool:
    """Return True if this library sealed a pickle, given its last `PICKLE_SEAL_BYTES` bytes."""
    return _PICKLE_SEAL.search(tail) is not None


def unseal_pickle(data: bytes | bytearray, *, url: str, key: str) -> memoryview:
    """Return the pickle in `data`, without a copy. Raises IntegrityError."""
    seal = _PICKLE_SEAL.search(data, max(0, len(data) - PICKLE_SEAL_BYTES))
    body = memoryview(data)[: max(0, len(data) - PICKLE_SEAL_BYTES)]
    if seal is None or int(seal[1], 16) != crc64nvme(body):
        raise IntegrityError("the checksum does not fit", url=url, key=key, start=0, stop=len(data))
    return body
