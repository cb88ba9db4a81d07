"""A run's folder on a node has a name that anybody can compute: what another user has put there is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.local_first.folder import RunFolder, run_key
from ckpt.local_first.own_files import open_own


def save(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(
        tmp_path / "durable", save=1, preflight=False, local=tmp_path / "local"
    ) as manager:
        manager.step(1, {"w": torch.ones(3)})
        manager.wait_durable(240)


def run_of(tmp_path: Path) -> Path:
    run = tmp_path / "local" / run_key(str(tmp_path / "durable"))
    run.mkdir(parents=True, exist_ok=True)
    return run


@pytest.mark.parametrize("name", [".ckpt-job.lock", "ckpt-drain.log", ".ckpt-drain.lock", "step-00000001"])
def test_links_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" if name.startswith("step") else tmp_path / "other" / "file"
    if other.suffix == "" and not other.is_dir():
        other.write_text("of the user")
    (run_of(tmp_path) / name).symlink_to(other)
    before = {path: path.read_bytes() for path in (tmp_path / "other").rglob("*")}
    with pytest.raises(ConfigurationError, match=f"{name} is a link: .*remove it, or give another folder"):
        save(tmp_path)
    assert {path: path.read_bytes() for path in (tmp_path / "other").rglob("*")} == before


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path).rmdir()
    (tmp_path / "other").mkdir()
    run = tmp_path / "local" / run_key(str(tmp_path / "durable"))
    run.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="is a link"):
        save(tmp_path)
    assert not any((tmp_path / "other").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
@pytest.mark.parametrize("whole", [True, False])
def test_what_another_user_has_made_is_refused(tmp_path: Path, whole: bool) -> None:
    save(tmp_path)
    run = run_of(tmp_path)
    os.chown(run if whole else run / "step-00000001", 65534, -1)
    with pytest.raises(ConfigurationError, match=r"was made by another user \(uid 65534\)"):
        save(tmp_path)
    with pytest.raises(ConfigurationError, match="another user"):
        ckpt.load({"w": torch.zeros(3)}, tmp_path / "durable" / "step-00000001", local=tmp_path / "local")


def test_the_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.chmod(0o777)  # of a version before
    folder = RunFolder(tmp_path / "local", tmp_path / "durable")
    assert Path(folder.path) == run
    assert run.stat().st_mode & 0o777 == 0o700
    other = RunFolder(tmp_path / "local", tmp_path / "other")
    assert Path(other.path).stat().st_mode & 0o777 == 0o700


def test_a_link_that_is_put_there_later_is_not_followed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "local", tmp_path / "durable")
    (tmp_path / "file").write_text("of the user")
    Path(folder.path, "log").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        open_own(folder.path, "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
