"""Uses of torch_checkpointing with our storage; run by `test_torch_checkpointing.py` in its environment."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.clock import SkippingClock
from support.servers import S3Server
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.consistency import environment
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    CommitError,
    ConfigurationError,
    IntegrityError,
    NotCommitted,
    UnsafeContent,
)
from ckpt.trainer_integration.adapters import torch_checkpointing as adapter
from ckpt.trainer_integration.adapters.torch_checkpointing import Storage, StorageConfig
from ckpt.trainer_integration.adapters.torch_checkpointing_saves import SharedKeys


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
    storage.write(folder / "model_0.pt", b"two")  # the rename never came: the writer begins anew
    storage.write(folder / "optimizer_0.pt", b"two")
    storage.rename(folder, tmp_path / "step-1", is_directory=True)
    assert storage.ls(tmp_path / "step-1") == ["model_0.pt", "optimizer_0.pt"]
    assert storage.read(tmp_path / "step-1" / "model_0.pt") == b"two"
    storage.rmdir(tmp_path / "step-1")
    storage.write(folder / "model_0.pt", b"three")
    storage.rename(folder, tmp_path / "step-1", is_directory=True)
    assert storage.read(tmp_path / "step-1" / "model_0.pt") == b"three"


def ranks_of(world_size: int) -> list[Storage]:
    """Make the storages of ranks that share a store, as those of a process group do."""
    store, configs = dist.HashStore(), [StorageConfig() for _ in range(world_size)]
    for rank, config in enumerate(configs):
        config._rank, config._world_size = rank, world_size
        config._keys._kept, config._keys._prefix = store, "run"
    return [config.create_storage() for config in configs]


def end_save(storages: list[Storage], folder: Path) -> None:
    """Do what the writers do after their barrier."""
    for storage in reversed(storages):
        assert storage.exists(folder)
    storages[0].rename(folder, folder.parent / folder.name.removeprefix("tmp_"), is_directory=True)


def test_a_save_that_failed_on_one_rank_is_repeated(tmp_path: Path) -> None:
    ranks, folder = ranks_of(2), tmp_path / "tmp_step-1"
    ranks[1].write(folder / "model_1.json", b"old")  # and rank 0 fails before its first file
    for number, rank in enumerate(ranks):
        rank.write(folder / f"model_{number}.json", b"new")
    end_save(ranks, folder)
    assert [ranks[0].read(tmp_path / "step-1" / f"model_{rank}.json") for rank in (0, 1)] == [b"new"] * 2


def test_a_rank_that_left_the_barrier_of_a_save_that_failed(tmp_path: Path) -> None:
    ranks, folder = ranks_of(2), tmp_path / "tmp_step-1"
    ranks[1].write(folder / "model_1.json", b"old")
    assert ranks[1].exists(folder)  # but rank 0's time was up
    ranks[1].write(folder / "model_1.json", b"new")
    ranks[0].write(folder / "model_0.json", b"new")
    with environment.replaced(SkippingClock()), pytest.raises(CommitError, match="rank 1 has not said"):
        ranks[0].rename(folder, tmp_path / "step-1", is_directory=True)
    assert not ranks[0].exists(tmp_path / "step-1")


def test_a_save_that_is_repeated_with_other_files(tmp_path: Path) -> None:
    ranks, folder = ranks_of(2), tmp_path / "tmp_step-1"
    for name in ("model", "moments"):
        for number, rank in enumerate(ranks):
            rank.mkdir(folder)
            rank.write(folder / f"{name}_{number}.json", b"data")
    with pytest.raises(CommitError, match=r"rank 0 wrote 'model_0\.json', then began the save anew"):
        end_save(ranks, folder)
    assert not ranks[0].exists(tmp_path / "step-1")
    for number, rank in enumerate(ranks):  # that save has ended
        rank.mkdir(folder)
        rank.write(folder / f"other_{number}.json", b"data")
    end_save(ranks, folder)
    assert ranks[0].ls(tmp_path / "step-1") == ["other_0.json", "other_1.json"]


def test_a_commit_does_not_look_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, folder = ranks_of(2), tmp_path / "tmp_step-1"
    for number, rank in enumerate(ranks):
        for name in ("model", "optimizer"):
            rank.write(folder / f"{name}_{number}.json", b"data")
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "list", lambda self, prefix="": iter(()))
        end_save(ranks, folder)
    names = ["model_0.json", "model_1.json", "optimizer_0.json", "optimizer_1.json"]
    assert ranks[0].ls(tmp_path / "step-1") == names


def test_a_rank_without_a_file(tmp_path: Path) -> None:
    ranks, folder = ranks_of(2), tmp_path / "tmp_step-1"
    ranks[0].write(folder / "model_0.json", b"data")
    with pytest.raises(CommitError, match="rank 1 wrote no file"):
        end_save(ranks, folder)


def test_keys_in_another_process(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ours = SharedKeys(0)
        sent = pickle.loads(pickle.dumps(ours))
        ours.connect().set("key", "value")
        assert sent.connect().get("key") == b"value"
        assert not SharedKeys(0).connect().check(["key"])  # of another start
    finally:
        dist.destroy_process_group()


def test_only_the_folder_that_is_asked_for_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StorageConfig().create_storage()
    writer.write(tmp_path / "tmp_step-1" / "a.json", b"data")
    writer.rename(tmp_path / "tmp_step-1", tmp_path / "step-1", is_directory=True)
    make = PosixStore.__init__

    def make_lagging(self: PosixStore, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.capabilities = dataclasses.replace(self.capabilities, cross_client_visibility=False)

    monkeypatch.setattr(PosixStore, "__init__", make_lagging)
    storage, clock = StorageConfig().create_storage(), SkippingClock()
    with environment.replaced(clock):
        assert storage.exists(tmp_path / "step-1" / "a.json")
        assert storage.read(tmp_path / "step-1" / "a.json") == b"data"
        assert not clock.skipped_s
        assert not storage.exists(tmp_path / "step-2")
        assert 50 < clock.skipped_s < 70


@pytest.mark.parametrize(
    "path", ["/nosuchfolder/step-1", "nosuchfolder/step-1", "nosuchfolder", "/nosuchfolder"]
)
def test_a_short_path_that_is_not_there(path: str) -> None:
    storage = StorageConfig().create_storage()
    assert not storage.exists(Path(path))
    with pytest.raises(FileNotFoundError):
        storage.read(Path(path))


def test_credentials_for_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def allowed(url: str, options: Any = None, *, wait: bool = False) -> bool:
        asked.append(url)
        if url != "s3://b/team/step-1":
            raise AccessDenied("403", url=url)
        return False

    monkeypatch.setattr(adapter, "is_committed", allowed)
    with pytest.raises(NotCommitted):
        StorageConfig().create_storage()._source(Path("s3://b/team/step-1"))
    assert asked == ["s3://b/team/step-1", "s3://b/team", "s3://b"]
    asked.clear()
    with pytest.raises(NotCommitted):
        StorageConfig(root="s3://b/team").create_storage()._source(Path("step-1"))
    assert asked == ["s3://b/team/step-1", "s3://b/team"]
    with pytest.raises(AccessDenied):
        StorageConfig().create_storage()._source(Path("s3://b/team"))


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
