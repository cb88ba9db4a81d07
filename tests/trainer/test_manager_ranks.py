"""`CheckpointManager` on several ranks, one of which fails or differs: all raise, none hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.proxy import Call, fault_proxy
from support.ranks import run_ranks
from support.servers import S3Server

import ckpt
from ckpt.backends.base import MIB
from ckpt.errors import CheckpointError, ConfigurationError, SaveFailed
from ckpt.trainer_integration import saving
from ckpt.trainer_integration.events import Event
from ckpt.trainer_integration.run import async_modes


class Broken:
    """A part that cannot be saved on the last rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self._rank == 1:
            raise MemoryError("no room for a copy")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded")


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"shared": torch.full((1000,), float(step)), f"own{rank}": torch.full((10,), float(step))}


def _one_rank_cannot_stage(rank: int, root: str, mode: Any) -> list[str]:
    errors = []
    with ckpt.CheckpointManager(
        root, save=saving.every_steps(1), async_mode=mode, preflight=False
    ) as manager:
        manager.step(1, {**state_of(rank, 1), "part": Broken(rank)})
        for ask in (manager.wait_durable, lambda: manager.step(2, state_of(rank, 2))):
            try:
                ask()
            except SaveFailed as error:
                errors.append(str(error))
        manager.wait_durable()
    return errors


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.long), "off"])
def test_a_rank_that_cannot_stage(tmp_path: Path, mode: str) -> None:
    for errors in run_ranks(2, _one_rank_cannot_stage, str(tmp_path), mode):
        (text,) = errors
        assert "rank 1" in text
        assert "no room for a copy" in text
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(tmp_path)] == [2]


def test_a_group_of_the_gpu_alone_cannot_save_by_a_process(tmp_path: Path) -> None:
    run_ranks(1, _no_cpu_backend, str(tmp_path))


def _no_cpu_backend(rank: int, root: str) -> None:
    vars(async_modes)["has_cpu_backend"] = lambda _: False  # as with NCCL, which needs a GPU (tests/gpu)
    with pytest.raises(ConfigurationError, match="cpu:gloo,cuda:nccl"):
        ckpt.CheckpointManager(root, save=1, async_mode="process")


def _lose_the_process(rank: int, root: str) -> tuple[str, int | None]:
    events: list[Event] = []
    with ckpt.CheckpointManager(
        root, save=saving.every_steps(1), async_mode="process", events=[events.append]
    ) as manager:
        manager.step(1, state_of(rank, 1))
        manager.wait_durable()
        assert rank == 1 or events[-1].values["write_s"] > 0, "figures come from the other process too"
        if rank == 1:
            (process,) = multiprocessing.active_children()
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        manager.step(2, state_of(rank, 2))
        try:
            manager.wait_durable()
            text = ""
        except SaveFailed as error:
            text = str(error)
        manager.step(3, state_of(rank, 3))
        return text, manager.wait_durable()


@pytest.mark.long
def test_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    """Between two saves nobody notices."""
    assert run_ranks(2, _lose_the_process, str(tmp_path)) == [("", 3), ("", 3)]
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(tmp_path)] == [1, 2, 3]


def _lose_the_process_at_work(rank: int, root: str) -> tuple[str, int | None]:
    with ckpt.CheckpointManager(
        root, save=saving.every_steps(1), async_mode="process", max_bandwidth_bytes_per_s=4e6
    ) as manager:
        manager.step(1, state_of(rank, 1))
        manager.wait_durable()
        manager.step(2, {f"own{rank}": torch.ones(4 << 20)})
        if rank == 1:
            (process,) = multiprocessing.active_children()
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        try:
            manager.wait_durable()
            text = ""
        except SaveFailed as error:
            text = str(error)
        manager.step(3, state_of(rank, 3))
        return text, manager.wait_durable()


def test_a_process_that_is_killed_in_a_save_fails_that_one_alone(tmp_path: Path) -> None:
    for text, durable_step in run_ranks(2, _lose_the_process_at_work, str(tmp_path)):
        assert "the save" in text
        assert durable_step == 3
    assert [
        checkpoint.step for checkpoint in ckpt.list_checkpoints(tmp_path) if checkpoint.state == "committed"
    ] == [1, 3]


def _one_rank_is_misconfigured(rank: int, root: str) -> str:
    root = "s3://bucket/run" if rank == 1 else root
    options = {"endpoint_url": 7} if rank == 1 else {}
    with pytest.raises(CheckpointError) as caught:
        ckpt.CheckpointManager(
            root, save=saving.every_steps(1) | saving.on_preemption(), storage_options=options
        )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return str(caught.value)


def test_a_rank_that_cannot_make_a_manager(tmp_path: Path) -> None:
    for text in run_ranks(2, _one_rank_is_misconfigured, str(tmp_path), timeout_s=60):
        assert "endpoint_url" in text


def _one_rank_has_a_wrong_number(rank: int, root: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        ckpt.CheckpointManager(root, save=1, stock_metadata_max_bytes=-rank)
    return str(caught.value)


def test_a_rank_with_a_wrong_number(tmp_path: Path) -> None:
    for text in run_ranks(2, _one_rank_has_a_wrong_number, str(tmp_path), timeout_s=60):
        assert "rank 1: stock_metadata_max_bytes must be" in text


def _save_through_faults(rank: int, root: str, mode: Any, options: dict[str, Any]) -> list[Event]:
    """Three saves, in which each rank has 12 MiB of its own."""
    events: list[Event] = []
    with ckpt.CheckpointManager(
        root,
        save=saving.every_steps(1),
        async_mode=mode,
        preflight=False,
        storage_options=options,
        events=[events.append],
    ) as manager:
        for step in (1, 2, 3):
            manager.step(step, {f"own{rank}": torch.full((3 * MIB,), float(step))})
    return events


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.long)])
def test_requests_that_were_sent_again_are_counted_over_all_ranks(s3: S3Server, mode: str) -> None:
    refused: list[str] = []

    def refuse_once(call: Call) -> str | int:
        """In the first save a part of each rank, and the commit, which the first rank sends after
        all have sent theirs; in the second a part of each rank.
        """
        is_part = call.is_part and "partNumber=2&" in f"{call.target}&" and "step-00000003" not in call.key
        is_commit = call.method == "PUT" and call.key.endswith("step-00000001/commit.json")
        if not (is_part or is_commit) or call.key in refused:
            return "pass"
        refused.append(call.key)
        return 503

    with fault_proxy(s3) as proxy:
        proxy.rule = refuse_once
        options = {**proxy.options, "part_size_bytes": 5 * MIB}
        root = f"s3://{s3.new_bucket()}/run"
        events, others = run_ranks(2, _save_through_faults, root, mode, options)
        assert len(refused) == 5
    durable = [event.values["retries"] for event in events if event.kind == "durable"]
    assert durable == [3, 2, 0]
    assert not others
