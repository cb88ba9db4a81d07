"""Run the endpoint: `python -m benchmarks.sink [--keep] [--certificate FILE] [--bytes-per-s N]`; it
prints its port and serves.

Below `/-/` it answers `stats` (counts as JSON), `reset` (counts from zero) and `clear` (forget all
objects).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import ssl
import threading

from benchmarks.sink.connection import Connection, Request
from benchmarks.sink.counters import Counters
from benchmarks.sink.objects import Objects
from benchmarks.sink.operations import answer, operation_of
from benchmarks.sink.pacing import Pacer

_SMALL_BYTES = 1 << 20
_CONTROL = "/-/"


class Server:
    """A thread per connection: the work is in system calls, without the interpreter's lock."""

    def __init__(self, keep_up_to_bytes: int, tls: ssl.SSLContext | None, pacer: Pacer | None) -> None:
        self._keep_up_to_bytes = keep_up_to_bytes
        self._tls, self._pacer = tls, pacer
        self._objects = Objects()
        self._counters = Counters()

    def serve(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=self._serve_one, args=(sock,), daemon=True).start()

    def _serve_one(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
            with sock:
                connection = Connection(sock, self._pacer)
                while request := connection.request():
                    self._reply(connection, request)

    def _reply(self, connection: Connection, request: Request) -> None:
        body = connection.body(request, self._keep_up_to_bytes)
        if request.path.startswith(_CONTROL):
            data = self._control(request.path.removeprefix(_CONTROL))
            connection.send("200 OK", {"Content-Length": str(len(data))}, [memoryview(data)])
            return
        operation = operation_of(request)
        reply = answer(self._objects, operation, request, body)
        sent = sum(view.nbytes for view in reply.views)
        # Before it is sent: a client that has the reply finds it counted.
        is_data = operation == "GetObject" and reply.status.startswith("2")
        self._counters.add(operation, request.path.strip("/"), body.nbytes, sent if is_data else 0)
        headers = {"Server": "sink", "x-amz-request-id": "0", **reply.headers}
        if not reply.status.startswith("204"):
            headers["Content-Length"] = str(reply.nbytes)
        connection.send(reply.status, headers, reply.views)

    def _control(self, action: str) -> bytes:
        if action == "reset":
            self._counters.reset()
        elif action == "clear":
            self._objects.clear()
        return json.dumps(self._counters.report()).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep all objects, not only small ones")
    parser.add_argument("--certificate", help="serve TLS with this certificate and key (one PEM file)")
    parser.add_argument(
        "--bytes-per-s", type=int, help="send no more than this, and take no more of what is dropped"
    )
    arguments = parser.parse_args()
    tls = None
    if arguments.certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(arguments.certificate)
    pacer = Pacer(arguments.bytes_per_s) if arguments.bytes_per_s else None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = Server((1 << 62) if arguments.keep else _SMALL_BYTES, tls, pacer)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        print(listener.getsockname()[1], flush=True)
        server.serve(listener)


if __name__ == "__main__":
    main()
