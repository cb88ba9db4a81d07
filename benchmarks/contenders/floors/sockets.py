"""Measure the floor of S3 transfers: the same bytes over plain sockets, the HTTP framing written by
hand.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import torch

from benchmarks.contenders import Settings
from benchmarks.contenders.floors.checksums import block_checksums

__all__ = ["Sockets"]

_CONNECTIONS = 4
_OBJECT_BYTES = 32 << 20


class Sockets:
    """Objects of 32 MiB on 4 connections: no HTTP library, no signature, no metadata.

    Option `checksums`: compute those that this library computes, and do nothing with them.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.endpoint is not None
        self._check = block_checksums if settings.options.get("checksums", False) else _nothing
        self._endpoint = settings.endpoint

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            list(threads.map(lambda lane: self._put(_objects(state), lane, place), range(_CONNECTIONS)))

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            list(threads.map(lambda lane: self._get(_objects(state), lane, place), range(_CONNECTIONS)))

    def _put(self, objects: list[list[memoryview]], lane: int, place: str) -> None:
        with self._connect() as sock:
            for number in range(lane, len(objects), _CONNECTIONS):
                views = objects[number]
                self._check(views)
                length = sum(view.nbytes for view in views)
                sock.sendall(_head("PUT", place, number, f"Content-Length: {length}\r\n"))
                for view in views:
                    sock.sendall(view)
                _read_head(sock)

    def _get(self, objects: list[list[memoryview]], lane: int, place: str) -> None:
        with self._connect() as sock:
            for number in range(lane, len(objects), _CONNECTIONS):
                sock.sendall(_head("GET", place, number, ""))
                ahead = memoryview(_read_head(sock))
                for view in objects[number]:
                    filled = min(len(ahead), view.nbytes)
                    view[:filled], ahead = ahead[:filled], ahead[filled:]
                    while filled < view.nbytes:
                        received = sock.recv_into(view[filled:])
                        if not received:
                            raise ConnectionError("the server went away")
                        filled += received
                self._check(objects[number])

    def _connect(self) -> socket.socket:
        parts = urlsplit(self._endpoint.url)
        sock = socket.create_connection((parts.hostname or "", parts.port or 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._endpoint.certificate is None:
            return sock
        context = ssl.create_default_context(cafile=self._endpoint.certificate)
        return context.wrap_socket(sock, server_hostname=parts.hostname)


def _nothing(views: list[memoryview]) -> None:
    pass


def _objects(state: dict[str, torch.Tensor]) -> list[list[memoryview]]:
    """Cut the state's memory into objects of equal size, each a list of views."""
    objects: list[list[memoryview]] = []
    room = 0
    for view in _memory(state):
        while view.nbytes:
            if not room:
                objects.append([])
                room = _OBJECT_BYTES
            objects[-1].append(view[:room])
            room, view = room - objects[-1][-1].nbytes, view[room:]
    return objects


def _memory(state: dict[str, torch.Tensor]) -> Iterator[memoryview]:
    for tensor in state.values():
        yield tensor.numpy().data.cast("B")


def _head(method: str, place: str, number: int, headers: str) -> bytes:
    path = f"{place.removeprefix('s3:/')}/{number}"
    return f"{method} {path} HTTP/1.1\r\nHost: benchmark\r\n{headers}\r\n".encode()


def _read_head(sock: socket.socket) -> bytes:
    """Receive a reply's head; return the part of its body that came with it."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        more = sock.recv(4096)
        if not more:
            raise ConnectionError("the server went away")
        received += more
    if b" 200 " not in received[:end].partition(b"\r\n")[0]:
        raise OSError(f"the server said {received[:100]!r}")
    return received[end + 4 :]
