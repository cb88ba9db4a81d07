"""Arguments of the user's own that go with requests: encryption, requester pays, object lock, tags.

Which request takes which of them, the SDK's own description of the service says.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ckpt.backends.options import nearest
from ckpt.errors import ConfigurationError

_logger = logging.getLogger(__name__)

_OPERATIONS = (
    "PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload",
    "AbortMultipartUpload", "ListParts", "ListMultipartUploads", "GetObject", "HeadObject",
    "DeleteObject", "DeleteObjects", "ListObjectsV2",
)  # fmt: skip
"""All that are sent for objects."""
_OURS = frozenset({
    "Bucket", "Key", "Body", "ContentLength", "ContentMD5", "UploadId", "PartNumber", "MultipartUpload",
    "MpuObjectSize", "Delete", "Range", "VersionId", "WriteOffsetBytes", "Prefix", "Delimiter",
    "KeyMarker", "UploadIdMarker", "PartNumberMarker", "MaxKeys", "MaxParts", "MaxUploads",
    "ContinuationToken", "StartAfter", "EncodingType", "IfMatch", "IfNoneMatch", "IfModifiedSince",
    "IfUnmodifiedSince", "IfMatchLastModifiedTime", "IfMatchSize", "IfMatchInitiatedTime",
})  # fmt: skip
"""What requests say by themselves."""
_OURS_BEGIN = ("Checksum", "CopySource")
_KEY_BYTES = 32
_LOCKS = ("ObjectLock", "Retention")
_TOGETHER = (
    ("ObjectLockMode", "ObjectLockRetainUntilDate"),
    ("ObjectLockRetainUntilDate", "ObjectLockMode"),
    ("SSEKMSKeyId", "ServerSideEncryption"),
)
"""Servers refuse the first of each without the second."""
_TEXTS = {
    "Tagging": "like 'team=a&kind=checkpoint'",
    "SSEKMSEncryptionContext": "that holds JSON in base64",
}
"""What could be taken for a dict."""
_LOOPBACK = re.compile(r"localhost|::1|127(\.\d+){3}")


def check_arguments(options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if what a user gives for requests cannot be sent; no text shows a key."""
    given = options["s3_additional_kwargs"]
    for name in given:
        if name in _OURS or str(name).startswith(_OURS_BEGIN):
            raise ConfigurationError(f"s3_additional_kwargs: {name} is set by the library itself")
    if options["checksum"] == "none" and any(str(name).startswith(_LOCKS) for name in given):
        raise ConfigurationError(
            "s3_additional_kwargs: a server takes an object under lock only with a checksum: "
            "leave out the option checksum, or give checksum='crc64nvme'"
        )
    if given.get("SSECustomerKey") is not None:
        _customer_key(given["SSECustomerKey"])
    elif given.get("SSECustomerAlgorithm") or given.get("SSECustomerKeyMD5"):
        raise ConfigurationError("s3_additional_kwargs: SSECustomerAlgorithm needs SSECustomerKey")
    for name, other in _TOGETHER:
        if given.get(name) is not None and given.get(other) is None:
            raise ConfigurationError(f"s3_additional_kwargs: {name} needs {other}")
    for name, example in _TEXTS.items():
        if not isinstance(given.get(name) or "", str):
            raise ConfigurationError(f"s3_additional_kwargs: {name} must be a text {example}")


def arguments_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the arguments that all requests get which take them, of checked options."""
    given = {name: value for name, value in options["s3_additional_kwargs"].items() if value is not None}
    if options["requester_pays"]:
        given["RequestPayer"] = "requester"
    if "SSECustomerKey" in given:
        key = _customer_key(given["SSECustomerKey"])
        # As they are sent: the SDKs encode the key for some of the requests that take it, not for all.
        given["SSECustomerKey"] = base64.b64encode(key).decode()
        digest = hashlib.md5(key, usedforsecurity=False).digest()
        given["SSECustomerKeyMD5"] = base64.b64encode(digest).decode()
        given.setdefault("SSECustomerAlgorithm", "AES256")
    return given


def hides_digests(options: Mapping[str, Any]) -> bool:
    """Tell whether objects are encrypted so that an ETag is no MD5 of the bytes."""
    given = options["s3_additional_kwargs"]
    return bool(given.get("SSECustomerKey")) or str(given.get("ServerSideEncryption")).startswith("aws:kms")


def secrets_of(options: Mapping[str, Any]) -> list[str]:
    """List a customer's key in the forms that texts could show it in."""
    key = options["s3_additional_kwargs"].get("SSECustomerKey")
    if key is None:
        return []
    try:
        data = _customer_key(key)
    except ConfigurationError:
        return [str(key)]
    forms = [base64.b64encode(data).decode(), data.hex(), repr(data)[2:-1], data.decode("latin-1")]
    return [*forms, str(key)]


def send_arguments(client: Any, options: Mapping[str, Any]) -> None:
    """Have a client send the user's arguments with every request that takes them.

    Raises ConfigurationError if no request takes one of them: encryption that is misspelt would be missing unseen.
    """
    given = arguments_of(options)
    if not given:
        return
    model = client.meta.service_model
    known = frozenset().union(*(model.operation_model(name).input_shape.members for name in _OPERATIONS))
    for name in given:
        if name not in known:
            meant = nearest(str(name), known - _OURS)
            raise ConfigurationError(f"s3_additional_kwargs: no request takes {name!r}{meant}")
    endpoint = urlsplit(str(client.meta.endpoint_url))
    is_plain = endpoint.scheme == "http" and not _LOOPBACK.fullmatch(endpoint.hostname or "")
    if is_plain and "SSECustomerKey" in given:
        _logger.warning("%s: the customer's key (SSE-C) is sent unencrypted: use https", endpoint.geturl())

    @functools.cache
    def taken(operation: str) -> dict[str, Any]:
        shape = model.operation_model(operation).input_shape
        return {name: value for name, value in given.items() if shape and name in shape.members}

    def add(params: dict[str, Any], model: Any, **_: Any) -> dict[str, Any]:
        return {**taken(model.name), **params}

    client.meta.events.register("provide-client-params.s3", add)


def _customer_key(key: Any) -> bytes:
    """Return the 32 bytes of a key, which may be given as they are or in base64. Raises ConfigurationError."""
    if isinstance(key, str):
        data = key.encode()
        if len(data) != _KEY_BYTES:
            try:
                data = base64.b64decode(data, validate=True)
            except binascii.Error:
                data = b""
    else:
        data = bytes(key) if isinstance(key, bytes | bytearray) else b""
    if len(data) != _KEY_BYTES:
        raise ConfigurationError(
            f"s3_additional_kwargs: SSECustomerKey must be {_KEY_BYTES} bytes, as bytes or in base64"
        )
    return data
