"""Serve S3 from memory, on the port named as argument: moto, one write at a time.

moto itself looks for an object and writes it in two steps, so that of several clients that create
an object more than one may win.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import BaseWSGIServer, make_server
from werkzeug.wsgi import get_input_stream


class _OneWriteAtATime(DomainDispatcherApplication):
    def __init__(self) -> None:
        super().__init__(create_backend_app)
        self._writing = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return super().__call__(environ, start_response)
        body = get_input_stream(environ).read()  # a client may be slow
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        with self._writing:
            return super().__call__(environ, start_response)


def make_s3_server(port: int) -> BaseWSGIServer:
    """Make the server; 0 is any free port."""
    return make_server(
        "127.0.0.1", port, _OneWriteAtATime(), threaded=True, request_handler=MotoRequestHandler
    )


if __name__ == "__main__":
    make_s3_server(int(sys.argv[1])).serve_forever()
