"""Those that give credentials: busy, out of reach, unwilling, or in need of a person."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import SkippingClock, skip_pauses_of_s3
from support.http_core import Handler, http_server
from support.strict_s3 import StrictS3

from ckpt.backends.base import Store, put_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied, CheckpointError, StorageUnavailable

HOUR = datetime.timedelta(hours=1)
STS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult>
<Credentials><AccessKeyId>AK</AccessKeyId><SecretAccessKey>SK</SecretAccessKey><SessionToken>ST</SessionToken>
<Expiration>{until}</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


class Service(Handler):
    """Gives credentials as IAM, STS and the agent of a pod do, after as many refusals as `refusals` says."""

    state: Any

    def serve(self) -> None:
        sent = self.rfile.read(self.length)
        state = self.state
        with state.lock:
            state.asked += 1
            is_refused = state.asked <= state.refusals
        until = (datetime.datetime.now(datetime.timezone.utc) + HOUR).strftime("%Y-%m-%dT%H:%M:%SZ")
        if is_refused:
            error = {"errorCode": "BXNIM0429E", "errorMessage": "Too many requests"}
            xml = f"<ErrorResponse><Error><Code>{state.code}</Code><Message>no</Message></Error></ErrorResponse>"
            answer = xml if b"AssumeRole" in sent else json.dumps(error)
        elif b"AssumeRole" in sent:
            answer = STS.format(until=until)
        else:
            answer = json.dumps({
                "access_token": "t0ken", "refresh_token": "r", "token_type": "Bearer", "expires_in": 3600,
                "expiration": 0, "AccessKeyId": "AK", "SecretAccessKey": "SK", "Token": "ST", "Expiration": until,
            })  # fmt: skip
        self.answer(state.status if is_refused else 200, {}, answer.encode())


class State:
    def __init__(self) -> None:
        self.asked = 0
        self.refusals = 0
        self.status = 429
        self.code = "Throttling"
        self.lock = threading.Lock()
        self.url = ""


@pytest.fixture
def service() -> Iterator[State]:
    state = State()
    with http_server(Service, state=state) as port:
        state.url = f"http://127.0.0.1:{port}/"
        yield state


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SkippingClock:
    clock = skip_pauses_of_s3(monkeypatch)
    for module in ("ckpt.backends.s3_protocol.retries", "ibm_botocore.credentials"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return clock


KINDS = ["IAM", "a trusted profile", "the agent of a pod", "STS"]


@contextlib.contextmanager
def opened(
    kind: str, url: str, server: StrictS3, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> Iterator[Store]:
    """A store whose credentials come from the service at `url`."""
    token = folder / "token"
    token.write_text("a.b.c")
    options: dict[str, Any] = {"endpoint_url": server.endpoint_url, **more}
    variables: dict[str, str] = {}
    if kind == "IAM":
        options |= {"ibm_api_key_id": "an-api-key", "ibm_auth_endpoint": url}
    elif kind == "a trusted profile":
        options |= {"iam_profile_id": "P", "cr_token_filename": str(token), "ibm_auth_endpoint": url}
    elif kind == "STS":
        variables = {
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
            "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/r",
        }
        variables["AWS_ENDPOINT_URL_STS"] = url
    else:
        variables = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": url}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    scheme = "cos" if "ibm_auth_endpoint" in options else "s3"
    with contextlib.closing(open_store(f"{scheme}://bucket/root", options, threads=4)) as store:
        yield store


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("kind", KINDS)
def test_a_busy_service_is_asked_again(
    service: State, server: StrictS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: int
) -> None:
    service.status = status
    service.refusals = 14
    with opened(kind, service.url, server, tmp_path, monkeypatch) as store:
        put_bytes(store, "k", b"x")
        assert store.retries > 0
    assert service.asked == 15
    assert server.objects


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_stays_busy_is_no_denial(
    service: State, server: StrictS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    service.status = 500
    service.code = "InternalError"
    service.refusals = 1000
    with (
        opened(kind, service.url, server, tmp_path, monkeypatch, max_attempts=2) as store,
        pytest.raises(StorageUnavailable),
    ):
        put_bytes(store, "k", b"x")
    assert service.asked < 25
    assert not server.requests


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_refuses_is_asked_no_more(
    service: State, server: StrictS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever it answers: 404 of a service does not mean that an object is missing."""
    service.status = 404
    service.code = "ResourceNotFoundException"
    service.refusals = 1000
    with (
        opened(kind, service.url, server, tmp_path, monkeypatch) as store,
        pytest.raises(AccessDenied, match="check the credentials"),
    ):
        store.stat("k")
    assert service.asked <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_out_of_reach(
    server: StrictS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with (
        opened(kind, "http://127.0.0.1:9/", server, tmp_path, monkeypatch, max_attempts=2) as store,
        pytest.raises(StorageUnavailable),
    ):
        put_bytes(store, "k", b"x")


def test_threads_that_wait_for_a_token_share_the_answer(
    service: State, server: StrictS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them signs with no token, and not each asks as long as the first has."""
    service.refusals = 1000
    with opened("IAM", service.url, server, tmp_path, monkeypatch, max_attempts=2) as store:
        results: list[object] = []

        def look() -> None:
            try:
                results.append(store.stat("k"))
            except CheckpointError as error:
                results.append(type(error))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [StorageUnavailable] * 4
    assert not server.requests


# -- people --------------------------------------------------------------------------------------------

ROLE = "sso_account_id = 123456789012\nsso_role_name = r\n"
START = "sso_region = us-east-1\nsso_start_url = https://example.invalid/start\n"
LOGINS = {
    "sso": (f"sso_session = work\n{ROLE}[sso-session work]\n{START}", "aws sso login --profile dev"),
    "sso of old": (START + ROLE, "aws sso login --profile dev"),
    "login": ("login_session = arn:aws:iam::123456789012:user/u\n", "aws login --profile dev"),
}


@pytest.mark.parametrize("given", ["option", "environment"])
@pytest.mark.parametrize("kind", LOGINS)
def test_a_login_that_is_missing_names_its_command(
    server: StrictS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, given: str
) -> None:
    settings, command = LOGINS[kind]
    (tmp_path / "config").write_text(f"[profile dev]\n{settings}")
    monkeypatch.setenv("AWS_LOGIN_CACHE_DIRECTORY", str(tmp_path))
    options = {"endpoint_url": server.endpoint_url}
    if given == "option":
        options["profile"] = "dev"
    else:
        monkeypatch.setenv("AWS_PROFILE", "dev")
    with (
        contextlib.closing(open_store("s3://bucket/root", options)) as store,
        pytest.raises(AccessDenied, match=command),
    ):
        store.stat("k")
    assert not server.requests


def test_an_mfa_code_is_not_waited_for(
    server: StrictS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config").write_text(
        "[profile dev]\nrole_arn = arn:aws:iam::123456789012:role/r\nsource_profile = base\n"
        "mfa_serial = arn:aws:iam::123456789012:mfa/me\n"
    )
    (tmp_path / "credentials").write_text("[base]\naws_access_key_id = AK\naws_secret_access_key = SK\n")
    monkeypatch.setattr(sys, "stdin", None)
    options = {"endpoint_url": server.endpoint_url, "profile": "dev"}
    with (
        contextlib.closing(open_store("s3://bucket/root", options)) as store,
        pytest.raises(AccessDenied, match=r"MFA code .*mfa/me.* export-credentials --profile dev"),
    ):
        store.stat("k")
    assert capsys.readouterr().out == ""
    assert not server.requests
