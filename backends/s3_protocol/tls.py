"""Move the bytes of TLS connections in large pieces, and begin them with what the last one agreed upon.

`ssl.SSLSocket` takes one record of at most 16 KiB from the kernel at a time, in two system calls, and sends one in each.
Here OpenSSL works on memory, and a system call moves many records: a fifth less CPU for a GB (decision 074).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_logger = logging.getLogger(__name__)

# Larger ones, and the copies of both, do not stay in the cache of every processor.
_RECEIVED_SIZE_BYTES = 256 << 10
_SENT_SIZE_BYTES = 96 << 10


class Sessions:
    """What the last connection agreed upon with a server: another one need not show its certificates again."""

    def __init__(self) -> None:
        self._last: tuple[object, ssl.SSLSession | None] = None, None

    def of(self, server: object) -> ssl.SSLSession | None:
        known, session = self._last
        return session if known == server else None

    def keep(self, server: object, session: ssl.SSLSession | None) -> None:
        self._last = server, session


class TlsSocket(socket.socket):
    """A client's end of a TLS connection. It takes over the connection `sock`, and shakes hands.

    As `ssl.SSLSocket` does by default, it takes a connection's end for the end of the bytes: HTTP tells how many there are.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None, sessions: Sessions
    ) -> None:
        timeout_s = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.context, self._sessions = context, sessions
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._received = memoryview(bytearray(_RECEIVED_SIZE_BYTES))
        self._is_session_kept = False
        try:
            self.settimeout(timeout_s)
            self._server = server_hostname, self.getpeername()[1]
            self._tls = context.wrap_bio(
                self._incoming,
                self._outgoing,
                server_hostname=server_hostname,
                session=sessions.of(self._server),
            )
            self._shake_hands()
        except BaseException:
            self.close()
            raise

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """Fill `buffer` with what has come, and wait if nothing has; return the number of bytes, 0 at the end."""
        view = memoryview(buffer).cast("B")
        size, filled = nbytes or view.nbytes, 0
        while filled < size:
            got: Any = None
            try:
                got = self._tls.read(size - filled, view[filled:])
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLEOFError:
                break
            if got:
                filled += got
            elif got == 0 or filled:
                break
            else:
                self._receive()
        if filled and not self._is_session_kept:
            # Not earlier: since TLS 1.3 it comes after the handshake.
            self._sessions.keep(self._server, self._tls.session)
            self._is_session_kept = True
        return filled

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data)])

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        view, sent = memoryview(data).cast("B"), 0
        while sent < view.nbytes:
            sent += self.send(view[sent:])

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        piece = memoryview(data).cast("B")[:_SENT_SIZE_BYTES]
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                sent = self._tls.write(piece)
                self._flush()
                return sent
            self._receive()

    def getpeercert(self, binary_form: bool = False) -> Any:
        return self._tls.getpeercert(binary_form)

    def selected_alpn_protocol(self) -> str | None:
        return self._tls.selected_alpn_protocol()

    def version(self) -> str | None:
        return self._tls.version()

    @property
    def session_reused(self) -> bool | None:
        return self._tls.session_reused

    def _shake_hands(self) -> None:
        try:
            while True:
                with contextlib.suppress(ssl.SSLWantReadError):
                    self._tls.do_handshake()
                    return self._flush()
                self._receive()
        except ssl.SSLError:
            with contextlib.suppress(OSError):
                self._flush()  # it tells the server why
            raise

    def _receive(self) -> None:
        """Wait for encrypted bytes."""
        self._flush()
        if got := super().recv_into(self._received):
            self._incoming.write(self._received[:got])
        else:
            self._incoming.write_eof()

    def _flush(self) -> None:
        if self._outgoing.pending:
            super().sendall(self._outgoing.read())


def use_large_pieces(client: Any) -> None:
    """Have the connections of an SDK's client made as `TlsSocket`, and its file of authorities read once.

    The SDK reads the file for each connection, which takes 14 ms for its own.
    """
    try:
        context = client._endpoint.http_session._manager.connection_pool_kw["ssl_context"]
        load = context.load_verify_locations
    except (AttributeError, KeyError) as error:  # it is private in the SDK, and may move
        _logger.debug("TLS is left to the SDK: %r", error)
        return
    if type(context) is not ssl.SSLContext:
        return
    sessions, loaded = Sessions(), set()

    def wrap_socket(sock: socket.socket, *, server_hostname: str | None = None) -> TlsSocket:
        return TlsSocket(sock, context, server_hostname, sessions)

    def load_verify_locations(cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        version = None
        if isinstance(cafile, str) and not (capath or cadata):
            found = os.stat(cafile)
            version = cafile, found.st_ino, found.st_size, found.st_mtime_ns
        if version is None or version not in loaded:
            load(cafile, capath, cadata)
            loaded.add(version)

    vars(context).update(wrap_socket=wrap_socket, load_verify_locations=load_verify_locations)
