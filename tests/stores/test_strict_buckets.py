"""Buckets whose policies refuse requests without encryption, payer, tags or a lock: all that touches one passes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError
from support.clock import skip_pauses_of_s3
from support.commands import options_of, run
from support.strict_buckets import bucket_that_needs, headers_of, operation_of, takes
from support.strict_s3 import Request, StrictS3, Upload

import ckpt
from ckpt.backends.base import MIB, PutMode, Store, put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.backends.s3_protocol.errors import Refusal
from ckpt.embeddings import DenseRows, Tables, TableShard
from ckpt.errors import ConfigurationError, SaveFailed, StorageError, StorageUnavailable
from ckpt.testing import CheckedBody
from ckpt.trainer_integration import keeping, saving

KEY = secrets.token_bytes(32)
DATA = secrets.token_bytes(6 * MIB)
KMS = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn:aws:kms:eu-central-1:1:key/2"}
LOCK = {"ObjectLockMode": "GOVERNANCE", "ObjectLockRetainUntilDate": "2030-01-01T00:00:00Z"}
BUCKETS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "sse-s3": ({"ServerSideEncryption": "AES256"}, {"x-amz-server-side-encryption": "AES256"}),
    "sse-kms": (
        {**KMS, "BucketKeyEnabled": True, "SSEKMSEncryptionContext": "e30="},
        {
            "x-amz-server-side-encryption": "aws:kms",
            "x-amz-server-side-encryption-aws-kms-key-id": KMS["SSEKMSKeyId"],
            "x-amz-server-side-encryption-bucket-key-enabled": "true",
            "x-amz-server-side-encryption-context": "e30=",
        },
    ),
    "sse-c": ({"SSECustomerKey": KEY}, headers_of(KEY)),
    "payer": ({"RequestPayer": "requester"}, {"x-amz-request-payer": "requester"}),
    "tags": (
        {"Tagging": "team=a&kind=checkpoint", "StorageClass": "STANDARD_IA", "ExpectedBucketOwner": "1" * 12},
        {
            "x-amz-tagging": "team=a&kind=checkpoint",
            "x-amz-storage-class": "STANDARD_IA",
            "x-amz-expected-bucket-owner": "1" * 12,
        },
    ),
    "lock": (
        LOCK | {"BypassGovernanceRetention": True},
        {
            "x-amz-object-lock-mode": "GOVERNANCE",
            "x-amz-object-lock-retain-until-date": "2030-01-01T00:00:00Z",
            "x-amz-bypass-governance-retention": "true",
        },
    ),
}  # fmt: skip


COS_LACKS = {"SSEKMSEncryptionContext", "BucketKeyEnabled"}
"""What ibm-cos-sdk's description of the service does not know."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_pauses_of_s3(monkeypatch)


def strict(server: StrictS3, *buckets: str) -> dict[str, Any]:
    """Give the server the policies of all these buckets; return the options that it asks for."""
    given: dict[str, Any] = {}
    needed: dict[str, str] = {}
    for bucket in buckets:
        given, needed = given | BUCKETS[bucket][0], needed | BUCKETS[bucket][1]
    server.rule = bucket_that_needs(needed)
    return {**server.options, "s3_additional_kwargs": given}


def live(server: StrictS3, options: dict[str, Any], tmp_path: Path) -> None:
    """Do all that touches a bucket."""
    root, state = "s3://bucket/run", {"w": torch.arange(1_600_000.0)}  # 6.4 MB: two parts
    with ckpt.CheckpointManager(
        root, storage_options=options, save=saving.every_steps(1), keep=keeping.last(1)
    ) as manager:  # tries the place out, and a conditional put
        for step in (1, 2):
            state["w"][0] = step
            manager.step(step, state)
    url = next(each.url for each in ckpt.list_checkpoints(root, storage_options=options))
    loaded = {"w": torch.zeros(1_600_000)}
    ckpt.load(loaded, url, storage_options=options)
    assert torch.equal(loaded["w"], state["w"])
    assert ckpt.verify(url, storage_options=options).ok
    copied = ckpt.copy(url, "s3://bucket/copy/step-2", storage_options=options)
    assert copied.sent_files == 1
    assert ckpt.remove("s3://bucket/copy/step-2", storage_options=options).data_bytes
    rows = DenseRows(0, values=torch.ones(9, 4))
    tables = Tables(TableShard("user", rows, shard=0, shards=1))
    tables.save({}, "s3://bucket/tables/step-1", storage_options=options)
    local = tmp_path / "local"
    ckpt.save(state, local / "step-7", no_dist=True, tags={"step": "7"})
    (drained,) = ckpt.drain(local, "s3://bucket/drained", storage_options=options)
    assert drained.state == "durable"
    server.uploads["dead"] = Upload("run/step-00000002/rank-00000/0123456789abcdef-0.distcp", 0.0)
    garbage = ckpt.collect_garbage(root, storage_options=options)
    assert [item.unfinished for item in garbage.items] == [True]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "buckets",
    [("sse-kms", "payer", "tags", "lock"), pytest.param(("sse-c", "payer"), marks=pytest.mark.long)],
)
def test_a_whole_life(server: StrictS3, buckets: tuple[str, ...], tmp_path: Path) -> None:
    options = strict(server, *buckets)
    live(server, options, tmp_path)
    seen = {operation_of(request) for request in server.requests}
    for header in (header for bucket in buckets for header in BUCKETS[bucket][1]):
        missing = (takes(header) or frozenset()) - seen - {"HeadBucket", "GetSetting", "ListParts"}
        assert not missing, f"{header}: the life sent no {missing}"


@pytest.mark.long
@pytest.mark.parametrize("buckets", [("sse-kms", "payer", "tags", "lock"), ("sse-c", "payer")])
def test_the_doctor(server: StrictS3, buckets: tuple[str, ...]) -> None:
    """It sends whatever a store can send, from two processes."""
    options = strict(server, *buckets)
    server.requires_checksums = False  # the doctor begins uploads without
    ran = run("doctor", "s3://bucket/run", *options_of(in_json(options)), "--second-client", "--json")
    assert ran.code == 0, ran.out + ran.err
    assert KEY.hex() not in ran.out + ran.err


def in_json(options: dict[str, Any]) -> dict[str, Any]:
    """As a command takes them: the key in base64."""
    given = {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in options["s3_additional_kwargs"].items()
    }
    return {**options, "s3_additional_kwargs": given}


class Note:
    """What remembers an upload, in memory."""

    data: bytes | None = None

    def read(self) -> bytes | None:
        return self.data

    def write(self, data: bytes) -> None:
        self.data = data

    def clear(self) -> None:
        self.data = None


@contextlib.contextmanager
def opened(scheme: str, options: dict[str, Any]) -> Iterator[Store]:
    with contextlib.closing(open_store(f"{scheme}://bucket/root", options)) as store:
        yield store


@pytest.mark.parametrize("scheme", ["s3", "cos"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_request_has_what_it_takes(server: StrictS3, scheme: str, bucket: str) -> None:
    """Also those of an upload that another process goes on with."""
    given, needed = BUCKETS[bucket]
    if scheme == "cos":
        given = {name: value for name, value in given.items() if name not in COS_LACKS}
        needed = {
            name: value for name, value in needed.items() if not name.endswith(("context", "key-enabled"))
        }
    options = {**server.options, "s3_additional_kwargs": given}
    not_known_to_ibm = {"ListMultipartUploads", "ListObjectsV2", "ListParts", "DeleteObjects"}
    policy = bucket_that_needs(needed, but=frozenset(not_known_to_ibm if scheme == "cos" else ()))
    server.rule = lambda request: (
        (500, "InternalError") if request.query.get("partNumber") == "2" else policy(request)
    )
    note = Note()
    with opened(scheme, options) as store, pytest.raises(StorageUnavailable):
        store.put_resumable("k", CheckedBody(DATA), note)
    assert note.data is not None
    assert base64.b64encode(KEY) not in note.data
    server.rule = policy
    with opened(scheme, options) as store:
        assert store.put_resumable("k", CheckedBody(DATA), note) == 5 * MIB
        put_bytes(store, "small", b"abc", mode=PutMode.CREATE)
        assert read_bytes(store, "k") == DATA
        assert {stat.key for stat in store.list()} == {"k", "small"}
        assert [*store.folders()] == []
        server.uploads["dead"] = Upload("root/x", 0.0)
        assert store.abandon() == 1
        store.delete(["k", "small"])
        store.delete(["k"])
    assert not server.objects
    assert {"ListParts", "AbortMultipartUpload", "DeleteObjects", "DeleteObject"} <= {
        request.operation for request in server.requests
    }


def test_what_a_bucket_asks_for_is_said(server: StrictS3) -> None:
    state = {"t": torch.zeros(10)}
    strict(server, "sse-kms")
    with pytest.raises(
        SaveFailed, match=r"AccessDenied.*whether the bucket asks for encryption.*s3_additional_kwargs"
    ):
        ckpt.save(state, "s3://bucket/run", storage_options=server.options)
    with opened("s3", strict(server, "sse-c")) as store:
        put_bytes(store, "k", b"abc")
    with opened("s3", server.options) as store:
        with pytest.raises(StorageError, match=r"stored with a customer's key .SSECustomerKey"):
            store.stat("k")
        with pytest.raises(StorageError, match="InvalidRequest"):
            store.read_into("k", 0, [memoryview(bytearray(1))])


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "InvalidObjectState", "archive class: restore it"),
        (400, "KMS.DisabledException", "kms:GenerateDataKey"),
        (301, "PermanentRedirect", "set region, or endpoint_url"),
        (400, "IllegalLocationConstraintException", "set region, or endpoint_url"),
        (407, "ProxyAuthenticationRequired", "the proxy asks for credentials"),
        (451, "UnavailableForLegalReasons", "under object lock"),
        (400, "ExpiredToken", "the credentials have expired: renew them"),
    ],
)
def test_refusals_say_what_to_do(server: StrictS3, status: int, code: str, advice: str) -> None:
    server.rule = lambda request: (status, code)
    with opened("s3", server.options) as store, pytest.raises(StorageError, match=advice):
        store.read_into("k", 0, [memoryview(bytearray(1))])


_DENIED = "User: arn:aws:iam::1:user/legal-nlp is not authorized to perform: s3:{} on resource: arn:aws:s3:::wormhole-runs"


@pytest.mark.parametrize(
    ("action", "status", "code", "message", "advice"),
    [
        ("put", 403, "AccessDenied", _DENIED.format("PutObjectRetention"), "grant s3:PutObjectRetention"),
        ("delete", 403, "AccessDenied", _DENIED.format("DeleteObject"), "grant s3:DeleteObject"),
        ("put", 403, "AccessDenied", _DENIED.format("PutObject") + " with an explicit deny", "asks for encryption"),
        ("put", 400, "InvalidArgument", "Illegal character in header", "in header"),
        ("put", 400, "InvalidRequest", "Bucket is missing Object Lock Configuration", "Object Lock Configuration"),
        ("delete", 403, "AccessDenied", "WORM protected", "when its retention has ended"),
        ("delete", 403, "AccessDenied", "no right to wormhole-runs", "whether the object is under object lock"),
    ],
)  # fmt: skip
def test_advice_is_of_what_failed(action: str, status: int, code: str, message: str, advice: str) -> None:
    reply = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    refusal = Refusal(ClientError(reply, "X"))
    text = refusal.message(refusal.kind(conditional=False), action, "bucket")
    assert advice in text.rpartition("; ")[2]
    assert ("its retention has ended" in text) == ("WORM protected" in text)


def test_parts_whose_etags_are_no_digests(server: StrictS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encrypted with a key of one's own: without checksums nothing tells which they are, and they are sent again."""
    monkeypatch.setattr(
        "support.strict_s3._etag", lambda data: f'"{hashlib.md5(b"salt" + data).hexdigest()}"'
    )
    server.requires_checksums = False
    options = {**server.options, "checksum": "none", "s3_additional_kwargs": {"SSECustomerKey": KEY}}
    server.rule = lambda request: (500, "InternalError") if request.query.get("partNumber") == "2" else "pass"
    note = Note()
    with opened("s3", options) as store:
        with pytest.raises(StorageUnavailable):
            store.put_resumable("k", CheckedBody(DATA), note)
        server.rule = lambda request: "pass"
        assert store.put_resumable("k", CheckedBody(DATA), note) == 0
        assert read_bytes(store, "k") == DATA
    assert len(server.sent("CreateMultipartUpload")) == 1
    assert not server.sent("AbortMultipartUpload")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"ServerSideEncrytion": "AES256"},
            "no request takes 'ServerSideEncrytion' .did you mean ServerSideEncryption",
        ),
        ({"Body": b""}, "Body is set by the library itself"),
        ({"ChecksumAlgorithm": "CRC32"}, "ChecksumAlgorithm is set by the library itself"),
        ({"SSECustomerKey": "too-short-a-secret"}, "must be 32 bytes, as bytes or in base64"),
        ({"SSECustomerKey": 7}, "must be 32 bytes"),
        ({"SSECustomerAlgorithm": "AES256"}, "SSECustomerAlgorithm needs SSECustomerKey"),
        (LOCK, "only with a checksum"),
        ({"ObjectLockMode": "GOVERNANCE"}, "ObjectLockMode needs ObjectLockRetainUntilDate"),
        ({"SSEKMSKeyId": "key/2"}, "SSEKMSKeyId needs ServerSideEncryption"),
        ({"Tagging": {"team": "a"}}, "Tagging must be a text like 'team=a&kind=checkpoint'"),
    ],
)
def test_what_cannot_be_sent_is_refused(server: StrictS3, given: dict[str, Any], text: str) -> None:
    checksum = "none" if given is LOCK else "crc64nvme"
    options = {**server.options, "s3_additional_kwargs": given, "checksum": checksum}
    with pytest.raises(ConfigurationError, match=text) as caught, opened("s3", options) as store:
        store.stat("k")
    assert "too-short-a-secret" not in str(caught.value)
    assert not server.requests


@pytest.mark.parametrize(
    "form", [KEY, base64.b64encode(KEY).decode(), bytearray(KEY)], ids=["", "base64", "array"]
)
def test_forms_of_a_customers_key(server: StrictS3, form: Any) -> None:
    server.rule = bucket_that_needs(headers_of(KEY) | {"x-amz-request-payer": "requester"})
    given = {"SSECustomerKey": form, "SSECustomerKeyMD5": "of another key", "SSECustomerAlgorithm": "AES256"}
    with opened("s3", {**server.options, "s3_additional_kwargs": given, "requester_pays": True}) as store:
        put_bytes(store, "k", b"abc")
        assert read_bytes(store, "k") == b"abc"


def test_a_key_on_a_plain_connection_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    options = {"endpoint_url": "http://s3.invalid", "key": "k", "secret": "s", "max_attempts": 1}
    given = {"s3_additional_kwargs": {"SSECustomerKey": KEY}}
    with opened("s3", options | given) as store, pytest.raises(StorageUnavailable):
        store.stat("k")
    assert "is sent unencrypted: use https" in caplog.text


def test_key_protect_is_a_matter_of_the_bucket(server: StrictS3) -> None:
    """A bucket is made with its root key; its objects then need nothing."""
    import ibm_boto3

    server.requires_checksums = False
    client = ibm_boto3.client(
        "s3", endpoint_url=server.endpoint_url, aws_access_key_id="k", aws_secret_access_key="s"
    )
    root_key = "crn:v1:bluemix:public:kms:us-south:a/1:2:key:3"
    client.create_bucket(
        Bucket="bucket", IBMSSEKPEncryptionAlgorithm="AES256", IBMSSEKPCustomerRootKeyCrn=root_key
    )
    made = server.requests[-1].headers
    assert made["ibm-sse-kp-customer-root-key-crn"] == root_key
    assert made["ibm-sse-kp-encryption-algorithm"] == "AES256"
    server.objects.clear()
    with opened("cos", server.options) as store:
        store.put("k", CheckedBody(DATA))
        assert read_bytes(store, "k") == DATA
    assert not [
        h for request in server.requests[1:] for h in request.headers if "sse" in h or "encryption" in h
    ]


# -- object lock ---------------------------------------------------------------------------------------


def locks(prefix: str) -> Any:
    """Refuse to delete what is below a prefix, as MinIO, COS and a deny policy do."""

    def rule(request: Request) -> str | tuple[int, str]:
        if request.operation == "DeleteObjects":
            return 501, "NotImplemented"
        is_locked = request.operation == "DeleteObject" and request.name.startswith(prefix)
        return (403, "AccessDenied") if is_locked else "pass"

    return rule


def test_gc_passes_over_what_is_locked(server: StrictS3) -> None:
    for step in (1, 2):
        ckpt.save({"t": torch.zeros(10)}, f"s3://bucket/run/step-{step}", storage_options=server.options)
        del server.objects[f"run/step-{step}/commit.json"]
    server.dates_s = dict.fromkeys(server.dates_s, 0.0)
    before = {name for name in server.objects if name.startswith("run/step-1/")}
    server.rule = locks("run/step-1/")
    ran = run("gc", "s3://bucket/run", *options_of(server.options))
    assert ran.code == 0
    assert "skipped step-1: some of it may not be deleted" in " ".join(ran.out.split())
    assert "object lock" in ran.out
    assert {name for name in server.objects if "/rank-" in name} == {n for n in before if "/rank-" in n}


def test_retention_goes_on_where_one_is_locked(server: StrictS3, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint whose commit record is locked stays whole; others go, and leave old versions, which is said."""
    server.rule, server.keeps_versions = locks("run/step-00000001/"), True
    state = {"w": torch.zeros(10)}
    with ckpt.CheckpointManager(
        "s3://bucket/run", storage_options=server.options, save=saving.every_steps(1), keep=keeping.last(1)
    ) as manager:
        for step in (1, 2, 3):
            state["w"][0] = step
            manager.step(step, state)
    left = [found.path for found in ckpt.list_checkpoints("s3://bucket/run", storage_options=server.options)]
    assert left == ["step-00000001", "step-00000003"]
    assert ckpt.verify("s3://bucket/run/step-00000001", storage_options=server.options).ok
    assert "object lock" in caplog.text
    assert caplog.text.count("NoncurrentVersionExpiration") == 1
    ran = run("rm", "s3://bucket/run/step-00000003", "--yes", *options_of(server.options))
    assert "the bucket keeps old versions" in ran.out
