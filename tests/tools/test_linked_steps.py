"""A step that was moved to another volume, with a link in its place: all commands see it as a restore does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.commands import run

import ckpt
from ckpt.trainer_integration import keeping

NAME = "step-00000003"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of three steps whose newest is a link to another folder, and `latest` another name of the second."""
    with ckpt.CheckpointManager(tmp_path / "run", save=1, async_mode="off") as manager:
        for step in (1, 2, 3):
            manager.step(step, weights={"w": torch.full((3,), float(step))})
    move_out(tmp_path, NAME)
    (tmp_path / "run" / "latest").symlink_to("step-00000002")
    return tmp_path / "run"


def move_out(folder: Path, name: str) -> None:
    (folder / "archive").mkdir(exist_ok=True)
    (folder / "run" / name).rename(folder / "archive" / name)
    (folder / "run" / name).symlink_to(f"../archive/{name}")


def restored(root: Path) -> int | None:
    with ckpt.CheckpointManager(root, save=1) as manager:
        found = manager.restore(weights={"w": torch.zeros(3)})
        return None if found is None else found.step


def listed(root: Path) -> int | None:
    each = ckpt.list_checkpoints(root)
    assert [one.step for one in each] == [1, 2, 3]
    return next(one.step for one in each if one.latest)


def watched(root: Path) -> int | None:
    return max(each.step or 0 for each in ckpt.watch(root, timeout_s=0))


def scrubbed(root: Path) -> int | None:
    assert len(ckpt.scrub(root).checkpoints) == 3
    return 3


def reported(root: Path) -> int | None:
    ran = run("report", root, "-o", root.parent / "report.html")
    assert ran.code == 0, ran
    return 3 if NAME in (root.parent / "report.html").read_text() else None


@pytest.mark.parametrize("record", ["kept", "lost"])
@pytest.mark.parametrize("see", [restored, listed, watched, scrubbed, reported])
def test_all_see_the_link(root: Path, see: Callable[[Path], int | None], record: str) -> None:
    if record == "lost":
        (root / "ckpt-run.json").unlink()
    assert see(root) == 3


def test_garbage_behind_a_link_stays(root: Path) -> None:
    stray = root.parent / "archive" / NAME / "rank-00000" / "0123456789abcdef-0.distcp"
    stray.write_bytes(b"x")
    assert ckpt.collect_garbage(root, grace_s=0).items == []
    assert stray.exists()


@pytest.mark.parametrize("name", [NAME, "latest"])
def test_the_removal_of_a_link_leaves_its_target(root: Path, name: str) -> None:
    target = os.path.realpath(root / name)
    dry = run("rm", root / name, "--dry-run")
    assert (dry.code, os.path.islink(root / name)) == (0, True)
    ran = run("rm", root / name)
    assert ran.code == 0, ran
    assert "the checkpoint that it leads to stays" in " ".join(ran.out.split())
    assert not os.path.lexists(root / name)
    assert ckpt.verify(target).ok


def test_retention_removes_the_link_alone(root: Path) -> None:
    with ckpt.CheckpointManager(root, save=1, async_mode="off", keep=keeping.last(1)) as manager:
        manager.restore(weights={"w": torch.zeros(3)})
        manager.step(4, weights={"w": torch.ones(3)})
    assert sorted(os.listdir(root)) == ["ckpt-run.json", "latest", "step-00000004"]
    assert ckpt.verify(root.parent / "archive" / NAME).ok


def test_links_over_sftp(root: Path) -> None:
    pytest.importorskip("paramiko")
    from support.sftp import sftp_server

    with sftp_server(root) as (url, options):
        each = ckpt.list_checkpoints(url, storage_options=options)
        assert [(one.path, one.latest) for one in each] == [
            ("step-00000001", False),
            ("step-00000002", False),
            (NAME, True),
        ]
        assert ckpt.remove(f"{url}/{NAME}", storage_options=options).is_link
    assert not os.path.lexists(root / NAME)
    assert ckpt.verify(root.parent / "archive" / NAME).ok
