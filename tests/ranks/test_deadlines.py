"""When a rank stops, all others fail in time, and say who it was and what it was doing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.deadlines import TIMEOUT_S, Acting, failure_of, state_of, wait_for_threads
from support.ranks import Job, run_ranks
from support.states import emptied
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.ranks.heartbeat import Limits, Watch
from ckpt.ranks.progress import Progress


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("call", "stopped"),
    [
        ("save", 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("save", 0), ("async_save", 2))),
    ],
)
def test_a_stopped_rank_is_named(call: str, stopped: int, tmp_path: Path) -> None:
    results = run_ranks(3, _one_stops, str(tmp_path), call, stopped, stopped=[stopped])
    for rank, (message, failures) in ((rank, result) for rank, result in enumerate(results) if result):
        assert f"rank {stopped} does not answer" in message
        assert "when last heard of, it was saving" in failures[stopped]
        assert set(failures) == {stopped, rank}
    assert [rank for rank, result in enumerate(results) if result is None] == [stopped]


def _one_stops(rank: int, url: str, call: str, stopped: int) -> Any:
    def stop() -> None:
        # Not before its first beat: then there is nothing to tell but that it does not answer.
        while not any(thread.name == "ckpt-beat" for thread in threading.enumerate()):
            time.sleep(0.01)
        time.sleep(1.5)
        stop_self()

    planner = Acting(stop) if rank == stopped else None
    if call == "save":
        return failure_of(lambda: ckpt.save(state_of(rank), url, planner=planner, timeout_s=TIMEOUT_S))
    future = ckpt.async_save(state_of(rank), url, planner=planner, timeout_s=TIMEOUT_S)
    return failure_of(lambda: future.result(60))


@pytest.mark.long
def test_a_rank_that_stops_in_a_load_is_named(tmp_path: Path) -> None:
    results = run_ranks(3, _one_stops_loading, str(tmp_path), stopped=[1])
    for message, failures in (results[0], results[2]):
        assert "rank 1 does not answer" in message
        assert set(failures) == {1}


def _one_stops_loading(rank: int, url: str) -> Any:
    class Stopping(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            if rank == 1:
                stop_self()
            return super().resolve_tensor(read_item)

    ckpt.save(state_of(rank), url)
    loaded = emptied(state_of(rank))
    return failure_of(lambda: ckpt.load(loaded, url, planner=Stopping(), timeout_s=TIMEOUT_S))


@pytest.mark.long
@pytest.mark.parametrize("call", ["save", "load"])
def test_a_rank_that_stops_before_the_call_is_named(call: str, tmp_path: Path) -> None:
    ckpt.save({"t": torch.ones(3)}, tmp_path)
    results = run_ranks(3, _stops_before, str(tmp_path), call, stopped=[1])
    for message, failures in (results[0], results[2]):
        assert "rank 1 does not answer" in message
        assert 1 in failures


def _stops_before(rank: int, url: str, call: str) -> Any:
    if rank == 1:
        stop_self()
    return failure_of(lambda: getattr(ckpt, call)({"t": torch.ones(3)}, url, timeout_s=TIMEOUT_S))


@pytest.mark.long
def test_a_stopped_rank_that_goes_on_fails_too(tmp_path: Path) -> None:
    """It finds that the others have given up, and commits nothing by itself."""
    job = Job(2, _one_stops, str(tmp_path), "save", 1)
    try:
        message, _ = job.result(0, 60)
        assert "rank 1 does not answer" in message
        os.kill(job.processes[1].pid, signal.SIGCONT)
        message, failures = job.result(1, 60)
        assert "the save failed" in message
        assert "rendezvous" not in message, "it was this rank that was silent"
        assert list(failures) == [1]
    finally:
        job.kill()
    assert not list(tmp_path.rglob("commit.json"))


@pytest.mark.long
def test_the_rank_that_holds_the_rendezvous_store_stops(tmp_path: Path) -> None:
    """Nobody can be asked then; the others fail all the same."""
    results = run_ranks(2, _holder_stops, str(tmp_path), stopped=[0])
    assert "the rendezvous store, or the rank that holds it, does not answer" in results[1][0]


def _holder_stops(rank: int, root: str) -> Any:
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    box: list[Any] = [None]
    if rank == 0:
        held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        box = [held.port]
    dist.broadcast_object_list(box, src=0)
    store = held if rank == 0 else dist.TCPStore("127.0.0.1", box[0], is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    planner = Acting(stop_self) if rank == 0 else None
    return failure_of(lambda: ckpt.save(state_of(rank), f"{root}/c", planner=planner, timeout_s=TIMEOUT_S))


@pytest.mark.long
def test_a_rank_that_is_stuck_in_the_users_code_is_named(tmp_path: Path) -> None:
    results = run_ranks(3, _stuck_in_state_dict, str(tmp_path))
    for rank in (0, 2):
        assert "rank 1: no progress for" in results[rank][0]
        assert "save of c" in results[rank][0]
    assert "the save failed" in results[1][0]  # as soon as it comes back


def _stuck_in_state_dict(rank: int, root: str) -> Any:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                time.sleep(1.2 * TIMEOUT_S)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    return failure_of(lambda: ckpt.save({"part": Part()}, f"{root}/c", timeout_s=TIMEOUT_S))


def test_a_roll_call_after_one_of_another_rank() -> None:
    """Who already told of a failure hears the store's next answer all the same, before it takes the store for dead."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (
        Watch(
            store,
            "g",
            rank=rank,
            size=2,
            call=1,
            limits=Limits(8.0),
            progress=Progress(),
            break_off=lambda: None,
        )
        for rank in (0, 1)
    )
    second.roll_call("the other one failed")
    first.start()
    while not first._signed_in:
        time.sleep(0.01)
    roll_call = first.roll_call("this one too")
    assert roll_call is not None
    assert roll_call.answers[1].failure == "the other one failed"
    first.close()
    second.close()


# -- and what is no reason to fail -----------------------------------------------------------------------


@pytest.mark.long
def test_slow_is_not_stopped(tmp_path: Path) -> None:
    """A save may take longer than the deadline, as long as it gets on: here by a cap on one rank's bandwidth."""
    assert all(run_ranks(2, _one_is_slow, str(tmp_path)))


def _one_is_slow(rank: int, url: str) -> bool:
    pace = {"max_bandwidth_bytes_per_s": 1.5e6} if rank == 1 else {}
    began_s = time.monotonic()
    ckpt.save(state_of(rank), url, timeout_s=6.0, **pace)  # type: ignore[arg-type]
    return time.monotonic() - began_s > 6.0


@pytest.mark.smoke
def test_a_short_save_says_nothing(tmp_path: Path) -> None:
    """The rendezvous store is not used, and no thread stays."""
    for keys, threads in run_ranks(2, _short_saves, str(tmp_path)):
        assert keys[0] == keys[1]
        assert threads == []


def _short_saves(rank: int, url: str) -> Any:
    ckpt.save(state_of(rank), url)
    store, keys = dist.distributed_c10d._get_default_store(), []
    for _ in range(2):
        ckpt.save(state_of(rank), url)
        ckpt.load(emptied(state_of(rank)), url)
        keys.append(store.num_keys())
    return keys, wait_for_threads()


@pytest.mark.parametrize("timeout_s", [0, -1.0, 0.5, float("inf"), float("nan"), "10", True])
def test_deadlines_that_make_no_sense(timeout_s: Any, tmp_path: Path) -> None:
    for call in (ckpt.save, ckpt.async_save, ckpt.load):
        with pytest.raises(ConfigurationError, match="timeout_s must be 1 s to 7 days"):
            call({}, tmp_path, timeout_s=timeout_s)


def test_a_rank_that_cannot_give_up_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """It was told, and what it waits in does not let go."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    progress, told = Progress(), threading.Event()
    progress.wait_for("all ranks to have read")
    watch = Watch(
        store, "stuck", rank=0, size=2, call=1, limits=Limits(1.0), progress=progress, break_off=told.set
    )  # fmt: skip
    watch.start()
    assert told.wait(30)
    deadline = time.monotonic() + 30
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.05)
    watch.close()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "rank 1 has never been heard of" in record.message
    assert "rank 0 was told to give up, but is still waiting for all ranks to have read" in record.message


def test_the_last_words_of_a_dead_rank_are_no_sign_of_life() -> None:
    """Said before anybody asked, heard only after."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def say(number: int) -> None:
        store.set("ckpt/beat/test/1", json.dumps([1, number, 0.1 * number, False, "saving", None]))

    watch = Watch(
        store, "test", rank=0, size=2, call=1, limits=Limits(TIMEOUT_S), progress=Progress(), break_off=lambda: None
    )  # fmt: skip
    say(1)
    watch.start()
    deadline = time.monotonic() + 60
    while 1 not in watch._heard and time.monotonic() < deadline:
        time.sleep(0.01)
    say(2)
    roll_call = watch.roll_call("lost")
    watch.close()
    assert roll_call is not None
    assert (roll_call.answers[1].is_alive, roll_call.answers[1].doing) == (False, "saving")
