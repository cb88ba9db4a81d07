"""The S3 store when the network or the server fails, over real sockets."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.clock import skip_pauses_of_s3
from support.proxy import Call, FaultProxy, fault_proxy
from support.servers import S3Server

import ckpt
from ckpt.backends.base import MIB, PutMode, Store, exists, put_bytes, read_bytes
from ckpt.backends.bodies import BytesBody
from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied, AlreadyExists, NotFound, SaveFailed, StorageUnavailable
from ckpt.writing.writer import SaveMeta

DATA = secrets.token_bytes(13 * MIB + 5)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_pauses_of_s3(monkeypatch)


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(s3) as proxy:
        yield proxy


@pytest.fixture(params=["s3", "cos"])
def store(request: pytest.FixtureRequest, proxy: FaultProxy) -> Iterator[Store]:
    bucket = proxy.server.new_bucket()
    options = {**proxy.options, "part_size_bytes": 5 * MIB}
    store = open_store(f"{request.param}://{bucket}/root", options, threads=3)
    yield store
    store.close()


def pending(store: Store, s3: S3Server) -> int:
    return len(s3.client().list_multipart_uploads(Bucket=store.url.split("/")[2]).get("Uploads", ()))


class Nth:
    """Do `action` with the n-th call that `applies`, and with `count` in all."""

    def __init__(self, action: Any, applies: Any, n: int = 1, count: int = 1) -> None:
        self.action, self.applies, self.first, self.last, self.seen = action, applies, n, n + count, 0

    def __call__(self, call: Call) -> str | int:
        if not self.applies(call):
            return "pass"
        self.seen += 1
        return self.action if self.first <= self.seen < self.last else "pass"


@pytest.mark.parametrize("action", [500, 503, "reset", "lose"])
@pytest.mark.parametrize("applies", ["is_part", "is_complete"])
def test_one_failure_is_survived(
    proxy: FaultProxy, store: Store, s3: S3Server, action: str | int, applies: str
) -> None:
    proxy.rule = Nth(action, lambda call: getattr(call, applies))
    store.put("k", BytesBody(DATA))
    assert store.retries == 1
    assert read_bytes(store, "k") == DATA
    assert pending(store, s3) == 0


@pytest.mark.parametrize("action", [500, 503, 403, "reset"])
@pytest.mark.parametrize("applies", ["is_part", "is_complete"])
def test_a_storm_leaves_nothing(
    proxy: FaultProxy, store: Store, s3: S3Server, action: str | int, applies: str
) -> None:
    proxy.rule = Nth(
        action, lambda call: getattr(call, applies), n=2 if applies == "is_part" else 1, count=10**6
    )
    expected = AccessDenied if action == 403 else StorageUnavailable
    with pytest.raises(expected) as caught:
        store.put("k", BytesBody(DATA))
    assert caught.value.key == "k"
    proxy.rule = lambda call: "pass"
    assert not exists(store, "k")
    assert pending(store, s3) == 0


def test_an_upload_the_server_forgot_is_begun_anew(proxy: FaultProxy, store: Store, s3: S3Server) -> None:
    proxy.rule = Nth(404, lambda call: call.is_part, n=2)
    store.put("k", BytesBody(DATA))
    assert store.retries == 1
    assert read_bytes(store, "k") == DATA
    assert pending(store, s3) == 0


@pytest.mark.parametrize("name", [".metadata", "commit.json", ".index", "-0.distcp", ".json"])
def test_damage_on_the_way_is_refused(proxy: FaultProxy, name: str) -> None:
    """Whatever a save puts has a checksum that a server can verify; the record of the commit too."""
    options, url = {**proxy.options, "part_size_bytes": 5 * MIB}, f"s3://{proxy.server.new_bucket()}/c"
    ckpt.save({"t": torch.zeros(9)}, url, storage_options=options)
    proxy.rule = Nth("damage", lambda call: call.method == "PUT" and call.key.endswith(name))
    with pytest.raises(SaveFailed, match="BadDigest"):
        ckpt.save({"t": torch.ones(9)}, url, storage_options=options)
    loaded = {"t": torch.full((9,), 7.0)}
    ckpt.load(loaded, url, storage_options=options)
    assert torch.equal(loaded["t"], torch.full((9,), float(name == ".metadata")))  # put after the commit


@pytest.mark.parametrize("action", ["cut", "reset", 500, 503])
def test_a_broken_read_goes_on_where_it_broke(proxy: FaultProxy, store: Store, action: str | int) -> None:
    put_bytes(store, "k", DATA)
    failures = 2 if action == "cut" else 1
    proxy.rule = Nth(action, lambda call: call.method == "GET", count=failures)
    first, second = bytearray(5 * MIB), bytearray(len(DATA) - 5 * MIB)
    store.read_into("k", 0, [memoryview(first), memoryview(second)])
    assert first + second == DATA
    assert store.retries == failures


@pytest.mark.parametrize("action", ["cut", "reset", 503])
def test_reads_give_up(proxy: FaultProxy, store: Store, action: str | int) -> None:
    put_bytes(store, "k", b"0123456789")
    proxy.rule = Nth(action, lambda call: call.method == "GET", count=10**6)
    with pytest.raises(StorageUnavailable) as caught:
        store.read_into("k", 2, [memoryview(bytearray(1))])
    assert caught.value.key == "k"


def test_create_where_conditions_are_not_implemented(proxy: FaultProxy, store: Store) -> None:
    """Swift answers 501: then look, and put without a condition."""
    conditional: list[Call] = []

    def rule(call: Call) -> str | int:
        if call.method == "PUT" and not conditional:
            conditional.append(call)
            return 501
        return "pass"

    proxy.rule = rule
    put_bytes(store, "k", b"first", mode=PutMode.CREATE)
    assert not store.capabilities.conditional_create
    with pytest.raises(AlreadyExists):
        put_bytes(store, "k", b"second", mode=PutMode.CREATE)
    assert read_bytes(store, "k") == b"first"


def test_no_server(s3: S3Server) -> None:
    store = open_store(
        "s3://bucket/x", {**s3.options, "endpoint_url": "http://127.0.0.1:9", "max_attempts": 2}
    )
    with pytest.raises(StorageUnavailable, match="Could not connect"):
        store.stat("k")


def test_no_bucket(s3: S3Server) -> None:
    store = open_store("s3://no-such-bucket/x", s3.options)
    with pytest.raises(NotFound, match="no bucket named 'no-such-bucket'") as caught:
        put_bytes(store, "k", b"x")
    assert str(caught.value).startswith("s3://no-such-bucket/x: ")


def test_a_save_counts_its_own_retries(proxy: FaultProxy) -> None:
    """Also where a writer is used again."""
    writer = ckpt.CheckpointWriter(f"s3://{proxy.server.new_bucket()}/c", storage_options=proxy.options)
    metas = []
    for failures in (1, 0):
        proxy.rule = Nth(503, lambda call: call.method == "PUT", count=failures)
        metas.append(dcp.save({"value": 1}, storage_writer=writer, no_dist=True).storage_meta)
    assert [isinstance(meta, SaveMeta) and meta.retries for meta in metas] == [1, 0]
