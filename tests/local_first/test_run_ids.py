"""Checkpoints name their run: what another one has left on a disk is no part of this one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run
from test_local_tier import Log, manager_of, state_of, train

import ckpt
from ckpt.draining.drain import Drained
from ckpt.draining.marker import marker_of
from ckpt.errors import ConfigurationError
from ckpt.local_first.folder import RunFolder
from ckpt.trainer_integration import keeping


def folder_of(folder: Path) -> Path:
    (found,) = (folder / "local").iterdir()
    return found


def restored(folder: Path, log: Log | None = None, **more: Any) -> int | None:
    state = {name: torch.zeros_like(value) for name, value in state_of(0).items()}
    with manager_of(folder, Log() if log is None else log, **more) as manager:
        found = manager.restore(state)
        assert found is None or int(state["step"]) == found.step
        return None if found is None else found.step


def files_of(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def test_all_that_a_run_saves_names_it(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2), keep=keeping.last(9))
    train(tmp_path, range(2, 4))
    marker = marker_of(str(folder_of(tmp_path)))
    assert marker is not None
    assert len(marker.run) == 16
    for root in (tmp_path / "durable", folder_of(tmp_path)):
        assert f'"run":"{marker.run}"' in (root / "ckpt-run.json").read_text()
        assert f'"run":"{marker.run}"' in (root / "step-00000003" / "commit.json").read_text()
    assert f'"run":"{marker.run}"' in (tmp_path / "durable" / "step-00000001" / "commit.json").read_text()


@pytest.mark.slow
def test_a_checkpoint_of_another_run_in_the_folder(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    train(ours, range(1, 3))
    train(theirs, range(1, 6))
    foreign = folder_of(ours) / "step-00000005"
    shutil.copytree(folder_of(theirs) / "step-00000005", foreign)
    before, log = files_of(foreign), Log()
    assert restored(ours, log) == 2
    assert log.of("passed_over").step == 5
    assert "of another run" in log.of("passed_over").reason
    with manager_of(ours, Log()) as manager:
        manager.restore({name: torch.zeros_like(value) for name, value in state_of(0).items()})
        for step in range(3, 6):
            manager.step(step, state_of(step))
        manager.wait_durable(240)
    assert files_of(foreign) == before
    assert not (ours / "durable" / "step-00000005").exists()
    assert restored(ours) == 5


@pytest.mark.slow
def test_a_node_that_comes_back_after_the_run_was_begun_anew(tmp_path: Path) -> None:
    train(tmp_path, range(1, 6))
    folder = folder_of(tmp_path)
    shutil.move(folder, tmp_path / "away")
    shutil.rmtree(tmp_path / "durable")
    train(tmp_path, range(1, 2))
    shutil.rmtree(folder)
    shutil.move(tmp_path / "away", folder)
    assert restored(tmp_path) == 1
    train(tmp_path, range(2, 3))
    assert [each.step for each in ckpt.list_checkpoints(tmp_path / "durable")] == [1, 2]


@pytest.mark.slow
def test_a_copy_of_a_root_is_a_root(tmp_path: Path) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    train(first, range(1, 3))
    copy.mkdir()
    shutil.copytree(first / "durable", copy / "durable")
    assert restored(copy) == 2
    train(copy, range(3, 4))
    assert restored(copy) == 3
    assert restored(first) == 2


def test_a_checkpoint_that_names_no_run_is_not_of_one_that_has_an_id(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3))
    ckpt.save(state_of(7), folder_of(tmp_path) / "step-00000007", no_dist=True, tags={"step": "7"})
    log = Log()
    assert restored(tmp_path, log) == 2
    assert "it names none" in log.of("passed_over").reason


def test_checkpoints_that_name_no_run_count_while_it_has_no_id(tmp_path: Path) -> None:
    """Those of versions before ids, and those of `ckpt.save`."""
    folder = RunFolder(tmp_path / "local", tmp_path / "durable")
    ckpt.save(state_of(7), folder.url("step-00000007"), no_dist=True, tags={"step": "7"})
    assert restored(tmp_path) == 7


@pytest.mark.slow
def test_a_run_of_before_has_an_id_from_now_on(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(tmp_path / "durable", save=1, preflight=False) as manager:
        manager.step(1, state_of(1))
    assert restored(tmp_path) == 1
    train(tmp_path, range(2, 3))
    assert '"run":"' in (tmp_path / "durable" / "ckpt-run.json").read_text()
    assert restored(tmp_path) == 2


def test_a_drain_to_another_root_is_refused(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3))
    folder, other = folder_of(tmp_path), tmp_path / "other"
    with pytest.raises(ConfigurationError, match=r"not of .*other: drain it to its own root; any_root=True"):
        list(ckpt.drain(folder, other))
    refused = run("drain", folder, other)
    assert (refused.code, "--any-root" in refused.err) == (2, True)
    assert not other.exists()
    assert run("drain", folder, tmp_path / "durable").code == 0
    assert run("drain", folder, other, "--any-root").code == 0
    assert [each.step for each in ckpt.list_checkpoints(other)] == [1, 2]


def drained_into_anothers_root(tmp_path: Path, **more: Any) -> list[Drained]:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    train(ours, range(1, 2), keep=keeping.last(9))
    train(theirs, range(1, 3), keep=keeping.last(9))
    shutil.copytree(folder_of(theirs) / "step-00000002", plain := tmp_path / "plain" / "step-00000002")
    return list(ckpt.drain(plain.parent, ours / "durable", **more))


@pytest.mark.slow
@pytest.mark.parametrize("any_root", [False, True])
def test_a_checkpoint_of_another_run_is_not_carried(tmp_path: Path, any_root: bool) -> None:
    (drained,) = drained_into_anothers_root(tmp_path, any_root=any_root)
    assert drained.state == ("durable" if any_root else "failed")
    assert ("of another run" in drained.reason) is not any_root
