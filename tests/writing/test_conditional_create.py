"""The commit goes by what a server was seen to make of "only if absent": asked once, by the rank that commits."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest
import torch
from support.proxy import FaultProxy
from support.ranks import run_ranks
from support.strict_s3 import Request, StrictS3

import ckpt
from ckpt.backends.base import Condition, PutMode, Store, put_bytes, read_bytes
from ckpt.backends.bodies import BytesBody
from ckpt.backends.registry import open_store
from ckpt.consistency import conditional_create
from ckpt.consistency.conditional_create import learn_condition, measure_condition
from ckpt.errors import AlreadyExists

PROBE = "rank-00000/0123456789abcdef.probe"


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditional_create, "_known", {})


@pytest.fixture
def server(server: StrictS3) -> StrictS3:
    server.requires_checksums = False
    return server


def refused(request: Request) -> str | tuple[int, str]:
    return (501, "NotImplemented") if "if-none-match" in request.headers else "pass"


def heads(server: StrictS3) -> int:
    return len(server.sent("HeadObject"))


# -- what is measured ----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_parts", [False, True])
def test_honoured(server: StrictS3, store: Store, in_parts: bool) -> None:
    assert measured(store, in_parts) is Condition.HONOURED
    assert not server.objects
    assert not server.uploads


@pytest.mark.parametrize("in_parts", [False, True])
def test_ignored(server: StrictS3, store: Store, in_parts: bool) -> None:
    server.knows_conditions = False
    assert measured(store, in_parts) is Condition.IGNORED
    assert not server.objects
    assert not server.uploads


@pytest.mark.parametrize("in_parts", [False, True])
def test_refused(server: StrictS3, store: Store, in_parts: bool) -> None:
    server.rule = refused
    assert measured(store, in_parts) is Condition.REFUSED
    assert not server.objects
    assert not server.uploads


def test_a_lost_reply_is_no_answer(server: StrictS3, store: Store) -> None:
    """The first put is sent again, and refused by what its first try made: that is an answer."""
    left = ["lose"]
    server.rule = lambda request: left.pop() if left and request.method == "PUT" else "pass"
    assert measured(store, False) is Condition.HONOURED
    assert not server.objects


def measured(store: Store, in_parts: bool) -> Condition:
    raw = store.raw_requests()
    assert raw is not None
    return measure_condition(store, raw, PROBE, in_parts=in_parts)


# -- what follows from it ------------------------------------------------------------------------------


def test_what_is_honoured_is_not_looked_for(server: StrictS3, store: Store) -> None:
    learn_condition(store, PROBE)
    assert store.capabilities.conditional_create
    put_bytes(store, "k", b"first", mode=PutMode.CREATE)
    with pytest.raises(AlreadyExists) as caught:
        put_bytes(store, "k", b"second", mode=PutMode.CREATE)
    assert caught.value.settled
    assert heads(server) == 0
    assert server.objects["root/k"] == b"first"


def test_what_is_ignored_is_looked_for_and_told(
    server: StrictS3, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    server.knows_conditions = False
    learn_condition(store, PROBE)
    assert not store.capabilities.conditional_create
    assert 'ignores "only if absent"' in caplog.text
    put_bytes(store, "k", b"first", mode=PutMode.CREATE)
    with pytest.raises(AlreadyExists):
        put_bytes(store, "k", b"second", mode=PutMode.CREATE)
    assert heads(server) == 2
    caplog.clear()
    learn_condition(open_store(store.url, server.options), PROBE)
    assert not caplog.text


def test_what_is_refused_is_not_sent_again(server: StrictS3, store: Store) -> None:
    server.rule = refused
    learn_condition(store, PROBE)
    server.requests.clear()
    put_bytes(store, "k", b"first", mode=PutMode.CREATE)
    assert not any("if-none-match" in request.headers for request in server.requests)
    with pytest.raises(AlreadyExists):
        put_bytes(store, "k", b"second", mode=PutMode.CREATE)


def test_uploads_in_parts_are_looked_for_all_the_same(server: StrictS3, store: Store) -> None:
    """Ceph honours conditions on a put, and ignores them when an upload is completed."""
    learn_condition(store, PROBE)
    server.knows_conditions = False
    server.objects["root/k"] = b"first"
    with pytest.raises(AlreadyExists):
        store.put("k", BytesBody(bytes(6 << 20)), mode=PutMode.CREATE)
    assert server.objects["root/k"] == b"first"


def test_no_permission_to_ask(server: StrictS3, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    server.rule = lambda request: (403, "AccessDenied") if request.name.endswith(".probe") else "pass"
    for _ in range(2):
        learn_condition(store, PROBE)
        assert not store.capabilities.conditional_create
    assert len([request for request in server.requests if request.method == "PUT"]) == 1  # asked once
    assert not caplog.text
    put_bytes(store, "k", b"first", mode=PutMode.CREATE)
    with pytest.raises(AlreadyExists):
        put_bytes(store, "k", b"second", mode=PutMode.CREATE)


def test_a_server_that_is_down_is_asked_again(server: StrictS3, store: Store) -> None:
    server.rule = lambda request: (500, "InternalError")
    learn_condition(store, PROBE)
    assert not store.capabilities.conditional_create
    server.rule = lambda request: "pass"
    learn_condition(store, PROBE)
    assert store.capabilities.conditional_create


def test_nothing_to_ask(tmp_path: Any) -> None:
    for url in (str(tmp_path / "x"), f"memory://{uuid.uuid4().hex}", f"fsspec+file://{tmp_path}/y"):
        store = open_store(url)
        learn_condition(store, PROBE)
        assert list(store.list()) == []


# -- saves ---------------------------------------------------------------------------------------------


def test_a_save_asks_once(proxy: FaultProxy) -> None:
    bucket = proxy.server.new_bucket()

    def requests_of_a_save(place: str) -> list[tuple[str, str]]:
        proxy.calls.clear()
        ckpt.save({"t": torch.ones(3)}, f"s3://{bucket}/{place}", storage_options=proxy.options)
        return [(call.method, call.key.rpartition("/")[2].partition(".")[2]) for call in proxy.calls]

    first, second, third = (requests_of_a_save(f"step-{step}") for step in range(3))
    asked = [call for call in first if call[1] == "probe"]
    assert asked == [("PUT", "probe"), ("PUT", "probe"), ("DELETE", "probe")]
    assert [call for call in first if call not in asked] == second == third
    overwriting = requests_of_a_save("step-2")
    assert ("PUT", "probe") not in overwriting
    listed = proxy.server.client().list_objects_v2(Bucket=bucket)["Contents"]
    assert not [found for found in listed if found["Key"].endswith(".probe")]


def test_the_commit_is_one_request_where_conditions_are_honoured(proxy: FaultProxy) -> None:
    url = f"s3://{proxy.server.new_bucket()}/c"
    ckpt.save({"t": torch.ones(3)}, url, storage_options=proxy.options)
    about_commit = [call.method for call in proxy.calls if call.key.endswith("/commit.json")]
    # Looked at before anything is written, looked at again, put, read back; and read after .metadata.
    assert about_commit == ["GET", "GET", "PUT", "GET", "GET"]


def test_an_overwrite_asks_nothing(server: StrictS3) -> None:
    ckpt.save({"t": torch.ones(3)}, "s3://bucket/c", storage_options=server.options)
    conditional_create._known.clear()
    server.requests.clear()
    ckpt.save({"t": torch.zeros(3)}, "s3://bucket/c", storage_options=server.options)
    assert not [request for request in server.requests if request.name.endswith(".probe")]


def test_only_the_rank_that_commits_asks(proxy: FaultProxy) -> None:
    run_ranks(2, _save, f"s3://{proxy.server.new_bucket()}/c", proxy.options)
    askers = {call.key.split("/")[-2] for call in proxy.calls if call.key.endswith(".probe")}
    assert askers == {"rank-00000"}


def _save(rank: int, url: str, options: dict[str, Any]) -> None:
    ckpt.save({"t": torch.ones(3)}, url, storage_options=options)


def test_saves_go_on_where_asking_fails(server: StrictS3, caplog: pytest.LogCaptureFixture) -> None:
    server.rule = lambda request: (403, "AccessDenied") if request.name.endswith(".probe") else "pass"
    ckpt.save({"t": torch.ones(3)}, "s3://bucket/c", storage_options=server.options)
    assert read_bytes(open_store("s3://bucket/c", server.options), "commit.json")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
