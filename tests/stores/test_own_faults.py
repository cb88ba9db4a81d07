"""Faults of this side: at once an error that names the variable or the option, and no outage."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import SkippingClock, skip_pauses_of_s3
from support.forward_proxy import certificate
from support.servers import free_port
from support.strict_s3 import StrictS3, strict_s3

from ckpt.backends.base import Store, put_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied, ConfigurationError

GIVEN = {
    "AWS_ACCESS_KEY_ID": "AK",
    "AWS_SECRET_ACCESS_KEY": "SK",
    "AWS_SESSION_TOKEN": "ST",
    "AWS_REGION": "eu-west-1",
}
HMAC = {"COS_HMAC_ACCESS_KEY_ID": "AK", "COS_HMAC_SECRET_ACCESS_KEY": "SK", "IBM_COS_REGION": "us-south"}
ROLE = {"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/trainer"}
AGENT = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:9/"}
PROFILE = {"COS_IAM_PROFILE_ID": "Profile-1"}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SkippingClock:
    clock = skip_pauses_of_s3(monkeypatch)
    monkeypatch.setattr("ckpt.backends.s3_protocol.retries.time", clock)
    for name in (*GIVEN, *HMAC, "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    return clock


@contextlib.contextmanager
def opened(scheme: str, endpoint_url: str, **options: Any) -> Iterator[Store]:
    given = {"endpoint_url": endpoint_url, **options}
    with contextlib.closing(open_store(f"{scheme}://bucket/root", given)) as store:
        yield store


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("scheme", "name", "end"),
    [
        *(("s3", name, "\n") for name in GIVEN if name != "AWS_SECRET_ACCESS_KEY"),
        ("cos", "COS_HMAC_ACCESS_KEY_ID", "\r\n"),
        ("cos", "IBM_COS_REGION", "\n"),
    ],
)
def test_what_no_header_can_carry(
    server: StrictS3, monkeypatch: pytest.MonkeyPatch, clock: SkippingClock, scheme: str, name: str, end: str
) -> None:
    variables = GIVEN if scheme == "s3" else HMAC
    use(monkeypatch, {**variables, name: variables[name] + end})
    with opened(scheme, server.endpoint_url) as store:
        with pytest.raises(ConfigurationError, match=f"{name} has a line break.*strip it") as caught:
            store.stat("k")
        assert store.retries == 0
    assert clock.skipped_s == 0
    assert "AK" not in str(caught.value)
    assert not server.requests


def test_a_secret_that_is_no_longer_that_of_the_key(
    server: StrictS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no header: the server refuses the signature."""
    server.rule = lambda request: (403, "SignatureDoesNotMatch")
    use(monkeypatch, {**GIVEN, "AWS_SECRET_ACCESS_KEY": "SK\n"})
    with (
        opened("s3", server.endpoint_url) as store,
        pytest.raises(AccessDenied, match="AWS_SECRET_ACCESS_KEY has a line break"),
    ):
        put_bytes(store, "k", b"x")


@pytest.mark.parametrize("kind", ["missing", "folder"])
@pytest.mark.parametrize(
    ("scheme", "name", "variables"),
    [
        ("s3", "AWS_WEB_IDENTITY_TOKEN_FILE", ROLE),
        ("s3", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", AGENT),
        ("cos", "COS_CR_TOKEN_FILENAME", PROFILE),
    ],
)
def test_a_file_with_a_token_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SkippingClock,
    scheme: str, name: str, variables: dict[str, str], kind: str,
) -> None:  # fmt: skip
    path = tmp_path / "token-of-a-pod"
    if kind == "folder":
        path.mkdir()
    use(monkeypatch, {**variables, name: str(path)})
    with (
        pytest.raises(ConfigurationError, match=f"{path}") as caught,
        opened(scheme, "http://127.0.0.1:9") as store,
    ):
        store.stat("k")
    assert name in str(caught.value) or "cr_token_filename" in str(caught.value)
    assert clock.skipped_s == 0


def test_a_file_with_a_token_that_goes_while_a_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token-of-a-pod"
    path.write_text("a.b.c")
    use(monkeypatch, {**PROFILE, "COS_CR_TOKEN_FILENAME": str(path)})
    monkeypatch.setattr("ibm_botocore.credentials.time", SkippingClock())
    with opened("cos", "http://127.0.0.1:9") as store:
        path.unlink()
        with pytest.raises(ConfigurationError, match=f"cr_token_filename names {path}: mount"):
            store.stat("k")


# -- certificates --------------------------------------------------------------------------------------


@contextlib.contextmanager
def over_tls(folder: Path) -> Iterator[StrictS3]:
    tls, _ = certificate(folder)
    with strict_s3(tls=tls) as server:
        server.requires_checksums = False
        yield server


@pytest.mark.parametrize("scheme", ["s3", "cos"])
@pytest.mark.parametrize(
    ("bundle", "found"),
    [
        ("missing.pem", r"AWS_CA_BUNDLE names .*missing.pem: mount"),
        ("empty.pem", "check the certificates: AWS_CA_BUNDLE"),
        ("other/server.pem", "check the certificates: AWS_CA_BUNDLE"),
    ],
)
def test_a_bundle_of_authorities_that_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: SkippingClock,
    scheme: str,
    bundle: str,
    found: str,
) -> None:
    (tmp_path / "empty.pem").write_text("none")
    (tmp_path / "other").mkdir()
    certificate(tmp_path / "other")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / bundle))
    with over_tls(tmp_path) as server, opened(scheme, server.endpoint_url, key="AK", secret="SK") as store:
        with pytest.raises(ConfigurationError, match=found):
            store.stat("k")
        assert store.retries == 0


@pytest.mark.parametrize("scheme", ["s3", "cos"])
def test_an_endpoint_that_speaks_no_tls(server: StrictS3, scheme: str) -> None:
    url = server.endpoint_url.replace("http://", "https://")
    with (
        opened(scheme, url, key="AK", secret="SK") as store,
        pytest.raises(ConfigurationError, match="speaks no TLS there: write http://"),
    ):
        store.stat("k")


@pytest.mark.parametrize("scheme", ["s3", "cos"])
@pytest.mark.parametrize("kind", ["one file", "list", "missing", "one of three"])
def test_a_certificate_of_the_client(tmp_path: Path, scheme: str, kind: str) -> None:
    """Given as JSON gives it: a list of certificate and key is the pair that the SDKs take."""
    _, pem = certificate(tmp_path)
    pair = [str(pem), str(pem.with_name("server.key"))]
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join(Path(path).read_bytes() for path in pair))
    given: Any = {
        "one file": str(both), "list": pair, "missing": ["/nowhere/pem", "/nowhere/key"], "one of three": [*pair, "x"]
    }[kind]  # fmt: skip
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*pair)
    tls.load_verify_locations(pem)
    tls.verify_mode = ssl.CERT_REQUIRED
    options = {"client_kwargs": {"verify": str(pem)}, "config_kwargs": {"client_cert": given}}
    with strict_s3(tls=tls) as server, contextlib.ExitStack() as stack:
        if kind == "missing":
            stack.enter_context(pytest.raises(ConfigurationError, match="client_cert names /nowhere/"))
        elif kind == "one of three":
            stack.enter_context(
                pytest.raises(ConfigurationError, match="client_cert must be a text or a pair")
            )
        store = stack.enter_context(opened(scheme, server.endpoint_url, key="AK", secret="SK", **options))
        put_bytes(store, "k", b"x")
        assert server.objects


def test_a_server_that_is_not_there_is_still_an_outage(clock: SkippingClock) -> None:
    with opened("s3", f"http://127.0.0.1:{free_port()}", key="AK", secret="SK", max_attempts=3) as store:
        with pytest.raises(Exception, match="check the endpoint") as caught:
            store.stat("k")
        assert type(caught.value).__name__ == "StorageUnavailable"
        assert store.retries == 2
