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
from ckpt.consistency.seal import seal_json
from ckpt.errors import AlreadyExists, ConfigurationError, FormatError, SaveFailed
from ckpt.format.records import decode_commit, encode, read_commit

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
    assert [(damage.kind, damage.key) for damage in damages] == [
        ("missing", "LICENSE"),
        ("checksum", "config.json"),
    ]
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
    ckpt.save(dict(STATE), tmp_path / "a", format="safetensors")
    save(tmp_path / "a", base)
    assert ckpt.verify(tmp_path / "a").ok
    ckpt.remove(tmp_path / "a")
    assert not (tmp_path / "a").exists()


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
