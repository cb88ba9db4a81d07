"""Uses of torch_checkpointing with our storage; run by `test_torch_checkpointing.py` in its environment."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers import S3Server
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import ckpt
from ckpt.errors import AlreadyExists, ConfigurationError, IntegrityError, NotCommitted, UnsafeContent
from ckpt.trainer_integration.adapters.torch_checkpointing import StorageConfig


def manager_of(storage: Any) -> CheckpointManager:
    return CheckpointManager(
        CheckpointManager.Config(
            items={"model": ItemSpec(resharder=DefaultResharder())},
            save=SyncCheckpointSaverConfig(),
            storage_config=storage,
        )
    )


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.randn(700, 800, generator=generator)}, "step": seed}


def check_load(manager: CheckpointManager, place: str, seed: int) -> None:
    into: dict[str, Any] = {"model": {"w": torch.zeros(700, 800)}, "step": 0}
    loaded = manager.load(place, into, strict=True)
    assert torch.equal(into["model"]["w"], state_of(seed)["model"]["w"])
    assert loaded["step"] == seed


def files_of(place: Path) -> list[str]:
    return StorageConfig().create_storage().ls(place)


def test_a_run_on_a_path(tmp_path: Path) -> None:
    manager = manager_of(StorageConfig(root=str(tmp_path)))
    for seed in (1, 2):
        manager.save(f"step-{seed}", state_of(seed))
        # torch_checkpointing's synchronous saver writes its metadata with the first save alone.
        assert files_of(tmp_path / f"step-{seed}") == ["metadata.pkl", "model_0.pt", "step_0.pt"]
        assert not ckpt.verify(tmp_path / f"step-{seed}").damages
    check_load(manager, "step-1", 1)
    check_load(manager, str(tmp_path / "step-2"), 2)
    with pytest.raises(AlreadyExists):
        manager.save("step-1", state_of(3))
    check_load(manager, "step-1", 1)
    storage = StorageConfig().create_storage()
    assert storage.ls(tmp_path) == ["step-1", "step-2"]
    storage.rmdir(tmp_path / "step-1")
    assert storage.ls(tmp_path) == ["step-2"]
    assert not storage.exists(tmp_path / "step-1")
    with pytest.raises(FileNotFoundError):
        manager.load("step-1", state_of(1))


def test_a_run_on_s3(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"s3://{s3.new_bucket()}/run"
    options = s3.options
    whole, relative = manager_of(StorageConfig(storage_options=options)), StorageConfig(root, options)
    whole.save(f"{root}/step-1", state_of(1))
    manager_of(relative).save("step-2", state_of(2))
    listed = ckpt.list_checkpoints(root, storage_options=options)
    assert [(each.step, each.state) for each in listed] == [(1, "committed"), (2, "committed")]
    check_load(whole, f"{root}/step-2", 2)
    check_load(manager_of(relative), "step-1", 1)


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    manager = manager_of(StorageConfig())
    manager.save(f"{tmp_path}/step-1", state_of(1))
    file = max(tmp_path.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError):
        check_load(manager, f"{tmp_path}/step-1", 1)


def test_metadata_that_would_run_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    storage = StorageConfig().create_storage()
    storage.write(tmp_path / "tmp_step-1" / "metadata.pkl", pickle.dumps(Hostile()))
    storage.rename(tmp_path / "tmp_step-1", tmp_path / "step-1", is_directory=True)
    with pytest.raises(UnsafeContent):
        check_load(manager_of(StorageConfig()), f"{tmp_path}/step-1", 1)
    assert not marker.exists()


def test_checkpoints_of_its_own_storage_load(tmp_path: Path) -> None:
    manager_of(LocalFileSystemStorageConfig(use_direct_io=False)).save(f"{tmp_path}/step-1", state_of(1))
    manager = manager_of(StorageConfig())
    check_load(manager, f"{tmp_path}/step-1", 1)
    with pytest.raises(NotCommitted):
        StorageConfig().create_storage().rmdir(tmp_path / "step-1")
    assert not ckpt.collect_garbage(tmp_path, grace_s=0).items
    check_load(manager, f"{tmp_path}/step-1", 1)


def test_a_torn_save_is_no_checkpoint(tmp_path: Path) -> None:
    storage = StorageConfig().create_storage()
    storage.write(tmp_path / "tmp_step-1" / "model_0.pt", b"data")
    assert not storage.exists(tmp_path / "step-1")
    assert [each.state for each in ckpt.list_checkpoints(tmp_path)] == ["incomplete"]
    with pytest.raises(FileNotFoundError):
        manager_of(StorageConfig()).load(f"{tmp_path}/step-1", state_of(1))
    manager = manager_of(StorageConfig())
    manager.save(f"{tmp_path}/step-1", state_of(1))
    check_load(manager, f"{tmp_path}/step-1", 1)


def test_a_save_that_failed_is_repeated(tmp_path: Path) -> None:
    storage = StorageConfig().create_storage()
    folder = tmp_path / "tmp_step-1"
    storage.write(folder / "model_0.pt", b"one")
    storage.write(folder / "optimizer_0.pt", b"one")
    storage.write(folder / "model_0.pt", b"two")  # the rename never came: the writer begins anew
    storage.rename(folder, tmp_path / "step-1", is_directory=True)
    assert storage.ls(tmp_path / "step-1") == ["model_0.pt"]
    assert storage.read(tmp_path / "step-1" / "model_0.pt") == b"two"
    storage.rmdir(tmp_path / "step-1")
    storage.write(folder / "model_0.pt", b"three")
    storage.rename(folder, tmp_path / "step-1", is_directory=True)
    assert storage.read(tmp_path / "step-1" / "model_0.pt") == b"three"


def test_a_write_that_no_rename_would_commit(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="write_to_temp_dir=True"):
        StorageConfig().create_storage().write(tmp_path / "step-1" / "model_0.pt", b"data")


@pytest.mark.parametrize(
    "options",
    [
        {"root": "nosuchscheme://bucket"},
        {"root": "/tmp", "storage_options": {"x": 1}},
        {"temp_dir_prefix": ""},
    ],
)
def test_a_wrong_setting_is_an_error_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        StorageConfig(**options)
