"""Tests of the adapter for Ray Train that need no workers; `test_ray.py` runs them in Ray's environment."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution import context
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager as RaysList
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from support.servers import S3Server

import ckpt
from adapters.test_law import s3_environment
from ckpt.backends.posix import PosixStore
from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.adapters.ray import CheckpointManager, url_of


def test_a_manager_outside_of_a_worker() -> None:
    with pytest.raises(ConfigurationError, match="in the function that Ray Train runs on its workers"):
        CheckpointManager(save=2)


def be_worker(
    monkeypatch: pytest.MonkeyPatch, rule: CheckpointConfig, filesystem: Any = None, folder: str = ""
) -> None:
    """Have this process pass for the one worker of a run of Ray Train."""
    storage = SimpleNamespace(storage_filesystem=filesystem, experiment_fs_path=folder)
    run_config = SimpleNamespace(checkpoint_config=rule)
    worker: Any = SimpleNamespace(
        train_run_context=SimpleNamespace(run_config=run_config), get_storage=lambda: storage
    )
    monkeypatch.setattr(context, "_train_context", worker)


@pytest.fixture
def drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Be a worker whose node is drained from step 3 on; note the steps that are reported."""
    be_worker(monkeypatch, CheckpointConfig(), pyarrow.fs.LocalFileSystem(), str(tmp_path))
    node = SimpleNamespace(
        preempted_node_ids=["node"], preempted_ranks=[0], deadline_ms=0, reported=[], is_due=False
    )
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: node if node.is_due else None)
    monkeypatch.setattr(ray.train, "report", lambda metrics, **_: node.reported.append(metrics["step"]))
    return node


def test_a_failed_save_does_not_end_the_run_at_a_preemption(
    drained: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = PosixStore.put

    def fail_at_2(self: Any, key: str, *arguments: Any, **options: Any) -> None:
        if "step-00000002" in f"{self.url}/{key}":
            raise OSError(28, "No space left on device")
        put(self, key, *arguments, **options)

    monkeypatch.setattr(PosixStore, "put", fail_at_2)
    with CheckpointManager(save=2) as manager:
        assert manager.step(2, {"a": torch.ones(3)})
        drained.is_due, drained.deadline_ms = True, int((time.time() + 100) * 1000)
        assert manager.step(3, {"a": torch.ones(3)})
        assert drained.reported == [3]
    assert [each.step for each in ckpt.list_checkpoints(tmp_path) if each.state == "committed"] == [3]


def test_a_preemption_waits_for_no_save_beyond_the_deadline(
    drained: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, put = threading.Event(), PosixStore.put

    def put_later(self: Any, key: str, *arguments: Any, **options: Any) -> None:
        if "step-00000002" in f"{self.url}/{key}":
            go_on.wait(30)
        put(self, key, *arguments, **options)

    monkeypatch.setattr(PosixStore, "put", put_later)
    with CheckpointManager(save=2) as manager:
        manager.step(2, {"a": torch.ones(3)})
        drained.is_due, drained.deadline_ms = True, int(time.time() * 1000)
        assert not manager.step(3, {"a": torch.ones(3)})
        go_on.set()
    assert drained.reported == [2]


@pytest.mark.parametrize("place", ["uri", "pyarrow", "s3fs"])
def test_an_endpoint_of_rays_own(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    if place == "uri":
        uri = "s3://bucket/runs?endpoint_override=http://127.0.0.1:9000&region=us-east-1"
        filesystem: Any = pyarrow.fs.FileSystem.from_uri(uri)[0]
    elif place == "pyarrow":
        filesystem = pyarrow.fs.S3FileSystem(
            endpoint_override="127.0.0.1:9000", scheme="http", region="us-east-1"
        )
    else:
        s3fs = pytest.importorskip("s3fs").S3FileSystem(endpoint_url="http://127.0.0.1:9000")
        filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(s3fs))
    be_worker(monkeypatch, CheckpointConfig(), filesystem, "bucket/runs/run")
    with pytest.raises(
        ConfigurationError, match=r"127\.0\.0\.1:9000, this manager .*amazonaws.*endpoint_url"
    ):
        CheckpointManager(save=2)
    CheckpointManager(save=2, storage_options={"endpoint_url": "http://127.0.0.1:9000"}).close()


def test_an_endpoint_of_the_managers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    filesystem = pyarrow.fs.S3FileSystem(region="us-east-1")
    be_worker(monkeypatch, CheckpointConfig(), filesystem, "bucket/runs/run")
    with pytest.raises(ConfigurationError, match=r"on AWS, this manager .*127\.0\.0\.1:9000"):
        CheckpointManager(save=2, storage_options={"endpoint_url": "http://127.0.0.1:9000"})


def test_a_process_that_would_run_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    be_worker(monkeypatch, CheckpointConfig(), pyarrow.fs.LocalFileSystem(), "/runs/a")
    with pytest.raises(ConfigurationError, match="use 'thread'"):
        CheckpointManager(save=2, async_mode="process")


def test_two_that_would_remove_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    be_worker(monkeypatch, CheckpointConfig(num_to_keep=2))
    with pytest.raises(ConfigurationError, match=r"CheckpointConfig\(num_to_keep=...\).*pass keep="):
        CheckpointManager(save=2)


@pytest.mark.filterwarnings("ignore")  # Ray's own, of pydantic
@pytest.mark.parametrize("place", ["local", "s3"])
def test_ray_starts_again_though_keep_has_removed_what_it_lists(
    place: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_environment(s3).items():
        monkeypatch.setenv(name, value)
    root = str(tmp_path) if place == "local" else f"s3://{s3.new_bucket()}/runs"
    storage = StorageContext(root, "run")
    be_worker(monkeypatch, CheckpointConfig(), storage.storage_filesystem, storage.experiment_fs_path)
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: None)

    async def train(steps: range) -> Any:
        """Train as one worker would, with the list that Ray's controller has; return what it began with."""
        listed = RaysList(CheckpointConfig(), storage)
        newest = listed.latest_checkpoint_result and listed.latest_checkpoint_result.checkpoint

        def report(metrics: dict[str, Any], checkpoint: Checkpoint, **_: Any) -> None:
            listed.register_checkpoint(_TrainingReport(checkpoint, metrics, validation=False))

        monkeypatch.setattr(ray.train, "report", report)
        monkeypatch.setattr(ray.train, "get_checkpoint", lambda: newest)
        state = {"a": torch.zeros(3)}
        with CheckpointManager(save=1, keep=1) as manager:
            restored = manager.restore(state)
            assert (restored.step if restored else 0) == steps[0] - 1
            for step in steps:
                state["a"].fill_(step)
                manager.step(step, state)
        return newest and newest.path

    assert asyncio.run(train(range(1, 4))) is None
    assert asyncio.run(train(range(4, 6))) == f"{storage.experiment_fs_path}/step-00000003"
    committed = [each.path for each in ckpt.list_checkpoints(f"{root}/run") if each.state == "committed"]
    assert committed == ["step-00000005"]


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
