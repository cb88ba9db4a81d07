"""Send one request over a connection of the SDK's pool, and receive its reply."""

from __future__ import annotations

from typing import Any

from ckpt.backends.s3_protocol.http_bodies import PartReader
from ckpt.backends.s3_protocol.replies import Reply

_MAX_REPLY_BYTES = 1 << 16


class Exchange:
    """A request and its reply, over a connection of a pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.connection: Any = None
        self.response: Any = None

    def send(self, method: str, head: bytes, body: PartReader | None) -> int:
        """Send the request; return the status of the reply, whose body is not read yet."""
        self.connection = connection = self._pool._get_conn()
        if connection.sock is None:
            connection.timeout = self._pool.timeout.connect_timeout
            connection.connect()
        sock = connection.sock
        sock.settimeout(self._pool.timeout.read_timeout)
        sock.sendall(head)
        for piece in body.pieces() if body is not None else ():
            sock.sendall(piece)
        self.response = Reply(sock, method=method)
        self.response.begin()
        status: int = self.response.status
        return status

    def has_body(self) -> bool:
        """Tell whether the reply has a body, or did not end; it is read up to 64 KiB."""
        return bool(self.response.read(_MAX_REPLY_BYTES)) or not self.response.isclosed()

    def close(self) -> None:
        """Give the connection back for reuse if the reply was read to its end, else drop it."""
        is_read = self.response.isclosed() or self.response.length == 0
        if self.response.will_close or not is_read:
            self.drop()
        else:
            self.response.close()
            self._pool._put_conn(self.connection)

    def finish(self) -> bytes:
        """Read the rest of a short reply, and give the connection back."""
        try:
            rest: bytes = self.response.read(_MAX_REPLY_BYTES)
        except Exception:
            self.drop()
            return b""
        self.close()
        return rest

    def drop(self) -> None:
        if self.response is not None:
            self.response.close()
        if self.connection is not None:
            self.connection.close()
            self._pool._put_conn(self.connection)


class ReplyBytes:
    """The bytes of a reply, received straight into the destination."""

    def __init__(self, exchange: Exchange) -> None:
        self._response, self._socket = exchange.response, exchange.connection.sock

    def readinto(self, view: memoryview) -> int:
        """Fill `view`, but not beyond the end of the reply; return the number of bytes that came."""
        view = view[: self._response.length]
        filled: int = self._response.fp.readinto1(view)  # first those that came with the headers
        got = filled
        while got and filled < view.nbytes:
            got = self._socket.recv_into(view[filled:])
            filled += got
        self._response.length -= filled
        return filled
