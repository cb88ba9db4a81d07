"""Read replies of HTTP so that nothing that came with one is taken for the next."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
from http.client import SWITCHING_PROTOCOLS, BadStatusLine, HTTPResponse, parse_headers
from typing import Any

_logger = logging.getLogger(__name__)

_MOST_INTERIM = 100
"""Interim replies (1xx) before the one that counts. No server has reason to send more."""


class Reply(HTTPResponse):
    """The reply to a request: the first that is not interim (1xx).

    The connection is shut down if more has come than the reply: who takes it from the pool sees that it has ended.
    """

    def __init__(self, sock: Any, *arguments: Any, status_tuple: Any = None, **more: Any) -> None:
        """`status_tuple` is a status line that was read before, as the SDK does after `Expect: 100-continue`."""
        super().__init__(sock, *arguments, **more)
        self._socket = sock
        self._status_tuple = status_tuple

    def _read_status(self) -> tuple[str, int, str]:
        for _ in range(_MOST_INTERIM):
            line: tuple[str, int, str] = self._status_tuple or super()._read_status()  # type: ignore[misc]
            self._status_tuple = None
            if not 100 <= line[1] < 200 or line[1] == SWITCHING_PROTOCOLS:
                return line
            parse_headers(self.fp)
        raise BadStatusLine(f"more than {_MOST_INTERIM} interim replies")

    def _close_conn(self) -> None:
        if self.fp is not None and isinstance(self._socket, socket.socket) and self._has_more():
            _logger.debug("a connection brought more than was asked for, and is not used again")
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        super()._close_conn()  # type: ignore[misc]

    def _has_more(self) -> bool:
        """Tell, without waiting, whether bytes have come that were not read."""
        timeout_s = self._socket.gettimeout()
        try:
            self._socket.settimeout(0)
            return bool(self.fp.peek(1)) or getattr(self._socket, "is_in_record", False)
        except (OSError, ValueError):  # nothing has come, or it is closed
            return False
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(timeout_s)


class _Replying:
    """What a connection of an SDK does otherwise: each reply of it is a `Reply`."""

    response_class: Any = Reply

    def _handle_expect_response(self, message_body: Any) -> None:
        super()._handle_expect_response(message_body)  # type: ignore[misc]
        if isinstance(self.response_class, functools.partial):  # the server has refused the body
            self.response_class = functools.partial(Reply, **self.response_class.keywords)


def use_replies(client: Any) -> None:
    """Have an SDK's client read each reply as a `Reply`."""
    try:
        pools = client._endpoint.http_session._pool_classes_by_scheme
        made = {scheme: _replying(pool) for scheme, pool in pools.items()}
    except (AttributeError, TypeError) as error:  # it is private in the SDK, and may move
        _logger.debug("replies are left to the SDK: %r", error)
        return
    pools.update(made)


def _replying(pool: Any) -> Any:
    connection = type(pool.ConnectionCls.__name__, (_Replying, pool.ConnectionCls), {})
    return type(pool.__name__, (pool,), {"ConnectionCls": connection})
