"""A small S3 server that is strict where real ones are lenient, and lies on request.

It verifies CRC64NVME headers and requires them, forgets a multipart upload once it is completed or aborted,
dates uploads, and keeps connections alive. `rule` decides what becomes of each request.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from awscrt.checksums import crc64nvme

from support.servers import ACCESS_KEY, SECRET_KEY


@dataclass(frozen=True)
class Request:
    """A request as a rule sees it; `name` is the object's, `query` its parameters (`?uploads`: an empty one)."""

    method: str
    name: str
    query: dict[str, str]
    headers: dict[str, str]
    connection: int

    @property
    def operation(self) -> str:
        """The S3 API's name of it."""
        if "uploads" in self.query:
            return "CreateMultipartUpload" if self.method == "POST" else "ListMultipartUploads"
        if "uploadId" in self.query:
            return {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}[
                self.method
            ]
        if "delete" in self.query:
            return "DeleteObjects"
        return f"{self.method.capitalize()}Object"


@dataclass
class Upload:
    name: str
    began_s: float
    parts: dict[int, bytes] = field(default_factory=dict)


Rule = Callable[[Request], str | tuple[int, str]]
"""What to do with a request: "pass"; (status, code) to refuse it with; "lose" its reply; for reads also
"200" (with Content-Range), "whole" (Range ignored), "shifted" (another range, and says so), "unnamed" (206
without Content-Range), "cut" the body in the middle, "stall" there; for writes "shorten" what is kept, "bare" (a reply
without headers)."""


@dataclass
class StrictS3:
    """`objects` by name, `uploads` by id, and all `requests` that came."""

    port: int = 0
    rule: Rule = lambda request: "pass"
    requires_checksums: bool = True
    knows_conditions: bool = True
    knows_checksums_of_parts: bool = True
    objects: dict[str, bytes] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "part_size_bytes": 5 << 20,
            "max_attempts": 2,
        }

    def sent(self, operation: str) -> list[Request]:
        return [request for request in self.requests if request.operation == operation]


@contextlib.contextmanager
def strict_s3() -> Iterator[StrictS3]:
    server = StrictS3()

    class Handler(_Handler):
        pass

    Handler.server_state, Handler.connections = server, itertools.count()
    httpd = _Server(("127.0.0.1", 0), Handler)
    server.port = httpd.server_address[1]
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # connections are cut on purpose


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class _Handler(http.server.BaseHTTPRequestHandler):
    server_state: StrictS3
    connections: Iterator[int]
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.connection_number = next(self.connections)

    def _serve(self) -> None:
        state = self.server_state
        if self.headers.get("expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        name = unquote(url.path).lstrip("/").partition("/")[2]
        request = Request(self.command, name, query, headers, self.connection_number)
        body = self.rfile.read(int(headers.get("content-length") or 0))
        with state.lock:
            state.requests.append(request)
            action = state.rule(request)
        try:
            if isinstance(action, tuple):
                raise _Refused(*action)
            with state.lock:
                status, extra, reply = getattr(self, f"_{request.operation}")(request, body, action)
        except _Refused as refused:
            status, extra = refused.status, {}
            reply = f"<Error><Code>{refused.code}</Code><Message>{refused.code}</Message></Error>".encode()
        if action == "bare":
            extra = {}
        if action == "lose":
            self.close_connection = True
            return
        self._answer(status, extra, reply, len(reply) // 2 if action in ("cut", "stall") else len(reply))
        if action == "stall":
            time.sleep(3)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _answer(self, status: int, headers: dict[str, str], reply: bytes, sent: int) -> None:
        self.send_response_only(status)
        self.send_header("date", formatdate(usegmt=True))
        for name, value in {"content-length": str(len(reply)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply[:sent])
        self.wfile.flush()
        self.close_connection = sent < len(reply)

    # -- what the API does -----------------------------------------------------------------------------

    def _verify(self, request: Request, data: bytes) -> str:
        declared = request.headers.get("x-amz-checksum-crc64nvme")
        if declared is None:
            if self.server_state.requires_checksums:
                raise _Refused(400, "MissingChecksum")
            return ""
        if declared != checksum_of(data):
            raise _Refused(400, "BadDigest")
        return declared

    def _keep(self, request: Request, data: bytes, etag: str, checksum: str) -> tuple[int, dict[str, str]]:
        state = self.server_state
        refused = state.knows_conditions and request.headers.get("if-none-match") == "*"
        if refused and request.name in state.objects:
            raise _Refused(412, "PreconditionFailed")
        state.objects[request.name], state.checksums[request.name] = data, checksum
        return 200, {"etag": etag}

    def _PutObject(self, request: Request, body: bytes, action: str) -> tuple[int, dict[str, str], bytes]:
        checksum = self._verify(request, body)
        kept = body[:-1] if action == "shorten" else body
        return *self._keep(request, kept, _etag(kept), checksum), b""

    def _GetObject(self, request: Request, body: bytes, action: str) -> tuple[int, dict[str, str], bytes]:
        if not request.name:
            return 200, {}, b"<ListBucketResult></ListBucketResult>"
        data = self._data(request)
        wanted = request.headers.get("if-match")
        if wanted is not None and wanted != _etag(data):
            raise _Refused(412, "PreconditionFailed")
        start, stop = 0, len(data)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if action == "whole" or found is None:
            return 200, {"etag": _etag(data)}, data
        start, stop = int(found[1]), min(int(found[2]) + 1, len(data))
        if start >= len(data):
            raise _Refused(416, "InvalidRange")
        if action == "shifted":
            start, stop = (start - 1, stop - 1) if start else (start + 1, stop + 1)
        headers = {"etag": _etag(data), "content-range": f"bytes {start}-{stop - 1}/{len(data)}"}
        if action == "unnamed":
            del headers["content-range"]
        return 200 if action == "200" else 206, headers, data[start:stop]

    def _HeadObject(self, request: Request, body: bytes, action: str) -> tuple[int, dict[str, str], bytes]:
        data = self._data(request)
        headers = {"etag": _etag(data), "content-length": str(len(data))}
        checksum = self.server_state.checksums.get(request.name)
        if checksum and request.headers.get("x-amz-checksum-mode") == "ENABLED":
            headers |= {"x-amz-checksum-crc64nvme": checksum, "x-amz-checksum-type": "FULL_OBJECT"}
        return 200, headers, b""

    def _DeleteObject(self, request: Request, body: bytes, action: str) -> tuple[int, dict[str, str], bytes]:
        self.server_state.objects.pop(request.name, None)
        return 204, {}, b""

    def _PostObject(self, request: Request, body: bytes, action: str) -> tuple[int, dict[str, str], bytes]:
        raise _Refused(405, "MethodNotAllowed")

    def _DeleteObjects(self, request: Request, body: bytes, action: str) -> tuple[int, dict[str, str], bytes]:
        for name in re.findall(r"<Key>(.*?)</Key>", body.decode()):
            self.server_state.objects.pop(name, None)
        return 200, {}, b"<DeleteResult></DeleteResult>"

    def _CreateMultipartUpload(
        self, request: Request, body: bytes, action: str
    ) -> tuple[int, dict[str, str], bytes]:
        if self.server_state.requires_checksums and (
            request.headers.get("x-amz-checksum-algorithm") != "CRC64NVME"
            or request.headers.get("x-amz-checksum-type") != "FULL_OBJECT"
        ):
            raise _Refused(400, "MissingChecksum")
        upload_id = f"upload-{next(self.server_state.ids)}"
        self.server_state.uploads[upload_id] = Upload(request.name, time.time())
        answer = (
            f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
        )
        return 200, {}, answer.encode()

    def _ListMultipartUploads(
        self, request: Request, body: bytes, action: str
    ) -> tuple[int, dict[str, str], bytes]:
        listed = "".join(
            f"<Upload><Key>{upload.name}</Key><UploadId>{upload_id}</UploadId>"
            f"<Initiated>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(upload.began_s))}</Initiated></Upload>"
            for upload_id, upload in self.server_state.uploads.items()
            if upload.name.startswith(request.query.get("prefix", ""))
        )
        return 200, {}, f"<ListMultipartUploadsResult>{listed}</ListMultipartUploadsResult>".encode()

    def _UploadPart(self, request: Request, body: bytes, action: str) -> tuple[int, dict[str, str], bytes]:
        upload = self._upload(request)
        self._verify(request, body)
        upload.parts[int(request.query["partNumber"])] = body
        return 200, {"etag": _etag(body)}, b""

    def _CompleteMultipartUpload(
        self, request: Request, body: bytes, action: str
    ) -> tuple[int, dict[str, str], bytes]:
        state, upload = self.server_state, self._upload(request)
        if b"<Checksum" in body and not state.knows_checksums_of_parts:
            raise _Refused(400, "MalformedXML")
        data = b"".join(upload.parts[number] for number in sorted(upload.parts))
        checksum = self._verify(request, data)
        if checksum and request.headers.get("x-amz-checksum-type") != "FULL_OBJECT":
            raise _Refused(400, "InvalidRequest")
        etags = [_etag(upload.parts[number]).strip('"') for number in sorted(upload.parts)]
        listed = re.findall(r"<ETag>(?:&quot;|\")?(\w+)(?:&quot;|\")?</ETag>", body.decode())
        if listed != etags:
            raise _Refused(400, "InvalidPart")
        kept = data[:-1] if action == "shorten" else data
        status, headers = self._keep(request, kept, _etag(kept), checksum)
        del state.uploads[request.query["uploadId"]]
        return status, headers, b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>"

    def _AbortMultipartUpload(
        self, request: Request, body: bytes, action: str
    ) -> tuple[int, dict[str, str], bytes]:
        self._upload(request)
        del self.server_state.uploads[request.query["uploadId"]]
        return 204, {}, b""

    def _data(self, request: Request) -> bytes:
        data = self.server_state.objects.get(request.name)
        if data is None:
            raise _Refused(404, "NoSuchKey")
        return data

    def _upload(self, request: Request) -> Upload:
        upload = self.server_state.uploads.get(request.query["uploadId"])
        if upload is None:
            raise _Refused(404, "NoSuchUpload")
        return upload

    def log_message(self, *_: Any) -> None:
        pass


def checksum_of(data: bytes) -> str:
    return base64.b64encode(crc64nvme(data).to_bytes(8, "big")).decode()


def _etag(data: bytes) -> str:
    """Not what S3 gives an object of many parts, so that only the checksum can tell whose it is."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
