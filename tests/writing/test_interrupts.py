"""Ctrl-C and `sys.exit()` during a save or load: for the program, not for its handling of failed saves."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import ckpt
from ckpt.backends import memory
from ckpt.errors import CheckpointError, LoadFailed, SaveFailed
from ckpt.ranks.first_rank import FirstRank
from ckpt.trainer_integration import saving


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def leave() -> None:
    sys.exit(3)


interrupted_by = pytest.mark.parametrize(
    ("interrupt", "seen"), [(ctrl_c, KeyboardInterrupt), (leave, SystemExit)]
)


class Interrupted(DefaultSavePlanner):
    """A planner that is interrupted in one of its methods."""

    def __init__(self, method: str, interrupt: Callable[[], None] = ctrl_c) -> None:
        super().__init__()

        def call(*args: Any) -> Any:
            interrupt()

        setattr(self, method, call)


@interrupted_by
@pytest.mark.parametrize("method", ["create_local_plan", "create_global_plan", "resolve_data"])
def test_in_a_save(
    interrupt: Callable[[], None], seen: type[BaseException], method: str, tmp_path: Path
) -> None:
    with pytest.raises(seen) as caught:
        ckpt.save({"t": torch.ones(3)}, tmp_path, planner=Interrupted(method, interrupt))
    assert not isinstance(caught.value, SystemExit) or caught.value.code == 3
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("method", ["create_local_plan", "resolve_tensor"])
def test_in_a_load(method: str, tmp_path: Path) -> None:
    ckpt.save({"t": torch.ones(3)}, tmp_path)
    planner = DefaultLoadPlanner()
    setattr(planner, method, lambda *args: ctrl_c())
    with pytest.raises(KeyboardInterrupt):
        ckpt.load({"t": torch.ones(3)}, tmp_path, planner=planner)


def test_of_one_rank_in_a_load(tmp_path: Path) -> None:
    ckpt.save({"t": torch.ones(3)}, tmp_path)
    for method in ("open", "_read"):
        interrupted, other = run_ranks(2, _interrupted_load, str(tmp_path), method)
        assert interrupted == ("KeyboardInterrupt", "")
        assert other[0] == "LoadFailed"
        assert other[1].startswith("the load failed: rank 0: ")
        assert "interrupted: KeyboardInterrupt" in other[1]


def _interrupted_load(rank: int, url: str, method: str) -> tuple[str, str]:
    if rank == 0:
        setattr(ckpt.CheckpointReader, method, lambda *args: ctrl_c())
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        ckpt.load({"t": torch.ones(3)}, url, timeout_s=30)
    assert not isinstance(caught.value, LoadFailed) or list(caught.value.failures) == [0]
    return type(caught.value).__name__, str(caught.value)


def test_in_the_commit(tmp_path: Path) -> None:
    """Whether it was committed is open: nothing is deleted, and here it was."""
    url = f"memory://{tmp_path.name}/c"

    def fault(operation: str, key: str, when: str) -> None:
        if (operation, key, when) == ("put", "commit.json", "after"):
            raise KeyboardInterrupt

    memory.inject(url, fault)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save({"t": torch.ones(3)}, url)
    loaded = torch.zeros(3)
    ckpt.load({"t": loaded}, url)
    assert loaded.tolist() == [1, 1, 1]


def test_a_manager_that_goes_on_after_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = ckpt.CheckpointManager(
        tmp_path, save=saving.every_steps(1), async_mode="off", on_failure="continue", preflight=False
    )
    monkeypatch.setattr(ckpt.CheckpointWriter, "_write", lambda *args: ctrl_c())
    with pytest.raises(KeyboardInterrupt):
        manager.step(1, {"t": torch.ones(3)})


@pytest.mark.parametrize("where", ["resolve_data", "between"])
def test_the_other_ranks_fail_and_name_it(where: str, tmp_path: Path) -> None:
    interrupted, other = run_ranks(2, _interrupted_rank, str(tmp_path), where)
    assert interrupted == "KeyboardInterrupt"
    assert "rank 0" in other
    assert "KeyboardInterrupt" in other
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _interrupted_rank(rank: int, url: str, where: str) -> str:
    state = {f"t{rank}": torch.ones(3)}
    planner: Any = None
    if rank == 0 and where == "resolve_data":
        planner = Interrupted(where)
    elif rank == 0:
        decide = FirstRank.decide

        def decide_and_stop(*args: Any) -> Any:
            decide(*args)
            ctrl_c()

        FirstRank.decide = decide_and_stop  # type: ignore[assignment, method-assign]
    try:
        ckpt.save(state, url, planner=planner, timeout_s=30)
    except SaveFailed as failed:
        return str(failed)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "saved"
