"""A step that was saved again, files that others carry now: what was said of an earlier save holds for that alone."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ckpt
from ckpt.backends.registry import open_store
from ckpt.draining.carry import Share
from ckpt.format.records import read_commit
from ckpt.local_first import drain_process
from ckpt.local_first.drain_process import STATUS, DrainProcess, DrainState, current_status
from ckpt.local_first.room import has_room


def save(folder: Path, step: int) -> str:
    """Save to a folder of a node, and return the id of the commit."""
    place = folder / f"step-{step:08}"
    ckpt.save({"x": torch.full((1000,), float(step))}, place, no_dist=True)
    return id_of(place)


def id_of(place: Path) -> str:
    commit = read_commit(open_store(place))
    assert commit is not None
    return commit.record.id


def say(folder: Path, **states: tuple[str, str, str]) -> None:
    """Say what became of checkpoints: the id, the state, the reason, by step."""
    checkpoints = {
        f"step-{int(step[1:]):08}": DrainState(id=commit_id, state=state, reason=reason)
        for step, (commit_id, state, reason) in states.items()
    }
    status = drain_process._Status(checkpoints=checkpoints)
    (folder / STATUS).write_bytes(msgspec.json.encode(status))


def test_a_save_that_is_not_durable_makes_no_room(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    say(tmp_path, _1=(first, "durable", ""), _2=(second, "durable", ""))
    assert {*current_status(str(tmp_path))} == {"step-00000001", "step-00000002"}
    save(tmp_path, 1)  # again, after going back
    assert {*current_status(str(tmp_path))} == {"step-00000002"}
    assert not has_room(str(tmp_path), 1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def test_files_that_another_node_carried_before(sharded_place: Path, tmp_path: Path) -> None:
    """A node is lost that had not sent its part; its partner, which waited for that, carries the copies."""
    node, durable = tmp_path / "node", tmp_path / "durable"
    shutil.copytree(sharded_place, node / "step-00000100")
    commit_id = id_of(node / "step-00000100")
    finish, before = threading.Event(), Share(frozenset({0}))
    finish.set()

    def carry(share: Share) -> DrainState:
        status = drain_process._File(str(node / STATUS))
        config = {"durable": str(durable), "share": share}
        drain_process._carry(str(node), config, finish, threading.Event(), status)
        return drain_process.read_status(str(node))["step-00000100"]

    assert carry(before).state == "waiting"
    assert carry(Share(frozenset({0}), {commit_id: frozenset()})).state == "durable"
    assert ckpt.verify(durable / "step-00000100").ok


def test_restored_from_the_nodes_is_not_durable_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"save": 1, "local": tmp_path / "local", "preflight": False}
    with ckpt.CheckpointManager(tmp_path / "durable", **options) as manager:
        manager.step(1, {"x": torch.ones(3)})
        assert manager.wait_durable(240) == 1
    shutil.rmtree(tmp_path / "durable")
    (run,) = (tmp_path / "local").iterdir()
    (run / STATUS).unlink()
    with monkeypatch.context() as patched:
        patched.setattr(DrainProcess, "look", lambda self: None)
        with ckpt.CheckpointManager(tmp_path / "durable", **options) as manager:
            found = manager.restore({"x": torch.zeros(3)})
            assert found is not None
            assert (found.step, manager.durable_step) == (1, None)
            patched.undo()
            assert manager.wait_durable(240) == 1
    assert ckpt.verify(tmp_path / "durable" / "step-00000001").ok
