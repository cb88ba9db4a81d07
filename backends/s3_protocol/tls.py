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
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_logger = logging.getLogger(__name__)

# Larger ones, and the copies of both, do not stay in the cache of every processor.
_RECEIVED_SIZE_BYTES = 256 << 10
_SENT_SIZE_BYTES = 96 << 10
_RECORD_SIZE_BYTES = 16 << 10
_HEAD_SIZE_BYTES, _LENGTH = 5, struct.Struct(">H")
_RECORD_EXTRA_BYTES = 14
"""A record has at least so many bytes beside its content, whatever the cipher; mostly 22."""


class Sessions:
    """What the last connection agreed upon with a server: another one need not show its certificates again."""

    def __init__(self) -> None:
        self._last: tuple[object, ssl.SSLSession | None] = None, None
        self._are_kept = True

    def of(self, server: object) -> ssl.SSLSession | None:
        known, session = self._last
        return session if known == server else None

    def keep(self, server: object, session: ssl.SSLSession | None) -> None:
        if self._are_kept:
            self._last = server, session

    def forget(self, *, for_good: bool = False) -> None:
        self._are_kept = self._are_kept and not for_good
        self._last = None, None


class TlsSocket(socket.socket):
    """A client's end of a TLS connection. It takes over the connection `sock`, and shakes hands.

    As `ssl.SSLSocket` does by default, it takes a connection's end for the end of the bytes: HTTP tells how many there are.
    It receives no byte beyond what is asked for, but the rest of a record, which a `Reply` looks for at its end.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None, sessions: Sessions
    ) -> None:
        if context.check_hostname and not server_hostname:
            raise ValueError("check_hostname requires server_hostname")
        timeout_s = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.context, self._sessions = context, sessions
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._received = memoryview(bytearray(_RECEIVED_SIZE_BYTES))
        self._is_session_kept = False
        self._left, self._head = 0, b""  # of the record that is coming
        try:
            self.settimeout(timeout_s)
            host, port = self.getpeername()[:2]
            self._server = server_hostname or host, port, context.verify_mode, context.check_hostname
            session = sessions.of(self._server)
            self._tls = context.wrap_bio(
                self._incoming, self._outgoing, server_hostname=server_hostname, session=session
            )
            try:
                self._shake_hands()
            except BaseException:
                if session is not None:  # it may be the reason
                    sessions.forget(for_good=True)
                raise
        except BaseException:
            self.close()
            raise

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """Fill `buffer` with what has come, and wait if nothing has; return the number of bytes, 0 at the end."""
        _refuse(flags)
        view = memoryview(buffer).cast("B")
        size, filled, until_s = min(nbytes or view.nbytes, view.nbytes), 0, None
        while filled < size:
            got: Any = None
            try:
                got = self._tls.read(size - filled, view[filled:])
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLEOFError:
                got = 0
            if got:
                filled += got
            elif got == 0:
                with contextlib.suppress(OSError):
                    self.shutdown(socket.SHUT_RD)  # who looks at it sees that it has ended
                break
            elif filled:
                break
            else:
                until_s = self._receive(size, until_s)
        if filled and not self._is_session_kept:
            # Not earlier: since TLS 1.3 it comes after the handshake.
            self._sessions.keep(self._server, self._tls.session)
            self._is_session_kept = True
        return filled

    @property
    def is_in_record(self) -> bool:
        """Tell whether a record has begun to come, and is not whole."""
        return bool(self._left or self._head or self._incoming.pending)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data, 0, flags)])

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        view, sent = memoryview(data).cast("B"), 0
        while sent < view.nbytes:
            sent += self.send(view[sent:], flags)

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        _refuse(flags)
        piece, until_s = memoryview(data).cast("B")[:_SENT_SIZE_BYTES], None
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                sent = self._tls.write(piece)
                self._flush()
                return sent
            until_s = self._receive(0, until_s)

    def _not_encrypted(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("not over TLS")

    sendmsg = sendfile = sendto = recvmsg = recvmsg_into = recvfrom = recvfrom_into = dup = _not_encrypted

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
        until_s = None
        try:
            while True:
                with contextlib.suppress(ssl.SSLWantReadError):
                    self._tls.do_handshake()
                    return self._flush()
                until_s = self._receive(0, until_s)
        except ssl.SSLError:
            with contextlib.suppress(OSError):
                self._flush()  # it tells the server why
            raise

    def _receive(self, wanted: int, until_s: float | None) -> float:
        """Wait for encrypted bytes: not for more than surely belong to the next `wanted` ones.

        Return until when it waits at most, which holds for the whole call of which this is a part.
        """
        self._flush()
        timeout_s = self.gettimeout()
        buffer = self._received[: self._surely_to_come(wanted)]
        if until_s is None or timeout_s is None:
            until_s = time.monotonic() + (timeout_s or 0)
            got = super().recv_into(buffer)
        else:
            self.settimeout(max(until_s - time.monotonic(), 0.001))
            try:
                got = super().recv_into(buffer)
            finally:
                self.settimeout(timeout_s)
        if got:
            self._incoming.write(buffer[:got])
            self._follow(buffer[:got])
        else:
            self._incoming.write_eof()
        return until_s

    def _surely_to_come(self, wanted: int) -> int:
        """Count the bytes, at least, until `wanted` bytes have come."""
        if self._left:  # a record has begun, and holds some of them
            return self._left + _in_records(max(wanted - _RECORD_SIZE_BYTES, 0))
        return max(_in_records(wanted), _HEAD_SIZE_BYTES) - len(self._head)

    def _follow(self, data: memoryview) -> None:
        """Note how much of the last record is still to come."""
        start, size = self._left, len(data)
        if self._head:
            missing = _HEAD_SIZE_BYTES - len(self._head)
            self._head += data[:missing]
            if len(self._head) < _HEAD_SIZE_BYTES:
                return
            start = missing + _length(self._head, 3)
            self._head = b""
        while start + _HEAD_SIZE_BYTES <= size:
            start += _HEAD_SIZE_BYTES + _length(data, start + 3)
        if start < size:
            self._head = bytes(data[start:])
        self._left = max(start - size, 0)

    def _flush(self) -> None:
        if self._outgoing.pending:
            super().sendall(self._outgoing.read())


def _in_records(nbytes: int) -> int:
    return nbytes + _RECORD_EXTRA_BYTES * -(-nbytes // _RECORD_SIZE_BYTES)


def _length(data: ReadableBuffer, offset: int) -> int:
    length: int = _LENGTH.unpack_from(data, offset)[0]
    return length


def _refuse(flags: int) -> None:
    if flags:
        raise ValueError("no flags over TLS")


def use_large_pieces(client: Any) -> None:
    """Have the connections of an SDK's client made as `TlsSocket`, and its file of authorities read once.

    The SDK reads the file for each connection, which takes 14 ms for its own.
    """
    try:
        context = client._endpoint.http_session._manager.connection_pool_kw["ssl_context"]
    except (AttributeError, KeyError, TypeError) as error:  # it is private in the SDK, and may move
        _logger.debug("TLS is left to the SDK: %r", error)
        return
    if type(context) is not ssl.SSLContext:
        return
    sessions, loaded = Sessions(), set()
    wrap, load, load_own = context.wrap_socket, context.load_verify_locations, context.load_cert_chain

    def wrap_socket(sock: socket.socket, *, server_hostname: str | None = None, **more: Any) -> socket.socket:
        if more:
            return wrap(sock, server_hostname=server_hostname, **more)
        return TlsSocket(sock, context, server_hostname, sessions)

    def load_verify_locations(cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        version = None
        if isinstance(cafile, str) and not (capath or cadata):
            found = os.stat(cafile)
            version = cafile, found.st_ino, found.st_size, found.st_mtime_ns
        if version is None or version not in loaded:
            load(cafile, capath, cadata)
            loaded.add(version)
            sessions.forget()

    def load_cert_chain(*arguments: Any, **more: Any) -> None:
        sessions.forget(for_good=True)  # they would show the client as it was
        load_own(*arguments, **more)

    vars(context).update(
        wrap_socket=wrap_socket, load_verify_locations=load_verify_locations, load_cert_chain=load_cert_chain
    )
