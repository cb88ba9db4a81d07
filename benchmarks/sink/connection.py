"""Speak HTTP/1.1 on one connection: parse heads, keep or drop bodies without copying them, send
replies.
"""

from __future__ import annotations

import mmap
import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from benchmarks.sink.pacing import Pacer

__all__ = ["Body", "Connection", "Request"]

_SCRATCH_BYTES = 16 << 20
_SCRATCH = mmap.mmap(-1, _SCRATCH_BYTES)
"""Where dropped bytes would go: with MSG_TRUNC the kernel does not even write them, so it stays unmapped."""

_PACED_BYTES = 256 << 10
_MAX_HEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class Request:
    """The head of a request; header names are in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass(frozen=True)
class Body:
    """The body of a request: its payload's size, and the payload unless it was dropped."""

    nbytes: int
    data: memoryview | None


class Connection:
    """One client."""

    def __init__(self, sock: socket.socket, pacer: Pacer | None = None) -> None:
        self._sock, self._pacer = sock, pacer
        self._plain = not isinstance(sock, ssl.SSLSocket)
        self._ahead = b""

    def request(self) -> Request | None:
        """Receive the next request's head; None when the client has gone."""
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            received = self._sock.recv(_MAX_HEAD_BYTES)
            if not received or len(self._ahead) > _MAX_HEAD_BYTES:
                return None
            self._ahead += received
        head, self._ahead = self._ahead[:end].decode("latin-1"), self._ahead[end + 4 :]
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ", 2)
        target = re.sub(r"^https?://[^/]*", "", target)  # some clients send the whole address
        path, _, query = target.partition("?")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return Request(method, unquote(path), dict(parse_qsl(query, keep_blank_values=True)), headers)

    def body(self, request: Request, keep_up_to_bytes: int) -> Body:
        """Receive the request's body; a longer one than `keep_up_to_bytes` is dropped."""
        if request.headers.get("expect", "").lower() == "100-continue":
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.headers.get("transfer-encoding", "").lower() == "chunked":
            body = self._chunked(keep_up_to_bytes)
        else:
            body = self._receive(int(request.headers.get("content-length", 0)), keep_up_to_bytes)
        if "x-amz-decoded-content-length" not in request.headers:
            return body
        nbytes = int(request.headers["x-amz-decoded-content-length"])
        return Body(nbytes, None if body.data is None else _decode_aws_chunks(body.data, nbytes))

    def send(self, status: str, headers: dict[str, str], views: Sequence[memoryview]) -> None:
        """Send a reply; `headers` says how long it is (a reply to HEAD has a length and no views)."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1")
        if sum(view.nbytes for view in views) < 32 << 10:
            self._sock.sendall(b"".join([head, *views]))
            return
        self._sock.sendall(head)
        for view in views:
            step = max(1, view.nbytes) if self._pacer is None else _PACED_BYTES
            for start in range(0, view.nbytes, step):
                if self._pacer is not None:
                    self._pacer.wait(len(view[start : start + step]))
                self._sock.sendall(view[start : start + step])

    def _chunked(self, keep_up_to_bytes: int) -> Body:
        nbytes, kept = 0, bytearray()
        while size := int(self._line().partition(b";")[0], 16):
            piece = self._receive(size, keep_up_to_bytes - nbytes)
            nbytes += size
            if piece.data is not None:
                kept += piece.data
            self._line()
        while self._line():
            pass  # trailers
        return Body(nbytes, memoryview(kept) if len(kept) == nbytes else None)

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            received = self._sock.recv(_MAX_HEAD_BYTES)
            if not received:
                raise ConnectionError("the client went away inside a body")
            self._ahead += received
        line, self._ahead = self._ahead[:end], self._ahead[end + 2 :]
        return line

    def _receive(self, nbytes: int, keep_up_to_bytes: int) -> Body:
        if nbytes > keep_up_to_bytes:
            self._drop(nbytes)
            return Body(nbytes, None)
        data = memoryview(bytearray(nbytes))
        ready = min(nbytes, len(self._ahead))
        data[:ready], self._ahead = self._ahead[:ready], self._ahead[ready:]
        flags = socket.MSG_WAITALL if self._plain else 0
        while ready < nbytes:
            received = self._sock.recv_into(data[ready:], 0, flags)
            if not received:
                raise ConnectionError("the client went away inside a body")
            ready += received
        return Body(nbytes, data)

    def _drop(self, nbytes: int) -> None:
        ready = min(nbytes, len(self._ahead))
        self._ahead, missing = self._ahead[ready:], nbytes - ready
        flags = socket.MSG_TRUNC | socket.MSG_WAITALL if self._plain else 0
        while missing:
            piece = min(missing, _SCRATCH_BYTES if self._pacer is None else _PACED_BYTES)
            if self._pacer is not None:
                self._pacer.wait(piece)
            received = self._sock.recv_into(_SCRATCH, piece, flags)
            if not received:
                raise ConnectionError("the client went away inside a body")
            missing -= received


def _decode_aws_chunks(data: memoryview, nbytes: int) -> memoryview:
    """Return the payload of an `aws-chunked` body: sizes, signatures and trailers left out."""
    raw, decoded, position = bytes(data), bytearray(), 0
    while True:
        end = raw.index(b"\r\n", position)
        size = int(raw[position:end].partition(b";")[0], 16)
        if not size:
            break
        decoded += raw[end + 2 : end + 2 + size]
        position = end + 2 + size + 2
    if len(decoded) != nbytes:
        raise ValueError(f"an aws-chunked body of {len(decoded)} bytes said it had {nbytes}")
    return memoryview(decoded)
