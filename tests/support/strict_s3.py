"""A small S3 server that is strict where real ones are lenient, and lies on request.

It verifies CRC64NVME headers and requires them, forgets a multipart upload once it is completed or aborted,
dates uploads, and keeps connections alive. `rule` decides what becomes of each request.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from awscrt.checksums import crc64nvme

from ckpt.backends.s3_protocol import sent_checksums
from support.http_core import Handler, http_server
from support.servers import S3Server

Reply = tuple[int, dict[str, str], bytes]


SETTINGS = {
    "versioning": "",
    "object-lock": "ObjectLockConfigurationNotFoundError",
    "lifecycle": "NoSuchLifecycleConfiguration",
    "encryption": "ServerSideEncryptionConfigurationNotFoundError",
    "protection": "NoSuchProtectionConfiguration",
}
"""Of a bucket, as requests name them; what S3 answers if there is none."""


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
            return {
                "GET": "ListParts",
                "PUT": "UploadPart",
                "POST": "CompleteMultipartUpload",
                "DELETE": "AbortMultipartUpload",
            }[self.method]
        if "delete" in self.query:
            return "DeleteObjects"
        if not self.name and self.query.keys() & SETTINGS.keys():
            return "GetSetting"
        return f"{self.method.capitalize()}Object"


@dataclass
class Upload:
    name: str
    began_s: float
    parts: dict[int, bytes] = field(default_factory=dict)
    checksums: dict[int, str] = field(default_factory=dict)


Action = str | tuple[int, str] | tuple[int, str, dict[str, str]]
Rule = Callable[[Request], Action]
"""What to do with a request: "pass"; (status, code), or with headers, to refuse it with; "lose" its reply; for reads also
"200" (with Content-Range), "whole" (Range ignored), "shifted" (another range, and says so), "unnamed" (206
without Content-Range), "cut" the body in the middle, "stall" there; for writes "shorten" what is kept, "bare" (a reply
without headers); for all "more" (a whole reply behind the right one), "interim" (replies 1xx before it); "forget" (nothing
is done, and success is answered), "empty", "page" and "error" (the same, with that body), "done" (it is done, and the
answer is an error under the status 200), "endless" (a listing that is cut off and names no next page)."""

INTERIM = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
FALSE = b"the wrong content"
MORE = (
    b'HTTP/1.1 206 Partial Content\r\nContent-Length: 17\r\nContent-Range: bytes 0-16/17\r\nETag: "false"\r\n\r\n'
    + FALSE
)
ERROR = b"<Error><Code>InternalError</Code><Message>InternalError</Message></Error>"
ANSWERS = {
    "forget": b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>",
    "empty": b"",
    "page": b"<html>hello</html>",
    "error": ERROR,
}


@dataclass
class StrictS3(S3Server):
    """`objects` by name, `uploads` by id, and all `requests` that came. All buckets are one and the same.

    `settings` are those of the bucket, as XML by their names. A bucket that is the first part of the host's name is
    not looked for in the path.
    """

    rule: Rule = lambda request: "pass"
    requires_checksums: bool = True
    knows_conditions: bool = True
    knows_checksums_of_parts: bool = True
    objects: dict[str, bytes] = field(default_factory=dict)
    dates_s: dict[str, float] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    keeps_versions: bool = False
    clock_offset_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ids: Iterator[int] = field(default_factory=itertools.count)
    connections: Iterator[int] = field(default_factory=itertools.count)
    connected: int = 0
    idle: threading.Condition = field(default_factory=threading.Condition)
    close_connections: bool = False
    last_etag: tuple[bytes | None, str] = None, ""

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "part_size_bytes": 5 << 20, "max_attempts": 2}

    def new_bucket(self) -> str:
        return "bucket"

    def etag_of(self, data: bytes) -> str:
        """Like `_etag`, at once if these are the data that it was asked of last."""
        if self.last_etag[0] is not data:
            self.last_etag = data, _etag(data)
        return self.last_etag[1]

    def settle(self) -> None:
        """Wait until no client is connected: what a killed one has sent has arrived."""
        with self.idle:
            assert self.idle.wait_for(lambda: not self.connected, 60)

    def sent(self, operation: str) -> list[Request]:
        return [request for request in self.requests if request.operation == operation]


@contextlib.contextmanager
def strict_s3(host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[StrictS3]:
    server = StrictS3("")
    with http_server(_Handler, host=host, state=server, tls=tls) as port:
        name = f"[{host}]" if ":" in host else host
        server.endpoint_url = f"{'http' if tls is None else 'https'}://{name}:{port}"
        _forget(server.endpoint_url)
        yield server


def _forget(endpoint_url: str) -> None:
    """Forget what was found out about a server before this one, which had the same port."""
    learned = sent_checksums._without_crc
    learned -= {bucket_url for bucket_url in learned if bucket_url.startswith(endpoint_url)}


class _Refused(Exception):
    def __init__(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.code, self.headers = status, code, dict(headers or {})


class _Handler(Handler):
    state: StrictS3

    def setup(self) -> None:
        super().setup()
        self.connection_number = next(self.state.connections)
        with self.state.idle:
            self.state.connected += 1

    def finish(self) -> None:
        super().finish()
        with self.state.idle:
            self.state.connected -= 1
            self.state.idle.notify_all()

    def serve(self) -> None:
        state = self.state
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        path = unquote(url.path).lstrip("/")
        name = path if headers.get("host", "").startswith("bucket.") else path.partition("/")[2]
        request = Request(self.command, name, query, headers, self.connection_number)
        body = self.rfile.read(self.length)
        action: Action = "pass"
        try:
            # Held to the end: after a rule that waits, this request is answered before the next.
            with state.lock:
                state.requests.append(request)
                action = state.rule(request)
                if isinstance(action, tuple):
                    raise _Refused(*action)
                if action in ANSWERS:
                    status = 200
                    extra = {"etag": '"false"'}
                    reply = ANSWERS[action]
                else:
                    status, extra, reply = getattr(self, f"_{request.operation}")(request, body, action)
                reply = ERROR if action == "done" else reply
                if action == "endless":
                    reply = re.sub(rb"<Next.*?</Next\w+>", b"", reply)
                    reply = reply.replace(b"<IsTruncated>false", b"<IsTruncated>true")
        except _Refused as refused:
            status, extra = refused.status, refused.headers
            region = f"<Region>{region}</Region>" if (region := extra.get("x-amz-bucket-region")) else ""
            about = f"<Code>{refused.code}</Code><Message>{refused.code}</Message>{region}"
            reply = f"<Error>{about}</Error>".encode()
        if action == "lose":
            self.close_connection = True
            return
        date = formatdate(time.time() + state.clock_offset_s, usegmt=True)
        extra = {"date": date, **({} if action == "bare" else extra)}
        sent = len(reply) // 2 if action in ("cut", "stall") else len(reply)
        around = INTERIM if action == "interim" else b"", MORE if action == "more" else b""
        self.answer(status, extra, reply, sent=sent, around=around)
        self.close_connection = state.close_connections or sent < len(reply)
        if action == "stall":
            time.sleep(3)

    # -- what the API does -----------------------------------------------------------------------------

    def _verify(self, request: Request, data: bytes) -> str:
        is_of_data = request.operation != "CompleteMultipartUpload"
        digest = request.headers.get("content-md5") if is_of_data else None
        if (
            digest is not None
            and base64.b64decode(digest) != hashlib.md5(data, usedforsecurity=False).digest()
        ):
            raise _Refused(400, "BadDigest")
        declared = request.headers.get("x-amz-checksum-crc64nvme")
        if declared is None:
            if self.state.requires_checksums:
                raise _Refused(400, "MissingChecksum")
            return ""
        if declared != checksum_of(data):
            raise _Refused(400, "BadDigest")
        return declared

    def _keep(self, request: Request, data: bytes, etag: str, checksum: str) -> tuple[int, dict[str, str]]:
        state = self.state
        refused = state.knows_conditions and request.headers.get("if-none-match") == "*"
        if refused and request.name in state.objects:
            raise _Refused(412, "PreconditionFailed")
        state.objects[request.name], state.checksums[request.name] = data, checksum
        state.dates_s[request.name] = time.time()
        return 200, {"etag": etag}

    def _PutObject(self, request: Request, body: bytes, action: str) -> Reply:
        checksum = self._verify(request, body)
        kept = body[:-1] if action == "shorten" else body
        return *self._keep(request, kept, _etag(kept), checksum), b""

    def _GetObject(self, request: Request, body: bytes, action: str) -> Reply:
        if not request.name:
            return self._list(request.query)
        data = self._data(request)
        wanted = request.headers.get("if-match")
        etag = self.state.etag_of(data)
        if wanted is not None and wanted != etag:
            raise _Refused(412, "PreconditionFailed")
        start, stop = 0, len(data)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if action == "whole" or found is None:
            return 200, {"etag": etag}, data
        start, stop = int(found[1]), min(int(found[2]) + 1, len(data))
        if start >= len(data):
            raise _Refused(416, "InvalidRange")
        if action == "shifted":
            start, stop = (start - 1, stop - 1) if start else (start + 1, stop + 1)
        headers = {"etag": etag, "content-range": f"bytes {start}-{stop - 1}/{len(data)}"}
        if action == "unnamed":
            del headers["content-range"]
        return 200 if action == "200" else 206, headers, data[start:stop]

    def _GetSetting(self, request: Request, body: bytes, action: str) -> Reply:
        (name,) = request.query.keys() & SETTINGS.keys()
        found = self.state.settings.get(name, "" if SETTINGS[name] else "<VersioningConfiguration/>")
        if not found:
            raise _Refused(404, SETTINGS[name])
        return 200, {}, found.encode()

    def _list(self, query: dict[str, str]) -> Reply:
        """ListObjectsV2: names in order, those with the delimiter after the prefix as one folder."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        entries: dict[str, bool] = {}  # whether it is a folder
        for name in sorted(self.state.objects):
            folder, is_folder, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            entry = prefix + folder + delimiter if is_folder else name
            if name.startswith(prefix) and entry > after:
                entries[entry] = bool(is_folder)
        page = list(entries)[: int(query.get("max-keys", 1000))]
        is_cut = len(page) < len(entries)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if is_cut else ""
        listed = "".join(
            f"<CommonPrefixes><Prefix>{quote(entry)}</Prefix></CommonPrefixes>"
            if entries[entry]
            else f"<Contents><Key>{quote(entry)}</Key><Size>{len(self.state.objects[entry])}</Size>"
            f"<LastModified>{_date(self.state.dates_s.get(entry, 0))}</LastModified></Contents>"
            for entry in page
        )
        answer = (
            f"<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
            f"{token}{listed}</ListBucketResult>"
        )
        return 200, {}, answer.encode()

    def _HeadObject(self, request: Request, body: bytes, action: str) -> Reply:
        if not request.name:  # the bucket: S3 answers where it is, here wherever it is asked for
            signed_for = re.search(
                r"Credential=[^/]+/[^/]+/([^/]+)/", request.headers.get("authorization", "")
            )
            return 200, {"x-amz-bucket-region": signed_for[1]} if signed_for else {}, b""
        data = self._data(request)
        headers = {"etag": self.state.etag_of(data), "content-length": str(len(data))}
        checksum = self.state.checksums.get(request.name)
        if checksum and request.headers.get("x-amz-checksum-mode") == "ENABLED":
            headers |= {"x-amz-checksum-crc64nvme": checksum, "x-amz-checksum-type": "FULL_OBJECT"}
        return 200, headers, b""

    def _DeleteObject(self, request: Request, body: bytes, action: str) -> Reply:
        self.state.objects.pop(request.name, None)
        return 204, {"x-amz-delete-marker": "true"} if self.state.keeps_versions else {}, b""

    def _PostObject(self, request: Request, body: bytes, action: str) -> Reply:
        raise _Refused(405, "MethodNotAllowed")

    def _DeleteObjects(self, request: Request, body: bytes, action: str) -> Reply:
        for name in re.findall(r"<Key>(.*?)</Key>", body.decode()):
            self.state.objects.pop(unescape(name), None)
        return 200, {}, b"<DeleteResult></DeleteResult>"

    def _CreateMultipartUpload(self, request: Request, body: bytes, action: str) -> Reply:
        if self.state.requires_checksums and (
            request.headers.get("x-amz-checksum-algorithm") != "CRC64NVME"
            or request.headers.get("x-amz-checksum-type") != "FULL_OBJECT"
        ):
            raise _Refused(400, "MissingChecksum")
        upload_id = f"upload-{next(self.state.ids)}"
        self.state.uploads[upload_id] = Upload(request.name, time.time() + self.state.clock_offset_s)
        answer = (
            f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
        )
        return 200, {}, answer.encode()

    def _ListMultipartUploads(self, request: Request, body: bytes, action: str) -> Reply:
        """A page of uploads, in the order of names and ids."""
        after = request.query.get("key-marker", ""), request.query.get("upload-id-marker", "")
        places = sorted((upload.name, upload_id) for upload_id, upload in self.state.uploads.items())
        left = [p for p in places if p[0].startswith(request.query.get("prefix", "")) and p > after]
        page = left[:1000]
        listed = "".join(
            f"<Upload><Key>{escape(name)}</Key><UploadId>{upload_id}</UploadId>"
            f"<Initiated>{_date(self.state.uploads[upload_id].began_s)}</Initiated></Upload>"
            for name, upload_id in page
        )
        if is_cut := len(page) < len(left):
            name, upload_id = page[-1]
            listed += f"<NextKeyMarker>{escape(name)}</NextKeyMarker>"
            listed += f"<NextUploadIdMarker>{upload_id}</NextUploadIdMarker>"
        cut = f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>"
        return 200, {}, f"<ListMultipartUploadsResult>{cut}{listed}</ListMultipartUploadsResult>".encode()

    def _UploadPart(self, request: Request, body: bytes, action: str) -> Reply:
        upload = self._upload(request)
        number = int(request.query["partNumber"])
        upload.checksums[number] = self._verify(request, body)
        upload.parts[number] = body
        return 200, {"etag": _etag(body)}, b""

    def _ListParts(self, request: Request, body: bytes, action: str) -> Reply:
        """Pages of two parts each."""
        upload, after = self._upload(request), int(request.query.get("part-number-marker") or 0)
        left = [number for number in sorted(upload.parts) if number > after]
        listed = ""
        for number in left[:2]:
            data, checksum = upload.parts[number], upload.checksums[number]
            listed += f"<Part><PartNumber>{number}</PartNumber><Size>{len(data)}</Size>"
            listed += f"<ETag>{escape(_etag(data))}</ETag>"
            listed += f"<ChecksumCRC64NVME>{checksum}</ChecksumCRC64NVME>" if checksum else ""
            listed += "</Part>"
        cut = f"<IsTruncated>{str(len(left) > 2).lower()}</IsTruncated>"
        cut += f"<NextPartNumberMarker>{left[1]}</NextPartNumberMarker>" if len(left) > 2 else ""
        return 200, {}, f"<ListPartsResult>{cut}{listed}</ListPartsResult>".encode()

    def _CompleteMultipartUpload(self, request: Request, body: bytes, action: str) -> Reply:
        state, upload = self.state, self._upload(request)
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

    def _AbortMultipartUpload(self, request: Request, body: bytes, action: str) -> Reply:
        self._upload(request)
        del self.state.uploads[request.query["uploadId"]]
        return 204, {}, b""

    def _data(self, request: Request) -> bytes:
        data = self.state.objects.get(request.name)
        if data is None:
            raise _Refused(404, "NoSuchKey")
        return data

    def _upload(self, request: Request) -> Upload:
        upload = self.state.uploads.get(request.query["uploadId"])
        if upload is None:
            raise _Refused(404, "NoSuchUpload")
        return upload


def checksum_of(data: bytes) -> str:
    return base64.b64encode(crc64nvme(data).to_bytes(8, "big")).decode()


def _date(moment_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(moment_s))


def _etag(data: bytes) -> str:
    """Not what S3 gives an object of many parts, so that only the checksum can tell whose it is."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
