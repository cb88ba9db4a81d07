"""Parts and ranges that are sent like one that the SDK has sent."""

from __future__ import annotations

import random
import secrets
import ssl
import string
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import botocore.session
import ibm_botocore.session
import pytest
from support.clock import skip_pauses_of_s3
from support.forward_proxy import certificate
from support.proxy import Call, FaultProxy
from support.strict_s3 import StrictS3, strict_s3
from urllib3 import HTTPResponse

from ckpt.backends.base import MIB, Store, put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.backends.s3_protocol import repeated_requests
from ckpt.backends.s3_protocol.options import new_session
from ckpt.backends.s3_protocol.repeated_requests import _derived_key, _Form, signed_headers
from ckpt.errors import NotFound, Truncated
from ckpt.testing import CheckedBody

DATA = secrets.token_bytes(33 * MIB + 5)  # seven parts
NAMES = string.ascii_letters + string.digits + " /+=&%?#~-_.!*'()äß漢"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_pauses_of_s3(monkeypatch)


class Sent:
    """A store of one thread, and the requests that its SDK sends."""

    def __init__(self, proxy: FaultProxy, scheme: str = "s3", **options: Any) -> None:
        settings = {**proxy.options, "part_size_bytes": 5 * MIB, **options}
        self.store: Store = open_store(f"{scheme}://bucket/root", settings, threads=1)
        self.by_sdk: list[str] = []
        client = self.store._s3.client  # type: ignore[attr-defined]
        client.meta.events.register("before-send.s3", self._note)

    def _note(self, event_name: str, **_: Any) -> None:
        self.by_sdk.append(event_name.rpartition(".")[2])


@pytest.fixture(params=["s3", "cos"])
def sent(request: pytest.FixtureRequest, proxy: FaultProxy) -> Iterator[Sent]:
    sent = Sent(proxy, request.param)
    yield sent
    sent.store.close()


def parts_of(proxy: FaultProxy) -> int:
    return sum(call.is_part for call in proxy.calls)


@pytest.mark.slow
def test_the_sdk_sends_none_but_the_first(proxy: FaultProxy, sent: Sent) -> None:
    sent.store.put("a/first ü+1", CheckedBody(DATA))
    sent.store.put("second", CheckedBody(DATA))
    assert parts_of(proxy) == 14
    assert sent.by_sdk.count("UploadPart") == 0  # what began the upload was its form
    for key in ("a/first ü+1", "second", "second"):
        assert read_bytes(sent.store, key) == DATA
    assert sent.by_sdk.count("GetObject") == 1
    assert sent.store.retries == 0


def test_a_signature_is_that_of_the_sdk() -> None:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import ReadOnlyCredentials

    chosen = random.Random(7)

    class AtThatMoment(S3SigV4Auth):  # type: ignore[misc]
        def add_auth(self, request: Any) -> None:
            request.context["timestamp"] = stamp
            self._modify_request_before_signing(request)
            text = self.string_to_sign(request, self.canonical_request(request))
            self._inject_signature_to_request(request, self.signature(text, request))

    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(1_790_000_000))
    for _ in range(300):
        token = chosen.choice(["", "token+/="])
        keys = ReadOnlyCredentials("AK" + chosen.choice(NAMES[:9]), "secret" + chosen.choice(NAMES), token)
        path = "/bucket/" + quote("".join(chosen.choices(NAMES, k=20)), safe="/~")
        upload = quote("".join(chosen.choices(NAMES, k=9)), safe="-_.~")
        query = chosen.choice(["", f"partNumber={chosen.randrange(1, 10_000)}&uploadId={upload}"])
        common = {"x-amz-content-sha256": "UNSIGNED-PAYLOAD", "user-agent": "a  b", "x-amz-meta-x": " a   b "}
        own = {"range": f"bytes={chosen.randrange(99)}-99", "content-length": "5", "if-match": '"e"'}
        form = _Form("host.invalid:9000", "/bucket", common, True, ("eu-west-1", "s3"), None)
        request = AWSRequest("PUT", f"http://host.invalid:9000{path}{query and '?'}{query}")
        for header, value in {**common, **own}.items():
            if header != "content-length":
                request.headers[header] = value
        request.headers["X-Amz-Date"] = stamp
        if token:
            request.headers["X-Amz-Security-Token"] = token
        request.context["client_config"] = SimpleNamespace(s3={"payload_signing_enabled": False})
        AtThatMoment(keys, "s3", "eu-west-1").add_auth(request)
        key = _derived_key(keys.secret_key, stamp[:8], "eu-west-1", "s3")
        signed = signed_headers(form, "PUT", path, query, own, keys, stamp, key)
        assert signed["authorization"] == request.headers["Authorization"]
        assert signed.get("x-amz-security-token", "") == token


@pytest.mark.parametrize("action", [500, 403, "reset", "lose"])
def test_a_failure_is_left_to_the_sdk(proxy: FaultProxy, sent: Sent, action: str | int) -> None:
    once = iter([action])

    def rule(call: Call) -> str | int:
        return next(once, "pass") if "partNumber=3&" in call.target else "pass"

    proxy.rule = rule
    sent.store.put("k", CheckedBody(DATA))
    assert sent.by_sdk.count("UploadPart") == 5  # the third again, and those in the pause after it
    assert sent.store.retries == 1
    assert read_bytes(sent.store, "k") == DATA


def test_a_reply_that_breaks_off_is_read_on(proxy: FaultProxy, sent: Sent) -> None:
    put_bytes(sent.store, "k", DATA[: 6 * MIB])
    assert read_bytes(sent.store, "k") == DATA[: 6 * MIB]
    once = iter(["cut"])
    proxy.rule = lambda call: next(once, "pass") if call.method == "GET" else "pass"
    assert read_bytes(sent.store, "k") == DATA[: 6 * MIB]
    assert sent.by_sdk.count("GetObject") == 1
    assert sent.store.retries == 1


def test_answers_are_those_of_the_sdk(sent: Sent) -> None:
    put_bytes(sent.store, "k", b"0123456789")
    buffer = memoryview(bytearray(4))
    sent.store.read_into("k", 2, [buffer])
    assert buffer.tobytes() == b"2345"
    with pytest.raises(Truncated, match="ends before byte 24"):
        sent.store.read_into("k", 20, [buffer])
    with pytest.raises(Truncated, match="ends at byte 10"):
        sent.store.read_into("k", 8, [buffer])
    assert sent.store.retries == 0


def test_a_missing_object_teaches_as_much_as_any(sent: Sent) -> None:
    for _ in range(3):
        with pytest.raises(NotFound):
            read_bytes(sent.store, "nothing")
    put_bytes(sent.store, "k", b"0123456789")
    assert read_bytes(sent.store, "k") == b"0123456789"
    assert sent.by_sdk.count("GetObject") == 1
    assert sent.store.retries == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 1},
        {"config_kwargs": {"retries": {"mode": "adaptive"}}},
        {"key": None, "secret": None, "anon": True},
        {"config_kwargs": {"s3": {"payload_signing_enabled": True}}},
        {"config_kwargs": {"request_checksum_calculation": "when_supported"}, "checksum": "none"},
    ],
    ids=["one attempt", "a rate that adapts", "anonymous", "signed bodies", "the SDK's checksums"],
)
def test_what_is_unusual_is_left_to_the_sdk(
    server: StrictS3, proxy: FaultProxy, options: dict[str, Any]
) -> None:
    server.requires_checksums = options.get("checksum") != "none"
    sent = Sent(proxy, **options)
    sent.store.put("k", CheckedBody(DATA))
    assert sent.by_sdk.count("UploadPart") == 7
    assert read_bytes(sent.store, "k") == DATA
    sent.store.close()


@pytest.mark.parametrize(
    "options",
    [
        {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
        {"s3_additional_kwargs": {"ExpectedBucketOwner": "0" * 12}},
        {"requester_pays": True},
        {"checksum": "none"},
    ],
    ids=["encryption", "an owner", "who pays", "no checksums"],
)
def test_where_an_upload_says_more_the_first_part_is_the_form(
    server: StrictS3, proxy: FaultProxy, options: dict[str, Any]
) -> None:
    server.requires_checksums = options.get("checksum") != "none"
    sent = Sent(proxy, **options)
    sent.store.put("k", CheckedBody(DATA))
    assert sent.by_sdk.count("UploadPart") == 1
    assert read_bytes(sent.store, "k") == DATA
    assert sent.store.retries == 0
    sent.store.close()


@pytest.mark.parametrize("sdk", [botocore.session, ibm_botocore.session], ids=["botocore", "ibm"])
def test_a_handler_is_of_one_session(sdk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = new_session(sdk), new_session(sdk)
    assert one.get_component("data_loader") is other.get_component("data_loader")
    one.register("an.event", lambda **_: "heard")
    assert [reply for _, reply in one.emit("an.event")] == ["heard"]
    assert other.emit("an.event") == []
    assert new_session(sdk).emit("an.event") == []
    plain = sdk.get_session()
    for event in ("before-parameter-build.s3.PutObject", "needs-retry.s3.PutObject", "choose-signer.s3"):
        has = [
            each.get_component("event_emitter")._emitter._handlers.prefix_search(event)
            for each in (other, plain)
        ]
        assert has[0] == has[1]
    # As moto does when it is imported.
    more = [*sdk.handlers.BUILTIN_HANDLERS, ("an.event", lambda **_: "heard")]
    monkeypatch.setattr(sdk.handlers, "BUILTIN_HANDLERS", more)
    assert [reply for _, reply in new_session(sdk).emit("an.event")] == ["heard"]


def test_an_sdk_of_another_make_sends_all_itself(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(self: Any, request: Any, name: str) -> None:
        raise AttributeError("_proxy_config")

    monkeypatch.setattr(repeated_requests.RepeatedRequests, "_form_of", unknown)
    sent = Sent(proxy)
    sent.store.put("k", CheckedBody(DATA))
    assert sent.by_sdk.count("UploadPart") == 7
    sent.store.close()
    s3 = sent.store._s3  # type: ignore[attr-defined]
    assert repeated_requests.RepeatedRequests(SimpleNamespace(), s3.retries, s3.secrets)._forms == {}


def test_connections_of_its_own_trust_as_the_sdk_does(tmp_path: Path) -> None:
    tls, trusted = certificate(tmp_path)
    with strict_s3(tls=tls) as server:
        options = {**server.options, "part_size_bytes": 5 * MIB, "client_kwargs": {"verify": str(trusted)}}
        store = open_store("s3://bucket/root", options, threads=1)
        store.put("k", CheckedBody(DATA))
        repeated = store._s3.repeated  # type: ignore[attr-defined]
        pool = repeated._forms["UploadPart"].pool
        pool._get_conn().close()  # none is left but a new one
        store.put("k", CheckedBody(DATA))
        connection = pool._get_conn()
        assert connection.is_verified
        assert connection.sock.context.verify_mode is ssl.CERT_REQUIRED
        connection.close()
        store.close()


def test_a_port_that_need_not_be_named_is_not_signed(sent: Sent) -> None:
    repeated = sent.store._s3.repeated  # type: ignore[attr-defined]
    keys = repeated._signer._credentials.get_frozen_credentials()
    signature = f"AWS4-HMAC-SHA256 Credential={keys.access_key}/20261126/r/s3/aws4_request, x"
    for url, host in (
        ("https://MinIO.example:443/b/k", "minio.example"),
        ("http://minio.example:9000/b/k", "minio.example:9000"),
        ("http://[::1]:80/b/k", "[::1]"),
    ):
        request = SimpleNamespace(url=url, method="GET", headers={"Authorization": signature})
        assert repeated._form_of(request, "k").host == host
        other = SimpleNamespace(
            url=url, method="GET", headers={"Authorization": signature.replace("=", "=X")}
        )
        assert repeated._form_of(other, "k") is None


def test_a_server_that_is_not_one_teaches_nothing(sent: Sent) -> None:
    """moto's `mock_aws`, for one, answers for the network: what followed would go to a real server."""
    repeated = sent.store._s3.repeated  # type: ignore[attr-defined]
    for status, raw, learned in (
        (200, BytesIO(), False),
        (301, HTTPResponse(), False),
        (403, HTTPResponse(), False),
        (404, HTTPResponse(), True),
        (206, HTTPResponse(), True),
    ):
        repeated._own.form = form = object()
        repeated._learn("GetObject", (SimpleNamespace(status_code=status, raw=raw), {}))
        assert (repeated._forms.pop("GetObject", None) is form) is learned


def test_pauses_grow_until_a_try_succeeds(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = sent.store._s3.repeated  # type: ignore[attr-defined]
    now_s = 1000.0
    monkeypatch.setattr(repeated_requests, "time", SimpleNamespace(monotonic=lambda: now_s))
    for pause_s in (10, 20, 40):
        assert repeated._may_try(now_s)
        repeated._pause()
        repeated._pause()  # another thread's, which began before
        repeated._go_on(now_s - 1)  # of one that began before, too
        now_s += pause_s - 1
        assert not repeated._may_try(now_s)
        now_s += 2
    assert [repeated._may_try(now_s) for _ in range(3)] == [True, False, False]  # one thread tries
    repeated._go_on(now_s)
    assert all(repeated._may_try(now_s) for _ in range(3))
