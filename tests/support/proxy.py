"""A fault between client and S3 server: an HTTP proxy that answers, delays, cuts or loses what a rule says."""

from __future__ import annotations

import contextlib
import functools
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from support.http_core import Handler, http_server
from support.servers import S3Server
from support.strict_s3 import checksum_of


@dataclass(frozen=True)
class Call:
    """A request as a rule sees it."""

    number: int  # 1, 2, ... since the proxy started
    method: str
    target: str  # path and query

    @property
    def key(self) -> str:
        return urlsplit(self.target).path.split("/", 2)[-1]

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber=" in self.target

    @property
    def is_complete(self) -> bool:
        return self.method == "POST" and "uploadId=" in self.target


Rule = Callable[[Call], str | int]
"""What to do with a call: "pass"; a status to answer with; "reset" the connection in the middle of the body;
"half-close" it there: no reply, but whatever still comes is read;
"lose" the reply of a request that was carried out; "late": carry it out `late_s` after the connection was lost;
"held back": carry it out when its call in `held_back` is made, long after that;
"cut" the reply in the middle; "flip" a bit of its body; "trickle" it, a byte now and then;
"hold" the reply in the middle of its body, until `settle`; "dribble": from there on, a byte now and then;
"stall": never answer; "stop reading" in the middle of the body; "delay" it; "throttle" its body and its reply;
"damage" a byte of the body, which the server sees if the request has a checksum; "damage unseen", which it does not."""


@dataclass
class FaultProxy:
    """`rule` can be replaced at any time; `calls` are all requests that came, `carried_out` the numbers of those answered."""

    server: S3Server
    port: int = 0
    rule: Rule = lambda call: "pass"
    late_s: float = 1.0
    delay_s: float = 0.5
    trickle_s: float = 0.5
    bandwidth_bytes_per_s: float = 4e6
    calls: list[Call] = field(default_factory=list)
    carried_out: set[int] = field(default_factory=set)
    held_back: list[Callable[[], object]] = field(default_factory=list)
    in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)

    def settle(self) -> None:
        """Let go of what is held, and wait until nothing is being carried out any more."""
        self.released.set()
        while self.in_flight:
            time.sleep(0.01)
        self.released = threading.Event()

    @property
    def options(self) -> dict[str, Any]:
        """Storage options to go through the proxy, with few and short retries."""
        return {**self.server.options, "endpoint_url": f"http://127.0.0.1:{self.port}", "max_attempts": 2}


@contextlib.contextmanager
def fault_proxy(server: S3Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server)
    with http_server(_Handler, proxy=proxy, upstream=urlsplit(server.endpoint_url).netloc) as proxy.port:
        try:
            yield proxy
        finally:
            proxy.released.set()


class _Handler(Handler):
    proxy: FaultProxy
    upstream: str

    def serve(self) -> None:
        with self.proxy.lock:
            call = Call(len(self.proxy.calls) + 1, self.command, self.path)
            self.proxy.calls.append(call)
            self.proxy.in_flight += 1
        try:
            self._carry_out(call)
        finally:
            with self.proxy.lock:
                self.proxy.in_flight -= 1

    def _carry_out(self, call: Call) -> None:
        action = self.proxy.rule(call)
        length = self.length
        if action in ("reset", "half-close", "stop reading"):
            self.rfile.read(length // 2)
            self._break(action)
            return
        body = self._body(length, throttled=action == "throttle")
        if len(body) < length:  # the client is gone
            self.reset()
            return
        if action == "delay":
            self.proxy.released.wait(self.proxy.delay_s)
        if action in ("damage", "damage unseen") and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
            if action == "damage" and not _matches(self.headers.get("x-amz-checksum-crc64nvme"), body):
                action = 400
        if isinstance(action, int):
            self.answer(action, {"content-type": "application/xml"}, _ERRORS[action])
            return
        if action == "stall":
            self._break("stop reading")
            return
        if action == "late":
            threading.Timer(self.proxy.late_s, self._forward, [body]).start()
            self.reset()
            return
        if action == "held back":
            self.proxy.held_back.append(functools.partial(self._forward, body))
            self.reset()
            return
        status, headers, reply = self._forward(body)
        self.proxy.carried_out.add(call.number)
        if action == "lose":
            self.reset()
        elif action == "cut":
            self.answer(status, headers, reply, sent=len(reply) // 2)
            self.reset()
        elif action == "trickle":
            self._trickle(f"HTTP/1.1 {status} OK\r\nx-filler: {'x' * 60000}".encode())
        elif action in ("hold", "dribble"):
            self.answer(status, headers, reply, sent=len(reply) // 2)
            if action == "hold":
                self.proxy.released.wait()
                self.wfile.write(reply[len(reply) // 2 :])
                self.wfile.flush()
            else:
                self._trickle(reply[len(reply) // 2 :])
        else:
            if action == "flip" and reply:
                reply = reply[:-1] + bytes([reply[-1] ^ 1])
            self.answer(status, headers, reply, pace=self._pace if action == "throttle" else None)

    def _body(self, length: int, *, throttled: bool) -> bytes:
        if not throttled:
            return self.rfile.read(length)
        body = bytearray()
        while piece := self.rfile.read(min(1 << 16, length - len(body))):
            body += piece
            self._pace(len(piece))
        return bytes(body)

    def _pace(self, size: int) -> None:
        self.proxy.released.wait(size / self.proxy.bandwidth_bytes_per_s)

    def _break(self, how: str) -> None:
        """End, or hold, a request whose body has not come whole."""
        if how == "half-close":
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(5)
            with contextlib.suppress(OSError):
                while self.connection.recv(1 << 16):
                    pass
        elif how == "stop reading":
            self.proxy.released.wait()
        self.reset()

    def _trickle(self, data: bytes) -> None:
        """Send a byte at a time: a client whose every wait is short waits for ever."""
        with contextlib.suppress(OSError):
            for byte in data:
                self.connection.sendall(bytes([byte]))
                if self.proxy.released.wait(self.proxy.trickle_s):
                    break
        self.reset()

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        with contextlib.closing(http.client.HTTPConnection(self.upstream, timeout=60)) as connection:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            reply = response.read()
        kept = {
            n: v for n, v in response.getheaders() if n.lower() not in ("connection", "transfer-encoding")
        }
        return response.status, kept, reply


def _matches(checksum: str | None, body: bytes) -> bool:
    return checksum is None or checksum == checksum_of(body)


_ERRORS = {
    status: f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    for status, code in {
        400: "BadDigest", 403: "ExpiredToken", 404: "NoSuchUpload", 500: "InternalError", 501: "NotImplemented", 503: "SlowDown",
    }.items()
}  # fmt: skip
