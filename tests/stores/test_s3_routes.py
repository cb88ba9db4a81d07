"""The ways to a bucket: proxies, TLS, IPv6, names of buckets in hosts and paths, redirects, clocks; forks."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import skip_pauses_of_s3
from support.forward_proxy import certificate, forward_proxy
from support.http_core import Handler, http_server
from support.strict_s3 import Request, StrictS3, strict_s3

from ckpt.backends.base import MIB, Store, put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied, ConfigurationError, StorageError, StorageUnavailable
from ckpt.testing import CheckedBody

DATA = secrets.token_bytes(6 * MIB)
TWO_PARTS = {"part_size_bytes": 5 * MIB, "max_attempts": 4}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_pauses_of_s3(monkeypatch)
    for name in (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "AWS_CA_BUNDLE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")


@contextlib.contextmanager
def opened(options: dict[str, Any], scheme: str = "s3") -> Iterator[Store]:
    with contextlib.closing(open_store(f"{scheme}://bucket/root", options)) as store:
        yield store


def works(store: Store) -> None:
    """Do what a save and a load do."""
    store.put("large", CheckedBody(DATA))
    put_bytes(store, "small", b"abc")
    assert read_bytes(store, "large") == DATA
    assert {stat.key for stat in store.list()} == {"large", "small"}
    store.delete(["large", "small"])


# -- proxies, TLS, IPv6, styles ------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["virtual", "path"])
@pytest.mark.parametrize("scheme", ["s3", "cos"])
def test_a_plain_proxy(server: StrictS3, monkeypatch: pytest.MonkeyPatch, scheme: str, style: str) -> None:
    """It finds the names of hosts itself: nobody here knows them. Given by the environment, or by an option."""
    config: dict[str, Any] = {"s3": {"addressing_style": style}}
    with forward_proxy(server.endpoint_url.removeprefix("http://")) as proxy:
        if style == "virtual":
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
        else:
            config["proxies"] = {"http": proxy.url}
        options = {**server.options, **TWO_PARTS, "config_kwargs": config}
        with opened(options | {"endpoint_url": "http://objects.invalid:8080"}, scheme) as store:
            works(store)
    host = "bucket.objects.invalid:8080" if style == "virtual" else "objects.invalid:8080"
    assert set(proxy.asked) == {host}
    assert {request.headers["host"] for request in server.requests} == {host}


def test_a_host_that_needs_no_proxy(server: StrictS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with opened(server.options) as store:
        put_bytes(store, "k", b"abc")


@pytest.mark.parametrize("scheme", ["s3", "cos"])
def test_a_tunnel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """CONNECT through a proxy that asks for a password, and TLS inside."""
    tls, trusted = certificate(tmp_path, "objects.invalid", "bucket.objects.invalid")
    with (
        strict_s3(tls=tls) as server,
        forward_proxy(server.endpoint_url.removeprefix("https://"), "me:proxy-pw") as proxy,
    ):
        options = {**server.options, **TWO_PARTS, "endpoint_url": "https://objects.invalid"}
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", "//me:proxy-pw@"))
        with opened(options | {"client_kwargs": {"verify": str(trusted)}}, scheme) as store:
            works(store)
        assert set(proxy.asked) <= {"objects.invalid:443", "bucket.objects.invalid:443"}
        assert server.requests
        with opened(options, scheme) as store, pytest.raises(ConfigurationError, match=r"SSL.*certificate"):
            store.stat("k")
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", "//me:wrong-pw@"))
        with (
            opened(options, scheme) as store,
            pytest.raises(StorageUnavailable, match="the proxy if there is one") as caught,
        ):
            store.stat("k")
        assert "wrong-pw" not in "".join(traceback.format_exception(caught.value))


def test_the_environments_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a proxy; a read fills the caller's memory below TLS as well."""
    tls, trusted = certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(trusted))
    with strict_s3(tls=tls) as server, opened({**server.options, **TWO_PARTS}) as store:
        works(store)


@pytest.mark.parametrize("scheme", ["s3", "cos"])
def test_an_address_of_ipv6(scheme: str) -> None:
    with strict_s3("::1") as server, opened({**server.options, **TWO_PARTS}, scheme) as store:
        assert "[::1]" in server.endpoint_url
        works(store)


# -- redirects -----------------------------------------------------------------------------------------

REDIRECTS: dict[str, tuple[int, str]] = {
    "301": (301, "PermanentRedirect"),
    "307": (307, "TemporaryRedirect"),
    "400": (400, "AuthorizationHeaderMalformed"),
    "asked": (307, "TemporaryRedirect"),
}


@pytest.mark.parametrize("kind", REDIRECTS)
def test_a_bucket_in_another_region(server: StrictS3, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A body that is sent again, is sent whole, and signed for the other region; later requests go there at once.

    A redirect that does not name the region is asked about.
    """
    region = {"x-amz-bucket-region": "eu-central-1"}

    def rule(request: Request) -> Any:
        there = (
            "eu-central-1" in request.headers["host"] and "/eu-central-1/" in request.headers["authorization"]
        )
        names_it = kind != "asked" or (request.method == "HEAD" and not request.name)
        return "pass" if there else (*REDIRECTS[kind], region if names_it else {})

    server.rule = rule
    options = {"key": "k", "secret": "s", "region": "us-west-2", "client_kwargs": {"use_ssl": False}}
    monkeypatch.setenv("HTTP_PROXY", server.endpoint_url)
    with opened(options | TWO_PARTS) as store:
        works(store)
    hosts = [request.headers["host"] for request in server.requests]
    assert set(hosts) == {"bucket.s3.us-west-2.amazonaws.com", "bucket.s3.eu-central-1.amazonaws.com"}
    assert hosts.count("bucket.s3.us-west-2.amazonaws.com") == (2 if kind == "asked" else 1)


class _ToHttps(Handler):
    """A web server before the store that sends all to https."""

    def serve(self) -> None:
        self.rfile.read(self.length)
        self.answer(301, {"location": "https://objects.invalid/x?sig=secret"}, b"<html>moved</html>")


def test_a_server_that_redirects_everything() -> None:
    with http_server(_ToHttps) as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s", "max_attempts": 2}
        with opened(options) as store:
            for action in (lambda: store.stat("k"), lambda: put_bytes(store, "k", b"x")):
                with pytest.raises(
                    StorageError, match=r"it is at https://objects\.invalid/x: set region, or endpoint_url"
                ) as caught:
                    action()
                assert "secret" not in str(caught.value)


# -- clocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead_s", "word"), [(-3600, "60 minutes ahead of"), (3600, "60 minutes behind")])
def test_a_clock_that_is_wrong(server: StrictS3, ahead_s: float, word: str) -> None:
    """The server's answer has its time; a reply to HEAD has nothing else."""
    server.clock_offset_s = ahead_s
    server.rule = lambda request: (403, "RequestTimeTooSkewed")
    with opened(server.options) as store:
        for action in (lambda: store.stat("k"), lambda: put_bytes(store, "k", b"x")):
            with pytest.raises(AccessDenied, match=f"clock is {word} the server's: set it"):
                action()


# -- forks ---------------------------------------------------------------------------------------------


def test_a_fork_opens_the_store_anew(server: StrictS3) -> None:
    with opened({**server.options, **TWO_PARTS}) as store:
        store.put("of-the-parent", CheckedBody(DATA))
        child = multiprocessing.get_context("fork").Process(
            target=store.put, args=("of-the-child", CheckedBody(DATA))
        )
        child.start()
        child.join(20)
        if child.is_alive():
            child.kill()
        assert child.exitcode == 0
        assert read_bytes(store, "of-the-child") == DATA
