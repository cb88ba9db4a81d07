"""Servers that cannot be reached: who hears of it, and how long they are tried again."""

from __future__ import annotations

import contextlib
import logging
import pickle
from typing import Any

import pytest
from support.clock import SkippingClock, skip_pauses_of_s3
from support.http_core import Handler, http_server
from support.servers import free_port, refusing_port
from support.strict_s3 import StrictS3

from ckpt.backends.base import Store, put_bytes
from ckpt.backends.registry import open_store
from ckpt.backends.retries import Retry, retry_policy
from ckpt.errors import ConfigurationError, NotFound, StorageUnavailable


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SkippingClock:
    clock = skip_pauses_of_s3(monkeypatch)
    monkeypatch.setattr("ckpt.backends.s3_protocol.retries.time", clock)
    return clock


def _open(scheme: str, port: int, **options: Any) -> contextlib.closing[Store]:
    given = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s", **options}
    return contextlib.closing(open_store(f"{scheme}://bucket/x", given))


@pytest.mark.parametrize("scheme", ["s3", "cos"])
def test_a_caller_gives_up_sooner(scheme: str, clock: SkippingClock) -> None:
    retries: list[Retry] = []
    with (
        retry_policy(unreachable_timeout_s=5, on_retry=retries.append),
        refusing_port() as port,
        _open(scheme, port) as store,
        pytest.raises(
            StorageUnavailable,
            match="check the endpoint, the proxy if there is one, and that the server is up",
        ),
    ):
        store.stat("k")
    assert 3 <= len(retries) == store.retries < 7
    assert clock.skipped_s <= 5
    assert {(retry.url, retry.unreachable) for retry in retries} == {(f"{scheme}://bucket/x", True)}
    assert "Could not connect" in retries[0].reason
    assert [retry.failing_s for retry in retries] == sorted(retry.failing_s for retry in retries)


def test_an_option_goes_before_the_policy() -> None:
    with (
        retry_policy(unreachable_timeout_s=500),
        refusing_port() as port,
        _open("s3", port, unreachable_timeout_s=0.01) as store,
        pytest.raises(StorageUnavailable),
    ):
        store.stat("k")
    assert store.retries == 1
    with pytest.raises(ConfigurationError, match="unreachable_timeout_s must be positive"):
        _open("s3", 9, unreachable_timeout_s=float("nan"))


def test_requests_that_follow_do_not_wait_again(clock: SkippingClock) -> None:
    with refusing_port() as port, _open("s3", port, unreachable_timeout_s=5) as store:
        for _ in range(10):
            with pytest.raises(StorageUnavailable):
                store.stat("k")
        assert clock.skipped_s <= 5
        clock.skipped_s += 100  # another time
        before = store.retries
        with pytest.raises(StorageUnavailable):
            store.stat("k")
        assert store.retries > before


def test_others_stay_patient(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="ckpt"),
        refusing_port() as port,
        _open("s3", port) as store,
        pytest.raises(StorageUnavailable),
    ):
        store.stat("k")
    assert store.retries == 7
    (record,) = caplog.records
    assert record.getMessage().startswith("s3://bucket/x cannot be reached, trying again: Endpoint")


class _OutOfOrder(Handler):
    def serve(self) -> None:
        self.answer(500, {}, b"")


class _Silent(Handler):
    def serve(self) -> None:
        self.reset()


@pytest.mark.parametrize("server", [_OutOfOrder, _Silent])
def test_pauses_can_be_short(server: type[Handler], clock: SkippingClock) -> None:
    """So a server that comes back is noticed soon. As many tries are made."""
    with (
        http_server(server) as port,
        _open("s3", port, longest_pause_s=0.1, max_attempts=12) as store,
        pytest.raises(StorageUnavailable),
    ):
        store.stat("k")
    assert store.retries == 11
    assert 0.5 < clock.skipped_s <= 1.1


class _Empty(Handler):
    def serve(self) -> None:
        self.answer(404, {}, b"")


def test_a_server_that_comes_back() -> None:
    port = free_port()
    with contextlib.ExitStack() as servers:

        def start(_: Retry) -> None:
            servers.enter_context(http_server(_Empty, port=port))

        with (
            retry_policy(unreachable_timeout_s=5, on_retry=start),
            _open("s3", port) as store,
            pytest.raises(NotFound),
        ):
            store.stat("k")


def test_other_failures_are_told_too(server: StrictS3) -> None:
    server.rule = lambda request: (503, "SlowDown") if len(server.requests) == 1 else "pass"
    retries: list[Retry] = []
    with retry_policy(unreachable_timeout_s=5, on_retry=retries.append):
        store = open_store("s3://bucket/x", server.options)
    with contextlib.closing(store):
        put_bytes(store, "k", b"1")
    reason = "the server asks for fewer requests (SlowDown)"
    assert [(retry.reason, retry.unreachable) for retry in retries] == [(reason, False)]


@pytest.mark.parametrize("refusal", [(503, "SlowDown"), (429, "TooManyRequests"), (503, "SlowDownWrite")])
def test_a_server_that_asks_for_fewer_requests_gets_more_time(
    server: StrictS3, clock: SkippingClock, refusal: tuple[int, str]
) -> None:
    server.rule = lambda request: refusal if len(server.requests) < 8 else "pass"
    with contextlib.closing(open_store("s3://bucket/x", {**server.options, "max_attempts": 2})) as store:
        put_bytes(store, "k", b"1")
        assert store.retries == 7
        server.requests.clear()
        server.rule = lambda request: refusal
        with pytest.raises(StorageUnavailable, match=refusal[1]):
            put_bytes(store, "k", b"2")
    assert len(server.requests) == 8
    assert clock.skipped_s <= 2 * 0.5 * 2**8


def test_a_head_has_no_body_that_says_why(server: StrictS3) -> None:
    """So it counts as asked for fewer requests if others just were, and else as another failure."""
    server.rule = lambda request: (503, "SlowDown")
    with contextlib.closing(open_store("s3://bucket/x", {**server.options, "max_attempts": 2})) as store:
        with pytest.raises(StorageUnavailable):
            store.stat("k")
        assert len(server.requests) == 2
        with pytest.raises(StorageUnavailable):
            put_bytes(store, "k", b"1")
        server.requests.clear()
        with pytest.raises(StorageUnavailable):
            store.stat("k")
        assert len(server.requests) == 8


def test_a_server_that_does_not_work_gets_no_more_time(server: StrictS3) -> None:
    server.rule = lambda request: (503, "ServiceUnavailable")
    store = open_store("s3://bucket/x", {**server.options, "max_attempts": 2})
    with contextlib.closing(store), pytest.raises(StorageUnavailable):
        put_bytes(store, "k", b"1")
    assert len(server.requests) == 2


def test_a_listener_stays_in_its_process() -> None:
    with retry_policy(unreachable_timeout_s=5, on_retry=lambda _: None), _open("s3", 9) as store:
        copy: Any = pickle.loads(pickle.dumps(store))
    assert copy._s3.options["unreachable_timeout_s"] == 5
