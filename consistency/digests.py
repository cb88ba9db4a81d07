"""Digest payloads in the parts that the blocks of their file cut them into: in any order, while they are in the cache.

A payload that lies in one block has the XXH3-128 of its bytes as digest; another one that of the digests of its
parts. Its probe is the XXH3-64 of its first bytes: of two that differ, tensors do, and no more need be read.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from ckpt.consistency.checksums import BLOCK_SIZE_BYTES

DIGEST_BYTES, PROBE_BYTES = 16, 8

_PROBED_BYTES = 4096


class StoredDigest(NamedTuple):
    """What a manifest says of a payload.

    Attributes:
        start, nbytes: its place in its file, which has blocks of `block_size_bytes`.
        probe: empty where there is none.
    """

    start: int
    nbytes: int
    block_size_bytes: int
    digest: bytes
    probe: bytes

    @property
    def probed_bytes(self) -> int:
        """How many bytes the probe is of: the first ones, of one block."""
        return min(_PROBED_BYTES, self.nbytes, -self.start % self.block_size_bytes or self.block_size_bytes)


def probe_of(data: memoryview) -> bytes:
    """Make a probe of the first bytes of a payload, those of one block."""
    return xxhash.xxh3_64_digest(data[:_PROBED_BYTES])


class PayloadDigest:
    """The digest of `nbytes` bytes from `start` on in a file."""

    def __init__(self, start: int, nbytes: int, block_size_bytes: int = BLOCK_SIZE_BYTES) -> None:
        self.start, self.stop = start, start + nbytes
        self._block = block_size_bytes
        self._first = start // block_size_bytes
        blocks = -(-self.stop // block_size_bytes) - self._first if nbytes else 0
        self._parts = bytearray(DIGEST_BYTES * blocks)
        self.probe = bytes(PROBE_BYTES)

    def add(self, position: int, part: memoryview) -> None:
        """Digest all of the payload that is in one block; it lies at `position`."""
        block = position // self._block
        begin, end = max(block * self._block, self.start), min((block + 1) * self._block, self.stop)
        assert (position, part.nbytes) == (begin, end - begin), "part of a part"
        at = DIGEST_BYTES * (block - self._first)
        self._parts[at : at + DIGEST_BYTES] = xxhash.xxh3_128_digest(part)
        if position == self.start:
            self.probe = probe_of(part)

    def digest(self) -> bytes:
        """Return the digest, after all has been added."""
        if len(self._parts) == DIGEST_BYTES:
            return bytes(self._parts)
        return xxhash.xxh3_128_digest(self._parts)


class FileDigests:
    """The digests of some payloads in one file, whose bytes come in pieces of its blocks, in any order."""

    def __init__(self, digests: Sequence[PayloadDigest]) -> None:
        """`digests` are in order of the places of their payloads."""
        self._digests, self._starts = digests, [digest.start for digest in digests]

    def see(self, position: int, piece: memoryview) -> None:
        """Digest what a piece of one block holds; what it holds of a payload is all that the block does."""
        stop = position + piece.nbytes
        number = max(0, bisect.bisect_right(self._starts, position) - 1)
        for digest in self._digests[number : bisect.bisect_left(self._starts, stop, number)]:
            begin, end = max(digest.start, position), min(digest.stop, stop)
            if begin < end:
                digest.add(begin, piece[begin - position : end - position])
