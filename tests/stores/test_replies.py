"""What comes behind, before or in the place of a reply of S3 is not taken for the answer to a request."""

from __future__ import annotations

import contextlib
import secrets
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock import skip_pauses_of_s3
from support.forward_proxy import certificate
from support.http_core import Handler, http_server
from support.strict_s3 import FALSE, INTERIM, MORE, Action, Request, StrictS3, strict_s3

import ckpt
from ckpt.backends.base import MIB, PutMode, Store, put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import (
    AccessDenied,
    IntegrityError,
    NotCommitted,
    NotFound,
    SaveFailed,
    StorageError,
    StorageUnavailable,
)
from ckpt.testing import CheckedBody

DATA = secrets.token_bytes(13 * MIB + 5)
NAME = "root/k"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_pauses_of_s3(monkeypatch)


@pytest.fixture(params=["http", "https"])
def open_one(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[StrictS3, Store]]:
    """A server, and a store there that has one connection."""
    context = None
    more = {}
    if request.param == "https":
        context, trusted = certificate(tmp_path)
        context.maximum_version = ssl.TLSVersion.TLSv1_3
        more = {"client_kwargs": {"verify": str(trusted)}}
    with strict_s3(tls=context) as server:
        store = open_store("s3://bucket/root", {**server.options, **more}, threads=1)
        yield server, store
        store.close()


def on(operation: str, *actions: Action) -> Callable[[Request], Action]:
    """A rule: the n-th request of this operation meets the n-th action, later ones the last."""
    left = list(actions)

    def rule(request: Request) -> Action:
        if request.operation != operation:
            return "pass"
        return left.pop(0) if len(left) > 1 else left[0]

    return rule


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 700, 20_000, 101_554])
def test_a_reply_behind_a_reply_is_for_nobody(open_one: tuple[StrictS3, Store], size: int) -> None:
    server, store = open_one
    server.objects = {NAME: DATA, "root/small": b"the right content"}
    for _ in range(4):  # by the SDK, and without it
        for operation, act in _requests(store, size).items():
            server.rule = on(operation, "more")
            act()
            server.rule = lambda request: "pass"
            assert read_bytes(store, "small") == b"the right content"


def _requests(store: Store, size: int) -> dict[str, Callable[[], object]]:
    target = bytearray(size)

    def read() -> None:
        store.read_into("k", 0, [memoryview(target)])
        assert target == DATA[:size]

    return {
        "GetObject": read,
        "HeadObject": lambda: store.stat("k"),
        "PutObject": lambda: put_bytes(store, "other", b"x"),
        "UploadPart": lambda: store.put("large", CheckedBody(DATA)),
        "CompleteMultipartUpload": lambda: store.put("large", CheckedBody(DATA)),
        "DeleteObject": lambda: store.delete(["other"]),
    }


def test_interim_replies_are_no_answers(open_one: tuple[StrictS3, Store]) -> None:
    server, store = open_one
    server.rule = lambda request: "interim"
    for _ in range(2):
        put_bytes(store, "small", b"abc")
        store.put("k", CheckedBody(DATA))
        assert read_bytes(store, "small") == b"abc"
        assert read_bytes(store, "k") == DATA
        assert store.stat("k").size_bytes == len(DATA)
    with pytest.raises(NotFound):
        read_bytes(store, "nothing")


def test_connections_are_kept_over_tls(open_one: tuple[StrictS3, Store]) -> None:
    server, store = open_one
    store.put("k", CheckedBody(DATA))
    for start in range(0, 10 * MIB, MIB + 7):
        target = bytearray(1000)
        store.read_into("k", start, [memoryview(target)])
        assert target == DATA[start : start + 1000]
        store.stat("k")
    assert len({request.connection for request in server.requests}) == 1


@pytest.mark.parametrize("action", ["page", "error"])
def test_a_part_that_is_answered_with_a_document_is_sent_again(
    server: StrictS3, store: Store, action: str
) -> None:
    server.rule = on("UploadPart", "pass", action, "pass")
    store.put("k", CheckedBody(DATA))
    assert server.objects[NAME] == DATA
    assert not server.uploads


@pytest.mark.parametrize("action", ["forget", "empty", "page", "error"])
def test_a_completion_that_is_acknowledged_and_not_done(server: StrictS3, store: Store, action: str) -> None:
    server.rule = on("CompleteMultipartUpload", action)
    kind = IntegrityError if action == "forget" else StorageUnavailable
    with pytest.raises(kind):
        store.put("k", CheckedBody(DATA))
    assert not server.objects
    assert not server.uploads
    server.rule = on("CompleteMultipartUpload", action, "pass")
    if action != "forget":
        store.put("k", CheckedBody(DATA))
        assert server.objects[NAME] == DATA


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("mode", list(PutMode))
@pytest.mark.parametrize("action", ["done", "lose"])
def test_a_completion_that_is_done_and_an_error(
    server: StrictS3, action: str, mode: PutMode, checksums: bool
) -> None:
    """Also where the server says nothing of the content but its size: it is read then."""
    server.requires_checksums = checksums
    options = {**server.options, "checksum": "crc64nvme" if checksums else "none"}
    with contextlib.closing(open_store("s3://bucket/root", options)) as store:
        server.rule = on("CompleteMultipartUpload", action, (500, "InternalError"))
        store.put("k", CheckedBody(DATA), mode=mode)
        assert server.objects[NAME] == DATA
        assert len(server.sent("CreateMultipartUpload")) == 1
        if not checksums:  # another object of that size
            server.rule = lambda request: (
                _replace(server) if request.operation == "CompleteMultipartUpload" else "pass"
            )
            with pytest.raises(StorageError):
                store.put("k", CheckedBody(DATA), mode=PutMode.OVERWRITE)
    assert not server.uploads


def _replace(server: StrictS3) -> Action:
    server.objects[NAME] = DATA[:-1] + bytes([DATA[-1] ^ 1])
    return 500, "InternalError"


@pytest.mark.parametrize("action", ["lose", "empty", "page"])
def test_no_upload_stays_where_none_could_be_begun(server: StrictS3, store: Store, action: str) -> None:
    server.rule = on("CreateMultipartUpload", "lose", action)
    with pytest.raises(StorageUnavailable):
        store.put("k", CheckedBody(DATA))
    assert not server.uploads


@pytest.mark.parametrize("action", ["page", "empty", "error"])
def test_a_listing_that_is_none_is_no_empty_listing(server: StrictS3, store: Store, action: str) -> None:
    server.objects = {NAME: b"x"}
    server.rule = on("GetObject", action)
    with pytest.raises(StorageUnavailable, match=r"answer|error under the status 200|InternalError"):
        list(store.list())
    server.rule = on("DeleteObjects", action)
    server.objects["root/j"] = b"x"
    with pytest.raises(StorageUnavailable):
        store.delete(["j", "k"])


def test_a_put_that_a_proxy_answers(server: StrictS3, store: Store) -> None:
    server.rule = on("PutObject", "bare")
    put_bytes(store, "k", b"x")
    assert server.objects[NAME] == b"x"

    def bare(request: Request) -> Action:
        server.objects.pop(NAME, None)
        return "bare" if request.operation == "PutObject" else "pass"

    server.rule = bare
    with pytest.raises(IntegrityError, match="acknowledged"):
        put_bytes(store, "k", b"x")


@pytest.mark.parametrize("action", ["forget", "done"])
def test_a_commit_record_is_read_back(server: StrictS3, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.consistency.commit._CONFIRM_TIMEOUT_S", 0.5)
    server.requires_checksums = False
    options = server.options
    state = {"w": torch.arange(5.0)}

    def rule(request: Request) -> Action:
        is_commit = request.operation == "PutObject" and request.name.endswith("commit.json")
        return action if is_commit else "pass"

    server.rule = rule
    save: dict[str, Any] = {"storage_options": options, "no_dist": True}
    if action == "done":
        ckpt.save(state, "s3://bucket/c", **save)
    else:
        with pytest.raises(SaveFailed, match=r"acknowledged the commit record, and does not show it"):
            ckpt.save(state, "s3://bucket/c", **save)
    server.rule = lambda request: "pass"
    found = {"w": torch.zeros(5)}
    if action == "done":
        ckpt.load(found, "s3://bucket/c", **save)
        assert torch.equal(found["w"], state["w"])
    else:
        with pytest.raises((NotCommitted, NotFound)):
            ckpt.load(found, "s3://bucket/c", **save)
    assert FALSE not in server.objects.values()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_redirect_leads_out_of_tls(tmp_path: Path, status: int) -> None:
    """Neither the data nor the credentials go to where a reply says."""
    context, trusted = certificate(tmp_path)
    with strict_s3() as plain, strict_s3(tls=context) as server:
        more = {"client_kwargs": {"verify": str(trusted)}}
        with contextlib.closing(open_store("s3://bucket/root", {**server.options, **more})) as store:
            put_bytes(store, "small", b"abc")
            assert read_bytes(store, "small") == b"abc"  # from now on requests go without the SDK too
            to = {"location": f"{plain.endpoint_url}/bucket/root/small"}
            server.rule = lambda request: (status, "TemporaryRedirect", to)
            for act in _requests(store, 5).values():
                with pytest.raises(StorageError):
                    act()
        assert not plain.requests


class _Refusing(Handler):
    """Refuses a body before it is sent, and sends one reply more."""

    def handle_expect_100(self) -> bool:
        self.answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>", around=(INTERIM, MORE))
        return False

    def serve(self) -> None:
        self.rfile.read(self.length)
        data = b"the right content"
        self.answer(206, {"content-range": f"bytes 0-{len(data) - 1}/{len(data)}", "etag": '"right"'}, data)


def test_a_refusal_before_the_body_ends_the_connection() -> None:
    with http_server(_Refusing) as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s", "max_attempts": 2}
        with contextlib.closing(open_store("s3://bucket/root", options, threads=1)) as store:
            for _ in range(3):
                with pytest.raises(AccessDenied):
                    put_bytes(store, "k", b"x" * 100_000)
                assert read_bytes(store, "small") == b"the right content"
