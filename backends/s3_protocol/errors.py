"""Translate the exceptions of boto3 and ibm-cos-sdk into this library's.

Servers leave out any part of an error reply (code, message, the whole body), so nothing here relies
on one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from ckpt.backends.options import redact_url
from ckpt.backends.s3_protocol.credential_faults import (
    credential_advice,
    got_no_answer,
    is_of_credentials,
    service_status,
)
from ckpt.backends.s3_protocol.own_faults import cannot_be_sent, is_own_fault, odd_values, own_advice
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    NotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
)


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


class NoSuchObject(Signal):
    """There is a bucket, and nothing under this name."""


class Replaced(Signal):
    """The object is not the one that was being read."""


class NoSetting(Signal):
    """The bucket has no such setting: the server knows it, and says so."""


class ChecksumRefused(Signal):
    """The server may not take the checksum that was sent, and did nothing; `original` is the error without this signal."""

    def __init__(self, text: str, original: Exception) -> None:
        super().__init__(text)
        self.original = original


_NOT_FOUND = frozenset({"NoSuchKey", "NoSuchBucket", "404", "NotFound"})
_DENIED = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "ExpiredTokenException", "InvalidToken",
     "RequestTimeTooSkewed", "401", "403", "Forbidden", "AllAccessDisabled", "AccountProblem"}
)  # fmt: skip
_REFUSED = frozenset({401, 403, 451})
"""451 is what IBM COS answers where an object is under retention."""
_ADVICE = {
    "RequestTimeTooSkewed": "set this machine's clock",
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"),
        "the credentials have expired: renew them (those of a profile, a credential_process or a role are looked "
        "for anew, those in storage_options and in environment variables are not)",
    ),
    "InvalidObjectState": "the object was moved to an archive class: restore it there first, and take away the lifecycle "
    "rule that moves checkpoints",
    **dict.fromkeys(
        ("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "301", "307",
         "IllegalLocationConstraintException"),
        "the bucket is in another region, or at another endpoint: set region, or endpoint_url",
    ),
    "407": "the proxy asks for credentials: give them in HTTPS_PROXY, or list the host in NO_PROXY",
}  # fmt: skip
"""By the server's code."""
_LOCKED = "the object is under object lock: it can go when its retention has ended"
_LOCK_WORDS = re.compile(r"\b(object lock|WORM|retention|legal hold)\b", re.IGNORECASE)
"""In what a server says of a delete."""
_NOT_GRANTED = re.compile(r"not authorized to perform:? (\w+:\w+)")
_ADVICE_BY_TEXT = (
    (re.compile("(Content-MD5|x-amz-checksum).* required", re.IGNORECASE),
     "leave out the option checksum: objects under lock need one"),
    (re.compile(r"\bKMS\b|kms:", re.IGNORECASE),
     "check the key of KMS, and that the credentials may use it (kms:GenerateDataKey, kms:Decrypt)"),
    (re.compile("encryption", re.IGNORECASE),
     "another encryption is asked for: see s3_additional_kwargs (SSECustomerKey, ServerSideEncryption)"),
)  # fmt: skip
"""By the server's message, the first that fits."""
_LARGEST_SKEW_S = 15 * 60
"""S3 refuses what is signed with a time further off."""
_WRONG_CHECKSUM = re.compile("BadDigest|mismatch|not match", re.IGNORECASE)
"""What servers say where they know the checksum, and the bytes have another one."""
_CHECKSUM_WORDS = re.compile("checksum|content-md5", re.IGNORECASE)
_NO_CHECKSUM_ADVICE = 'if the server takes no checksums, give the storage option checksum="none"'
_FULL = frozenset({"EntityTooLarge", "InsufficientStorage", "507", "XMinioStorageFull"})
_UNSUPPORTED = frozenset({"NotImplemented", "501", "MethodNotAllowed", "XNotImplemented"})
# Some of them come with a 4xx status.
_TRANSIENT = frozenset(
    {"RequestTimeout", "RequestTimeoutException", "SlowDown", "Throttling", "ThrottlingException",
     "TooManyRequests", "RequestLimitExceeded", "InternalError", "ServiceUnavailable", "503"}
)  # fmt: skip
_NO_SETTING = frozenset(
    {"ObjectLockConfigurationNotFoundError", "NoSuchLifecycleConfiguration",
     "ServerSideEncryptionConfigurationNotFoundError"}
)  # fmt: skip
# The SDK itself refuses these: nothing was sent.
_UNSENT = frozenset({"ParamValidationError", "NoCredentialsError"})
_CONNECTION_ERROR = re.compile("Connection|Timeout|HTTPClient|SSL|IncompleteRead|ResponseStreaming|Protocol")
_UNREACHABLE = frozenset(
    {"EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError", "SSLError"}
)
_URL = re.compile(r"https?://[^\s\"'<>]*")


_REFUSED_TRIES = "CkptRefusedTries"
_NO_OPTIONS: Mapping[str, Any] = {}


def _is_transient(status: int, code: str) -> bool:
    return status >= 500 or status in (408, 429) or code in _TRANSIENT


def _is_refused(status: int, code: str) -> bool:
    """Tell whether a server that answers so has done nothing, and will not."""
    return 400 <= status < 500 and status != 409 and not _is_transient(status, code)


def note_refused_tries(
    response_dict: Mapping[str, Any] | None,
    parsed_response: dict[str, Any] | None,
    context: dict[str, Any],
    **_: Any,
) -> None:
    """Note in a reply how many tries before it were refused: it settles the request if all were."""
    if response_dict is None or parsed_response is None:
        return
    before = context.get(_REFUSED_TRIES, 0)
    parsed_response.setdefault("ResponseMetadata", {})[_REFUSED_TRIES] = before
    code = str((parsed_response.get("Error") or {}).get("Code") or "")
    if _is_refused(int(response_dict["status_code"]), code):
        context[_REFUSED_TRIES] = before + 1


class Refusal:
    """An SDK's exception; an empty code, status 0 and `retries` None are unknown. `options` are the store's."""

    def __init__(self, error: Exception, options: Mapping[str, Any] = _NO_OPTIONS) -> None:
        response: Any = getattr(error, "response", None)
        is_reply = isinstance(response, dict)
        reply = response if is_reply else {}
        inner, about = reply.get("Error") or {}, reply.get("ResponseMetadata") or {}
        self.error = error
        self._options = options
        self._is_of_credentials = is_of_credentials(error)
        self.code = str(inner.get("Code") or "")
        self.status = int(about.get("HTTPStatusCode") or 0)
        self.retries: int | None = about.get("RetryAttempts")
        self._refused_tries = int(about.get(_REFUSED_TRIES) or 0)
        self._message = str(inner.get("Message") or "")
        headers = about.get("HTTPHeaders") or {}
        self._date = str(headers.get("date") or "")
        self._location = redact_url(str(headers.get("location") or ""))
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
        """Tell whether nothing was sent, or the server refused all that was."""
        if type(self.error).__name__ in _UNSENT:
            return True
        return _is_refused(self.status, self.code) and self.retries == self._refused_tries

    @property
    def may_pass(self) -> bool:
        """Return whether the same request may work later: a busy server or service of credentials, a broken connection."""
        if is_own_fault(self.error):
            return False
        if self._is_of_credentials and got_no_answer(self.error):
            return True
        status = self.status or service_status(self.error)
        return _is_transient(status, self.code) or is_connection_error(self.error)

    @property
    def is_throttled(self) -> bool:
        """Return whether the service of credentials asks for fewer requests."""
        return 429 in (self.status, service_status(self.error)) or "Throttl" in self.code

    @property
    def may_refuse_checksum(self) -> bool:
        """Return whether a server may answer so to a checksum that it does not know."""
        if self.status == 501 or self.code == "NotImplemented":
            return True
        is_other = self.code in _ADVICE or self.code in _DENIED or self.code in _FULL or self.may_pass
        return (
            self.status == 400 and not is_other and not _WRONG_CHECKSUM.search(f"{self.code} {self._message}")
        )

    def signal(self) -> type[Signal]:
        """Choose the signal for callers that act upon this; `Signal` itself if there is none."""
        if self.code == "NoSuchUpload":
            return UploadGone
        if self.code in _NO_SETTING:
            return NoSetting
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

    def kind(self, *, conditional: bool) -> type[StorageError | ConfigurationError]:
        """Choose our error, for a request that was `conditional` or was not."""
        if is_own_fault(self.error):
            return ConfigurationError
        if self._is_of_credentials:  # whatever the status: that of another service is not the store's
            return StorageUnavailable if self.may_pass else AccessDenied
        if conditional and self.status in (409, 412):
            return AlreadyExists
        if self.status == 404 or self.code in _NOT_FOUND:
            return NotFound
        # Some servers answer 403 to a request over a quota.
        if self.status == 507 or self.code in _FULL or "Quota" in self.code:
            return StorageFull
        if self.status in _REFUSED or self.code in _DENIED:
            return AccessDenied
        if self.may_pass:
            return StorageUnavailable
        return StorageError

    def message(self, kind: type[CheckpointError], action: str, bucket: str) -> str:
        """Say what failed; `action` completes "cannot ..."."""
        if kind is AlreadyExists:
            return f"exists already ({self.code or self.status})"
        if self.is_about_bucket:
            return f"there is no bucket named {bucket!r}"
        advice = self._advice(kind, action)
        if cannot_be_sent(self.error):  # whose text shows a whole header
            return f"cannot {action}: {advice}"
        return f"cannot {action}: {self.text}{'; ' if advice else ''}{advice}"

    def _advice(self, kind: type[CheckpointError], action: str) -> str:
        if kind is ConfigurationError:
            return own_advice(self.error, self._options)
        if self._is_of_credentials:
            return credential_advice(self.error, self._options, may_pass=self.may_pass)
        return self._advice_on_reply(kind, action)

    def _advice_on_reply(self, kind: type[CheckpointError], action: str) -> str:
        skew_s = self._skew_s()
        if self.status == 403 and abs(skew_s) > _LARGEST_SKEW_S:
            direction = "ahead of" if skew_s > 0 else "behind"
            return f"this machine's clock is {abs(skew_s) / 60:.0f} minutes {direction} the server's: set it"
        if 300 <= self.status < 400 and self._location:
            return f"it is at {self._location}: set region, or endpoint_url"
        if advice := _ADVICE.get(self.code) or _ADVICE.get(str(self.status)):
            return advice
        missing = _NOT_GRANTED.search(self._message)
        if missing and "explicit deny" not in self._message:  # which no grant overrules
            return f"grant {missing[1]} to the credentials"
        if self.status == 451 or (action == "delete" and self.status < 500 and self._speaks_of_lock):
            return _LOCKED
        if 400 <= self.status < 500:
            for pattern, advice in _ADVICE_BY_TEXT:
                if pattern.search(f"{self.code} {self._message}"):
                    return advice
        if self.status == 400 and action == "stat":  # a reply to HEAD, which says no more
            return (
                "have the credentials expired, is the bucket in another region, or was it stored with a customer's key "
                "(SSECustomerKey in s3_additional_kwargs)?"
            )
        if kind is AccessDenied and (odd := odd_values()):
            return odd
        if kind is AccessDenied and action in ("put", "start a multipart upload"):
            return (
                "check the credentials and their permissions, and whether the bucket asks for encryption, tags or a "
                "lock (s3_additional_kwargs)"
            )
        if kind is AccessDenied and action == "delete":
            return "check the credentials and their permissions, and whether the object is under object lock"
        if kind is AccessDenied:
            return "check the credentials and their permissions"
        if is_unreachable(self.error):
            return "check the endpoint, the proxy if there is one, and that the server is up"
        is_sent = (
            action.startswith(("put", "start", "upload part")) and self._options.get("checksum") != "none"
        )
        if is_sent and self.may_refuse_checksum and (self.status == 501 or _CHECKSUM_WORDS.search(self.text)):
            return _NO_CHECKSUM_ADVICE
        return ""

    @property
    def _speaks_of_lock(self) -> bool:
        return _LOCK_WORDS.search(f"{self.code} {self._message}") is not None

    def _skew_s(self) -> float:
        """Return by how much this machine's clock is ahead of the server's; 0 if it does not say."""
        try:
            return time.time() - parsedate_to_datetime(self._date).timestamp()
        except (TypeError, ValueError):
            return 0.0


def is_connection_error(error: Exception) -> bool:
    """Tell whether no answer came, or only a part of it."""
    return isinstance(error, OSError) or _CONNECTION_ERROR.search(type(error).__name__) is not None


def is_unreachable(error: Exception) -> bool:
    """Tell whether no server was reached, so that nothing was sent."""
    return type(error).__name__ in _UNREACHABLE


def text_of(error: Exception) -> str:
    """Return an exception's name and text, with the URLs in it redacted."""
    return f"{type(error).__name__}: {_URL.sub(lambda url: redact_url(url[0]), str(error))}"
