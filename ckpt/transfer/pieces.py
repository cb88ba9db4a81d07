"""Name runs of bytes in files, and who takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ckpt.transfer.boxes import span

_STRIDED_BYTES = 4 << 20
"""The longest run of a file that is read whole for the rows that are wanted of it."""

_WORTH_SKIPPING_BYTES = 2 << 20
"""A gap between wanted rows that is worth a request of its own; less is read and dropped."""


class Sink(Protocol):
    """Takes the bytes of a piece."""

    @property
    def unit_bytes(self) -> int:
        """The piece may be cut after any multiple of it and delivered in parts; 0 if it must come whole."""

    def deliver(self, start: int, data: memoryview) -> None:
        """Take `data`, the piece's bytes from `start` on."""


Note = Callable[[int, int, int], None]
"""Called with where in a piece bytes begin, how many they are, and their CRC64NVME, once they are verified."""


@dataclass(frozen=True)
class Piece:
    """Bytes `[start, stop)` of a file, their sink, and the callback that takes their checksums."""

    start: int
    stop: int
    sink: Sink
    note: Note | None = None


@dataclass(frozen=True, eq=False)
class MemorySink:
    """The destination's own memory: storage can write straight into it."""

    memory: memoryview
    unit_bytes = 1

    def deliver(self, start: int, data: memoryview) -> None:
        self.memory[start : start + data.nbytes] = data


class NoSink:
    """Bytes that are read only to be verified."""

    unit_bytes = 1

    def deliver(self, start: int, data: memoryview) -> None:
        pass


class Array(Protocol):
    """A torch tensor, or an array of numpy."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Any, /) -> Any: ...


A = TypeVar("A", bound=Array)


def box_pieces(
    start: int,
    item_bytes: int,
    strides: Sequence[int],
    target: A,
    *,
    run: Callable[[int, A], Sink | None],
    strided: Callable[[A, Sequence[int]], Sink],
) -> Iterator[Piece]:
    """List the pieces of a box of the file that begins at byte `start` and has the shape of `target`.

    Args:
        strides: of the box in the file, in elements; from the largest to the smallest.
        run: makes the sink of a part that is a run of the file without gaps, from the run's first
            byte; None if it has none for it.
        strided: makes the sink of a part whose elements lie in the piece with gaps between them.
    """
    shape = target.shape
    length = span(shape, strides)
    if length == math.prod(shape) and (sink := run(start, target)) is not None:
        yield Piece(start, start + length * item_bytes, sink)
        return
    row_bytes = span(shape[1:], strides[1:]) * item_bytes if shape else item_bytes
    step_bytes = strides[0] * item_bytes if shape else item_bytes
    sparse = bool(shape) and step_bytes - row_bytes > _WORTH_SKIPPING_BYTES
    if length * item_bytes <= _STRIDED_BYTES and not sparse:
        yield Piece(start, start + length * item_bytes, strided(target, strides))
        return
    together = 1 if sparse or row_bytes > _STRIDED_BYTES else max(1, _STRIDED_BYTES // step_bytes)
    for row in range(0, shape[0], together):
        rows = target[row : row + together]
        # `...`: else numpy gives a number, in place of a view of one element.
        inner = (strides[1:], rows[0, ...]) if rows.shape[0] == 1 else (strides, rows)
        yield from box_pieces(start + row * step_bytes, item_bytes, *inner, run=run, strided=strided)


def frame_pieces(start: int, stop: int, payload: slice, block_bytes: int) -> Iterator[Piece]:
    """List the parts of an item's frame, around its payload, that are in blocks of their own.

    They are read only to be checked: a read of a whole item reports any damage to it.
    """
    if payload.start == payload.stop:
        yield Piece(start, stop, NoSink())
        return
    if start // block_bytes != payload.start // block_bytes:
        yield Piece(start, payload.start, NoSink())
    if (stop - 1) // block_bytes != (payload.stop - 1) // block_bytes:
        yield Piece(payload.stop, stop, NoSink())
