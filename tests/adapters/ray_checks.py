"""Tests of the adapter for Ray Train that need no workers; `test_ray.py` runs them in Ray's environment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import torch
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution import context
from ray.train.v2._internal.execution.storage import StorageContext
from support.servers import S3Server

import ckpt
from adapters.test_law import s3_environment
from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.adapters.ray import CheckpointManager, url_of


def test_a_manager_outside_of_a_worker() -> None:
    with pytest.raises(ConfigurationError, match="in the function that Ray Train runs on its workers"):
        CheckpointManager(save=2)


def test_two_that_would_remove_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    run_config = SimpleNamespace(checkpoint_config=CheckpointConfig(num_to_keep=2))
    worker: Any = SimpleNamespace(train_run_context=SimpleNamespace(run_config=run_config))
    monkeypatch.setattr(context, "_train_context", worker)
    with pytest.raises(ConfigurationError, match=r"CheckpointConfig\(num_to_keep=...\).*pass keep="):
        CheckpointManager(save=2)


def test_ray_reads_what_is_saved_into_its_experiment_on_s3(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_environment(s3).items():
        monkeypatch.setenv(name, value)
    storage = StorageContext(f"s3://{s3.new_bucket()}/runs", "run")
    checkpoint = Checkpoint(f"{storage.experiment_fs_path}/step-00000001", storage.storage_filesystem)
    assert context.is_managed_checkpoint(storage, checkpoint)  # else `report` would refuse it
    state = {"a": torch.ones(3)}
    ckpt.save(state, url_of(checkpoint), no_dist=True)
    state["a"].zero_()
    ckpt.load(state, checkpoint.to_directory(str(tmp_path / "copy")), no_dist=True)
    assert state["a"].sum() == 3


def test_where_the_checkpoints_of_ray_are() -> None:
    from fsspec.implementations.memory import MemoryFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    local, s3 = pyarrow.fs.LocalFileSystem(), pyarrow.fs.S3FileSystem(region="us-east-1")
    assert url_of(Checkpoint("/runs/a/step-1", local)) == "/runs/a/step-1"
    assert url_of(Checkpoint("bucket/runs/step-1", s3)) == "s3://bucket/runs/step-1"
    memory = PyFileSystem(FSSpecHandler(MemoryFileSystem()))
    assert url_of(Checkpoint("runs/step-1", memory)) == "memory://runs/step-1"
    part = pyarrow.fs.SubTreeFileSystem("/runs", local)
    with pytest.raises(ConfigurationError, match="'subtree' has no URL here"):
        url_of(Checkpoint("step-1", part))
