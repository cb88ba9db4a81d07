"""Places: a relative path means one folder from the first call on, and a typing error in a URL makes no folder."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.forward_proxy import certificate
from support.strict_s3 import StrictS3, strict_s3

import ckpt
from ckpt.backends.registry import normal_url, open_store
from ckpt.embeddings import Tables
from ckpt.errors import ConfigurationError
from ckpt.trainer_integration import events, keeping
from ckpt.trainer_integration.sinks.prometheus import PrometheusTextfile
from ckpt.trainer_integration.token_files import TokenFiles, write_token_file


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Begin in the folder `start`; the other one has to stay empty."""
    start = tmp_path / "start"
    other = tmp_path / "other"
    start.mkdir()
    other.mkdir()
    monkeypatch.chdir(start)
    yield other
    assert os.listdir(other) == []


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), float(step))}


def test_a_manager_after_a_change_of_directory(elsewhere: Path, tmp_path: Path) -> None:
    log = events.JsonLines("events.jsonl")
    sink = PrometheusTextfile("run.prom")
    with ckpt.CheckpointManager("run", save=1, keep=keeping.last(2), events=[log, sink]) as manager:
        for step in range(1, 5):
            manager.step(step, state_of(step))
            os.chdir(elsewhere)
        manager.wait_durable()
    start = tmp_path / "start"
    assert sorted(os.listdir(start)) == ["events.jsonl", "run", "run.prom"]
    assert sorted(os.listdir(start / "run")) == ["ckpt-run.json", "step-00000003", "step-00000004"]
    os.chdir(start)
    state = state_of(0)
    with ckpt.CheckpointManager("run", save=1) as manager:
        restored = manager.restore(state)
    assert restored is not None
    assert (restored.step, state["w"].tolist()) == (4, [4.0] * 3)


def _manage(root: str, **more: Any) -> Callable[[], object]:
    """Make a manager, and return the use of it."""
    manager = ckpt.CheckpointManager(root, save=1, keep=keeping.last(1), preflight=False, **more)

    def use() -> None:
        with manager:
            for step in (1, 2):
                manager.step(step, state_of(step))
                manager.wait_durable(240)

    return use


def _manage_by_a_process(server: StrictS3) -> Callable[[], object]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return _manage("run", async_mode="process")


def _manage_with_a_fallback(server: StrictS3) -> Callable[[], object]:
    options: dict[str, Any] = {"fallback": "near", "async_mode": "off", "storage_options": server.options}
    server.rule = lambda request: (403, "AccessDenied") if request.method == "PUT" else "pass"
    manager = ckpt.CheckpointManager("s3://bucket/run", save=1, preflight=False, **options)

    def use() -> None:
        with manager:
            manager.step(1, state_of(1))
            assert not server.objects
            server.rule = lambda request: "pass"
            assert manager.wait_durable(240) == 1

    return use


def _load(url: str, **storage_options: Any) -> Callable[[], object]:
    reader = ckpt.CheckpointReader(url, storage_options=storage_options)
    state = state_of(0)
    return lambda: torch.distributed.checkpoint.load(state, storage_reader=reader)


def _load_from_an_archive(server: StrictS3) -> Callable[[], object]:
    ckpt.save(state_of(1), "step-1")
    shutil.make_archive("near", "tar", ".", "step-1")
    return _load("tar://step-1::near.tar")


def _load_through_a_cache(server: StrictS3) -> Callable[[], object]:
    ckpt.save(state_of(1), "s3://bucket/run/step-1", storage_options=server.options)
    s3 = {name: server.options[name] for name in ("endpoint_url", "key", "secret")}
    return _load("simplecache::s3://bucket/run/step-1", s3=s3, simplecache={"cache_storage": "near"})


def _save_by_tls(server: StrictS3) -> Callable[[], object]:
    """The folder of the server's certificate is `near`."""
    Path("near").mkdir()
    context, trusted = certificate(Path("near"))
    stack = contextlib.ExitStack()
    of_tls = stack.enter_context(strict_s3(tls=context))
    relative = os.path.relpath(trusted)
    options = {**of_tls.options, "client_kwargs": {"verify": relative}, "max_attempts": 1}
    use = _manage("s3://bucket/run", storage_options=options)

    def use_and_stop() -> None:
        with stack:
            use()
            assert of_tls.objects

    return use_and_stop


def _save_with_a_base(server: StrictS3) -> Callable[[], object]:
    ckpt.save(state_of(1), "near/step-1", digests=True)
    save = ckpt.async_save(state_of(1), "near/step-2", base="near/step-1")
    return lambda: save.result(240)


def _save_in_the_background(**more: Any) -> Callable[[], object]:
    save = ckpt.async_save(state_of(1), "run/step-1", **more)
    return lambda: save.result(240)


def _use_a_tier(server: StrictS3) -> Callable[[], object]:
    tier = ckpt.LocalTier("near")
    return lambda: _manage(os.path.join(os.path.dirname(tier.path), "run"), local=tier)()


GIVEN: dict[str, tuple[Callable[[StrictS3], Callable[[], object]], str]] = {
    "root": (lambda server: _manage("run"), "run/step-00000002"),
    "local=": (lambda server: _manage("run", local="near"), "near"),
    "LocalTier": (_use_a_tier, "near"),
    "fallback=": (_manage_with_a_fallback, "near"),
    "the saving process": (_manage_by_a_process, "run/step-00000002"),
    "async_save": (lambda server: _save_in_the_background(), "run/step-1"),
    "async_save with local=": (lambda server: _save_in_the_background(local="near"), "run/step-1"),
    "base=": (_save_with_a_base, "near/step-2"),
    "a chain": (_load_from_an_archive, "near.tar"),
    "cache_storage": (_load_through_a_cache, "near"),
    "verify": (_save_by_tls, "near"),
}
"""What is given, and what is in the folder `start` after its use."""


@pytest.mark.parametrize("what", [*GIVEN])
def test_a_place_is_resolved_when_it_is_given(
    elsewhere: Path, tmp_path: Path, server: StrictS3, what: str
) -> None:
    give, left = GIVEN[what]
    use = give(server)
    os.chdir(elsewhere)
    try:
        use()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert (tmp_path / "start" / left).exists()
    if left == "run/step-00000002":
        assert not (tmp_path / "start" / "run" / "step-00000001").exists(), "retention removes there"


def test_tables_after_a_change_of_directory(elsewhere: Path, tmp_path: Path) -> None:
    tables = Tables()
    save = tables.async_save(state_of(1), "run/step-1")
    os.chdir(elsewhere)
    save.result(240)
    assert (tmp_path / "start" / "run" / "step-1" / "commit.json").exists()
    tables.save(state_of(2), tmp_path / "start" / "run" / "step-2")  # next to its base


def test_writers_readers_and_watchers_after_a_change_of_directory(elsewhere: Path, tmp_path: Path) -> None:
    writer = ckpt.CheckpointWriter("run/step-1")
    reader = ckpt.CheckpointReader("run/step-1")
    copy = pickle.dumps(writer)
    watched = ckpt.watch("run", cursor="cursor.json", timeout_s=0)
    write_token_file("tokens.bin", [np.arange(4, dtype=np.uint16)])
    tokens = pickle.dumps(TokenFiles(["tokens.bin"]))
    fsspec = open_store("local://by-fsspec")
    os.chdir(elsewhere)
    for each in (writer, pickle.loads(copy)):
        each.reset()
        torch.distributed.checkpoint.save(state_of(7), storage_writer=each)
    state = state_of(0)
    torch.distributed.checkpoint.load(state, storage_reader=reader)
    assert state["w"].tolist() == [7.0] * 3
    assert [each.url for each in watched] == [str(tmp_path / "start" / "run" / "step-1")]
    assert (tmp_path / "start" / "cursor.json").exists()
    assert pickle.loads(tokens).tokens(0).tolist() == [0, 1, 2, 3]
    fsspec.prepare("")
    assert fsspec.url == f"local://{tmp_path / 'start' / 'by-fsspec'}"


def test_a_working_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigurationError, match="working directory, which was removed"):
        ckpt.save(state_of(1), "run/step-1")
    ckpt.save(state_of(1), tmp_path / "run" / "step-1")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("s3//bucket/x", "s3://bucket/x"),
        ("S3//bucket/x", "S3://bucket/x"),
        ("s3:bucket/x", "s3://bucket/x"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("gs//bucket/x", "gs://bucket/x"),
        ("cos//user:secret@bucket/x", "cos://bucket/x"),
        ("file//tmp/x", "file:///tmp/x"),
        ("fsspec+s3//bucket/x", "fsspec+s3://bucket/x"),
        ("simplecache::s3//bucket/x", "simplecache::s3://bucket/x"),
    ],
)
def test_typing_errors_in_a_scheme(elsewhere: Path, tmp_path: Path, typed: str, meant: str) -> None:
    calls = lambda: ckpt.save(state_of(1), typed), lambda: ckpt.CheckpointManager(typed, save=1)
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        assert repr(meant) in caught.value.message
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="looks like a URL"):
        ckpt.async_save(state_of(1), tmp_path / "step-1", local=typed).result()
    assert os.listdir(tmp_path / "start") == []


@pytest.mark.parametrize(
    "path", ["data//x", "local//x", "s3/x", "./s3//x", "run:1/x", "s3-runs//x", "a//s3//x"]
)
def test_folders_that_look_like_schemes(elsewhere: Path, tmp_path: Path, path: str) -> None:
    assert normal_url(path) == str(tmp_path / "start" / path).replace("//", "/").replace("/./", "/")
    ckpt.save(state_of(1), path)
    assert (tmp_path / "start" / path / "commit.json").exists()
