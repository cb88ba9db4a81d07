"""Credentials that expire: looked for anew, waited for once, and no longer."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import SkippingClock, skip_pauses_of_s3
from support.strict_s3 import Request, StrictS3

from ckpt.backends.base import MIB, Store, put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied, NotFound, StorageError
from ckpt.testing import CheckedBody

TWO_PARTS = {"part_size_bytes": 5 * MIB, "max_attempts": 4}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SkippingClock:
    return skip_pauses_of_s3(monkeypatch)


@contextlib.contextmanager
def opened(options: dict[str, Any]) -> Iterator[Store]:
    with contextlib.closing(open_store("s3://bucket/root", options)) as store:
        yield store


def profile(folder: Path, key: str) -> None:
    """Rotate a shared file, as a sidecar does."""
    text = f"[default]\naws_access_key_id={key}\naws_secret_access_key=secret-of-{key}\naws_session_token=token-of-{key}\n"
    (folder / "new").write_text(text)
    (folder / "new").replace(folder / "credentials")


def process(folder: Path, key: str) -> None:
    """Have a credential_process give out another key, which it says is good for an hour."""
    given = {
        "Version": 1, "AccessKeyId": key, "SecretAccessKey": f"secret-of-{key}", "SessionToken": f"token-of-{key}",
        "Expiration": "2099-01-01T00:00:00Z",
    }  # fmt: skip
    (folder / "given.json").write_text(json.dumps(given))
    code = f"print(open({str(folder / 'given.json')!r}).read())"
    (folder / "run.py").write_text(code)
    (folder / "config").write_text(f"[default]\ncredential_process = {sys.executable} {folder / 'run.py'}\n")


def key_of(request: Request) -> str:
    return request.headers["authorization"].partition("Credential=")[2].partition("/")[0]


@pytest.fixture
def rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path


@pytest.mark.parametrize("late", [0, 2], ids=["", "late"])
@pytest.mark.parametrize("give", [profile, process])
def test_credentials_expire_in_an_upload(
    server: StrictS3, rotated: Path, give: Callable[[Path, str], None], late: int
) -> None:
    """The upload goes on: nothing that was sent is sent again. Whoever rotates them may be some tries late."""
    good, refused = {"KEY1"}, []

    def rule(request: Request) -> str | tuple[int, str]:
        if (
            request.operation == "UploadPart"
            and server.uploads
            and any(u.parts for u in server.uploads.values())
        ):
            good.discard("KEY1")
        if key_of(request) in good:
            return "pass"
        refused.append(request)
        if len(refused) == late + 1:
            give(rotated, "KEY2")
            good.add("KEY2")
        return 400, "ExpiredToken"

    give(rotated, "KEY1")
    server.rule = rule
    options = {"endpoint_url": server.endpoint_url, **TWO_PARTS, "max_attempts": 8}
    body = secrets.token_bytes(16 * MIB)
    with contextlib.closing(open_store("s3://bucket/root", options, threads=1)) as store:
        store.put("large", CheckedBody(body))
        assert read_bytes(store, "large") == body
    assert len(server.sent("CreateMultipartUpload")) == 1
    assert len(server.sent("UploadPart")) == 4 + len(refused)
    assert not server.uploads


def test_credentials_that_expire_while_many_requests_run(server: StrictS3, rotated: Path) -> None:
    """Each finds that others have renewed them; a HEAD, whose reply says nothing, as well."""
    profile(rotated, "KEY1")
    with opened({"endpoint_url": server.endpoint_url, **TWO_PARTS}) as store:
        put_bytes(store, "small", b"abc")
        profile(rotated, "KEY2")
        server.rule = lambda request: "pass" if key_of(request) == "KEY2" else (400, "ExpiredToken")
        assert store.stat("small").size_bytes == 3
        profile(rotated, "KEY3")
        server.rule = lambda request: "pass" if key_of(request) == "KEY3" else (403, "InvalidAccessKeyId")
        store.put("large", CheckedBody(secrets.token_bytes(31 * MIB)))
    assert {key_of(request) for request in server.requests} == {"KEY1", "KEY2", "KEY3"}


@pytest.mark.parametrize("given", [True, False])
def test_credentials_that_nobody_renews(server: StrictS3, rotated: Path, given: bool) -> None:
    """Those that never served are not waited for."""
    profile(rotated, "KEY1")
    server.rule = lambda request: (400, "ExpiredToken")
    options = {**(server.options if given else {"endpoint_url": server.endpoint_url}), "max_attempts": 4}
    with opened(options) as store, pytest.raises(AccessDenied, match="expired: renew them") as caught:
        put_bytes(store, "k", b"x")
    assert len(server.requests) == 1
    assert "token-of" not in "".join(traceback.format_exception(caught.value))


def test_successors_are_waited_for_once(server: StrictS3, rotated: Path, clock: SkippingClock) -> None:
    """About 20 s for the whole store, then each request fails at once, and is settled: nothing was done."""
    process(rotated, "KEY1")
    options = {"endpoint_url": server.endpoint_url, "max_attempts": 20}
    with opened(options) as store:
        with pytest.raises(NotFound):  # it has served, then
            store.stat("k")
        server.rule = lambda request: (400, "ExpiredToken")
        began_s = clock.monotonic()
        with pytest.raises(AccessDenied, match="environment variables are not") as caught:
            put_bytes(store, "k", b"x")
        assert caught.value.settled
        # The time that passes by itself counts too: on a busy machine it is more than a moment.
        assert clock.skipped_s < 20.001 <= clock.monotonic() - began_s + 0.001
        sent = len(server.requests)
        with pytest.raises(AccessDenied) as caught:
            put_bytes(store, "k", b"x")
        assert caught.value.settled
        assert len(server.requests) == sent + 1
        process(rotated, "KEY2")
        clock.sleep(1)
        server.rule = lambda request: "pass" if key_of(request) == "KEY2" else (400, "ExpiredToken")
        put_bytes(store, "k", b"x")


def test_a_refusal_after_a_lost_reply_settles_nothing(server: StrictS3, rotated: Path) -> None:
    profile(rotated, "KEY1")
    actions: Iterator[str | tuple[int, str]] = iter(["lose", *[(400, "ExpiredToken")] * 9])
    server.rule = lambda request: next(actions)
    with opened({"endpoint_url": server.endpoint_url, "max_attempts": 4}) as store:
        with pytest.raises(AccessDenied) as caught:
            put_bytes(store, "k", b"x")
        assert not caught.value.settled


def test_credentials_of_the_environment_are_not_waited_for(
    server: StrictS3, rotated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-KEY1")
    with opened({"endpoint_url": server.endpoint_url, "max_attempts": 8}) as store:
        put_bytes(store, "k", b"x")
        server.rule = lambda request: (400, "ExpiredToken")
        with pytest.raises(AccessDenied):
            put_bytes(store, "k", b"x")
    assert len(server.requests) == 2


def test_a_head_waits_with_others(server: StrictS3, rotated: Path) -> None:
    """Its reply says nothing, but another request with these credentials was called expired."""
    profile(rotated, "KEY1")
    heads = []

    def rule(request: Request) -> str | tuple[int, str]:
        if request.method == "HEAD" and request.name and key_of(request) == "KEY1":
            heads.append(request)
            if len(heads) == 2:
                profile(rotated, "KEY2")
        return "pass" if key_of(request) == "KEY2" else (400, "ExpiredToken")

    with opened({"endpoint_url": server.endpoint_url, "max_attempts": 5}) as store:
        put_bytes(store, "k", b"x")
        server.rule = rule
        with pytest.raises(AccessDenied):
            put_bytes(store, "other", b"x")
        assert store.stat("k").size_bytes == 1


def test_a_head_that_is_refused_renews_once(server: StrictS3, rotated: Path) -> None:
    """A program may give out another token each time: a 400 to HEAD may have other reasons than those."""
    process(rotated, "KEY1")
    run = rotated / "run.py"
    count = f"open({str(rotated / 'runs')!r}, 'a').write('x')\nimport os\n"
    run.write_text(
        count + run.read_text().replace(".read()", ".read().replace('token-of', os.urandom(4).hex())")
    )
    with opened({"endpoint_url": server.endpoint_url, "max_attempts": 8}) as store:
        put_bytes(store, "k", b"x")
        server.rule = lambda request: (400, "InvalidRequest") if request.method == "HEAD" else "pass"
        with pytest.raises(StorageError):
            store.stat("k")
    assert len(server.requests) <= 5
    assert len((rotated / "runs").read_text()) == 2


def test_an_old_signature_is_renewed_too(server: StrictS3, rotated: Path) -> None:
    profile(rotated, "KEY1")
    options = {"endpoint_url": server.endpoint_url, "config_kwargs": {"signature_version": "s3"}}
    with opened(options) as store:
        put_bytes(store, "k", b"x")
        assert server.requests[-1].headers["authorization"].startswith("AWS KEY1:")
        profile(rotated, "KEY2")
        server.rule = lambda request: (
            (403, "InvalidAccessKeyId") if "KEY1" in request.headers["authorization"] else "pass"
        )
        put_bytes(store, "k", b"x")
    assert len(server.requests) == 3
