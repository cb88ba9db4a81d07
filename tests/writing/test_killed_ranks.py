"""Ranks that are killed: the others are told which, and the checkpoint that was committed last loads."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.proxy import Call, FaultProxy
from support.ranks import exit_code_of, run_ranks, start
from support.saves import (
    FailingPlanner,
    Place,
    digest_of,
    kill_self,
    load_is,
    loaded_from,
    state_of,
)
from support.states import emptied
from support.strict_s3 import StrictS3

import ckpt
import ckpt.ranks.group
from ckpt.errors import (
    LoadFailed,
    SaveFailed,
)


@pytest.fixture(params=[pytest.param("posix", marks=pytest.mark.smoke), "strict"])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: StrictS3) -> Place:
    return (str(tmp_path / "c"), {}) if request.param == "posix" else ("s3://bucket/c", server.options)


def test_one_rank_is_killed(place: Place) -> None:
    """The others are told which, and do not wait for it."""
    results = run_ranks(3, _one_is_killed, place, 1, killed=[1])
    for rank in (0, 2):
        failures, message = results[rank]
        assert failures == {1: "CheckpointError", rank: "CommitUnknown"}
        assert "rank 1 does not answer" in message
    for rank in range(3):
        assert load_is(1, rank, *place)


def _one_is_killed(rank: int, place: Place, victim: int) -> Any:
    url, options = place
    ckpt.save(state_of(rank, 1), url, storage_options=options)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(
            state_of(rank, 2),
            url,
            storage_options=options,
            planner=FailingPlanner(4 if rank == victim else 100, kill_self),
            timeout_s=20.0,
        )
    return _kinds(caught.value), str(caught.value)


def _kinds(error: SaveFailed) -> dict[int, str]:
    return {rank: type(failure).__name__ for rank, failure in error.failures.items()}


@pytest.mark.long
def test_the_coordinator_is_killed(place: Place) -> None:
    results = run_ranks(2, _one_is_killed, place, 0, killed=[0])
    assert results[1][0] == {0: "CheckpointError", 1: "CommitUnknown"}
    assert "rank 0 does not answer" in results[1][1]
    for rank in range(2):
        assert load_is(1, rank, *place)


@pytest.mark.parametrize(
    "call",
    ["save", *(pytest.param(call, marks=pytest.mark.long) for call in ("async_save", "load"))],
)
def test_a_rank_is_killed_before_the_first_call(call: str, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    ckpt.save({"t": torch.ones(3)}, url)
    for message, failed in run_ranks(3, _killed_before, url, call, killed=[1])[::2]:
        assert "rank 1 does not answer" in message
        assert failed == [1]


def _killed_before(rank: int, url: str, call: str) -> Any:
    dist.barrier()
    if rank == 1:
        kill_self()
    with pytest.raises(SaveFailed if "save" in call else LoadFailed) as caught:
        getattr(ckpt, call)({"t": torch.ones(3)}, url, timeout_s=20.0)
    return str(caught.value), sorted(caught.value.failures)


def test_a_rank_of_a_subgroup_is_killed(tmp_path: Path) -> None:
    results = run_ranks(4, _one_of_a_subgroup_is_killed, str(tmp_path), killed=[2])
    for rank in (1, 3):
        failures, message = results[rank]
        assert 1 in failures  # the second of the three
        assert "rank 1 does not answer" in message


def _one_of_a_subgroup_is_killed(rank: int, url: str) -> Any:
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    planner = FailingPlanner(1, kill_self) if rank == 2 else None
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(rank, 1), url, process_group=group, planner=planner, timeout_s=20.0)
    return sorted(caught.value.failures), str(caught.value)


def test_a_rank_is_killed_in_a_load(tmp_path: Path) -> None:
    results = run_ranks(3, _killed_in_load, str(tmp_path), killed=[2])
    for rank in (0, 1):
        assert results[rank][0] == [2]
        assert "rank 2 does not answer" in results[rank][1]


def _killed_in_load(rank: int, url: str) -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Killing(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            if rank == 2:
                kill_self()
            return super().resolve_tensor(read_item)

    ckpt.save(state_of(rank, 1), url)
    with pytest.raises(LoadFailed) as caught:
        ckpt.load(emptied(state_of(rank, 1)), url, planner=Killing(), timeout_s=20.0)
    return sorted(caught.value.failures), str(caught.value)


def _save(place: Place, seed: int) -> None:
    ckpt.save(state_of(0, seed), place[0], storage_options=place[1])


@pytest.mark.long
def test_killed_at_every_request(proxy: FaultProxy, proxied: Place) -> None:
    """SIGKILL of the whole job before and after each request of a save that overwrites a checkpoint.

    The old values load until the commit's request has gone through, the new ones from then on.
    """
    _save(proxied, 1)
    old, new, at, outcomes = 1, 2, 0, []
    while True:
        at += 1
        for carried_out in (False, True):  # the request at which it dies
            died_at = _kill_at_request(proxy, at, carried_out, proxied, new)
            is_new = load_is_one_of(proxied, old, new)
            if is_new:
                old, new = new, new + 1
            if died_at is None:
                break
            outcomes.append((died_at.method, died_at.key.split("/")[-1], carried_out, is_new))
        if died_at is None:
            break
    assert len(outcomes) >= 2 * 14, outcomes
    commit = next(i for i, outcome in enumerate(outcomes) if outcome[:3] == ("PUT", "commit.json", True))
    assert [outcome[3] for outcome in outcomes] == [i >= commit for i in range(len(outcomes))], "\n".join(
        map(str, outcomes)
    )


def _kill_at_request(proxy: FaultProxy, at: int, carried_out: bool, place: Place, seed: int) -> Call | None:
    """Start a save and kill it at its n-th request; None if it made fewer."""
    before, died_at, is_killed = len(proxy.calls), [], threading.Event()

    def rule(call: Call) -> str:
        if call.number - before < at:
            return "pass"
        if call.number - before == at:
            died_at.append(call)
            if carried_out:
                return "lose"
        is_killed.wait(60)
        return "reset"

    proxy.rule = rule  # before there is a process that sends any
    with start(_save, place, seed) as saver:
        while saver.exitcode is None and not died_at:
            saver.join(0.01)
        # Killed at once, it may not have sent the body yet. A lost reply reaches nobody: who asks again is held.
        if died_at and carried_out:
            deadline = time.monotonic() + 60
            while died_at[0].number not in proxy.carried_out:
                assert time.monotonic() < deadline, died_at
                time.sleep(0.01)
    is_killed.set()
    proxy.settle()
    proxy.rule = lambda call: "pass"
    return died_at[0] if died_at else None


_SYSTEM_CALLS = ("mkdir", "open", "writev", "fsync", "close", "replace", "link", "unlink")


def _save_and_die(url: str, seed: int, at: int) -> None:
    """Save, and die of SIGKILL right before the n-th call that changes the file system."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                kill_self()
            return call(*args, **kwargs)

        return wrapper

    for name in _SYSTEM_CALLS:
        setattr(os, name, counted(getattr(os, name)))
    ckpt.save(state_of(0, seed), url, threads=1)


@pytest.mark.long
def test_killed_at_every_system_call(tmp_path: Path) -> None:
    """SIGKILL between any two calls that change the file system, in a save that overwrites a checkpoint.

    To the file system, right before a call is right after the one before it: one thread makes them all.
    """
    place: Place = (str(tmp_path / "c"), {})
    _save(place, 1)
    old, new, at, outcomes = 1, 2, 0, []
    exit_code: int | None = -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        at += 1
        exit_code = exit_code_of(_save_and_die, place[0], new, at)
        is_new = load_is_one_of(place, old, new)
        if is_new:
            old, new = new, new + 1
        outcomes.append(is_new)
    assert exit_code == 0
    assert len(outcomes) > 30
    assert outcomes == sorted(outcomes), "once committed, always committed"
    assert 0 < outcomes.count(False) < len(outcomes) - 2


def load_is_one_of(place: Place, old: int, new: int) -> bool:
    """Whether the new values load; if not, the old ones must."""
    found = loaded_from(0, place[0], place[1])
    if found == digest_of(0, new):
        return True
    assert found == digest_of(0, old)
    return False
