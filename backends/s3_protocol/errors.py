"""Translate the exceptions of boto3 and ibm-cos-sdk into this library's.

Servers leave out any part of an error reply (code, message, the whole body), so nothing here relies
on one.
"""

from __future__ import annotations

import re
from typing import Any

from ckpt.backends.options import redact_url
from ckpt.errors import AccessDenied, AlreadyExists, NotFound, StorageError, StorageFull, StorageUnavailable


class Signal(Exception):
    """An answer that the S3 store acts upon; it never leaves the store."""


class UploadGone(Signal):
    """The server does not know this multipart upload (any more)."""


class NotImplementedByServer(Signal):
    """The server does not offer this request, or not with this condition."""


class Conflict(Signal):
    """Another conditional write of the same key was in flight; S3 asks to begin anew."""


class Malformed(Signal):
    """The server does not understand the document that was sent."""


class RangeRefused(Signal):
    """The object ends before the range begins."""


class Replaced(Signal):
    """The object is not the one that was being read."""


CREDENTIAL_ERRORS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError",
     "UnauthorizedSSOTokenError", "SSOTokenLoadError", "NoAuthTokenError", "MetadataRetrievalError"}
)  # fmt: skip

_NOT_FOUND = frozenset({"NoSuchKey", "NoSuchBucket", "404", "NotFound"})
_DENIED = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
     "RequestTimeTooSkewed", "401", "403", "Forbidden", "AllAccessDisabled", "AccountProblem"}
)  # fmt: skip
_FULL = frozenset({"EntityTooLarge", "InsufficientStorage", "507", "XMinioStorageFull"})
_UNSUPPORTED = frozenset({"NotImplemented", "501", "MethodNotAllowed", "XNotImplemented"})
# Some of them come with a 4xx status.
_TRANSIENT = frozenset(
    {"RequestTimeout", "RequestTimeoutException", "SlowDown", "Throttling", "ThrottlingException",
     "TooManyRequests", "RequestLimitExceeded", "InternalError", "ServiceUnavailable", "503"}
)  # fmt: skip
# The SDK itself refuses these: nothing was sent.
_UNSENT = frozenset({"ParamValidationError", "NoCredentialsError"})
_CONNECTION_ERROR = re.compile("Connection|Timeout|HTTPClient|SSL|IncompleteRead|ResponseStreaming|Protocol")
_UNREACHABLE = frozenset(
    {"EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError", "SSLError"}
)
_URL = re.compile(r"https?://[^\s\"'<>]*")


class Refusal:
    """An SDK's exception; an empty code, status 0 and `retries` None are unknown."""

    def __init__(self, error: Exception) -> None:
        response: Any = getattr(error, "response", None)
        is_reply = isinstance(response, dict)
        reply = response if is_reply else {}
        inner, about = reply.get("Error") or {}, reply.get("ResponseMetadata") or {}
        self.error = error
        self.code = str(inner.get("Code") or "")
        self.status = int(about.get("HTTPStatusCode") or 0)
        self.retries: int | None = about.get("RetryAttempts")
        self.text = text_of(error)
        if is_reply:
            kind = self.code or self.status or type(error).__name__
            self.text = f"{kind}: {inner.get('Message') or 'no message'}"

    @property
    def is_about_bucket(self) -> bool:
        """Tell whether the bucket is missing, whatever the key."""
        return self.code == "NoSuchBucket"

    @property
    def settled(self) -> bool:
        """Tell whether nothing was sent, or the server refused the one request that was."""
        if type(self.error).__name__ in _UNSENT:
            return True
        return 400 <= self.status < 500 and self.status != 409 and not self._transient and self.retries == 0

    @property
    def _transient(self) -> bool:
        return self.status >= 500 or self.status in (408, 429) or self.code in _TRANSIENT

    def signal(self) -> type[Signal]:
        """Choose the signal for callers that act upon this; `Signal` itself if there is none."""
        if self.code == "NoSuchUpload":
            return UploadGone
        if self.code == "MalformedXML":
            return Malformed
        if self.status in (405, 501) or self.code in _UNSUPPORTED:
            return NotImplementedByServer
        if self.status == 416:
            return RangeRefused
        if self.status == 412:
            return Replaced
        if self.status == 409 and "Exist" not in self.code:
            return Conflict
        return Signal

    def kind(self, *, conditional: bool) -> type[StorageError]:
        """Choose our error, for a request that was `conditional` or was not."""
        if conditional and self.status in (409, 412):
            return AlreadyExists
        if self.status == 404 or self.code in _NOT_FOUND:
            return NotFound
        # Some servers answer 403 to a request over a quota.
        if self.status == 507 or self.code in _FULL or "Quota" in self.code:
            return StorageFull
        if (
            self.status in (401, 403)
            or self.code in _DENIED
            or type(self.error).__name__ in CREDENTIAL_ERRORS
        ):
            return AccessDenied
        if self._transient or is_connection_error(self.error):
            return StorageUnavailable
        return StorageError

    def message(self, kind: type[StorageError], action: str, bucket: str) -> str:
        """Say what failed; `action` completes "cannot ..."."""
        if kind is AlreadyExists:
            return f"exists already ({self.code or self.status})"
        if self.is_about_bucket:
            return f"there is no bucket named {bucket!r}"
        advice = ""
        if kind is AccessDenied:
            advice = "; check the credentials and their permissions"
        elif is_unreachable(self.error):
            advice = "; check the endpoint, and that the server is up"
        return f"cannot {action}: {self.text}{advice}"


def is_connection_error(error: Exception) -> bool:
    """Tell whether no answer came, or only a part of it."""
    return isinstance(error, OSError) or _CONNECTION_ERROR.search(type(error).__name__) is not None


def is_unreachable(error: Exception) -> bool:
    """Tell whether no server was reached, so that nothing was sent."""
    return type(error).__name__ in _UNREACHABLE


def text_of(error: Exception) -> str:
    """Return an exception's name and text, with the URLs in it redacted."""
    return f"{type(error).__name__}: {_URL.sub(lambda url: redact_url(url[0]), str(error))}"
