"""Translate the exceptions of boto3 and ibm-cos-sdk into this library's.

Servers leave out any part of an error reply (code, message, the whole body), so nothing here relies
on one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
_URL = re.compile(r"https?://[^\s\"'<>]*")


@dataclass(frozen=True)
class _Facts:
    """Facts from an SDK's exception; an empty code, status 0 and `retries` None are unknown."""

    code: str
    status: int
    retries: int | None
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Facts:
        response = getattr(error, "response", None)
        if not isinstance(response, dict):
            return cls("", 0, None, text_of(error))
        inner = response.get("Error") or {}
        about = response.get("ResponseMetadata") or {}
        code = str(inner.get("Code") or "")
        status = int(about.get("HTTPStatusCode") or 0)
        text = f"{code or status or type(error).__name__}: {inner.get('Message') or 'no message'}"
        return cls(code, status, about.get("RetryAttempts"), text)

    @property
    def transient(self) -> bool:
        return self.status >= 500 or self.status in (408, 429) or self.code in _TRANSIENT

    @property
    def refused(self) -> bool:
        """Tell whether the server refused the one request that it was sent."""
        return 400 <= self.status < 500 and self.status != 409 and not self.transient and self.retries == 0


def translate(
    error: Exception,
    action: str,
    *,
    url: str,
    key: str,
    bucket: str,
    signals: tuple[type[Signal], ...] = (),
    harmless: bool = False,
) -> Signal | StorageError:
    """Make our exception from an SDK's.

    Args:
        action: completes "cannot ..." in the text.
        signals: answers that the caller acts upon.
        harmless: however this request ended, no object appeared by it.
    """
    facts = _Facts.of(error)
    signal = _signal(facts)
    if signal in signals:
        return signal(facts.text)
    kind = _kind(facts, error, conditional=Conflict in signals)
    text = f"cannot {action}: {facts.text}"
    if kind is AlreadyExists:
        text = f"exists already ({facts.code or facts.status})"
    elif facts.code == "NoSuchBucket":
        text = f"there is no bucket named {bucket!r}"
    elif kind is AccessDenied:
        text += "; check the credentials and their permissions"
    settled = harmless or facts.refused or type(error).__name__ in _UNSENT
    return kind(text, url=url, key=key, settled=settled)


def _signal(facts: _Facts) -> type[Signal]:
    if facts.code == "NoSuchUpload":
        return UploadGone
    if facts.code == "MalformedXML":
        return Malformed
    if facts.status in (405, 501) or facts.code in _UNSUPPORTED:
        return NotImplementedByServer
    if facts.status == 416:
        return RangeRefused
    if facts.status == 412:
        return Replaced
    if facts.status == 409 and "Exist" not in facts.code:
        return Conflict
    return Signal


def _kind(facts: _Facts, error: Exception, conditional: bool) -> type[StorageError]:
    code, status = facts.code, facts.status
    if conditional and status in (409, 412):
        return AlreadyExists
    if status == 404 or code in _NOT_FOUND:
        return NotFound
    # Some servers answer 403 to a request over a quota.
    if status == 507 or code in _FULL or "Quota" in code:
        return StorageFull
    if status in (401, 403) or code in _DENIED or type(error).__name__ in CREDENTIAL_ERRORS:
        return AccessDenied
    if facts.transient or is_connection_error(error):
        return StorageUnavailable
    return StorageError


def is_connection_error(error: Exception) -> bool:
    """Tell whether no answer came, or only a part of it."""
    return isinstance(error, OSError) or _CONNECTION_ERROR.search(type(error).__name__) is not None


def text_of(error: Exception) -> str:
    """Return an exception's name and text, with the URLs in it redacted."""
    return f"{type(error).__name__}: {_URL.sub(lambda url: redact_url(url[0]), str(error))}"
