"""Serve HTTP/1.1 on a loopback port, in threads of this process: the core of the tests' own servers."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection; `serve` is called for each request on it, its headers read, its body not."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    tls: ssl.SSLContext | None = None

    def setup(self) -> None:
        if self.tls is not None:
            self.request = self.tls.wrap_socket(self.request, server_side=True)
        super().setup()

    def serve(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.serve()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    @property
    def length(self) -> int:
        """The size of the request's body, in bytes."""
        return int(self.headers.get("content-length") or 0)

    def answer(
        self,
        status: int,
        headers: Mapping[str, str],
        reply: bytes,
        *,
        sent: int | None = None,
        pace: Callable[[int], object] | None = None,
        around: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        """Send a reply, or its first `sent` bytes; `pace` is told of every 64 KiB and may wait.

        The bytes `around` it go before and behind it, without a pause.

        `content-length` among the headers holds only for a HEAD, whose reply has no body.
        """
        headers = {name.lower(): value for name, value in headers.items()}
        if self.command != "HEAD" or "content-length" not in headers:
            headers["content-length"] = str(len(reply))
        self.wfile.write(around[0])
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        body = memoryview((b"" if self.command == "HEAD" else reply[:sent]) + around[1])
        step = 1 << 16 if pace else max(1, len(body))
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
            if pace:
                self.wfile.flush()
                pace(step)
        self.wfile.flush()

    def reset(self) -> None:
        """End the connection with RST, as a crashed host or a middlebox does."""
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client may be gone
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()
        if self.tls is not None:
            self.request.close()  # the server closes only what it was wrapped around

    def log_message(self, *_: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    """On an address of IPv6 if that has a colon."""

    def __init__(self, host: str, port: int, handler: type[Handler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    daemon_threads = True
    is_stopped = False

    def serve_until_stopped(self) -> None:
        """Serve without looking at the clock: `serve_forever` ends only when its next poll is due."""
        while True:
            connection, address = self.get_request()
            if self.is_stopped:
                connection.close()
                return
            self.process_request(connection, address)

    def stop(self) -> None:
        self.is_stopped = True
        host, port = self.server_address[:2]
        socket.create_connection((str(host), port)).close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # connections are cut on purpose, and clients killed


@contextlib.contextmanager
def http_server(
    handler: type[Handler], *, port: int = 0, host: str = "127.0.0.1", **attributes: Any
) -> Iterator[int]:
    """Serve with a handler that has these attributes until the end of the block, and yield the port."""
    server = _Server(host, port, type(handler.__name__, (handler,), attributes))
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.stop()
        thread.join()
        server.server_close()
