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
from torch_checkpointing.barriers import _FileStoreConnectionInfo
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_writer import CallbackArgs, CheckpointWriterArgs, CheckpointWriterConfig
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.logging_utils import EventLogger
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from torch_checkpointing.types import RankInfo

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
    StorageFull,
    StorageUnavailable,
    UnsafeContent,
)
from ckpt.reading import foreign_files
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


class Writer:
    """Call the storage of a rank as torch_checkpointing's `CheckpointWriter` does."""

    def __init__(self, config: StorageConfig | None = None, rank: int = 0, world_size: int = 1) -> None:
        config = config or StorageConfig()
        self.storage, self.event_logger = config.create_storage(), EventLogger()
        info = RankInfo(
            global_world_size=world_size, global_rank=rank, role_rank=rank, role_world_size=world_size
        )
        self.args = self.storage.known_to(CheckpointWriterArgs(CheckpointWriterConfig(), info, config))

    def write(self, place: Path, **files: bytes) -> Writer:
        """Do what it does before the barrier, or a part of that: `end` is missing."""
        self.place, self.folder = place, place.with_name(f"tmp_{place.name}")
        self._call(self.args.pre_write_callback)
        for name, data in files.items():
            self.storage.mkdir(self.folder)
            self.storage.write(self.folder / f"{name}.json", data)
        return self

    def end(self) -> Writer:
        self._call(self.args.pre_finalize_callback)
        return self

    def commit(self) -> None:
        assert self.storage.exists(self.folder)
        self.storage.rename(self.folder, self.place, is_directory=True)

    def _call(self, callback: Any) -> None:
        callback(CallbackArgs(str(self.place), self.storage, self.event_logger))


def ranks_of(tmp_path: Path, world_size: int) -> list[Writer]:
    """Make the writers of ranks that share a store, as those of a process group do."""
    configs = [StorageConfig() for _ in range(world_size)]
    for config in configs:
        config._keys._store_connection = _FileStoreConnectionInfo(str(tmp_path / "keys"))
        config._keys.generation = "run"
    return [Writer(config, rank, world_size) for rank, config in enumerate(configs)]


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

    writer = Writer().write(tmp_path / "step-1")
    writer.storage.write(writer.folder / "metadata.pkl", pickle.dumps(Hostile()))
    writer.end().commit()
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
    writer = Writer().write(tmp_path / "step-1", model_0=b"data").end()
    assert not writer.storage.exists(tmp_path / "step-1")
    assert [each.state for each in ckpt.list_checkpoints(tmp_path)] == ["incomplete"]
    with pytest.raises(FileNotFoundError):
        manager_of(StorageConfig()).load(f"{tmp_path}/step-1", state_of(1))
    manager = manager_of(StorageConfig())
    manager.save(f"{tmp_path}/step-1", state_of(1))
    check_load(manager, f"{tmp_path}/step-1", 1)


def test_a_save_that_failed_is_repeated(tmp_path: Path) -> None:
    place, writer = tmp_path / "step-1", Writer()
    writer.write(place, model=b"one", optimizer=b"one", more=b"one")  # its end never came
    writer.write(place, model=b"two", optimizer=b"two").end().commit()
    assert files_of(place) == ["model.json", "optimizer.json"]
    assert writer.storage.read(place / "model.json") == b"two"
    writer.storage.rmdir(place)
    writer.write(place, model=b"three").end().commit()
    assert files_of(place) == ["model.json"]
    assert writer.storage.read(place / "model.json") == b"three"


def test_a_file_that_failed_ends_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: PosixStore, *args: Any, **options: Any) -> None:
        raise StorageFull("no space")

    place, writer = tmp_path / "step-1", Writer()
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "put", full)
        with pytest.raises(StorageFull):
            writer.write(place, model=b"one", optimizer=b"one").end()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    writer.write(place, model=b"two").end().commit()
    assert files_of(place) == ["model.json"]


def test_a_rank_could_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(self: PosixStore, *args: Any, **options: Any) -> None:
        raise StorageUnavailable("503")

    place, ranks = tmp_path / "step-1", ranks_of(tmp_path, 2)
    ranks[1].write(place, model_1=b"old").end()
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "prepare", down)
        with pytest.raises(StorageUnavailable):
            ranks[0].write(place)
    ranks[1].write(place, model_1=b"new").end()
    ranks[0].write(place, model_0=b"new").end().commit()
    assert ranks[0].storage.read(place / "model_1.json") == b"new"


def test_ranks_repeat_a_save_with_fewer_files(tmp_path: Path) -> None:
    place, ranks = tmp_path / "step-1", ranks_of(tmp_path, 2)
    ranks[0].write(place, model_0=b"old", optimizer_0=b"old")  # and fails
    ranks[1].write(place, model_1=b"old", optimizer_1=b"old").end()  # waits at the barrier in vain
    ranks[1].write(place, model_1=b"new").end()
    ranks[0].write(place, model_0=b"new").end().commit()
    assert files_of(place) == ["model_0.json", "model_1.json"]
    assert [ranks[0].storage.read(place / f"model_{rank}.json") for rank in (0, 1)] == [b"new"] * 2


def test_a_rank_that_still_ends_the_save_that_failed(tmp_path: Path) -> None:
    place, ranks = tmp_path / "step-1", ranks_of(tmp_path, 2)
    ranks[0].write(place, model_0=b"old")  # fails, and begins anew while rank 1 waits for it
    ranks[1].write(place, model_1=b"old").end()
    ranks[0].write(place, model_0=b"new").end()
    with pytest.raises(CommitError, match="rank 1 has not said"):
        ranks[0].commit()
    assert not ranks[0].storage.exists(place)


def test_a_rank_that_has_not_ended_its_part(tmp_path: Path) -> None:
    place, ranks = tmp_path / "step-1", ranks_of(tmp_path, 2)
    for rank in ranks:
        rank.write(place, **{f"model_{rank.args.rank_info.role_rank}": b"data"})
    ranks[0].end()
    with pytest.raises(CommitError, match="rank 1 has not said"):
        ranks[0].commit()
    ranks[1].end()
    ranks[0].commit()
    assert files_of(place) == ["model_0.json", "model_1.json"]


def test_a_commit_does_not_look_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, ranks = tmp_path / "step-1", ranks_of(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "list", lambda self, prefix="": iter(()))
        ranks[1].write(place, model_1=b"data", optimizer_1=b"data").end()
        ranks[0].write(place, model_0=b"data", optimizer_0=b"data").end().commit()
    names = ["model_0.json", "model_1.json", "optimizer_0.json", "optimizer_1.json"]
    assert files_of(place) == names
    (listed,) = ckpt.list_checkpoints(tmp_path)
    assert listed.world_size == 2


def test_a_rank_without_a_file(tmp_path: Path) -> None:
    place, ranks = tmp_path / "step-1", ranks_of(tmp_path, 2)
    ranks[1].write(place).end()
    ranks[0].write(place, model_0=b"data").end().commit()
    assert files_of(place) == ["model_0.json"]
    assert not ckpt.verify(place).damages


def test_keys_in_another_process(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ours, more = StorageConfig()._keys, StorageConfig()._keys
        sent = pickle.loads(pickle.dumps(ours))
        ours.connect().set("key", "value")
        assert sent.connect().get("key") == b"value"
        assert not more.connect().check(["key"])  # of another manager
    finally:
        dist.destroy_process_group()


def test_only_the_folder_that_is_asked_for_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writer().write(tmp_path / "step-1", a=b"data").end().commit()
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

    monkeypatch.setattr(foreign_files, "is_committed", allowed)
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
    with pytest.raises(ConfigurationError, match="CheckpointWriter alone"):
        StorageConfig().create_storage().write(tmp_path / "step-1" / "model_0.pt", b"data")


def test_a_writer_without_a_rename_is_an_error_at_once() -> None:
    config = SyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(write_to_temp_dir=False))
    items = {"model": ItemSpec(resharder=DefaultResharder())}
    with pytest.raises(ConfigurationError, match="write_to_temp_dir=True"):
        CheckpointManager(CheckpointManager.Config(items=items, save=config, storage_config=StorageConfig()))


@pytest.mark.parametrize(
    "options",
    [
        {"root": "nosuchscheme://bucket"},
        {"root": "/tmp", "storage_options": {"x": 1}},
    ],
)
def test_a_wrong_setting_is_an_error_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        StorageConfig(**options)
