"""Carry out reads: into the destination where possible, every block checked before its bytes are used."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from ckpt.backends.base import Store, transfer_size_bytes
from ckpt.consistency.block_digests import DIGEST_BYTES, block_digests
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, CheckedBuffers, joined_blocks, joined_runs
from ckpt.consistency.checksums import Piece as CrcPiece
from ckpt.errors import IntegrityError
from ckpt.lanes import run_in_lanes
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.pieces import MemorySink, Note, Piece
from ckpt.transfer.read_requests import Request, Slice, plan_requests

_logger = logging.getLogger(__name__)

_DIRECT_BYTES = 64 << 10
"""A run shorter than this is cheaper to copy out of scratch than to read as a buffer of its own."""

_GAP_BYTES = 128 << 10
_ATTEMPTS = 2

WhenVisible = Callable[[Callable[[], None]], None]


def at_once(read: Callable[[], None]) -> None:
    """Read what is visible, or is not there: a `WhenVisible` that does not wait."""
    read()


"""Carries out a read, again if the file is not visible yet."""


@dataclass(frozen=True, eq=False)
class StoredFile:
    """A data file, and its blocks' checksums, and packed digests, where they are known and to be verified."""

    key: str
    size_bytes: int
    block_size_bytes: int = 1
    block_crcs: Sequence[int] | None = None
    algorithm: str | None = None
    digests: bytes = b""

    def forged_blocks(self, start: int, buffers: Sequence[memoryview]) -> list[int]:
        """List the blocks that have not their digest, of those in `buffers`, which begin at `start`."""
        if self.algorithm is None:
            return []
        first = start // self.block_size_bytes
        found = block_digests(self.algorithm, buffers, self.block_size_bytes)
        begin = first * DIGEST_BYTES
        expected = self.digests[begin : begin + DIGEST_BYTES * len(found)]
        stored = (expected[DIGEST_BYTES * n : DIGEST_BYTES * (n + 1)] for n in range(len(found)))
        return [first + n for n, (one, other) in enumerate(zip(found, stored, strict=True)) if one != other]


def read_verified(
    store: Store,
    file: StoredFile,
    start: int,
    buffers: Sequence[memoryview],
    when_visible: WhenVisible,
    *,
    fault: str = "the stored bytes do not match their checksum",
) -> list[int]:
    """Fill `buffers` with a file's bytes from the begin of a block on, and check them.

    Returns the blocks' checksums; none if the file has none to verify. Raises IntegrityError, with
    `fault` as its text, if a block is damaged, also when it is read again.
    """
    pieces = read_pieces(store, file, start, buffers, when_visible, fault=fault)
    return joined_blocks(pieces, file.block_size_bytes)


def read_pieces(
    store: Store,
    file: StoredFile,
    start: int,
    buffers: Sequence[memoryview],
    when_visible: WhenVisible,
    *,
    fault: str = "the stored bytes do not match their checksum",
    cuts: Sequence[int] = (),
) -> list[CrcPiece]:
    """Read as `read_verified` does, and return the checksums of pieces, which end with a block or at one of `cuts`.

    With `cuts` there are some of a file without checksums too: of its bytes as they came.
    """
    size, text = file.block_size_bytes, fault
    for attempt in range(1, _ATTEMPTS + 1):
        fault = text  # the last attempt says what is wrong
        if file.block_crcs is None:
            came = CheckedBuffers(buffers, BLOCK_SIZE_BYTES, cuts) if cuts else None
            when_visible(partial(store.read_into, file.key, start, buffers if came is None else came))
            return [] if came is None else came.pieces()
        checked = CheckedBuffers(buffers, size, cuts)
        when_visible(partial(store.read_into, file.key, start, checked))
        pieces = checked.pieces()
        numbered = enumerate(joined_blocks(pieces, size), start // size)
        damaged = next((number for number, crc in numbered if crc != file.block_crcs[number]), None)
        if damaged is None:
            damaged = next(iter(file.forged_blocks(start, buffers)), None)
            if damaged is None:
                return pieces
            fault = "the stored bytes do not match their digest, though their checksum: they were forged"
        begin, end = damaged * size, min((damaged + 1) * size, file.size_bytes)
        if attempt < _ATTEMPTS:  # perhaps they were only damaged on their way
            _logger.warning(
                "%s: bytes %d-%d do not match their checksum, reading again", file.key, begin, end
            )
    raise IntegrityError(fault, url=store.url, key=file.key, start=begin, stop=end)


@dataclass(frozen=True)
class Fetcher:
    """Reads pieces of files, many at a time, through a staging pool.

    Attributes:
        request_bytes: how much to read at a time; None for the size that suits the store.
    """

    store: Store
    pool: StagingPool
    when_visible: WhenVisible
    request_bytes: int | None = None

    def run(self, wanted: Iterable[tuple[StoredFile, Iterable[Piece]]], threads: Executor) -> None:
        """Deliver all pieces to their sinks, or raise the first error once no read is running any more.

        Reads of a file begin when `wanted` gives it.
        """
        suitable = self.store.part_size_bytes or transfer_size_bytes(self.store.threads)
        request_bytes = self.request_bytes or suitable
        requests = (
            (file, request)
            for file, pieces in wanted
            for request in plan_requests(
                pieces,
                grid_bytes=file.block_size_bytes,
                file_bytes=file.size_bytes,
                gap_bytes=_GAP_BYTES if file.block_crcs is None else file.block_size_bytes // 2,
                request_bytes=request_bytes,
            )
        )
        most = self.store.threads
        run_in_lanes(threads.submit, lambda request: self._fetch(*request), requests, most=most)

    def _fetch(self, file: StoredFile, request: Request) -> None:
        segments, scratch_bytes = _segments(request)
        with self.pool.take(scratch_bytes) as scratch:
            buffers = [
                scratch[s.scratch_at : s.scratch_at + s.stop - s.start] if s.memory is None else s.memory
                for s in segments
            ]
            cuts = _noted_cuts(request)
            crcs = read_pieces(self.store, file, request.start, buffers, self.when_visible, cuts=cuts)
            if cuts:
                _note(request, crcs)
            remaining = iter(segments)
            segment = next(remaining)
            for part in request.slices:
                while segment.stop <= part.start:
                    segment = next(remaining)
                if segment.memory is None:  # else it was received where it belongs
                    assert part.stop <= segment.stop
                    at = segment.scratch_at + part.start - segment.start
                    data = scratch[at : at + part.stop - part.start]
                    part.piece.sink.deliver(part.start - part.piece.start, data)


@dataclass
class _Segment:
    """Bytes `[start, stop)` of a request, received in a destination's `memory` or in scratch."""

    start: int
    stop: int
    memory: memoryview | None
    scratch_at: int = -1


def _noted(request: Request) -> Iterator[tuple[Slice, Note]]:
    """List the slices whose checksums are noted as the bytes come; a piece with gaps notes its own."""
    for part in request.slices:
        if part.piece.note is not None and part.piece.sink.unit_bytes:
            yield part, part.piece.note


def _noted_cuts(request: Request) -> list[int]:
    """List the bounds of these slices in the bytes of a request, in order."""
    return sorted({place - request.start for part, _ in _noted(request) for place in (part.start, part.stop)})


def _note(request: Request, crcs: Sequence[CrcPiece]) -> None:
    """Note the checksum of each of these slices, joined of those of its pieces."""
    begins = [begin for begin, _, _ in crcs]
    for part, note in _noted(request):
        first, stop = (bisect_left(begins, place - request.start) for place in (part.start, part.stop))
        note(part.start - part.piece.start, part.stop - part.start, joined_runs(crcs[first:stop]))


def _segments(request: Request) -> tuple[list[_Segment], int]:
    """Lay out where a request's bytes are received, and count the scratch bytes that this takes."""
    segments: list[_Segment] = []
    position, scratch_bytes = request.start, 0
    for part in [*_direct(request.slices), None]:
        gap_stop = request.stop if part is None else part.start
        if gap_stop > position:
            # Aligned as in the file, so that elements are aligned too.
            scratch_bytes += (position - scratch_bytes) % 64
            segments.append(_Segment(position, gap_stop, None, scratch_bytes))
            scratch_bytes += gap_stop - position
        if part is not None:
            assert isinstance(part.piece.sink, MemorySink)
            offset = part.start - part.piece.start
            memory = part.piece.sink.memory[offset : offset + part.stop - part.start]
            segments.append(_Segment(part.start, part.stop, memory))
            position = part.stop
    return segments, scratch_bytes


def _direct(slices: Sequence[Slice]) -> list[Slice]:
    """Choose the slices to receive where they belong: long ones whose bytes nobody else wants."""
    shared: set[int] = set()
    farthest = -1
    for number, part in enumerate(slices):
        if farthest >= 0 and part.start < slices[farthest].stop:
            shared |= {number, farthest}
        if farthest < 0 or part.stop > slices[farthest].stop:
            farthest = number
    return [
        part
        for number, part in enumerate(slices)
        if number not in shared
        and isinstance(part.piece.sink, MemorySink)
        and part.stop - part.start >= _DIRECT_BYTES
    ]
