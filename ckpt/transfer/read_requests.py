"""Plan reads for pieces: few, of bounded size, in whole checksum blocks, no byte twice without need."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckpt.transfer.pieces import Piece


@dataclass(frozen=True)
class Slice:
    """Bytes `[start, stop)` of a file, inside of `piece`."""

    piece: Piece
    start: int
    stop: int


@dataclass
class Request:
    """One read of bytes `[start, stop)` of a file and the slices it serves, in order of their start."""

    start: int
    stop: int
    slices: list[Slice] = field(default_factory=list)


def plan_requests(
    pieces: Iterable[Piece], *, grid_bytes: int, file_bytes: int, gap_bytes: int, request_bytes: int
) -> Iterator[Request]:
    """Plan requests that cover `pieces` of one file, which may overlap.

    Args:
        grid_bytes: requests begin and end at multiples of it (a checksum block; 1 where there are
            none).
        file_bytes: the file's size; the last request ends there at most.
        gap_bytes: bytes nobody asked for that may be read to join two pieces in one request.
        request_bytes: size of a request, rounded up to the grid; one piece that cannot be cut may
            exceed it.
    """
    request_bytes = _round_up(request_bytes, grid_bytes)
    current: Request | None = None
    # Always the slice that starts first: what is cut off a piece waits its turn among the others.
    todo = [(piece.start, number, piece) for number, piece in enumerate(pieces) if piece.start < piece.stop]
    heapq.heapify(todo)
    while todo:
        start, number, piece = heapq.heappop(todo)
        begin = start - start % grid_bytes
        stop = start
        if current is not None and begin <= current.stop + gap_bytes:
            stop = _cut(piece, start, current.start + request_bytes)
        if current is None or stop == start:
            if current is not None:
                yield current
            current = Request(begin, begin)
            stop = _cut(piece, start, begin + request_bytes)
            stop = piece.stop if stop == start else stop
        current.stop = max(current.stop, min(_round_up(stop, grid_bytes), file_bytes))
        current.slices.append(Slice(piece, start, stop))
        if stop < piece.stop:
            heapq.heappush(todo, (stop, number, piece))
    if current is not None:
        yield current


def _cut(piece: Piece, start: int, limit: int) -> int:
    """Tell how far `piece`, from `start` on, fits below `limit`; `start` if no part of it does."""
    if piece.stop <= limit:
        return piece.stop
    unit = piece.sink.unit_bytes
    if unit == 0 or limit <= start:
        return start
    return max(start, limit - (limit - piece.start) % unit)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
