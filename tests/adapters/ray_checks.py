"""Tests of the adapter for Ray Train that need no workers; `test_ray.py` runs them in Ray's environment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution import context

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
