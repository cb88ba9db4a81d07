"""A machine's clock is set back between two saves of a run: the later one counts as the later one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.consistency.environment import Environment
from ckpt.format.records import read_commit
from ckpt.format.run_clock import RunClock
from ckpt.format.run_record import RunCheckpoint
from ckpt.local_first import calls
from ckpt.trainer_integration import keeping

HOUR_S = 3600.0


class SetClock(Environment):
    """The real one, with a clock that is set."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.real = time.time

    def now(self) -> float:
        return self.real() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetClock]:
    clock = SetClock()
    with environment.replaced(clock):
        monkeypatch.setattr("time.time", clock.now)
        yield clock


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((5,), value)}


def loaded(url: Path, **options: Any) -> float:
    found = state(0.0)
    ckpt.load(found, url, no_dist=True, **options)
    return float(found["x"][0])


def made_at(folder: Path) -> str:
    commit = read_commit(open_store(folder))
    assert commit is not None
    return commit.record.created_at


@pytest.mark.parametrize("seen", ["in this process", "on the node", "in the root"])
def test_a_place_that_is_saved_again(seen: str, tmp_path: Path, clock: SetClock) -> None:
    url = tmp_path / "run" / "step-1"
    local = tmp_path / "local"
    given: dict[str, Any] = {"local": local, "no_dist": True}
    ckpt.async_save(state(1.0), url, **given).result(60)
    first = made_at(url)
    clock.ahead_s = -HOUR_S
    if seen != "in this process":
        calls._clocks.clear()  # as another process begins
    if seen == "in the root":
        for run in local.iterdir():
            for folder in run.glob("step-*"):
                shutil.rmtree(folder)
        assert loaded(url, local=local) == 1.0
    ckpt.async_save(state(2.0), url, **given).result(60)
    assert loaded(url, local=local) == loaded(url) == 2.0
    assert made_at(url) >= first


@pytest.mark.parametrize("local", [False, True])
def test_a_step_of_a_manager_that_is_saved_again(local: bool, tmp_path: Path, clock: SetClock) -> None:
    options: dict[str, Any] = {"save": 1, "preflight": False, "keep": keeping.last(2)}
    options |= {"local": tmp_path / "local"} if local else {}
    with ckpt.CheckpointManager(tmp_path / "run", **options) as manager:
        for step in (1, 2):
            manager.step(step, state(step), metrics={"loss": 1.0})
            assert manager.wait_durable(240) == step
        clock.ahead_s = -HOUR_S
        manager.restore(state(0.0), step=1)
        manager.step(2, state(20.0), metrics={"loss": 2.0})
        assert manager.wait_durable(240) == 2
        manager.step(3, state(3.0), metrics={"loss": 3.0})
        assert manager.wait_durable(240) == 3
    found = {each.step: each for each in ckpt.list_checkpoints(tmp_path / "run")}
    assert loaded(tmp_path / "run" / "step-00000002") == 20.0
    assert [*found] == [2, 3]


def test_a_rule_by_age_goes_by_the_time_of_the_run(tmp_path: Path, clock: SetClock) -> None:
    """Neither is all kept until the clock has caught up, nor goes the first save after that."""
    with ckpt.CheckpointManager(
        tmp_path / "run", save=1, preflight=False, keep=keeping.within(HOUR_S / 2)
    ) as manager:
        manager.step(1, state(1.0))
        manager.wait_durable(240)
        clock.ahead_s = -24 * HOUR_S
        manager.step(2, state(2.0))
        manager.wait_durable(240)
    found = [each.step for each in ckpt.list_checkpoints(tmp_path / "run")]
    assert found == [1, 2]


class Hands(Environment):
    """A clock and a watch, both set by hand."""

    at_s = 1000.0
    passed_s = 0.0

    def now(self) -> float:
        return self.at_s

    def monotonic(self) -> float:
        return self.passed_s


def test_the_clock_of_a_run_goes_on() -> None:
    hands = Hands()
    with environment.replaced(hands):
        clock = RunClock()
        assert clock.now() == 1000.0
        hands.at_s = 400.0
        hands.passed_s = 10.0
        assert clock.now() == 1010.0
        hands.at_s = 5000.0
        hands.passed_s = 20.0
        assert clock.now() == 5000.0
        clock.saw(6000.0)
        clock.saw(100.0)
        hands.passed_s = 25.0
        assert clock.now() == 6005.0


def test_age_is_counted_from_the_newest() -> None:
    saved = [RunCheckpoint(step=step, path=f"step-{step:08}", saved_at_s=1000.0 * step) for step in (1, 2, 3)]
    assert {*keeping.within(1500).keeps(saved, 500.0)} == {2, 3}
    assert {*keeping.within(1500).keeps(saved, 4000.0)} == {3}
