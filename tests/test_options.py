"""Arguments, options and URLs: what is accepted, and what is said when it is wrong."""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import ckpt
from ckpt.backends.base import MIB, Capabilities, part_size_bytes
from ckpt.backends.memory import MemoryStore
from ckpt.backends.posix import PosixStore, _filesystem_type
from ckpt.backends.registry import open_store, register
from ckpt.errors import ConfigurationError, SaveFailed

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
        ({"checksum": "md5"}, "checksum must be 'crc64nvme' or 'none'"),
        ({"unknown": 1}, r"unknown storage option\(s\) unknown; known are anon, checksum"),
        ({"profile": "no-such-profile"}, "no-such-profile"),
        ({"endpoint_url": "not a url"}, "not a url"),
    ],
)
def test_wrong_s3_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_store("s3://bucket/x", options).stat("k")


def test_wrong_options_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="file: unknown storage option"):
        ckpt.CheckpointWriter(tmp_path, storage_options={"key": "x"})
    with pytest.raises(ConfigurationError, match="endpoint_url or region"):
        open_store("cos://bucket/x")
    with pytest.raises(ConfigurationError, match="not both"):
        open_store("cos://b/x", {"region": "eu-de", "key": "a", "secret": "b", "ibm_api_key_id": "c"})
    with pytest.raises(ConfigurationError, match="visibility_timeout_s must not be negative"):
        ckpt.CheckpointReader(tmp_path, visibility_timeout_s=-1)
    with pytest.raises(ConfigurationError, match="visibility_timeout_s must not be negative"):
        ckpt.CheckpointReader(tmp_path, visibility_timeout_s=float("nan"))
    with pytest.raises(ConfigurationError, match="tags are texts"):
        ckpt.CheckpointWriter(tmp_path, tags={"step": 5})  # type: ignore[dict-item]


def test_cos_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IBM_COS_REGION", "eu-de")
    monkeypatch.setenv("IBM_API_KEY_ID", "the-key")
    monkeypatch.setenv("IBM_SERVICE_INSTANCE_ID", "crn")
    store: Any = open_store("cos://bucket/x")
    assert store._options["endpoint_url"] == "https://s3.eu-de.cloud-object-storage.appdomain.cloud"
    assert store._options["ibm_api_key_id"] == "the-key"
    monkeypatch.setenv("COS_HMAC_ACCESS_KEY_ID", "hmac")
    monkeypatch.setenv("COS_HMAC_SECRET_ACCESS_KEY", "secret")
    store = open_store("cos://bucket/x")
    assert (store._options["key"], store._options["ibm_api_key_id"]) == ("hmac", None)


def test_s3_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    client = open_store("s3://bucket/x")._client  # type: ignore[attr-defined]
    assert client.meta.endpoint_url == "http://127.0.0.1:9"
    assert client.meta.region_name == "eu-central-1"
    assert client._request_signer._credentials.access_key == "from-environment"


@pytest.mark.parametrize("url", ["s3:/bucket/x", "cos:/b", "fsspec+s3:/b/x"])
def test_urls_that_went_through_pathlib(url: str) -> None:
    with pytest.raises(ConfigurationError, match="looks like a URL that went through pathlib"):
        open_store(Path(url))
    for kind in (ckpt.CheckpointWriter, ckpt.CheckpointReader):
        assert not kind.validate_checkpoint_id(url)


def test_paths_that_only_look_odd(tmp_path: Path) -> None:
    for name in ("with space", "a:b", "run[lr=0.1]*?", "ü", "100%"):
        ckpt.save({"t": torch.ones(3)}, tmp_path / name)
        loaded = {"t": torch.zeros(3)}
        ckpt.load(loaded, str(tmp_path / name))
        assert torch.equal(loaded["t"], torch.ones(3))


def test_file_urls(tmp_path: Path) -> None:
    ckpt.save({"t": torch.ones(3)}, f"file://{tmp_path}/with%20space")
    assert (tmp_path / "with space" / "commit.json").exists()
    with pytest.raises(ConfigurationError, match="absolute path"):
        open_store("file://host/x")


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = ckpt.CheckpointWriter("run/step-1")
    assert writer.checkpoint_id == f"{tmp_path}/run/step-1"


@pytest.mark.parametrize("url", ["", 5, None])
def test_no_url(url: Any) -> None:
    with pytest.raises((ConfigurationError, TypeError)):
        ckpt.CheckpointWriter(url)


def test_unknown_scheme() -> None:
    with pytest.raises(SaveFailed, match="Protocol not known: nosuch"):
        ckpt.save({"t": torch.ones(3)}, "nosuch://place/x")


def test_missing_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, module, extra in (
        ("s3", "boto3", "s3"),
        ("cos", "ibm_boto3", "cos"),
        ("gs", "fsspec", "fsspec"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        options = {"endpoint_url": "http://x"} if scheme == "cos" else {}
        with pytest.raises(ConfigurationError, match=rf"pip install 'ckpt-storage\[{extra}\]'"):
            open_store(f"{scheme}://bucket/x", options).stat("k")


def test_registered_schemes() -> None:
    def factory(url: str, options: Mapping[str, Any] | None, *, threads: int) -> MemoryStore:
        return MemoryStore(url.replace("mine://", "memory://"), options, threads=threads)

    register("mine", factory)
    assert open_store("mine://place/x").url == "memory://place/x"


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    found = types.SimpleNamespace(load=lambda: lambda url, options, threads: PosixStore("/tmp/third-party"))
    monkeypatch.setattr(
        "ckpt.backends.registry.entry_points",
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
    with pytest.raises(SaveFailed, match="overwrite=False"):
        ckpt.save({"t": torch.zeros(3)}, tmp_path, overwrite=False)
    loaded = {"t": torch.zeros(3)}
    ckpt.load(loaded, tmp_path)
    assert torch.equal(loaded["t"], torch.ones(3))


def test_capabilities_follow_the_file_system(tmp_path: Path) -> None:
    assert _filesystem_type("/proc/self") == "proc"
    assert _filesystem_type("/dev/shm/not/there/yet") == "tmpfs"
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
