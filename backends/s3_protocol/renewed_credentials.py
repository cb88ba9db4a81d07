"""Credentials that a server calls expired are looked for anew, and the request is sent again.

boto3 renews by itself what tells when it expires (roles, credential_process), before that moment, by this machine's
clock. It reads a shared file once: who rotates one that says no time would end an upload that takes longer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Any

from ckpt.backends.s3_protocol.connection import CARRIED

_logger = logging.getLogger(__name__)

_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidAccessKeyId",
     "InvalidToken"}
)  # fmt: skip
_SERVED = frozenset({404, 409, 412, 416})
"""Answers that a server gives to those alone whom it knows."""
_SIGNED_BY, _SENT_AT_S, _RENEWED = "ckpt_signed_by", "ckpt_sent_at_s", "ckpt_renewed"
_LONGEST_PAUSE_S = 4.0
_LONGEST_WAIT_S = 20.0
"""For the successors of credentials that have served, by all threads together."""
_LOOK_AGAIN_S = 1.0
"""Until then the last look stands: threads are refused in crowds, and a look may run a program."""

_Identity = tuple[str, str | None]
"""A key's id and its token."""


@dataclass
class _Refused:
    """Credentials to which there was no successor when they were looked at last.

    Attributes:
        waiting_since_s: when they were first called expired after they had served.
    """

    identity: _Identity
    looked_at_s: float = -math.inf
    waiting_since_s: float | None = None


class RenewedCredentials:
    """What botocore takes for its credentials: those that its chain of providers found last."""

    def __init__(self, providers: Any, first: Any) -> None:
        self._providers, self._current = providers, first
        self._lock = threading.Lock()
        self._served = False
        self._refused: _Refused | None = None

    def get_frozen_credentials(self) -> Any:
        return self._current.get_frozen_credentials()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_current":
            raise AttributeError(name)
        return getattr(self._current, name)

    def watch(self, client: Any, max_attempts: int) -> None:
        """Follow the requests of a client that signs with these."""

        def note(request: Any, **_: Any) -> None:
            found = CARRIED.search(request.headers.get("Authorization") or "")
            token = request.headers.get("X-Amz-Security-Token")
            request.context[_SIGNED_BY] = (found[0], token) if found else None
            request.context[_SENT_AT_S] = time.monotonic()

        def judge(
            attempts: int, response: Any, operation: Any, request_dict: dict[str, Any], **_: Any
        ) -> float | None:
            """Return the pause before the next try; None: it is not for expired credentials."""
            context = request_dict["context"]
            identity = context.get(_SIGNED_BY)
            if response is None or identity is None:
                return None
            status = response[0].status_code
            is_expired = str((response[1].get("Error") or {}).get("Code")) in _EXPIRED
            # A reply to HEAD has no body that says why.
            is_silent = status == 400 and operation.name == "HeadObject"
            if not is_expired and not is_silent:
                if status < 300 or status in _SERVED:
                    self._note_served(identity, context[_SENT_AT_S])
                return None
            # Once a request: what a provider gives anew each time may be refused each time.
            if attempts >= max_attempts or context.get(_RENEWED):
                return None
            if self._renew(identity):
                context[_RENEWED] = True
                return 0.0
            return self._pause_s(identity, attempts, is_expired=is_expired)

        client.meta.events.register("request-created.s3", note)
        client.meta.events.register_first("needs-retry.s3", judge)

    def _note_served(self, identity: _Identity, sent_at_s: float) -> None:
        self._served = True
        refused = self._refused
        if refused is None or refused.identity != identity or refused.waiting_since_s is None:
            return
        # What was sent before they were refused says nothing of now.
        if sent_at_s > refused.waiting_since_s:
            with self._lock:
                self._refused = None

    def _renew(self, identity: _Identity) -> bool:
        """Look for other credentials than those refused; tell whether there are some."""
        with self._lock:
            try:
                if _names(self._current) != identity:  # another thread has renewed them meanwhile
                    return True
                if self._refused is None or self._refused.identity != identity:
                    self._refused = _Refused(identity)
                if time.monotonic() - self._refused.looked_at_s < _LOOK_AGAIN_S:
                    return False
                try:
                    found = self._providers.load_credentials()
                finally:
                    self._refused.looked_at_s = time.monotonic()
                if found is None or _names(found) == identity:
                    return False
            except Exception as error:  # of any provider: the refusal is what is reported
                _logger.info("no other credentials were found: %s", type(error).__name__)
                return False
            self._current, self._refused = found, None
        _logger.info("the server called the credentials expired; others were found")
        return True

    def _pause_s(self, identity: _Identity, attempts: int, *, is_expired: bool) -> float | None:
        """Return how long to wait for successors: whoever rotates credentials may be a moment late.

        None: they are not waited for, as these never served, cannot be rotated, or were waited for long enough.
        """
        now_s = time.monotonic()
        with self._lock:
            refused = self._refused
            if refused is None or refused.identity != identity:
                return None
            can_be_rotated = getattr(self._current, "method", None) != "env"
            if is_expired and self._served and can_be_rotated and refused.waiting_since_s is None:
                refused.waiting_since_s = now_s
            if refused.waiting_since_s is None:
                return None
            left_s = refused.waiting_since_s + _LONGEST_WAIT_S - now_s
        return min(_LONGEST_PAUSE_S, 0.5 * 2.0 ** (attempts - 1), left_s) if left_s > 0 else None


def _names(credentials: Any) -> _Identity:
    frozen = credentials.get_frozen_credentials()
    return frozen.access_key, frozen.token


class RenewingProviders:
    """Stand in for the chain of providers of a botocore session.

    Attributes:
        found: the credentials that a client of the session got; None if there were none.
    """

    def __init__(self, session: Any) -> None:
        self.found: RenewedCredentials | None = None
        self._providers = session.get_component("credential_provider")
        session.register_component("credential_provider", self)

    def load_credentials(self) -> RenewedCredentials | None:
        first = self._providers.load_credentials()
        self.found = None if first is None else RenewedCredentials(self._providers, first)
        return self.found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_providers":
            raise AttributeError(name)
        return getattr(self._providers, name)
