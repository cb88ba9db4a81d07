"""Compute the CRC64NVME of blocks, and combine them for anything larger: no byte is read twice.

CRC64NVME because it runs at memory speed, can be combined, and is what S3 verifies for whole
objects. It guards against damage, not against forgery.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from awscrt import checksums

BLOCK_SIZE_BYTES = 1 << 19
"""The unit of verification: small, because a cut inside a block costs reading all of it."""


def crc64nvme(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """Return the CRC64NVME of `data`, continuing from `seed`."""
    return int(checksums.crc64nvme(data, seed))


def crc_text(crc: int) -> str:
    """Write a CRC as records do, in 16 hexadecimal digits."""
    return f"{crc:016x}"


def block_crcs(
    buffers: Iterable[memoryview],
    block_size_bytes: int,
    see: Callable[[int, memoryview, int], None] | None = None,
    cuts: Sequence[int] = (),
    *,
    see_whole: bool = True,
) -> list[int]:
    """Return the CRC of every block of the bytes in `buffers`, which start at a block's start.

    `see` is shown each piece right after it was read: where it begins, its bytes and its CRC. None is of two blocks or
    buffers, or goes beyond one of `cuts`, which are in order. It may leave out whole blocks, whose CRCs are returned.
    """
    crcs: list[int] = []
    crc, missing, position = 0, block_size_bytes, 0
    ends = iter([*cuts, math.inf])
    end = next(ends)
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            while end <= position:
                end = next(ends)
            piece = buffer[start : start + int(min(missing, end - position))]
            own = crc64nvme(piece)
            crc = own if missing == block_size_bytes else joined(crc, own, piece.nbytes)
            if see is not None and (see_whole or piece.nbytes < block_size_bytes):
                see(position, piece, own)
            start += piece.nbytes
            position += piece.nbytes
            missing -= piece.nbytes
            if missing == 0:
                crcs.append(crc)
                crc, missing = 0, block_size_bytes
    if missing != block_size_bytes:
        crcs.append(crc)
    return crcs


def joined(crc: int, following: int, nbytes: int) -> int:
    """Return the CRC of bytes with the CRC `crc` and `nbytes` more with the CRC `following`."""
    return int(checksums.combine_crc64nvme(crc, following, nbytes))


def combine_blocks(crcs: Sequence[int], nbytes: int, block_size_bytes: int) -> int:
    """Return the CRC of `nbytes` bytes whose blocks have the CRCs `crcs`."""
    total, remaining = 0, nbytes
    for crc in crcs:
        size = min(block_size_bytes, remaining)
        total = checksums.combine_crc64nvme(total, crc, size)
        remaining -= size
    return int(total)
