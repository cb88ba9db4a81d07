"""Places: a relative path means one folder from the first call on, and a typing error in a URL makes no folder."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

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


def test_a_local_tier_after_a_change_of_directory(elsewhere: Path, tmp_path: Path) -> None:
    with ckpt.CheckpointManager("run", save=1, local="near") as manager:
        for step in (1, 2):
            manager.step(step, state_of(step))
            os.chdir(elsewhere)
        assert manager.wait_durable(240) == 2
    assert (tmp_path / "start" / "run" / "step-00000002" / "commit.json").exists()
    assert (tmp_path / "start" / "near").is_dir()


def test_background_saves_after_a_change_of_directory(elsewhere: Path, tmp_path: Path) -> None:
    saves = [ckpt.async_save(state_of(1), "plain/step-1")]
    saves.append(ckpt.async_save(state_of(1), "tiered/step-1", local="near"))
    os.chdir(elsewhere)
    for save in saves:
        save.result(60)
    for root in ("plain", "tiered"):
        assert (tmp_path / "start" / root / "step-1" / "commit.json").exists()


def test_tables_after_a_change_of_directory(elsewhere: Path, tmp_path: Path) -> None:
    tables = Tables()
    save = tables.async_save(state_of(1), "run/step-1")
    os.chdir(elsewhere)
    save.result(60)
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
