"""`ckpt.save(..., format="safetensors", config_from=...)`: the configuration lies there at the commit, which lists it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.saves import kill_self

import ckpt
from ckpt.backends.base import put_bytes
from ckpt.backends.registry import open_store
from ckpt.consistency import commit
from ckpt.consistency.checksums import crc64nvme
from ckpt.consistency.seal import seal_json
from ckpt.errors import AlreadyExists, ConfigurationError, FormatError, IntegrityError, SaveFailed
from ckpt.format.records import decode_commit, encode, read_commit
from ckpt.reading import checkpoint
from ckpt.tools import remove as remove_module
from ckpt.writing.coordinator import Coordinator

STATE = {"w": torch.arange(12.0).reshape(3, 4)}
FILES = {"config.json": b'{"model_type": "t5"}', "tokenizer.json": b"{}" * 1000, "LICENSE": b"free"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a model that a training began with."""
    folder = tmp_path / "base"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    for name in ("model.safetensors", "pytorch_model.bin", ".gitattributes", "ckpt-scrub.json"):
        (folder / name).write_bytes(b"no part of the configuration")
    return folder


def save(place: Any, base: Any, **more: Any) -> None:
    ckpt.save(dict(STATE), place, format="safetensors", config_from=base, **more)


def config_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name in FILES}


def test_it_is_copied_verified_and_removed_with_the_model(tmp_path: Path, base: Path) -> None:
    save(tmp_path / "a", base, block_digests="sha256")
    assert config_files(tmp_path / "a") == FILES
    assert ckpt.verify(tmp_path / "a").ok
    assert ckpt.verify(tmp_path / "a").strays == []
    ckpt.copy(tmp_path / "a", tmp_path / "b")
    assert config_files(tmp_path / "b") == FILES
    assert ckpt.verify(tmp_path / "b").ok
    removed = ckpt.remove(tmp_path / "a")
    assert set(FILES) < set(removed.keys)
    assert not (tmp_path / "a").exists()
    assert sorted(path.name for path in base.iterdir())[:2] == [".gitattributes", "LICENSE"]


def test_a_changed_file_is_found_and_stays(tmp_path: Path, base: Path) -> None:
    save(tmp_path / "a", base)
    (tmp_path / "a" / "config.json").write_bytes(b'{"model_type": "t6"}')
    (tmp_path / "a" / "LICENSE").unlink()
    damages = ckpt.verify(tmp_path / "a").damages
    assert {(damage.kind, damage.key) for damage in damages} == {
        ("missing", "LICENSE"),
        ("checksum", "config.json"),
    }
    ckpt.remove(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["config.json"]


def test_another_one_at_the_place_is_refused_before_data_are_written(tmp_path: Path, base: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_bytes(b"{}")
    with pytest.raises(
        SaveFailed, match=r"config\.json.*another file of this name is here already"
    ) as caught:
        save(tmp_path / "a", base)
    assert isinstance(caught.value.failures[0], AlreadyExists)
    assert (tmp_path / "a" / "config.json").read_bytes() == b"{}"
    assert not [*tmp_path.glob("a/*.safetensors")]


def test_a_later_save_at_the_place_keeps_it(tmp_path: Path, base: Path) -> None:
    save(tmp_path / "a", base)
    ckpt.save(dict(STATE), tmp_path / "a", format="safetensors", block_digests="sha256")
    assert ckpt.verify(tmp_path / "a").ok
    save(tmp_path / "a", base)
    assert ckpt.verify(tmp_path / "a").ok
    ckpt.remove(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_later_save_does_not_list_what_was_changed(tmp_path: Path, base: Path) -> None:
    save(tmp_path / "a", base)
    (tmp_path / "a" / "config.json").write_bytes(b"edited")
    (tmp_path / "a" / "tokenizer.json").unlink()
    ckpt.save(dict(STATE), tmp_path / "a", format="safetensors")
    assert ckpt.verify(tmp_path / "a").ok
    ckpt.remove(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["config.json"]


@pytest.mark.parametrize("how", ["save", "copy"])
def test_files_of_the_model_that_is_replaced_go(how: str, tmp_path: Path, base: Path) -> None:
    save(tmp_path / "a", base)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes(FILES["config.json"])
    if how == "save":
        save(tmp_path / "a", other)
    else:
        save(tmp_path / "b", other)
        ckpt.copy(tmp_path / "b", tmp_path / "a", overwrite=True)
    assert config_files(tmp_path / "a") == {"config.json": FILES["config.json"]}
    assert ckpt.verify(tmp_path / "a").ok


def test_files_that_were_there_stay_their_owner_s(tmp_path: Path, base: Path) -> None:
    """Also if they are the same, or if the folder is its own configuration."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_bytes(FILES["config.json"])
    save(tmp_path / "a", base)
    ckpt.remove(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["config.json"]
    save(tmp_path / "a", tmp_path / "a")
    ckpt.remove(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["config.json"]


def test_a_save_that_fails_deletes_none(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save may have found them here and be committed."""
    commit_of = Coordinator.commit

    def lose(self: Coordinator, *args: Any, **options: Any) -> None:
        monkeypatch.setattr(Coordinator, "commit", commit_of)
        save(tmp_path / "a", base)
        commit_of(self, *args, **options)

    monkeypatch.setattr(Coordinator, "commit", lose)
    with pytest.raises(SaveFailed):
        save(tmp_path / "a", base)
    assert config_files(tmp_path / "a") == FILES
    assert ckpt.verify(tmp_path / "a").ok


def test_a_forged_file_is_found_by_its_digest(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", base, block_digests="sha256")
    forged = FILES["LICENSE"].upper()
    (tmp_path / "a" / "LICENSE").write_bytes(forged)
    crc = crc64nvme(FILES["LICENSE"])
    monkeypatch.setattr(
        checkpoint, "crc64nvme", lambda data: crc if bytes(data) == forged else crc64nvme(data)
    )
    (damage,) = ckpt.verify(tmp_path / "a").damages
    assert (damage.kind, damage.key) == ("checksum", "LICENSE")
    assert "do not match their digest" in damage.message
    digest = ckpt.verify(tmp_path / "a").digest
    with pytest.raises(IntegrityError, match="do not match their digest"):
        ckpt.copy(tmp_path / "a", tmp_path / "b", expect=digest)
    assert not [*tmp_path.glob("b/*.safetensors")]


def test_a_drain_carries_it(tmp_path: Path, base: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "local" / f"step-{step}", base)
    states = [each.state for each in ckpt.drain(tmp_path / "local", tmp_path / "durable", keep_local=1)]
    assert "durable" in states
    for step in (1, 2):
        assert config_files(tmp_path / "durable" / f"step-{step}") == FILES
        assert ckpt.verify(tmp_path / "durable" / f"step-{step}").ok


def test_a_copy_that_lacks_a_file_is_completed(tmp_path: Path, base: Path) -> None:
    save(tmp_path / "a", base)
    ckpt.copy(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "config.json").unlink()
    assert ckpt.copy(tmp_path / "a", tmp_path / "b").already_there
    assert ckpt.verify(tmp_path / "b").ok


def test_a_save_replaces_a_damaged_checkpoint(tmp_path: Path, base: Path) -> None:
    """What its commit lists is not known, so the files that are here belong to nothing that is known."""
    save(tmp_path / "a", base, tags={"run": "a"})
    damaged = tmp_path / "a" / "commit.json"
    damaged.write_bytes(damaged.read_bytes().replace(b'"run":"a"', b'"run":"b"'))
    save(tmp_path / "a", base)
    assert ckpt.verify(tmp_path / "a").damages == []
    ckpt.remove(tmp_path / "a")
    assert config_files(tmp_path / "a") == FILES


def test_base_folders_as_people_have_them(tmp_path: Path, base: Path) -> None:
    os.symlink("nothing", base / "a-link-to-nothing.json")
    os.symlink("..", base / "a-link-to-a-folder")
    os.mkfifo(base / "a-pipe")
    (base / "rank-00000").write_bytes(b"no folder of ours")
    (tmp_path / "blobs").mkdir()
    save(tmp_path / "a", base)
    assert config_files(tmp_path / "a") == FILES
    os.symlink(tmp_path / "elsewhere", base / "vocab.txt")
    (tmp_path / "elsewhere").write_bytes(b"x")
    with pytest.raises(SaveFailed, match=r"vocab\.txt is a link that leads out of this folder"):
        save(tmp_path / "b", base)


def test_too_many_files_are_refused(tmp_path: Path, base: Path) -> None:
    for number in range(1001):
        (base / f"{number}.txt").touch()
    with pytest.raises(SaveFailed, match=r"1,004 files here are not weights.* a save takes 1,000 files"):
        save(tmp_path / "a", base)
    assert not (tmp_path / "a" / "config.json").exists()


def test_options_of_the_place_are_for_the_same_storage(base: Path) -> None:
    ckpt.save(
        dict(STATE),
        "memory://models/other",
        format="safetensors",
        config_from=base,
        storage_options={"visibility_lag_s": 0},
    )


def _remove_and_die(rank: int, place: str) -> None:
    vars(remove_module)["delete_counted"] = lambda *_, **__: kill_self()
    ckpt.remove(place)


def test_a_removal_that_is_killed_leaves_no_model(tmp_path: Path, base: Path) -> None:
    """The commit goes before the configuration does."""
    save(tmp_path / "a", base)
    with pytest.raises(RuntimeError):
        run_ranks(1, _remove_and_die, str(tmp_path / "a"))
    assert read_commit(open_store(tmp_path / "a")) is None
    assert config_files(tmp_path / "a") == FILES


def _save_and_die(rank: int, place: str, base: str) -> None:
    vars(commit)["put_bytes"] = lambda *_, **__: kill_self()
    save(place, base)


def test_it_lies_there_before_the_commit(tmp_path: Path, base: Path) -> None:
    with pytest.raises(RuntimeError):
        run_ranks(1, _save_and_die, str(tmp_path / "a"), str(base))
    assert config_files(tmp_path / "a") == FILES
    assert read_commit(open_store(tmp_path / "a")) is None


def _save_relative(rank: int, root: str) -> None:
    os.chdir(root)
    future = ckpt.async_save(dict(STATE), "a", format="safetensors", config_from="base")
    os.chdir("/")
    future.result(60)


def test_ranks_save_it_once_and_in_the_background(tmp_path: Path, base: Path) -> None:
    run_ranks(2, _save_relative, str(tmp_path))
    assert config_files(tmp_path / "a") == FILES
    assert ckpt.verify(tmp_path / "a").ok


def test_from_a_store_to_a_store(base: Path) -> None:
    store = open_store("memory://models/base")
    for name, data in FILES.items():
        put_bytes(store, name, data)
    save("memory://models/new", "memory://models/base")
    assert ckpt.verify("memory://models/new").ok
    assert "config.json" in [stat.key for stat in open_store("memory://models/new").list()]
    save("memory://models/newer", base)
    assert ckpt.verify("memory://models/newer").ok


def test_wrong_arguments(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ConfigurationError, match='config_from is for format="safetensors"'):
        ckpt.save(dict(STATE), tmp_path / "a", config_from=base)
    (base / "config.json").unlink()
    with pytest.raises(SaveFailed, match=r"base: there is no config\.json here to take along"):
        save(tmp_path / "a", base)


@pytest.mark.parametrize(
    "name", ["../config.json", "a/config.json", "commit.json", "model.safetensors", ".profile", ""]
)
def test_a_record_cannot_list_other_files(name: str, tmp_path: Path, base: Path) -> None:
    save(tmp_path / "a", base)
    stored = read_commit(open_store(tmp_path / "a"))
    assert stored is not None
    raw = json.loads(encode(stored.record))
    raw["config_files"][0]["path"] = name
    del raw["crc64nvme"]
    with pytest.raises(FormatError):
        decode_commit(seal_json(json.dumps(raw).encode()), url="here", key="commit.json")
