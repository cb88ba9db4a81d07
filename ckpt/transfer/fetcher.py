"""Carrying out reads: into the destination where possible, every block checked before its bytes are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from ckpt.backends.base import Store, transfer_size_bytes
from ckpt.consistency.checksums import block_crcs
from ckpt.errors import IntegrityError
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.read_pieces import MemorySink, Piece
from ckpt.transfer.read_requests import Request, Slice, plan_requests
from ckpt.transfer.tensor_memory import memory_of
from ckpt.transfer.threads import run_all

_logger = logging.getLogger(__name__)

_DIRECT_BYTES = 64 << 10
"""A run shorter than this is cheaper to copy out of scratch than to read as a buffer of its own."""

_GAP_BYTES = 128 << 10
_ATTEMPTS = 2


@dataclass(frozen=True, eq=False)
class StoredFile:
    """A data file: its key and size, and its blocks' checksums where they are known and to be verified."""

    key: str
    size_bytes: int
    block_size_bytes: int = 1
    block_crcs: Sequence[int] | None = None


@dataclass
class _Segment:
    """Bytes `[start, stop)` of a request: memory of a destination, or a place in scratch."""

    start: int
    stop: int
    memory: memoryview | None
    scratch_at: int = -1


class Fetcher:
    """Reads pieces of files, many at a time, through a staging pool.

    Args:
        when_visible: carries out a read, again if the file is not visible yet.
    """

    def __init__(
        self, store: Store, pool: StagingPool, when_visible: Callable[[Callable[[], None]], None]
    ) -> None:
        self._store, self._pool, self._when_visible = store, pool, when_visible

    def run(self, wanted: Mapping[StoredFile, Iterable[Piece]], threads: Executor) -> None:
        """Deliver all pieces to their sinks, or raise the first error once no read is running any more."""
        requests = (
            (file, request)
            for file, pieces in wanted.items()
            for request in plan_requests(
                pieces,
                grid_bytes=file.block_size_bytes,
                file_bytes=file.size_bytes,
                gap_bytes=_GAP_BYTES if file.block_crcs is None else file.block_size_bytes // 2,
                request_bytes=transfer_size_bytes(self._store.threads),
            )
        )
        run_all(threads, lambda request: self._fetch(*request), requests)

    def _fetch(self, file: StoredFile, request: Request) -> None:
        segments, scratch_bytes = _segments(request)
        with self._pool.take(scratch_bytes) as scratch:
            memory = memory_of(scratch)
            buffers = [
                memory[s.scratch_at : s.scratch_at + s.stop - s.start] if s.memory is None else s.memory
                for s in segments
            ]
            for attempt in range(1, _ATTEMPTS + 1):
                self._when_visible(lambda: self._store.read_into(file.key, request.start, buffers))
                damaged = _damaged(file, request, buffers)
                if damaged is None:
                    break
                start, stop = damaged
                if attempt == _ATTEMPTS:
                    raise IntegrityError(
                        "the stored bytes do not match their checksum",
                        url=self._store.url, key=file.key, start=start, stop=stop,
                    )  # fmt: skip
                # Perhaps they were only damaged on their way.
                _logger.warning(
                    "%s: bytes %d-%d do not match their checksum, reading again", file.key, start, stop
                )
            _deliver(request, segments, scratch)


def _damaged(file: StoredFile, request: Request, buffers: Sequence[memoryview]) -> tuple[int, int] | None:
    """The byte range of the first block that is not what was written."""
    if file.block_crcs is None:
        return None
    size = file.block_size_bytes
    first = request.start // size
    for number, crc in enumerate(block_crcs(buffers, size), first):
        if crc != file.block_crcs[number]:
            return number * size, min((number + 1) * size, file.size_bytes)
    return None


def _segments(request: Request) -> tuple[list[_Segment], int]:
    """How a request's bytes are received, and how much scratch that takes."""
    segments: list[_Segment] = []
    position = request.start
    scratch_end = 0

    def receive_in_scratch(stop: int) -> None:
        nonlocal scratch_end
        if stop > position:
            # Aligned as in the file, so that elements are aligned too.
            scratch_end += (position - scratch_end) % 64
            segments.append(_Segment(position, stop, None, scratch_end))
            scratch_end += stop - position

    for part in _direct(request.slices):
        receive_in_scratch(part.start)
        assert isinstance(part.piece.sink, MemorySink)
        offset = part.start - part.piece.start
        memory = part.piece.sink.memory[offset : offset + part.stop - part.start]
        segments.append(_Segment(part.start, part.stop, memory))
        position = part.stop
    receive_in_scratch(request.stop)
    return segments, scratch_end


def _direct(slices: Sequence[Slice]) -> list[Slice]:
    """The slices that can be received where they belong: long ones whose bytes nobody else wants."""
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


def _deliver(request: Request, segments: Sequence[_Segment], scratch: torch.Tensor) -> None:
    """Hand the slices that were received in scratch to their sinks."""
    places = iter([segment for segment in segments if segment.memory is None])
    direct = {id(part) for part in _direct(request.slices)}
    place = next(places, None)
    for part in request.slices:
        if id(part) in direct:
            continue
        while place is not None and place.stop <= part.start:
            place = next(places, None)
        assert place is not None
        assert place.start <= part.start < part.stop <= place.stop
        at = place.scratch_at + part.start - place.start
        part.piece.sink.deliver(part.start - part.piece.start, scratch[at : at + part.stop - part.start])
