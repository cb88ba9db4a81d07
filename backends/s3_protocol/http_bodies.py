"""Move the bytes of S3 requests and replies between the callers' own buffers and the socket."""

from __future__ import annotations

import bisect
import contextlib
import functools
import http.client
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.backends.base import MIB
from ckpt.backends.bodies import Part
from ckpt.backends.cancellable_reads import Read
from ckpt.backends.s3_protocol.errors import is_connection_error

_SEND_SIZE_BYTES = 4 * MIB
_PACED_SEND_SIZE_BYTES = MIB // 4


class PartReader:
    """The buffers of a part as the readable, seekable body that boto3 asks for, not copied."""

    def __init__(self, part: Part) -> None:
        self._buffers = [buffer for buffer in part.buffers if buffer.nbytes]
        self._pace = part.pace
        self._ends = list(itertools.accumulate(buffer.nbytes for buffer in self._buffers))
        self._size = part.nbytes
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def read(self, size: int | None = -1) -> memoryview | bytes:
        """Return at most `size` bytes, fewer where a buffer ends; by default a copy of the rest."""
        if size is None or size < 0:
            return b"".join(self.pieces())
        if self._position >= self._size:
            return b""
        index = bisect.bisect_right(self._ends, self._position)
        buffer = self._buffers[index]
        start = self._position - (self._ends[index] - buffer.nbytes)
        piece = buffer[start : start + size]
        self._position += piece.nbytes
        return piece

    def pieces(self) -> Iterator[memoryview | bytes]:
        """Yield the rest, in pieces as large as the buffers allow."""
        size = _SEND_SIZE_BYTES if self._pace is None else _PACED_SEND_SIZE_BYTES
        while self._position < self._size:
            piece = self.read(size)
            if self._pace is not None:
                self._pace(len(piece))
            yield piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True


@dataclass(frozen=True)
class _Pieces:
    """A request's body for the HTTP stack: an iterable is sent piece by piece."""

    reader: PartReader

    def __iter__(self) -> Iterator[memoryview | bytes]:
        return self.reader.pieces()

    def seek(self, offset: int) -> None:  # the SDKs call this before they try again
        self.reader.seek(offset)


def send_whole_buffers(request: Any, **_: Any) -> None:
    """Have the body of a request that is signed, and about to be sent, sent in large pieces.

    The HTTP stack would read it in blocks of 16 KiB, each a system call. A retry is signed anew, from
    the reader.
    """
    if isinstance(request.body, PartReader):
        request.body = _Pieces(request.body)


class RawBody:
    """A response body read straight into the destination.

    boto3's StreamingBody and urllib3 read into fresh `bytes` and copy; the `http.client` response
    below them fills our memory. If that is out of reach (`sock` is None), their own `read` serves.
    """

    def __init__(self, response: Any, sock: socket.socket | None, close: Callable[[], object]) -> None:
        self._response, self._socket, self.close = response, sock, close

    @staticmethod
    def of_sdk(body: Any) -> RawBody:
        """Find the response below a body of the SDK."""
        raw: Any = getattr(body, "_raw_stream", None)
        response = getattr(raw, "_fp", None)
        # Taken now: when the reply has come whole, the response lets go of it.
        sock = getattr(getattr(getattr(response, "fp", None), "raw", None), "_sock", None)
        if not isinstance(response, http.client.HTTPResponse) or not isinstance(sock, socket.socket):
            return RawBody(body, None, body.close)

        def close() -> None:
            """Give the connection back for reuse if the reply was read to its end, else drop it."""
            if response.isclosed():
                raw.release_conn()
            else:
                body.close()

        return RawBody(response, sock, close)

    def read_into(
        self, buffers: Sequence[memoryview], read: Read, came: Callable[[int], None]
    ) -> tuple[int, Exception | None]:
        """Fill `buffers`; return the number of bytes that came, and the error that ended them. `came` is told of each piece."""
        total = 0
        try:
            for buffer in buffers:
                filled = 0
                while filled < buffer.nbytes:
                    # In slices: if the connection breaks, all but the last one surely came.
                    got = self._read_some(buffer[filled : filled + MIB], read)
                    if not got:
                        return total, None
                    filled += got
                    total += got
                    came(got)
        except Exception as error:
            if isinstance(error, http.client.HTTPException | ValueError) or is_connection_error(error):
                return total, error
            raise
        return total, None

    def _read_some(self, view: memoryview, read: Read) -> int:
        if self._socket is not None:
            with read.filling(functools.partial(_interrupt, self._socket)):
                got: int = self._response.readinto(view)
                return got
        data = self._response.read(view.nbytes)
        with read.filling():
            view[: len(data)] = data
        return len(data)


def _interrupt(connection: socket.socket) -> None:
    """End a connection, from another thread: a read that waits for its bytes gets none."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS, which would take its leave first
