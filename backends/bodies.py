"""Bodies: bytes on their way into a store; and helpers for the buffers that reads fill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from awscrt.checksums import crc64nvme


@dataclass(frozen=True)
class Part:
    """A run of a body's bytes, ready to be sent.

    Attributes:
        buffers: byte views, in order; valid only while the part is open.
        crc64nvme: the checksum of all of them, when the body knows it.
        pace: call it with a number of bytes right before they are sent; it may wait (a bandwidth
            cap).
    """

    buffers: Sequence[memoryview]
    crc64nvme: int | None = None
    pace: Callable[[int], None] | None = None

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


class Body(Protocol):
    """Bytes of known length, to be had in any order, in parallel, and again for a retry."""

    @property
    def nbytes(self) -> int: ...

    @property
    def has_checksums(self) -> bool:
        """Tell whether every part and the whole come with a CRC64NVME."""

    def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
        """Open bytes `[start, stop)`: multiples of 1 MiB, but for a `stop` at the end.

        An exception ends the put and reaches the caller unchanged.
        """

    def crc64nvme(self) -> int | None:
        """Return the checksum of the whole body, known once every part has been opened."""


class BytesBody:
    """A body that is already in memory, without checksums."""

    has_checksums = False

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B").toreadonly()

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
        return contextlib.nullcontext(Part([self._view[start:stop]]))

    def crc64nvme(self) -> None:
        return None


class CheckedBody(BytesBody):
    """A body in memory with checksums of every part and of the whole."""

    has_checksums = True

    def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
        view = self._view[start:stop]
        return contextlib.nullcontext(Part([view], crc64nvme(view)))

    def crc64nvme(self) -> int:  # type: ignore[override]
        return int(crc64nvme(self._view))


class BodyError(Exception):
    """Carries a body's exception past the code that translates the store's own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextlib.contextmanager
def open_part(body: Body, start: int, stop: int) -> Iterator[Part]:
    """Open a part; exceptions of the body become a BodyError (see `body_errors_unchanged`)."""
    with contextlib.ExitStack() as stack:
        try:
            part = stack.enter_context(body.part(start, stop))
        except Exception as error:
            raise BodyError(error) from error
        yield part


@contextlib.contextmanager
def body_errors_unchanged() -> Iterator[None]:
    """Raise a body's exceptions unchanged: a planner's OSError is not the disk's."""
    try:
        yield
        return
    except BodyError as error:
        carried = error.error
    raise carried  # outside of the handler, which would become its context


def remaining(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return the rest of `buffers` after their first `nbytes`."""
    for index, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer[nbytes:], *buffers[index + 1 :]]
        nbytes -= buffer.nbytes
    return []


def fill(buffers: Sequence[memoryview], data: memoryview) -> None:
    """Copy `data` into `buffers`, in order, until either ends."""
    position = 0
    for buffer in buffers:
        piece = data[position : position + buffer.nbytes]
        buffer[: piece.nbytes] = piece
        position += piece.nbytes
