"""Count the requests that a client sends again, tell of them, and give up on servers out of reach."""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt.backends.options import scrub
from ckpt.backends.retries import Retry, current_policy
from ckpt.backends.s3_protocol.answers import refuse_foreign
from ckpt.backends.s3_protocol.credential_faults import got_no_answer
from ckpt.backends.s3_protocol.errors import Refusal, is_connection_error, is_unreachable, text_of
from ckpt.backends.s3_protocol.own_faults import is_own_fault

_logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 4.0
SDK_LONGEST_PAUSE_S = 20.0
_PASSING = frozenset({500, 502, 503, 504})
_THROTTLED = frozenset(
    {"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests",
     "RequestLimitExceeded", "429"}
)  # fmt: skip
_THROTTLED_ATTEMPTS = 4
"""Times `max_attempts`: a server that asks for fewer requests works, and thousands of ranks may have asked at once."""
_FIRST_THROTTLED_PAUSE_S, _LONGEST_THROTTLED_PAUSE_S = 1.0, 20.0
_ONE_OUTAGE_S = 60.0
"""Failures that lie further apart do not belong together."""

T = TypeVar("T")


@dataclass
class _Outage:
    """Failures in a row: when the first and the last one came, and why that failed."""

    began_at_s: float
    last_at_s: float
    reason: str = ""
    unreachable: bool = False
    told: bool = False


class Retries:
    """The requests that one store sends again.

    Attributes:
        count: their number.
    """

    def __init__(
        self,
        url: str,
        max_attempts: int,
        unreachable_timeout_s: float,
        longest_pause_s: float = SDK_LONGEST_PAUSE_S,
    ) -> None:
        self.count = 0
        self._url, self._max_attempts, self._timeout_s = url, max_attempts, unreachable_timeout_s
        self._longest_pause_s = longest_pause_s
        self._on_retry = current_policy.get().on_retry
        self._lock = threading.Lock()
        self._outage: _Outage | None = None
        self._throttled_at_s = -math.inf
        self._asking = threading.Lock()
        self._refused_at_s = -math.inf
        self._refusal: Exception | None = None

    def __reduce__(self) -> tuple[type[Retries], tuple[str, int, float, float]]:
        return Retries, (self._url, self._max_attempts, self._timeout_s, self._longest_pause_s)

    def watch(self, client: Any, secrets: Callable[[], list[str]]) -> None:
        """Follow the requests of a client; `secrets` are not to be told."""

        def judge(
            attempts: int, response: Any, caught_exception: Exception | None, operation: Any, **_: Any
        ) -> float | None:
            if caught_exception is not None:
                return self._judge(attempts, caught_exception, secrets)
            refuse_foreign(operation.name, *response)
            return self._judge_reply(attempts, *response, is_head=operation.name.startswith("Head"))

        def note(request: Any, **_: Any) -> None:
            if request.context["retries"]["attempt"] > 1:
                self.note()

        # The first answer counts, so before the SDK's own.
        client.meta.events.register_first("needs-retry.s3", judge)
        client.meta.events.register("request-created.s3", note)

    def note(self, reason: str = "") -> None:
        """Count a request that is sent again, and tell of it; by default it is for the last failure."""
        with self._lock:
            self.count += 1
        now_s = time.monotonic()
        outage = self._outage or _Outage(now_s, now_s, "the server asked for it")
        if self._on_retry is not None:
            failing_s = now_s - outage.began_at_s
            self._on_retry(Retry(self._url, reason or outage.reason, failing_s, outage.unreachable))
        elif outage.unreachable and not outage.told:
            outage.told = True
            _logger.warning("%s cannot be reached, trying again: %s", self._url, outage.reason)

    def failed(self, reason: str, *, unreachable: bool, is_throttled: bool) -> None:
        """Count a request that failed without the SDK, which sends it now; after a pause if the server asks for one."""
        self._note_failure(reason, unreachable=unreachable)
        self.note(reason)
        if is_throttled:
            self._throttled_at_s = time.monotonic()
            time.sleep(random.uniform(0, _FIRST_THROTTLED_PAUSE_S))

    def until_given(self, ask: Callable[[], T], secrets: Callable[[], list[str]]) -> T:
        """Call `ask`, which may ask a service for credentials; again while that is busy or out of reach, as long as S3 is.

        One thread asks at a time. What it is refused, those that waited for it are refused too.
        """
        began_at_s = time.monotonic()
        with self._asking:
            if self._refusal is not None and self._refused_at_s > began_at_s:
                raise self._refusal
            try:
                return self._ask_patiently(ask, secrets)
            except Exception as error:
                self._refusal = error
                self._refused_at_s = time.monotonic()
                raise

    def _ask_patiently(self, ask: Callable[[], T], secrets: Callable[[], list[str]]) -> T:
        began_at_s = time.monotonic()
        for attempt in itertools.count(1):
            try:
                return ask()
            except Exception as error:
                refusal = Refusal(error)
                is_unanswered = is_connection_error(error) or got_no_answer(error)
                most = self._max_attempts * (_THROTTLED_ATTEMPTS if refusal.is_throttled else 1)
                is_late = is_unanswered and time.monotonic() - began_at_s >= self._timeout_s
                if not refusal.may_pass or attempt >= most or is_late:
                    raise
                reason = scrub(text_of(error), secrets())
                self._note_failure(reason, unreachable=is_unanswered)
                self.note(reason)
            time.sleep(_pause_s(attempt))
        raise AssertionError

    def succeeded(self) -> None:
        """Note that the server has answered."""
        self._outage = None

    def _judge(self, attempts: int, error: Exception, secrets: Callable[[], list[str]]) -> float | None:
        """Return the pause before the next try, or None to leave that to the SDK.

        Raises `error` if it is time to give up, or no server can cure it.
        """
        if is_own_fault(error):
            raise error
        outage = self._note_failure(scrub(text_of(error), secrets()), unreachable=is_unreachable(error))
        left_s = outage.began_at_s + self._timeout_s - outage.last_at_s
        if not outage.unreachable or left_s == math.inf:
            return self._short_pause_s(attempts) if is_connection_error(error) else None
        if attempts >= self._max_attempts:
            return None
        if left_s <= 0:
            raise error
        return min(_rising_s(attempts, min(_LONGEST_PAUSE_S, self._longest_pause_s)), left_s)

    def _short_pause_s(self, attempts: int) -> float | None:
        """Return the pause before the next try, where pauses are to be shorter than those of the SDK."""
        is_sdk = self._longest_pause_s >= SDK_LONGEST_PAUSE_S or attempts >= self._max_attempts
        return None if is_sdk else _rising_s(attempts, self._longest_pause_s)

    def _judge_reply(self, attempts: int, reply: Any, parsed: Any, *, is_head: bool) -> float | None:
        """Return the pause before the next try, or None to leave that to the SDK."""
        status = reply.status_code
        if status < 500 and status not in (408, 429):
            self._outage = None
            return None
        code = str((parsed.get("Error") or {}).get("Code") or status)
        is_throttled = code in _THROTTLED or status == 429
        if is_throttled:
            self._throttled_at_s = time.monotonic()
        elif is_head and status == 503:  # which has no body that says why
            is_throttled = time.monotonic() - self._throttled_at_s < _ONE_OUTAGE_S
        about = "asks for fewer requests" if is_throttled else "answered"
        self._note_failure(f"the server {about} {f'({code})' if is_throttled else status}", unreachable=False)
        if not is_throttled:
            return self._short_pause_s(attempts) if status in _PASSING else None
        if attempts >= _THROTTLED_ATTEMPTS * self._max_attempts:
            return None
        return _pause_s(attempts)

    def _note_failure(self, reason: str, *, unreachable: bool) -> _Outage:
        now_s, outage = time.monotonic(), self._outage
        if outage is None or now_s - outage.last_at_s > _ONE_OUTAGE_S:
            self._outage = outage = _Outage(now_s, now_s)
        outage.last_at_s, outage.reason, outage.unreachable = now_s, reason, unreachable
        return outage


def _rising_s(attempts: int, longest_s: float) -> float:
    return min(longest_s, 0.5 * 2.0 ** (attempts - 1)) * random.uniform(0.5, 1)


def _pause_s(attempts: int) -> float:
    """Return how long to wait before the next try at a server that asks for fewer requests."""
    return random.uniform(0, min(_LONGEST_THROTTLED_PAUSE_S, 0.5 * 2.0 ** min(attempts, 8)))
