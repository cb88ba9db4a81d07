"""Send requests like one that the SDK has sent: the next part of an upload, the next range of an object.

Between large bodies a request costs the SDK 4 ms of CPU, a fifth of a whole save. Its first one of a kind is kept as a
form; for parts, the one that began the upload if it says no more than they do. Others fill in what differs, are signed
anew (Signature Version 4) with the SDK's credentials, and go over the connections of its own pool. Only a plain success
counts: whatever else happens, the caller sends the request through the SDK, whose retries, redirects and errors apply,
and for a while no other request is sent this way: 10 s, then twice as long each time, and then one tries.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlsplit

from ckpt.backends.bodies import Part
from ckpt.backends.options import scrub
from ckpt.backends.s3_protocol.errors import NoSuchObject, is_unreachable, text_of
from ckpt.backends.s3_protocol.exchange import Exchange, ReplyBytes
from ckpt.backends.s3_protocol.http_bodies import PartReader, RawBody
from ckpt.backends.s3_protocol.retries import Retries
from ckpt.errors import CheckpointError

_logger = logging.getLogger(__name__)

_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 300.0
_ALGORITHM = "AWS4-HMAC-SHA256"
_UNSIGNED_BODY = "UNSIGNED-PAYLOAD"
_EXPRESS = "x-amz-s3session-token"
_CHECKSUM = "x-amz-checksum-crc64nvme"
_OF_ONE_REQUEST = frozenset({
    "authorization", "x-amz-date", "x-amz-security-token", _CHECKSUM, "content-length", "range",
    "if-match", "expect", "host", "amz-sdk-invocation-id", "amz-sdk-request",
    "x-amzn-trace-id", "traceparent", "tracestate", "baggage",
})  # fmt: skip
"""Headers that are filled in, and those that are of one request alone."""
_BEGINS = "CreateMultipartUpload"
_ALGORITHM_OF_PARTS, _TYPE_OF_CHECKSUM = "x-amz-checksum-algorithm", "x-amz-checksum-type"
_CHECKSUM_HEADERS = {"x-amz-checksum-mode", _ALGORITHM_OF_PARTS, _TYPE_OF_CHECKSUM, _CHECKSUM}
_OF_EACH_REQUEST = frozenset({"user-agent", "x-amz-content-sha256", "accept-encoding"})
"""Headers that requests of all kinds have."""
_EXPECTED = {"UploadPart": (200,), "GetObject": (200, 206)}
_ANSWERS = {"UploadPart": (), "GetObject": (404, 412, 416)}
"""No failures, but for the SDK to tell."""
_NOT_SIGNED = frozenset({"user-agent", "content-length", "accept-encoding"})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_THROTTLED = (429, 503)


@dataclass(frozen=True)
class _Form:
    """What all requests of a kind have in common.

    Attributes:
        root: the path of the bucket, "" if the host names it.
        is_checked: whether the body has a checksum.
        scope: region and service, as the signature names them.
    """

    host: str
    root: str
    headers: Mapping[str, str] = field(repr=False)
    is_checked: bool
    scope: tuple[str, str]
    pool: Any


class RepeatedRequests:
    """The forms of one client. None are kept where requests are sent once, or at a rate that the SDK adapts.

    `is_plain`: requests have no arguments but those that this library gives them.
    """

    def __init__(
        self, client: Any, retries: Retries, secrets: Callable[[], list[str]], *, is_plain: bool = False
    ) -> None:
        self._is_plain = is_plain
        self._retries, self._secrets = retries, secrets
        self._forms: dict[str, _Form] = {}
        self._paused_until_s, self._tried_at_s, self._pause_s = 0.0, 0.0, _PAUSE_S
        self._own = threading.local()
        self._signing_key: tuple[tuple[str, ...], bytes] = ((), b"")
        self._lock = threading.Lock()
        try:  # what is private in the SDK may move: then it sends all requests itself
            self._session, self._signer = client._endpoint.http_session, client._request_signer
            tries = client.meta.config.retries or {}
        except AttributeError as error:
            _logger.debug("all requests are left to the SDK: %r", error)
            return
        if tries.get("mode") == "adaptive" or tries.get("total_max_attempts") == 1:
            return
        register = client.meta.events.register
        for operation in (*_EXPECTED, _BEGINS):
            register(f"before-send.s3.{operation}", functools.partial(self._look, operation))
            register(f"needs-retry.s3.{operation}", functools.partial(self._learn, operation))

    def close(self) -> None:
        """Let go of the SDK's connections."""
        self._forms.clear()

    @contextlib.contextmanager
    def learning(self, name: str) -> Iterator[None]:
        """Learn from the SDK's request for the object `name`, which is sent inside."""
        self._own.name, self._own.form = name, None
        try:
            yield
        finally:
            self._own.name = self._own.form = None

    def upload_part(
        self, name: str, part: Part, upload_id: str, number: int, crc64nvme: str | None
    ) -> str | None:
        """Send a part; return its ETag, or None if the SDK has to send it."""
        headers = {"content-length": str(part.nbytes)}
        if crc64nvme is not None:
            headers[_CHECKSUM] = crc64nvme
        query = f"partNumber={number}&uploadId={quote(upload_id, safe='-_.~')}"
        exchange = self._send("UploadPart", "PUT", name, query, headers, PartReader(part))
        if exchange is None:
            return None
        exchange.close()
        etag: str | None = exchange.response.getheader("ETag")
        return etag

    def get(self, name: str, start: int, stop: int, etag: str) -> tuple[dict[str, Any], RawBody] | None:
        """Ask for bytes `[start, stop)`; return the reply, as the SDK does, or None if the SDK has to ask.

        Raises NoSuchObject.
        """
        headers = {"range": f"bytes={start}-{stop - 1}", **({"if-match": etag} if etag else {})}
        exchange = self._send("GetObject", "GET", name, "", headers, None)
        if exchange is None:
            return None
        response = exchange.response
        if response.length is None:
            exchange.drop()
            return None
        reply = {
            "ContentLength": response.length,
            "ContentRange": response.getheader("Content-Range"),
            "ETag": response.getheader("ETag"),
            "ResponseMetadata": {"HTTPStatusCode": response.status},
        }
        return reply, RawBody(ReplyBytes(exchange), exchange.connection.sock, exchange.close)

    def _look(self, kind: str, /, request: Any, **_: Any) -> None:
        """Look at what the SDK is about to send: a form, if it is of the usual kind."""
        name, self._own.form = getattr(self._own, "name", None), None
        if name is None:
            return
        try:
            self._own.form = self._form_of(request, name)
        except Exception as error:  # of another SDK; its request is to be sent all the same
            _logger.debug("%s is left to the SDK: %s", kind, type(error).__name__)

    def _learn(self, kind: str, /, response: Any, **_: Any) -> None:
        """Keep the form if the request was answered, and did go to a server: some tests answer for one."""
        form = getattr(self._own, "form", None)
        status = 0 if response is None else response[0].status_code
        if form is None or not (0 < status < 300 or status in _ANSWERS.get(kind, ())):
            self._forms.pop(kind, None)
        elif type(getattr(response[0], "raw", None)).__module__.startswith("urllib3"):
            if kind != _BEGINS:
                self._forms[kind] = form
            elif self._is_plain and (part := _part_of(form)) is not None:
                self._forms.setdefault("UploadPart", part)

    def _form_of(self, request: Any, name: str) -> _Form | None:
        url, path = urlsplit(request.url), f"/{quote(name, safe='/~')}"
        headers = {key.lower(): _text(value) for key, value in request.headers.items()}
        signature = headers.get("authorization", "").split()
        is_body_signed = request.method != "GET" and headers.get("x-amz-content-sha256") != _UNSIGNED_BODY
        if signature[:1] != [_ALGORITHM] or is_body_signed or _EXPRESS in headers:
            return None
        if any(_is_digest(header) for header in headers):
            return None
        if not url.path.endswith(path) or self._session._proxy_config.proxy_url_for(request.url):
            return None
        key, _, region, service, _ = signature[1].removeprefix("Credential=").rstrip(",").rsplit("/", 4)
        if key != self._signer._credentials.get_frozen_credentials().access_key:
            return None  # some requests have credentials of their own
        pool = self._session._manager.connection_from_url(request.url)
        self._session._setup_ssl_cert(pool, request.url, self._session._verify)
        assert pool._get_conn
        assert pool._put_conn
        host = url.netloc.lower()
        if url.port == _DEFAULT_PORTS[url.scheme]:
            host = host.removesuffix(f":{url.port}")
        common = {key: value for key, value in headers.items() if key not in _OF_ONE_REQUEST}
        common["accept-encoding"] = "identity"
        root, is_checked = url.path.removesuffix(path), _CHECKSUM in headers
        return _Form(host, root, common, is_checked, (region, service), pool)

    def _send(
        self,
        operation: str,
        method: str,
        name: str,
        query: str,
        headers: Mapping[str, str],
        body: PartReader | None,
    ) -> Exchange | None:
        """Send a request; return it with its reply, or None if that is no success."""
        form = self._forms.get(operation)
        if form is None or (body is not None and form.is_checked != (_CHECKSUM in headers)):
            return None
        began_s = time.monotonic()
        if not self._may_try(began_s):
            return None
        path, unreachable = f"{form.root}/{quote(name, safe='/~')}", False
        exchange = Exchange(form.pool)
        try:
            signed = self._signed(form, method, path, query, headers)
            lines = [
                f"{method} {path}{query and '?'}{query} HTTP/1.1",
                *(f"{header}: {value}" for header, value in signed.items()),
            ]
            status = exchange.send(method, "\r\n".join([*lines, "", ""]).encode(), body)
            is_plain = status in _EXPECTED[operation] and (body is None or not exchange.has_body())
        except CheckpointError:  # it was cancelled
            exchange.drop()
            raise
        except Exception as error:
            status, problem, unreachable = 0, scrub(text_of(error), self._secrets()), is_unreachable(error)
            is_plain = False
        else:
            problem = f"the server answered {status}"
        if is_plain:
            self._go_on(began_s)
            return exchange
        _logger.debug("%s is left to the SDK: %s", operation, problem)
        if status in _ANSWERS[operation]:
            rest = exchange.finish()
            self._go_on(began_s)
            if status == 404 and b"<Code>NoSuchKey</Code>" in rest:
                raise NoSuchObject
        else:
            exchange.drop()
            self._pause()
            self._retries.failed(problem, unreachable=unreachable, is_throttled=status in _THROTTLED)
        return None

    def _may_try(self, now_s: float) -> bool:
        """Tell whether there is no pause; when one has ended, one thread may."""
        with self._lock:
            if now_s < self._paused_until_s:
                return False
            if self._paused_until_s:
                self._paused_until_s = now_s + self._pause_s
            return True

    def _pause(self) -> None:
        """Leave all requests to the SDK for a while: 10 s, twice that if the next try fails too, and so on."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._tried_at_s:  # else another thread has failed with this one
                self._paused_until_s = self._tried_at_s = now_s + self._pause_s
                self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)

    def _go_on(self, began_s: float) -> None:
        """End the pause, if this request was the try after it."""
        self._retries.succeeded()
        with self._lock:
            if began_s >= self._tried_at_s:
                self._paused_until_s, self._tried_at_s, self._pause_s = 0.0, 0.0, _PAUSE_S

    def _signed(
        self, form: _Form, method: str, path: str, query: str, headers: Mapping[str, str]
    ) -> dict[str, str]:
        """Return all headers of a request, its signature among them. `query` is in order, and encoded."""
        keys = self._signer._credentials.get_frozen_credentials()
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        parts = (keys.secret_key, now[:8], *form.scope)
        known, signing_key = self._signing_key
        if known != parts:
            signing_key = _derived_key(*parts)
            self._signing_key = parts, signing_key
        return signed_headers(form, method, path, query, headers, keys, now, signing_key)


def signed_headers(
    form: _Form,
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    keys: Any,
    now: str,
    signing_key: bytes,
) -> dict[str, str]:
    """Sign a request by Signature Version 4; `keys` are the SDK's, `now` is `%Y%m%dT%H%M%SZ`."""
    scope = "/".join([now[:8], *form.scope, "aws4_request"])
    found = {**form.headers, **headers, "host": form.host, "x-amz-date": now}
    if keys.token:
        found["x-amz-security-token"] = keys.token
    signed = sorted(found.keys() - _NOT_SIGNED)
    canonical = "\n".join([
        method, path, query, *(f"{name}:{' '.join(found[name].split())}" for name in signed),
        "", ";".join(signed), found["x-amz-content-sha256"],
    ])  # fmt: skip
    text = "\n".join([_ALGORITHM, now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = hmac.digest(signing_key, text.encode(), "sha256").hex()
    found["authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key}/{scope}, SignedHeaders={';'.join(signed)}, "
        f"Signature={signature}"
    )
    return found


def _derived_key(secret: str, *scope: str) -> bytes:
    """Derive the key of a day, a region and a service."""
    key = f"AWS4{secret}".encode()
    for text in (*scope, "aws4_request"):
        key = hmac.digest(key, text.encode(), "sha256")
    return key


def _part_of(begin: _Form) -> _Form | None:
    """Make the form of parts with checksums from the request that begins their upload; None if it says more, or less."""
    headers = dict(begin.headers)
    if headers.pop(_ALGORITHM_OF_PARTS, None) != "CRC64NVME":
        return None  # the SDK may compute others
    headers.pop(_TYPE_OF_CHECKSUM, None)
    return replace(begin, headers=headers, is_checked=True) if headers.keys() <= _OF_EACH_REQUEST else None


def _is_digest(header: str) -> bool:
    """Tell whether a header is of one body, and not one that is filled in."""
    return header == "content-md5" or (
        header.startswith("x-amz-checksum-") and header not in _CHECKSUM_HEADERS
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
