"""Credentials appear nowhere: not in errors, logs, records or representations."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib
import logging
import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.http_core import Handler, http_server
from support.proxy import fault_proxy
from support.rooms import modules
from support.servers import SECRET_KEY, IamServer
from support.strict_s3 import StrictS3, strict_s3

import ckpt
from ckpt.acceptance.tasks import Setup
from ckpt.backends.base import PutMode, put_bytes
from ckpt.backends.options import redact_url
from ckpt.backends.registry import open_store
from ckpt.conversion.endpoints import Endpoint
from ckpt.dcp_hook import _Settings
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.local_first.saving import Place
from ckpt.scrubbing.scrub import _Places

TOKEN = "session-token-that-is-secret"
CUSTOMER_KEY = b"a customer's key, 32 bytes long."
IN_BASE64 = base64.b64encode(CUSTOMER_KEY).decode()


def shows_the_key(text: str) -> bool:
    return any(form in text for form in (IN_BASE64, CUSTOMER_KEY.decode(), CUSTOMER_KEY.hex()))


@pytest.mark.parametrize("scheme", ["s3", "cos", "fsspec+s3"])
def test_a_whole_life(
    scheme: str, server: StrictS3, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server.requires_checksums = not scheme.startswith("fsspec")  # s3fs sends none
    texts: list[str] = []
    options = dict(server.options)
    if scheme == "s3":
        options["token"] = TOKEN
    if not scheme.startswith("fsspec"):
        options["s3_additional_kwargs"] = {"SSECustomerKey": CUSTOMER_KEY if scheme == "s3" else IN_BASE64}
    with caplog.at_level(logging.DEBUG, logger="ckpt"), fault_proxy(server) as proxy:
        options["endpoint_url"] = f"http://127.0.0.1:{proxy.port}"
        if scheme.startswith("fsspec"):
            del options["max_attempts"], options["part_size_bytes"]
        else:
            options["max_attempts"] = 1
        url = f"{scheme}://bucket/c"
        metadata = ckpt.save({"t": torch.ones(10), "o": 3}, url, storage_options=options)
        writer, reader = (
            ckpt.CheckpointWriter(url, storage_options=options),
            ckpt.CheckpointReader(url, storage_options=options),
        )
        texts += [
            repr(metadata),
            repr(writer),
            repr(reader),
            str(writer.checkpoint_id),
            repr(writer.storage_meta()),
        ]
        proxy.rule = lambda call: 403
        for action in (
            lambda: ckpt.load({"t": torch.ones(10)}, url, storage_options=options),
            lambda: ckpt.save({"t": torch.ones(10)}, url, storage_options=options),
        ):
            with pytest.raises(CheckpointError) as caught:
                action()
            texts += [str(caught.value), repr(caught.value), repr(pickle.dumps(caught.value))]
            texts.append("".join(traceback.format_exception(caught.value)))
    assert server.objects
    if not scheme.startswith("fsspec"):
        sent = server.requests[0].headers
        assert sent["x-amz-server-side-encryption-customer-key"] == IN_BASE64
    texts += [repr(data) for data in server.objects.values()]
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("ckpt")]
    assert ours
    texts += ours
    texts += list(capfd.readouterr())
    for text in texts:
        assert SECRET_KEY not in text
        assert TOKEN not in text
        assert not shows_the_key(text)


def test_a_refused_api_key(server: StrictS3, iam: IamServer) -> None:
    options = {
        "endpoint_url": server.endpoint_url,
        "ibm_api_key_id": "the-wrong-and-secret-key",
        "ibm_service_instance_id": "crn:1",
        "ibm_auth_endpoint": iam.url,
        "max_attempts": 1,
    }
    store = open_store("cos://bucket/x", options)
    with pytest.raises(ckpt.errors.AccessDenied) as caught:
        store.stat("k")
    text = "".join(traceback.format_exception(caught.value)) + repr(store)
    assert "the-wrong-and-secret-key" not in text


def test_user_info_in_urls(tmp_path: Path) -> None:
    assert redact_url("https://me:pw@host/x?token=1#f") == "https://host/x"
    assert redact_url("ftp://me:pw@host/a#1?b") == "ftp://host/a#1?b"  # a name, not a fragment
    assert redact_url("s3://bucket/a#b") == "s3://bucket/a#b"
    assert redact_url("s3://bucket/key@2") == "s3://bucket/key@2"
    for scheme in ("abfs", "ABFSS", "az", "simplecache::abfs", "fsspec+az"):
        azure = f"{scheme}://container@account.dfs.core.windows.net/x"
        assert redact_url(azure) == azure
    chain = "filecache::https://me:pw@host/x?token=1"
    assert redact_url(chain) == "filecache::https://host/x"
    assert redact_url("zip://a#b::" + chain) == "zip://a#b::filecache::https://host/x"
    assert redact_url("simplecache::ftp://me:pw@host/a#1") == "simplecache::ftp://host/a#1"
    for password in ("secret-pw", "a:@secret-pw"):
        store = open_store(f"fsspec+ftp://me:{password}@127.0.0.1:9/place")
        assert store.url == "fsspec+ftp://127.0.0.1:9/place"
        with pytest.raises(CheckpointError) as caught:
            store.stat("k")
        assert "secret-pw" not in "".join(traceback.format_exception(caught.value))
    for url in (
        "s3://key:secret-pw@bucket/x",
        "cos://key:secret-pw@bucket/x",
        "s3://key:secret-pw/y@bucket/x",
    ):
        with pytest.raises(ConfigurationError, match="storage_options") as wrong:
            open_store(url, {"endpoint_url": "http://127.0.0.1:9"})
        assert "secret-pw" not in str(wrong.value)
    for endpoint in ("http://key:secret-pw@host", "http://host/?token=secret-pw"):
        for options in ({"endpoint_url": endpoint}, {"client_kwargs": {"endpoint_url": endpoint}}):
            with pytest.raises(ConfigurationError, match="must be a plain URL") as wrong:
                open_store("s3://bucket/x", options)
            assert "secret-pw" not in str(wrong.value)


class _Refusing(Handler):
    def serve(self) -> None:
        self.answer(403, {}, b"")


@pytest.mark.parametrize("chain", ["", "fsspec+", "simplecache::"])
@pytest.mark.parametrize(
    "query", ["?sig=a%2bSECRET%3d", "?sig=a|SECRET", "?a=b&sig=SECRET#c", "?sig=a b'SECRET"]
)
def test_queries_of_urls(chain: str, query: str) -> None:
    """Also as the client writes them, which quotes them anew."""
    with http_server(_Refusing) as port:
        store = open_store(f"{chain}http://127.0.0.1:{port}/run{query}")
        with pytest.raises(CheckpointError) as caught:
            store.stat("k")
    assert store.url == f"{chain}http://127.0.0.1:{port}/run"
    assert f"http://127.0.0.1:{port}/run" in str(caught.value)
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_representations_show_no_options() -> None:
    """Tracebacks with local variables show them."""
    url, options = "ftp://me:secret-pw@host/place", {"secret": SECRET_KEY}
    for shown in (
        Endpoint(url, options, lambda store: store, contextlib.ExitStack()),
        Setup(url, options, None, torch.float32, 0),
        open_store("s3://bucket/x", {"key": "k", **options}),
        ckpt.CheckpointWriter("s3://bucket/x", storage_options={"key": "k", **options}),
        _Settings(options, ()),
        _Places(url, options, url, options, None),
        Place(url, {"storage_options": options}),
    ):
        assert not re.search(f"secret-pw|{SECRET_KEY}", repr(shown))


def test_no_dataclass_shows_options() -> None:
    """Also those that come later: a field with options has `repr=False`."""
    for name in modules():
        with contextlib.suppress(
            ConfigurationError, ImportError
        ):  # adapters whose framework is not installed
            importlib.import_module(name)
    shown = [
        f"{kind.__module__}.{kind.__name__}.{each.name}"
        for kind in _subclasses(object)
        if str(kind.__module__).partition(".")[0] == "ckpt" and dataclasses.is_dataclass(kind)
        for each in dataclasses.fields(kind)
        if each.repr and "options" in each.name and "Options" not in str(each.type)
    ]
    assert shown == []


def _subclasses(kind: type) -> set[type]:
    found: set[type] = set()
    todo = [kind]
    while todo:
        new: set[type] = set(type.__subclasses__(todo.pop())) - found
        found |= new
        todo += new
    return found


def test_wrong_options_are_named_without_values() -> None:
    options: dict[str, Any] = {"sekret": "secret-value", "key": "k"}
    with pytest.raises(ConfigurationError, match="unknown storage option") as caught:
        open_store("s3://bucket/x", options)
    assert "sekret" in str(caught.value)
    assert "secret-value" not in str(caught.value)


@pytest.mark.parametrize("name", ["key", "secret", "token"])
def test_credentials_read_with_their_line_break(name: str) -> None:
    options = {"key": "the-key", "secret": "secret-value", "token": "the-token"}
    options[name] += "\n"
    with pytest.raises(ConfigurationError, match=f"{name} contains a line break") as caught:
        open_store("s3://bucket/x", options)
    assert options[name].strip() not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "cos", "fsspec+s3"])
def test_credentials_with_a_line_break_from_elsewhere(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP stack refuses such a header, and quotes it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-access-key\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-value\n")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token\n")
    options: dict[str, Any] = {"endpoint_url": "http://127.0.0.1:9"}
    if scheme == "fsspec+s3":
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
    else:
        options["max_attempts"] = 1
    store = open_store(f"{scheme}://bucket/x", options)
    with pytest.raises(CheckpointError) as caught:
        store.stat("k")
    text = "".join(traceback.format_exception(caught.value))
    for value in ("the-access-key", "secret-value", "session-token"):
        assert value not in text
    store.close()


class _Quoting(Handler):
    """Quote the request in the reply, as some proxies do."""

    def serve(self) -> None:
        self.rfile.read(self.length)
        quoted = f"{self.headers.get('x-amz-security-token')} {self.headers.get('authorization')}"
        self.answer(
            400, {}, f"<Error><Code>InvalidRequest</Code><Message>{quoted}</Message></Error>".encode()
        )


def test_servers_that_quote_credentials_of_the_sdk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iam: IamServer
) -> None:
    """Credentials that the SDK found by itself, in a profile or at a token endpoint."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id=AKIAOFAPROFILE\naws_secret_access_key=profile-secret\n"
        f"aws_session_token={TOKEN}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with_iam = {
        "ibm_api_key_id": iam.api_key,
        "ibm_service_instance_id": "crn:1",
        "ibm_auth_endpoint": iam.url,
    }
    with http_server(_Quoting) as port:
        for scheme, options in (("s3", {}), ("cos", with_iam)):
            endpoint = {"endpoint_url": f"http://127.0.0.1:{port}", "max_attempts": 1}
            store = open_store(f"{scheme}://bucket/x", {**endpoint, **options})
            with pytest.raises(CheckpointError, match=r"InvalidRequest: .*\*\*\*") as caught:
                store.read_into("k", 0, [memoryview(bytearray(1))])
            text = "".join(traceback.format_exception(caught.value)) + repr(pickle.dumps(caught.value))
            assert not re.search("AKIAOFAPROFILE|session-token|Signature=[0-9a-f]|earer token", text)
            store.close()


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_servers_that_quote_credentials(scheme: str) -> None:
    with strict_s3() as server:
        server.rule = lambda request: (400, f"Bad-{SECRET_KEY}-{TOKEN}-{IN_BASE64}-{CUSTOMER_KEY.decode()}")
        options = {name: server.options[name] for name in ("endpoint_url", "key", "secret")}
        if scheme == "s3":
            options["s3_additional_kwargs"] = {"SSECustomerKey": IN_BASE64}
        store = open_store(f"{scheme}://bucket/x", {**options, "token": TOKEN})
        with pytest.raises(CheckpointError) as caught:
            store.read_into("k", 0, [memoryview(bytearray(1))])
        text = "".join(traceback.format_exception(caught.value)) + repr(pickle.dumps(caught.value))
        server.rule = lambda request: (409, f"Conflict-{SECRET_KEY}-{TOKEN}")
        with pytest.raises(CheckpointError) as caught:  # an answer that the store itself judges
            put_bytes(store, "k", b"data", mode=PutMode.CREATE)
        text += "".join(traceback.format_exception(caught.value)) + repr(pickle.dumps(caught.value))
        assert scheme != "s3" or not shows_the_key(text)
        assert SECRET_KEY not in text
        assert TOKEN not in text
        store.close()
