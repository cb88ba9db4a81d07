"""Compute the CRC64NVME of blocks, and combine them for anything larger: no byte is read twice.

CRC64NVME because it runs at memory speed, can be combined, and is what S3 verifies for whole
objects. It guards against damage, not against forgery.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence

from awscrt import checksums

from ckpt.backends.bodies import WatchedBuffers, split

BLOCK_SIZE_BYTES = 1 << 19
"""The unit of verification: small, because a cut inside a block costs reading all of it."""


def crc64nvme(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """Return the CRC64NVME of `data`, continuing from `seed`."""
    return int(checksums.crc64nvme(data, seed))


def crc_text(crc: int) -> str:
    """Write a CRC as records do, in 16 hexadecimal digits."""
    return f"{crc:016x}"


Piece = tuple[int, int, int]
"""Where bytes begin, how many there are, and their CRC."""

See = Callable[[int, memoryview], None]


def block_crcs(buffers: Iterable[memoryview], block_size_bytes: int, see: See | None = None) -> list[int]:
    """Return the CRC of every block of the bytes in `buffers`, which start at a block's start; `see` as `cut_crcs`."""
    return [crc for _, _, crc in cut_crcs(buffers, block_size_bytes, (), see)]


def cut_crcs(
    buffers: Iterable[memoryview], block_size_bytes: int, cuts: Sequence[int], see: See | None = None
) -> list[Piece]:
    """Return the pieces of the bytes in `buffers`, which end with a block or at one of `cuts`, which are in order.

    `see` is shown bytes right after they were read, and where they begin: never those of two pieces, or buffers.
    """
    pieces: list[Piece] = []
    position = begin = crc = 0
    ends = iter([*cuts, math.inf])
    end = next(ends)
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            while end <= position:
                end = next(ends)
            due = min(position - position % block_size_bytes + block_size_bytes, end)
            run = buffer[start : start + int(due - position)]
            crc = crc64nvme(run, crc)
            if see is not None:
                see(position, run)
            start += run.nbytes
            position += run.nbytes
            if position == due:
                pieces.append((begin, position - begin, crc))
                begin, crc = position, 0
    if begin < position:
        pieces.append((begin, position - begin, crc))
    return pieces


class CheckedBuffers(WatchedBuffers):
    """The buffers of a read from a block's start on; each block's CRC is computed when the block has come.

    Bytes that a cache of the processor still holds are not read from memory once more: checking them takes a third of the time.

    Args:
        cuts: places in the bytes, in order; blocks are computed in pieces that end there, so that the
            CRC of the bytes between two cuts is known too.
    """

    def __init__(
        self, buffers: Iterable[memoryview], block_size_bytes: int, cuts: Sequence[int] = ()
    ) -> None:
        super().__init__(buffer for buffer in buffers if buffer.nbytes)
        self._block_size_bytes, self._cuts = block_size_bytes, cuts
        self.begin()

    def begin(self) -> None:
        self._pieces: list[Piece] = []
        self._pending: list[memoryview] = [*self]
        self._checked_bytes = 0
        self._came_bytes = 0  # of those that are pending

    def came(self, nbytes: int) -> None:
        self._came_bytes += nbytes
        whole = self._came_bytes - self._came_bytes % self._block_size_bytes
        if whole:
            blocks, self._pending = split(self._pending, whole)
            self._check(blocks)
            self._came_bytes -= whole

    def crcs(self) -> list[int]:
        """Return the CRC of every block, after the read; those that the store has not shown are computed now."""
        return joined_blocks(self.pieces(), self._block_size_bytes)

    def pieces(self) -> list[Piece]:
        """Return the same by pieces, which end with a block or at a cut."""
        self._check(self._pending)
        pieces = self._pieces
        self.begin()
        return pieces

    def _check(self, blocks: Sequence[memoryview]) -> None:
        done, cuts = self._checked_bytes, self._cuts
        if cuts:
            cuts = [cut - done for cut in cuts[bisect.bisect_right(cuts, done) :]]
        pieces = cut_crcs(blocks, self._block_size_bytes, cuts)
        self._pieces += ((done + begin, nbytes, crc) for begin, nbytes, crc in pieces)
        self._checked_bytes += sum(block.nbytes for block in blocks)


def joined_blocks(pieces: Iterable[Piece], block_size_bytes: int) -> list[int]:
    """Return the CRCs of the blocks of which these are the pieces, in order."""
    crcs: list[int] = []
    for begin, nbytes, crc in pieces:
        if begin % block_size_bytes:
            crcs[-1] = joined(crcs[-1], crc, nbytes)
        else:
            crcs.append(crc)
    return crcs


def joined(crc: int, following: int, nbytes: int) -> int:
    """Return the CRC of bytes with the CRC `crc` and `nbytes` more with the CRC `following`."""
    return int(checksums.combine_crc64nvme(crc, following, nbytes))


def joined_runs(pieces: Iterable[Piece]) -> int:
    """Return the CRC of the bytes of which these are the pieces, in order."""
    total = 0
    for _, nbytes, crc in pieces:
        total = joined(total, crc, nbytes)
    return total


def combine_blocks(crcs: Sequence[int], nbytes: int, block_size_bytes: int) -> int:
    """Return the CRC of `nbytes` bytes whose blocks have the CRCs `crcs`."""
    total, remaining = 0, nbytes
    for crc in crcs:
        size = min(block_size_bytes, remaining)
        total = checksums.combine_crc64nvme(total, crc, size)
        remaining -= size
    return int(total)
