"""Arguments, options and URLs: what is accepted, and what is said when it is wrong."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import run_ranks
from support.servers import IamServer
from support.strict_s3 import strict_s3

import ckpt
from ckpt.backends.base import MIB, Capabilities, part_size_bytes
from ckpt.backends.memory import MemoryStore
from ckpt.backends.options import options_dict
from ckpt.backends.paths import filesystem_type
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store, register
from ckpt.errors import AccessDenied, ConfigurationError, SaveFailed

S3 = Capabilities(
    max_object_size_bytes=5 << 40, max_parts=10_000, min_part_size_bytes=5 * MIB, max_part_size_bytes=5 << 30
)


@given(st.integers(0, 5 << 40), st.integers(1, 64 * MIB))
def test_part_size_grows_with_the_object(nbytes: int, wanted: int) -> None:
    size = part_size_bytes(nbytes, wanted, S3)
    assert size % MIB == 0
    assert size >= max(wanted, 5 * MIB)
    assert -(-nbytes // size) <= 10_000
    assert size < max(wanted, 5 * MIB) + MIB or -(-nbytes // (size - MIB)) > 10_000


def test_objects_over_the_limit() -> None:
    with pytest.raises(ConfigurationError, match="over the store's limit of 5120 GiB; shard the model"):
        part_size_bytes((5 << 40) + 1, MIB, S3)


@pytest.mark.parametrize("threads", [0, -1])
def test_threads(tmp_path: Path, threads: int) -> None:
    for kind in (ckpt.CheckpointWriter, ckpt.CheckpointReader):
        with pytest.raises(ConfigurationError, match="threads must be at least 1"):
            kind(tmp_path, threads=threads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part_size_bytes": 0}, "part_size_bytes must be positive"),
        ({"max_attempts": -1}, "max_attempts must be positive"),
        ({"read_timeout_s": 0}, "read_timeout_s must be positive"),
        ({"part_size_bytes": "32MB"}, "part_size_bytes must be a whole number, not a str"),
        ({"part_size_bytes": True}, "part_size_bytes must be a whole number, not a bool"),
        ({"part_size_bytes": 6 << 30}, r"part_size_bytes must be at most 5368709120 \(5 GiB\)"),
        ({"read_timeout_s": "60"}, "read_timeout_s must be a number, not a str"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s must be positive"),
        ({"anon": "false"}, "anon must be True or False, not a str"),
        ({"config_kwargs": "x"}, "config_kwargs must be a dict, not a str"),
        ({"key": 5}, "key must be a str, not a int"),
        ({"key": "only"}, "key and secret belong together"),
        ({"secret": "only"}, "key and secret belong together"),
        ({"config_kwargs": {"no_such_thing": 1}}, "no_such_thing"),
        ({"client_kwargs": {"no_such_thing": 1}}, "no_such_thing"),
        ({"checksum": "sha1"}, "checksum must be 'crc64nvme', 'md5' or 'none'"),
        ({"unknown": 1}, r"unknown storage option\(s\) unknown; known are anon, checksum"),
        ({"endpoint": "x"}, r"endpoint \(did you mean endpoint_url\?\); known are"),
        ({"aws_session_token": "x"}, r"aws_session_token \(did you mean token\?\)"),
        ({"profile": "no-such-profile"}, "no-such-profile"),
        ({"endpoint_url": "not a url"}, "not a url"),
    ],
)
def test_wrong_s3_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_store("s3://bucket/x", options).stat("k")


def test_options_that_are_none() -> None:
    """As configuration files give what is not set."""
    options = dict.fromkeys(["key", "secret", "client_kwargs", "config_kwargs", "s3_additional_kwargs"])
    store: Any = open_store("s3://bucket/x", options)
    assert store._s3.client.meta.config.s3["payload_signing_enabled"] is False


def test_wrong_options_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="file: unknown storage option"):
        ckpt.CheckpointWriter(tmp_path, storage_options={"key": "x"})
    with pytest.raises(ConfigurationError, match="fsync must be True or False, not a str"):
        open_store(str(tmp_path), {"fsync": "false"})
    with pytest.raises(ConfigurationError, match="storage_options must be a dict, not a list"):
        open_store(str(tmp_path), [1])  # type: ignore[arg-type]
    elsewhere: list[Any] = [
        functools.partial(ckpt.doctor, tmp_path),
        functools.partial(ckpt.roundtrip, tmp_path, "t5-small"),
        ckpt.install,
    ]
    for call in elsewhere:
        with pytest.raises(ConfigurationError, match="storage_options must be a dict, not a str"):
            call(storage_options="x")
    with pytest.raises(ConfigurationError, match="endpoint_url or region"):
        open_store("cos://bucket/x")
    with pytest.raises(ConfigurationError, match="not several"):
        open_store("cos://b/x", {"region": "eu-de", "key": "a", "secret": "b", "ibm_api_key_id": "c"})
    with pytest.raises(ConfigurationError, match="visibility_timeout_s must not be negative"):
        ckpt.CheckpointReader(tmp_path, visibility_timeout_s=-1)
    with pytest.raises(ConfigurationError, match="visibility_timeout_s must not be negative"):
        ckpt.CheckpointReader(tmp_path, visibility_timeout_s=float("nan"))
    with pytest.raises(ConfigurationError, match="tags map str to str"):
        ckpt.CheckpointWriter(tmp_path, tags={"step": 5})  # type: ignore[dict-item]


def test_cos_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IBM_COS_REGION", "eu-de")
    monkeypatch.setenv("IBM_API_KEY_ID", "the-key")
    monkeypatch.setenv("IBM_SERVICE_INSTANCE_ID", "crn")
    store: Any = open_store("cos://bucket/x")
    assert store._s3.options["endpoint_url"] == "https://s3.eu-de.cloud-object-storage.appdomain.cloud"
    assert store._s3.options["ibm_api_key_id"] == "the-key"
    monkeypatch.setenv("COS_HMAC_ACCESS_KEY_ID", "hmac")
    monkeypatch.setenv("COS_HMAC_SECRET_ACCESS_KEY", "secret")
    store = open_store("cos://bucket/x")
    assert (store._s3.options["key"], store._s3.options["ibm_api_key_id"]) == ("hmac", None)


def test_a_trusted_profile_is_an_identity_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iam: IamServer
) -> None:
    with strict_s3() as server:
        monkeypatch.setenv("COS_ENDPOINT_URL", server.endpoint_url)
        monkeypatch.setenv("COS_IAM_PROFILE_ID", iam.profile_id)
        monkeypatch.setenv("IBM_AUTH_ENDPOINT", iam.url)
        with pytest.raises(ConfigurationError, match="there is no /var/run/secrets/tokens/sa-token"):
            open_store("cos://bucket/x")
        (tmp_path / "sa-token").write_text(f"{iam.pod_token}\n")
        monkeypatch.setenv("COS_CR_TOKEN_FILENAME", str(tmp_path / "sa-token"))
        store: Any = open_store("cos://bucket/x")
        client = store._s3.client
        assert client.meta.config.signature_version == "oauth"
        token = client._request_signer._credentials.token_manager.get_token()
        assert token == iam.tokens[-1]
        store.close()
        (tmp_path / "sa-token").write_text("another")
        with pytest.raises(AccessDenied, match="Provided API key could not be found") as caught:
            open_store("cos://bucket/x").stat("k")
        assert "another" not in str(caught.value)
    both = {"iam_profile_id": "p", "ibm_api_key_id": "c", "region": "eu-de"}
    with pytest.raises(ConfigurationError, match="not several"):
        open_store("cos://b/x", both)
    monkeypatch.setenv("IBM_API_KEY_ID", "the-key")
    options = open_store("cos://bucket/x")._s3.options  # type: ignore[attr-defined]
    assert (options["ibm_api_key_id"], options["iam_profile_id"]) == ("the-key", None), "keys come first"


def test_a_cos_api_key_from_the_sdks_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ibm-cos-sdk finds an API key by itself; then requests must be signed with a token."""
    for name in ("IBM_API_KEY_ID", "COS_HMAC_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\nibm_api_key_id = the-key\nibm_service_instance_id = crn\n")
    monkeypatch.setenv("COS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    client = open_store("cos://bucket/x", {"region": "eu-de"})._s3.client  # type: ignore[attr-defined]
    assert client.meta.config.signature_version == "oauth"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    client = open_store("cos://bucket/x", {"region": "eu-de"})._s3.client  # type: ignore[attr-defined]
    assert client.meta.config.signature_version == "s3v4"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/x", {}),
        ("s3://b/x", {"endpoint_url": "https://s3.eu-central-1.amazonaws.com"}),
        ("cos://b/x", {"region": "eu-de"}),
        ("fsspec+s3://b/x", {}),
    ],
)
def test_no_server_is_trusted_by_its_name(url: str, options: dict[str, Any]) -> None:
    assert not open_store(url, options).capabilities.conditional_create


def test_servers_are_told_apart_by_where_requests_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(url: str, **options: str) -> str:
        raw = open_store(url, options).raw_requests()
        assert raw is not None
        return raw.bucket_url

    assert place("s3://b/x") == place("s3://b/y")
    assert place("s3://b/x") != place("s3://c/x")
    elsewhere = place("s3://b/x", endpoint_url="http://127.0.0.1:9")
    assert elsewhere == "http://127.0.0.1:9/b"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert place("s3://b/x") == elsewhere


def test_s3_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    client = open_store("s3://bucket/x")._s3.client  # type: ignore[attr-defined]
    assert client.meta.endpoint_url == "http://127.0.0.1:9"
    assert client.meta.region_name == "eu-central-1"
    assert client._request_signer._credentials.access_key == "from-environment"


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/bucket/x", "s3://bucket/x"),
        ("cos:/b", "cos://b"),
        ("fsspec+s3:/b/x", "fsspec+s3://b/x"),
        ("file:/some/place", "file:///some/place"),
        ("s3:/key:secret-pw@b/x", "s3://b/x"),
    ],
)
def test_urls_that_went_through_pathlib(url: str, meant: str) -> None:
    with pytest.raises(
        ConfigurationError,
        match=f"went through pathlib; .* str: {re.escape(repr(meant))} .*as Lightning does",
    ):
        open_store(Path(url))
    for kind in (ckpt.CheckpointWriter, ckpt.CheckpointReader):
        assert not kind.validate_checkpoint_id(url)


def test_paths_that_only_look_odd(tmp_path: Path) -> None:
    for name in ("with space", "a:b", "run[lr=0.1]*?", "ü", "100%"):
        ckpt.save({"t": torch.ones(3)}, tmp_path / name)
        loaded = {"t": torch.zeros(3)}
        ckpt.load(loaded, str(tmp_path / name))
        assert torch.equal(loaded["t"], torch.ones(3))


@pytest.mark.parametrize("name", ["plain", "with space", "with%20escape", "a#1", "a?b=c", "100%"])
def test_file_urls_are_literal(tmp_path: Path, name: str) -> None:
    """As fsspec, and so stock PyTorch, takes them."""
    import fsspec

    url = f"file://{tmp_path}/{name}"
    assert open_store(url).url == str(tmp_path / name) == fsspec.core.url_to_fs(url)[1]
    assert open_store(f"file://localhost{tmp_path}/{name}").url == str(tmp_path / name)


def test_file_urls_are_absolute() -> None:
    with pytest.raises(ConfigurationError, match="absolute path"):
        open_store("file://host/x")


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = ckpt.CheckpointWriter("run/step-1")
    assert writer.checkpoint_id == f"{tmp_path}/run/step-1"


def test_names_that_look_like_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("a$b", "_$folder$", "5$", "$", "$5", "./C:\\run"):
        assert open_store(url).url == os.path.join(tmp_path, url.removeprefix("./"))
    assert open_store(f"file://{tmp_path}/$HOME").url == f"{tmp_path}/$HOME"


@pytest.mark.parametrize("url", ["", 5, None, b"bytes"])
def test_no_url(url: Any) -> None:
    with pytest.raises(ConfigurationError, match="a path or URL in a str"):
        open_store(url)
    with pytest.raises((ConfigurationError, TypeError)):
        ckpt.CheckpointWriter(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "s4://bucket/x",
            r"s4:// is not known \(did you mean s3\?\); known are cos, file, memory, .*s3.*sftp",
        ),
        ("fsspec+gcss://bucket/x", r"gcss:// is not known \(did you mean gcs\?\)"),
        ("zip::nosuch://place/x", "nosuch:// is not known; known are"),
    ],
)
def test_unknown_schemes(url: str, message: str) -> None:
    """They are refused at once, not in a collective, where DCP would wrap it into a BaseException."""
    for kind in (ckpt.CheckpointWriter, ckpt.CheckpointReader):
        assert not kind.validate_checkpoint_id(url)
        with pytest.raises(ConfigurationError, match=message):
            kind(url)
    with pytest.raises(ConfigurationError, match=message):
        ckpt.save({"t": torch.ones(3)}, url)


def test_schemes_in_capitals() -> None:
    assert open_store("S3://bucket/Key").url == "s3://bucket/Key"
    assert open_store("Memory://place/x").url == "memory://place/x"
    assert open_store("File:///tmp/X").url == "/tmp/X"
    assert open_store("FSSPEC+Memory://place/X").url == "fsspec+memory://place/X"


def test_home_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ckpt.save({"t": torch.ones(3)}, "~/run")
    assert ckpt.CheckpointReader(Path("~/run")).checkpoint_id == f"{tmp_path}/run"
    assert [listed.state for listed in ckpt.list_checkpoints("~/run")] == ["committed"]
    assert ckpt.convert("~/run", "~/model.safetensors").destination == f"{tmp_path}/model.safetensors"
    assert ckpt.convert("~/model.safetensors", "~/back").tensors == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "model.safetensors", "run"]
    assert open_store("~root/x").url == os.path.expanduser("~root/x") != "~root/x"
    with pytest.raises(ConfigurationError, match=r"no user 'no-such-user'; .* write './~no-such-user/x'"):
        open_store("~no-such-user/x")
    assert open_store("./~no-such-user/x").url == f"{tmp_path}/~no-such-user/x"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://my bucket/x", "no bucket can be named 'my bucket': only letters, digits"),
        ("cos://bücket/x", "no bucket can be named 'bücket'"),
        ("s3://arn:aws:s3:::name/x", r"write the bucket's name, as in s3://name/prefix"),
        ("a\0b", "NUL character"),
        ("s3://bucket/\ud800", r"not valid Unicode: 's3://bucket/\\ud800'"),
        ("/tmp/\ud800", "not valid Unicode"),
        ("$SCRATCH/run", r"'\$SCRATCH/run' has '\$SCRATCH' in it, which only a shell expands"),
        ("runs/$SLURM_JOB_ID", r"has '\$SLURM_JOB_ID' in it"),
        ("run-${job}/x", r"has '\$\{job\}' in it"),
        ("~/$user", r"has '\$user' in it"),
        ("s3://${BUCKET}/run", r"has '\$\{BUCKET\}' in it"),
        (r"C:\run", "is a path of Windows"),
        ("c:/run", "is a path of Windows"),
        (r"\\server\run", "is a path of Windows"),
    ],
)
def test_urls_that_name_nothing(url: str, message: str) -> None:
    options = {"region": "eu-de"} if url.startswith("cos") else None
    for call in (ckpt.list_checkpoints, ckpt.inspect, ckpt.verify, ckpt.remove, ckpt.collect_garbage):
        with pytest.raises(ConfigurationError, match=message) as caught:
            call(url, storage_options=options)
        assert len(str(caught.value)) < 200


def test_wrong_first_arguments(tmp_path: Path) -> None:
    model, url = torch.nn.Linear(2, 2), str(tmp_path / "c")
    calls: list[Any] = [ckpt.save, ckpt.async_save, ckpt.load]
    for call in calls:
        for state, place, message in (
            (model, url, r'must be a dict, not a Linear: write \{"model": model\}'),
            (torch.optim.SGD(model.parameters()), url, r'write \{"optimizer": optimizer\}'),
            ([1], url, "must be a dict, not a list$"),
            (url, {"t": torch.ones(2)}, "the arguments are swapped"),
            (url, model, "the arguments are swapped"),
            ({"a": 1, 2: 3}, url, "the keys of state_dict must all be str"),
        ):
            with pytest.raises(ConfigurationError, match=message) as caught:
                call(state, place)
            assert "rank" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="planner must be a planner of DCP, not 'x'"):
        calls[0]({"t": 1}, url, planner="x")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"overwrite": "no"}, "overwrite must be True or False, not 'no'"),
        ({"tags": "x"}, "tags must be a dict, not a str"),
        ({"storage_options": "x"}, "storage_options must be a dict, not a str"),
        ({"threads": True}, "threads must be at least 1, at most 4096, not True"),
        ({"threads": 10**9}, "threads must be at least 1, at most 4096"),
        ({"verify": None}, "verify must be True or False, not None"),
        ({"trusted_objects": None}, "trusted_objects must be a list of names, not None"),
        ({"trusted_objects": [5]}, r"trusted_objects must be a list of names, not \[5\]"),
        ({"visibility_timeout_s": "1"}, "visibility_timeout_s must not be negative, but a number: '1'"),
    ],
)
def test_arguments_of_wrong_types(tmp_path: Path, argument: dict[str, Any], message: str) -> None:
    for kind in (ckpt.CheckpointWriter, ckpt.CheckpointReader):
        if argument.keys() <= inspect.signature(kind).parameters.keys():
            with pytest.raises(ConfigurationError, match=message):
                kind(tmp_path, **argument)


@pytest.mark.parametrize("budget", [float("nan"), float("inf"), "1", True, 1 << 20])
def test_wrong_budgets(tmp_path: Path, budget: Any) -> None:
    for call in (ckpt.save, ckpt.async_save, ckpt.load):
        with pytest.raises(ConfigurationError, match="memory_budget_bytes must be at least"):
            call({"t": torch.ones(3)}, tmp_path / "c", memory_budget_bytes=budget)


def test_missing_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, module, extra in (
        ("s3", "boto3", "s3"),
        ("cos", "ibm_boto3", "cos"),
        ("gs", "fsspec", "fsspec"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        options = {"endpoint_url": "http://x"} if scheme == "cos" else {}
        with pytest.raises(ConfigurationError, match=rf"pip install './ckpt-storage\[{extra}\]'"):
            open_store(f"{scheme}://bucket/x", options).stat("k")


def test_registered_schemes() -> None:
    def factory(url: str, options: Mapping[str, Any] | None, *, threads: int) -> MemoryStore:
        return MemoryStore(url.replace("mine://", "memory://"), options, threads=threads)

    register("mine", factory)
    assert open_store("mine://place/x").url == "memory://place/x"


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    found = types.SimpleNamespace(load=lambda: lambda url, options, threads: PosixStore("/tmp/third-party"))
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group, name: [found] if (group, name) == ("ckpt.backends", "third") else [],
    )
    assert open_store("third://x").url == "/tmp/third-party"


def test_writers_and_readers_pickle(tmp_path: Path) -> None:
    """As DCP's process-based asynchronous save needs."""
    writer = pickle.loads(pickle.dumps(ckpt.CheckpointWriter(tmp_path, threads=3)))
    reader = pickle.loads(pickle.dumps(ckpt.CheckpointReader(tmp_path)))
    assert bool(writer)
    assert writer.checkpoint_id == reader.checkpoint_id == str(tmp_path)


def test_collectives_are_needed(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with pytest.raises(ConfigurationError, match="use_collectives=False"), pytest.warns(match="disabled"):
        dcp.save({"t": torch.ones(3)}, storage_writer=ckpt.CheckpointWriter(tmp_path), use_collectives=False)


def test_existing_checkpoints_can_be_protected(tmp_path: Path) -> None:
    ckpt.save({"t": torch.ones(3)}, tmp_path, overwrite=False)
    with pytest.raises(SaveFailed, match="overwrite=True"):
        ckpt.save({"t": torch.zeros(3)}, tmp_path, overwrite=False)
    loaded = {"t": torch.zeros(3)}
    ckpt.load(loaded, tmp_path)
    assert torch.equal(loaded["t"], torch.ones(3))


def test_capabilities_follow_the_file_system(tmp_path: Path) -> None:
    assert filesystem_type("/proc/self") == "proc"
    assert filesystem_type("/dev/shm/not/there/yet") == "tmpfs"
    assert not PosixStore("/proc/x").capabilities.cross_client_visibility
    assert PosixStore("/dev/shm/x").capabilities.conditional_create


def test_no_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    (message,) = run_ranks(1, _save_as_nobody, str(tmp_path / "closed" / "c"))
    assert "AccessDenied" in message
    assert "Permission denied" in message


def _save_as_nobody(rank: int, url: str) -> str:
    if os.geteuid() == 0:
        os.seteuid(65534)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save({"t": torch.ones(3)}, url)
    return f"{type(caught.value.failures[0]).__name__}: {caught.value}"


@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("name", ["client_cert", "proxy_client_cert", "cert", "auth"])
def test_pairs_may_be_lists_as_json_writes_them(
    name: str, form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any depth; other lists stay lists. Files are resolved when they are given."""
    monkeypatch.chdir(tmp_path)
    given = {"config_kwargs": {name: form(["a", "b"]), "names": ["a", "b"]}}
    pair = ("a", "b") if name == "auth" else (f"{tmp_path}/a", f"{tmp_path}/b")
    assert options_dict(given) == {"config_kwargs": {name: pair, "names": ["a", "b"]}}
    with pytest.raises(ConfigurationError, match=f"{name} must be a text or a pair of texts"):
        options_dict({name: ["a", "b", "c"]})
