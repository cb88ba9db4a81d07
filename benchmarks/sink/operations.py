"""Carry out the S3 operations that checkpoint clients use.

Keys here are `bucket/key`; every bucket exists.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import unquote

from benchmarks.sink.connection import Body, Request
from benchmarks.sink.objects import Objects, StoredObject

__all__ = ["Reply", "answer", "operation_of"]

_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_MODIFIED = "2026-01-01T00:00:00.000Z"
_MODIFIED_HTTP = formatdate(1767225600, usegmt=True)


@dataclass(frozen=True)
class Reply:
    """A status, headers, and the views to send; `nbytes` is their length, also where a HEAD sends
    none.
    """

    status: str
    headers: dict[str, str] = field(default_factory=dict)
    views: list[memoryview] = field(default_factory=list)
    nbytes: int = 0


def operation_of(request: Request) -> str:
    """Name the operation as the S3 API does."""
    key = request.path.strip("/").partition("/")[2]
    query = request.query
    if request.method == "PUT" and "partNumber" in query:
        return "UploadPart"
    if request.method == "PUT" and not key:
        return "CreateBucket"
    if request.method == "PUT":
        return "CopyObject" if "x-amz-copy-source" in request.headers else "PutObject"
    if request.method == "POST" and "uploads" in query:
        return "CreateMultipartUpload"
    if request.method == "POST" and "uploadId" in query:
        return "CompleteMultipartUpload"
    if request.method == "POST" and "delete" in query:
        return "DeleteObjects"
    if request.method == "DELETE":
        return "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
    if request.method in ("GET", "HEAD") and key:
        return "GetObject" if request.method == "GET" else "HeadObject"
    if request.method == "HEAD":
        return "HeadBucket"
    if request.method == "GET":
        return "GetBucketLocation" if "location" in query else "ListObjects"
    return "Unknown"


def answer(objects: Objects, operation: str, request: Request, body: Body) -> Reply:
    """Carry out a request."""
    work = _OPERATIONS.get(operation)
    if work is None:
        return _error("501 Not Implemented", "NotImplemented")
    return work(objects, request.path.strip("/"), request, body)


def _put(objects: Objects, key: str, request: Request, body: Body) -> Reply:
    stored = objects.put(key, [body], only_if_absent=request.headers.get("if-none-match") == "*")
    return _EXISTS if stored is None else Reply("200 OK", {"ETag": stored.etag})


def _copy(objects: Objects, key: str, request: Request, body: Body) -> Reply:
    source = objects.get(unquote(request.headers["x-amz-copy-source"]).strip("/"))
    if source is None:
        return _NO_KEY
    stored = objects.put(key, source.bodies)
    assert stored is not None
    return _xml(f"<CopyObjectResult {_NAMESPACE}><LastModified>{_MODIFIED}</LastModified>"
                f"<ETag>{stored.etag}</ETag></CopyObjectResult>")  # fmt: skip


def _start_upload(objects: Objects, key: str, request: Request, body: Body) -> Reply:
    bucket, _, name = key.partition("/")
    return _xml(
        f"<InitiateMultipartUploadResult {_NAMESPACE}><Bucket>{bucket}</Bucket><Key>{html.escape(name)}</Key>"
        f"<UploadId>{objects.start_upload()}</UploadId></InitiateMultipartUploadResult>"
    )


def _upload_part(objects: Objects, key: str, request: Request, body: Body) -> Reply:
    number = int(request.query["partNumber"])
    if not objects.add_part(request.query["uploadId"], number, body):
        return _NO_UPLOAD
    return Reply("200 OK", {"ETag": f'"{number:032x}"'})


def _complete(objects: Objects, key: str, request: Request, body: Body) -> Reply:
    if request.headers.get("if-none-match") == "*" and objects.get(key) is not None:
        return _EXISTS
    parts = objects.take_upload(request.query["uploadId"])
    if parts is None:
        return _NO_UPLOAD
    wanted = [int(n) for n in re.findall(r"<PartNumber>\s*(\d+)\s*</PartNumber>", _text(body))]
    if not wanted or any(number not in parts for number in wanted):
        return _error("400 Bad Request", "InvalidPart")
    stored = objects.put(key, [parts[number] for number in wanted])
    assert stored is not None
    bucket, _, name = key.partition("/")
    return _xml(
        f"<CompleteMultipartUploadResult {_NAMESPACE}><Bucket>{bucket}</Bucket><Key>{html.escape(name)}</Key>"
        f"<ETag>{stored.etag}</ETag></CompleteMultipartUploadResult>"
    )


def _abort(objects: Objects, key: str, request: Request, body: Body) -> Reply:
    return _NO_UPLOAD if objects.take_upload(request.query["uploadId"]) is None else Reply("204 No Content")


def _delete(objects: Objects, key: str, request: Request, body: Body) -> Reply:
    objects.delete(key)
    return Reply("204 No Content")


def _delete_many(objects: Objects, bucket: str, request: Request, body: Body) -> Reply:
    names = [html.unescape(name) for name in re.findall(r"<Key>(.*?)</Key>", _text(body), re.DOTALL)]
    for name in names:
        objects.delete(f"{bucket}/{name}")
    deleted = "".join(f"<Deleted><Key>{html.escape(name)}</Key></Deleted>" for name in names)
    return _xml(f"<DeleteResult {_NAMESPACE}>{deleted}</DeleteResult>")


def _head(objects: Objects, key: str, request: Request, body: Body) -> Reply:
    stored = objects.get(key)
    if stored is None:
        return Reply("404 Not Found")
    return Reply("200 OK", _headers_of(stored), nbytes=stored.nbytes)


def _get(objects: Objects, key: str, request: Request, body: Body) -> Reply:
    stored = objects.get(key)
    if stored is None:
        return _NO_KEY
    if request.headers.get("if-match", stored.etag).strip('"') != stored.etag.strip('"'):
        return _error("412 Precondition Failed", "PreconditionFailed")
    start, stop, status, headers = 0, stored.nbytes, "200 OK", _headers_of(stored)
    if byte_range := re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "")):
        first, last = byte_range.groups()
        start = int(first) if first else max(0, stored.nbytes - int(last))
        stop = min(int(last) + 1, stored.nbytes) if first and last else stored.nbytes
        if start >= stored.nbytes:
            return _error("416 Requested Range Not Satisfiable", "InvalidRange")
        status = "206 Partial Content"
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.nbytes}"
    try:
        return Reply(status, headers, stored.views(start, stop), stop - start)
    except LookupError as error:
        return _error("409 Conflict", "InvalidObjectState", str(error))


def _list(objects: Objects, bucket: str, request: Request, body: Body) -> Reply:
    query = request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after") or query.get("marker") or ""
    limit = int(query.get("max-keys", 1000))
    rows: dict[str, str] = {}
    for full in objects.keys(f"{bucket}/{prefix}"):
        key = full[len(bucket) + 1 :]
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        name = key if cut < 0 else key[: cut + len(delimiter)]
        if name <= after or name in rows or (after and name.startswith(after)):
            continue
        stored = objects.get(full)
        if cut >= 0:
            rows[name] = f"<CommonPrefixes><Prefix>{html.escape(name)}</Prefix></CommonPrefixes>"
        elif stored is not None:
            rows[name] = (
                f"<Contents><Key>{html.escape(name)}</Key><LastModified>{_MODIFIED}</LastModified>"
                f"<ETag>{html.escape(stored.etag)}</ETag><Size>{stored.nbytes}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
    names = list(rows)[:limit]
    cut_off = len(rows) > limit
    token = f"<NextContinuationToken>{html.escape(names[-1])}</NextContinuationToken>" if cut_off else ""
    return _xml(
        f"<ListBucketResult {_NAMESPACE}><Name>{bucket}</Name><Prefix>{html.escape(prefix)}</Prefix>"
        f"<KeyCount>{len(names)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
        f"<IsTruncated>{str(cut_off).lower()}</IsTruncated>{token}{''.join(rows[n] for n in names)}"
        "</ListBucketResult>"
    )


def _location(objects: Objects, bucket: str, request: Request, body: Body) -> Reply:
    return _xml(f"<LocationConstraint {_NAMESPACE}>us-east-1</LocationConstraint>")


def _bucket(objects: Objects, bucket: str, request: Request, body: Body) -> Reply:
    return Reply("200 OK", {"x-amz-bucket-region": "us-east-1"})


def _headers_of(stored: StoredObject) -> dict[str, str]:
    return {
        "ETag": stored.etag,
        "Last-Modified": _MODIFIED_HTTP,
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }


def _text(body: Body) -> str:
    return "" if body.data is None else bytes(body.data).decode()


def _xml(text: str, status: str = "200 OK") -> Reply:
    data = f"{_XML}{text}".encode()
    return Reply(status, {"Content-Type": "application/xml"}, [memoryview(data)], len(data))


def _error(status: str, code: str, message: str = "") -> Reply:
    return _xml(
        f"<Error><Code>{code}</Code><Message>{html.escape(message or code)}</Message></Error>", status
    )


_NO_KEY = _error("404 Not Found", "NoSuchKey")
_NO_UPLOAD = _error("404 Not Found", "NoSuchUpload")
_EXISTS = _error("412 Precondition Failed", "PreconditionFailed")

_OPERATIONS: dict[str, Callable[[Objects, str, Request, Body], Reply]] = {
    "PutObject": _put,
    "CopyObject": _copy,
    "CreateMultipartUpload": _start_upload,
    "UploadPart": _upload_part,
    "CompleteMultipartUpload": _complete,
    "AbortMultipartUpload": _abort,
    "DeleteObject": _delete,
    "DeleteObjects": _delete_many,
    "HeadObject": _head,
    "GetObject": _get,
    "ListObjects": _list,
    "GetBucketLocation": _location,
    "HeadBucket": _bucket,
    "CreateBucket": _bucket,
}
