"""Policies of buckets, as rules of `StrictS3`: which headers S3's API reference lets each request have, and which must be there.

Written down here a second time, as the product takes it from the SDK's description of the service.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping

from support.strict_s3 import Request, Rule

_WRITES = frozenset({"PutObject", "CreateMultipartUpload"})
_OF_A_CUSTOMER = _WRITES | {
    "UploadPart", "CompleteMultipartUpload", "ListParts", "GetObject", "HeadObject",
}  # fmt: skip
_ALL = _OF_A_CUSTOMER | {
    "AbortMultipartUpload", "ListMultipartUploads", "ListObjectsV2", "DeleteObject", "DeleteObjects",
}  # fmt: skip
_TAKEN_BY = {
    "x-amz-server-side-encryption-customer-": _OF_A_CUSTOMER,
    "x-amz-server-side-encryption": _WRITES,
    "x-amz-object-lock-": _WRITES,
    "x-amz-tagging": _WRITES,
    "x-amz-storage-class": _WRITES,
    "x-amz-bypass-governance-retention": frozenset({"DeleteObject", "DeleteObjects"}),
    "x-amz-request-payer": _ALL,
    "x-amz-expected-bucket-owner": _ALL | {"GetSetting", "HeadBucket"},
}
"""By how headers begin; the first that fits."""


def operation_of(request: Request) -> str:
    """The operation by S3's name, listings and buckets apart from objects."""
    if not request.name and request.operation in ("GetObject", "HeadObject"):
        return "ListObjectsV2" if request.method == "GET" else "HeadBucket"
    return request.operation


def takes(header: str) -> frozenset[str] | None:
    """The operations that take a header; None for one that is no concern of a policy."""
    return next((taken for begin, taken in _TAKEN_BY.items() if header.startswith(begin)), None)


def bucket_that_needs(needed: Mapping[str, str], *, but: frozenset[str] = frozenset()) -> Rule:
    """Refuse requests without one of the headers that they take, but those named; and with one that they do not take."""

    def rule(request: Request) -> str | tuple[int, str]:
        operation = operation_of(request)
        for header in request.headers:
            if operation not in (takes(header) or {operation}):
                return 400, "InvalidArgument"
        for header, value in needed.items():
            is_due = operation not in but and operation in (takes(header) or ())
            if is_due and request.headers.get(header, "").replace("True", "true") != value:
                return (400, "InvalidRequest") if "customer" in header else (403, "AccessDenied")
        has_digest = any(header.startswith(("content-md5", "x-amz-checksum-")) for header in request.headers)
        is_locked = any("object-lock" in header for header in needed)
        if is_locked and operation in ("PutObject", "UploadPart") and not has_digest:
            return 400, "InvalidRequest"
        return "pass"

    return rule


def headers_of(customer_key: bytes) -> dict[str, str]:
    """What requests carry for SSE-C."""
    begin = "x-amz-server-side-encryption-customer-"
    digest = hashlib.md5(customer_key, usedforsecurity=False).digest()
    return {
        f"{begin}algorithm": "AES256",
        f"{begin}key": base64.b64encode(customer_key).decode(),
        f"{begin}key-md5": base64.b64encode(digest).decode(),
    }
