"""Bodies: bytes on their way into a store; how single requests and unfinished uploads take them; buffers that reads fill."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from awscrt.checksums import crc64nvme


@dataclass(frozen=True)
class Part:
    """A run of a body's bytes, ready to be sent.

    Attributes:
        buffers: byte views, in order; valid only while the part is open.
        crc64nvme: the checksum of all of them, when the body knows it.
        pace: call it with a number of bytes right before they are sent; it may wait (a bandwidth
            cap).
        md5: the digest for a server that takes no CRC64NVME; by default that of the bytes, which must then have
            their checksum.
    """

    buffers: Sequence[memoryview]
    crc64nvme: int | None = None
    pace: Callable[[int], None] | None = None
    md5: bytes | None = None

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


class UploadNote(Protocol):
    """Remembers the unfinished upload of one object for the next process, in the store's own words. Raises nothing."""

    def read(self) -> bytes | None:
        """Return what was written; None if nothing is known, or another process uses it."""

    def write(self, data: bytes) -> None: ...

    def clear(self) -> None: ...


class Condition(enum.Enum):
    """How a server treats "only if absent"."""

    HONOURED = "honoured"
    REFUSED = "refused"
    IGNORED = "ignored"


class RawRequests(Protocol):
    """Single requests to a server, for probes; keys are those of the store, errors `ckpt.errors`.

    Nothing is checked before, and nothing replaces a request that is refused.
    """

    bucket_url: str
    """Endpoint and bucket: for all keys in it, the server answers alike."""

    @property
    def checksum(self) -> str:
        """Return what goes with bytes for the server to verify: "crc64nvme", "md5" or "none"."""

    def put(self, key: str, body: Body, *, create: bool = False, part_size_bytes: int | None = None) -> bool:
        """Put an object, in parts if their size is given; False if the server cannot.

        Raises AlreadyExists with `create`, if the server says so.
        """

    def learn(self, condition: Condition | None) -> None:
        """Have the store act on this measurement from now on; None: it could not be measured."""

    def begin(self, key: str) -> str:
        """Begin an upload in parts; returns its id."""

    def send_part(self, key: str, upload_id: str, number: int, body: Body) -> None:
        """Send one part."""

    def uploads(self, key: str) -> list[str]:
        """List the ids of the unfinished uploads of `key`."""

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload."""

    def setting(self, name: str) -> Mapping[str, Any]:
        """Read the bucket's `versioning`, `object_lock`, `lifecycle`, `encryption` or (COS) `protection`; empty if none.

        The words are those of S3's replies, as its SDK gives them. Raises StorageError if the server does not say.
        """

    def name_of(self, key: str) -> str:
        """Return the name of the object at `key` in its bucket."""


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
    return split(buffers, nbytes)[1]


def split(buffers: Sequence[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the first `nbytes` of `buffers`, and the rest."""
    if buffers and 0 < nbytes < buffers[0].nbytes:  # mostly
        return [buffers[0][:nbytes]], [buffers[0][nbytes:], *buffers[1:]]
    for index, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            first = [buffer[:nbytes]] if nbytes else []
            return [*buffers[:index], *first], [buffer[nbytes:], *buffers[index + 1 :]]
        nbytes -= buffer.nbytes
    return [*buffers], []


def fill(buffers: Sequence[memoryview], data: memoryview) -> None:
    """Copy `data` into `buffers`, in order, until either ends."""
    position = 0
    for buffer in buffers:
        piece = data[position : position + buffer.nbytes]
        buffer[: piece.nbytes] = piece
        position += piece.nbytes


class WatchedBuffers(list[memoryview]):
    """The buffers of a read, of which a store may show what has come, to be looked at while the processor's cache holds it.

    A store that does not know of it fills them as any others; another one uses `showing`.

    Attributes:
        read: the read that may show what has come; an earlier one may not have ended yet, but nobody waits for it.
    """

    read: object = None

    def begin(self) -> None:
        """Start over: of what a read has shown before, which has failed, nothing counts."""

    def came(self, nbytes: int) -> None:
        """Look at so many more bytes, which are in place and stay as they are."""


@contextlib.contextmanager
def showing(buffers: Sequence[memoryview]) -> Iterator[Callable[[int], None]]:
    """Begin a read that fills `buffers` in order; yield the call that tells how many more bytes have come, to stay.

    A store need not tell of all. What it told of does not count if the read fails.
    """
    if not isinstance(buffers, WatchedBuffers):
        yield lambda nbytes: None
        return
    buffers.read = read = object()
    buffers.begin()

    def came(nbytes: int) -> None:
        if buffers.read is read:
            buffers.came(nbytes)

    try:
        yield came
    except BaseException:
        if buffers.read is read:
            buffers.begin()
        raise
