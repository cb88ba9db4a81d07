"""Rewrite records and blocks as somebody would who knows the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckpt.consistency.checksums import crc64nvme
from ckpt.consistency.seal import seal_json, unseal_json


def read_record(path: Path) -> dict[str, Any]:
    """Read a sealed record."""
    record: dict[str, Any] = json.loads(unseal_json(path.read_bytes(), url="", key=""))
    return record


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record with a seal that fits."""
    path.write_bytes(seal_json(json.dumps(record, separators=(",", ":")).encode()))


def force_same_checksum(block: memoryview, at: int) -> None:
    """Change a byte at `at` of a block, and others after it so that its checksum stays."""
    before = crc64nvme(block)
    block[at] ^= 0x40
    force_crc(block, at + 64, before)
    assert crc64nvme(block) == before


def force_crc(block: memoryview, at: int, wanted: int) -> None:
    """Change the 8 bytes at `at` so that a block has the checksum that is wanted: it is linear in them."""
    rows = []
    for bit in range(64):
        probe = bytearray(len(block))
        probe[at + bit // 8] = 1 << bit % 8
        rows.append((crc64nvme(probe) ^ crc64nvme(bytes(len(block))), 1 << bit))
    need, chosen = crc64nvme(block) ^ wanted, 0
    for column in range(64):  # Gauss, over bits
        pivot = next((row for row in rows if row[0] >> column & 1), None)
        if pivot is None:
            continue
        rows = [
            (row[0] ^ pivot[0], row[1] ^ pivot[1]) if row[0] >> column & 1 else row
            for row in rows
            if row is not pivot
        ]
        if need >> column & 1:
            need, chosen = need ^ pivot[0], chosen ^ pivot[1]
    assert need == 0
    for byte in range(8):
        block[at + byte] ^= chosen >> 8 * byte & 255
