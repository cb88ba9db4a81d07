"""Servers that refuse CRC64NVME: Content-MD5 goes with the bytes instead, so that damage on the way is still refused."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.commands import options_of, run
from support.proxy import Call, FaultProxy
from support.strict_s3 import Request, StrictS3

import ckpt
from ckpt.backends.base import MIB, PutMode, Store, put_bytes, read_bytes
from ckpt.backends.bodies import BytesBody, Part
from ckpt.backends.registry import open_store
from ckpt.backends.s3_protocol.sent_checksums import checksum_of
from ckpt.errors import AlreadyExists, SaveFailed, StorageError
from ckpt.testing import CheckedBody

REFUSALS = [(400, "InvalidArgument"), (400, "InvalidRequest"), (501, "NotImplemented")]
DATA = secrets.token_bytes(6 * MIB)


def refuse(server: StrictS3, status: int = 400, code: str = "InvalidArgument", *, md5: bool = False) -> None:
    """Have the server refuse each request that has a header of a checksum."""
    server.requires_checksums = False

    def rule(request: Request) -> str | tuple[int, str]:
        is_md5 = md5 and "content-md5" in request.headers
        has_checksum = any(
            name.startswith(("x-amz-checksum", "x-amz-sdk-checksum")) for name in request.headers
        )
        return (status, code) if has_checksum or is_md5 else "pass"

    server.rule = rule


@contextlib.contextmanager
def opened(scheme: str, server: Any, **more: Any) -> Iterator[Store]:
    options = {**server.options, "part_size_bytes": 5 * MIB, **more}
    with contextlib.closing(open_store(f"{scheme}://bucket/root", options)) as store:
        yield store


@pytest.mark.parametrize("scheme", ["s3", pytest.param("cos", marks=pytest.mark.server)])
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(("status", "code"), REFUSALS)
def test_the_store_finds_out_once(
    server: StrictS3, caplog: pytest.LogCaptureFixture, scheme: str, in_parts: bool, status: int, code: str
) -> None:
    """Whatever it puts first; a second store knows it."""
    refuse(server, status, code)
    body = CheckedBody(DATA if in_parts else DATA[:MIB])
    for number in range(2):
        with opened(scheme, server) as store, caplog.at_level(logging.WARNING, "ckpt"):
            store.put(f"k{number}", body, mode=PutMode.CREATE)
            put_bytes(store, f"small{number}", b"x")
            with pytest.raises(AlreadyExists):
                put_bytes(store, f"small{number}", b"x", mode=PutMode.CREATE)
            assert read_bytes(store, f"k{number}") == bytes(body._view)
            raw = store.raw_requests()
            assert raw is not None
            assert raw.checksum == "md5"
    sent = [request for request in server.requests if request.operation in ("PutObject", "UploadPart")]
    refused = [request for request in server.requests if server.rule(request) != "pass"]
    assert len(refused) == 1
    assert all("content-md5" in request.headers for request in sent if request not in refused)
    (line,) = caplog.messages
    assert 'checksum="md5"' in line
    assert code in line


def test_a_server_that_refuses_only_the_parts(server: StrictS3) -> None:
    refuse(server)
    rule = server.rule
    server.rule = lambda request: "pass" if request.operation == "CreateMultipartUpload" else rule(request)
    with opened("s3", server) as store:
        store.put("k", CheckedBody(DATA))
        assert read_bytes(store, "k") == DATA
    assert not server.uploads


def test_damage_on_the_way_is_still_refused(server: StrictS3, proxy: FaultProxy) -> None:
    """It is what the checksum of a request is for; and it is not taken for a refusal of the checksum."""
    refuse(server)
    place = "s3://bucket/run"
    ckpt.save({"t": torch.ones(9)}, f"{place}/step-1", storage_options=proxy.options)

    def damage(call: Call) -> str:
        return "damage unseen" if call.method == "PUT" and call.key.endswith(".distcp") else "pass"

    proxy.rule = damage
    for step in (2, 3):
        with pytest.raises(SaveFailed, match="BadDigest"):
            ckpt.save({"t": torch.ones(9)}, f"{place}/step-{step}", storage_options=proxy.options)
        server.rule = lambda request: "pass"


def test_bytes_that_changed_are_not_sent() -> None:
    with CheckedBody(b"abc").part(0, 3) as part:
        changed = Part([memoryview(b"abd")], part.crc64nvme)
    assert checksum_of(part, "md5") == {"ContentMD5": "kAFQmDzST7DWlj99KOF/cg=="}
    with pytest.raises(StorageError, match="changed after their checksum"):
        checksum_of(changed, "md5")
    with BytesBody(b"abc").part(0, 3) as plain:
        assert checksum_of(plain, "md5") == {}


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented")])
def test_a_server_that_takes_no_checksum(server: StrictS3, status: int, code: str) -> None:
    """Nothing would find damage on the way: that is the user's choice."""
    refuse(server, status, code, md5=True)
    with opened("s3", server) as store, pytest.raises(StorageError, match='storage option checksum="none"'):
        put_bytes(store, "k", b"x")
    with opened("s3", server, checksum="none") as store:
        put_bytes(store, "k", b"x")


def test_a_refusal_for_another_reason(server: StrictS3) -> None:
    server.rule = lambda request: (400, "InvalidRequest")
    with opened("s3", server) as store:
        with pytest.raises(StorageError, match="cannot put: InvalidRequest") as caught:
            put_bytes(store, "k", b"x")
        assert caught.value.settled
        raw = store.raw_requests()
        assert raw is not None
        assert raw.checksum == "crc64nvme"
        server.rule = lambda request: "pass"
        put_bytes(store, "k", b"x")  # which this server wants with CRC64NVME


def test_the_doctor_names_the_option(server: StrictS3) -> None:
    refuse(server)
    done = run("doctor", "s3://bucket/doctor", *options_of(server.options))
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "Content-MD5 is sent instead, and verified" in said
    assert 'storage option checksum="md5"' in said
