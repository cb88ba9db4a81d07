"""When a rank stops, or what it writes to does: all others fail in time, and say who it was and what it was doing."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.fault_disk import Orders, fault_disk
from support.proxy import Call, FaultProxy
from support.ranks import Job, run_ranks
from support.states import digest, emptied, random_tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

import ckpt
from ckpt.backends import memory
from ckpt.backends.base import MIB
from ckpt.consistency.environment import Environment, replaced
from ckpt.errors import AccessDenied, ConfigurationError, LoadFailed, SaveFailed, StorageUnavailable
from ckpt.ranks.heartbeat import Limits, Watch
from ckpt.ranks.progress import Progress

TIMEOUT_S = 8.0


def state_of(rank: int, seed: int = 0) -> dict[str, Any]:
    return {
        f"rank{rank}.large": random_tensor(3 * MIB, seed=seed + rank),
        f"rank{rank}.object": {"seed": seed},
    }


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Acting(DefaultSavePlanner):
    """Does something when a tensor's data are asked for."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            self.act()
        return super().resolve_data(write_item)


def failure_of(call: Callable[[], Any]) -> tuple[str, dict[int, str]]:
    """The text of the failure of a save or load, and of each rank's, once they have travelled."""
    with pytest.raises((SaveFailed, LoadFailed)) as caught:
        call()
    failure = pickle.loads(pickle.dumps(caught.value))
    return str(failure), {rank: str(error) for rank, error in failure.failures.items()}


# -- a rank stops ----------------------------------------------------------------------------------------


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
        time.sleep(
            1.5
        )  # not before its first beat: then there is nothing to tell but that it does not answer
        stop_self()

    planner = Acting(stop) if rank == stopped else None
    if call == "save":
        return failure_of(lambda: ckpt.save(state_of(rank), url, planner=planner, timeout_s=TIMEOUT_S))
    future = ckpt.async_save(state_of(rank), url, planner=planner, timeout_s=TIMEOUT_S)
    return failure_of(lambda: future.result(60))


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


@pytest.mark.parametrize("call", ["save", pytest.param("load", marks=pytest.mark.long)])
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
            limits=Limits(20.0),
            progress=Progress,
            break_off=lambda: None,
        )
        for rank in (0, 1)
    )
    second.roll_call("the other one failed")
    first.start()
    while not first._signed_in:
        time.sleep(0.01)
    answers = first.roll_call("this one too")
    assert answers is not None
    assert answers[1].failure == "the other one failed"
    first.close()
    second.close()


# -- the storage stops -----------------------------------------------------------------------------------


def is_second_part_of_rank_1(call: Call) -> bool:
    number = re.search(r"partNumber=(\d+)", call.target)
    return "rank-00001" in call.key and number is not None and number[1] == "2"


@pytest.mark.parametrize(
    "action",
    ["stall", *(pytest.param(action, marks=pytest.mark.long) for action in ("stop reading", "trickle"))],
)
@pytest.mark.parametrize("function", ["ckpt", pytest.param("dcp", marks=pytest.mark.long)])
def test_a_stalled_upload_is_named(proxy: FaultProxy, action: str, function: str) -> None:
    """The server keeps the connection and does not answer: a rank gives that up itself, also in `dcp.save`."""
    place = f"s3://{proxy.server.new_bucket()}/c", {**proxy.options, "part_size_bytes": 5 * MIB}
    proxy.rule = lambda call: action if is_second_part_of_rank_1(call) else "pass"
    for message in run_ranks(2, _upload_stalls, place, function):
        assert "rank 1: s3://" in message
        assert "without progress: writing rank-00001/" in message
        assert "(5.0 of 12.0 MiB)" in message


def _upload_stalls(rank: int, place: tuple[str, dict[str, Any]], function: str) -> str:
    url, options = place
    if function == "ckpt":
        with pytest.raises(SaveFailed) as caught:
            ckpt.save(state_of(rank), url, storage_options=options, timeout_s=TIMEOUT_S, threads=1)
        failures = caught.value.failures
    else:
        writer = ckpt.CheckpointWriter(url, storage_options=options, timeout_s=TIMEOUT_S, threads=1)
        with pytest.raises(CheckpointException) as raised:
            dcp.save(state_of(rank), storage_writer=writer)
        failures = {rank: failure[0] for rank, failure in raised.value.failures.items()}
    assert list(failures) == [1]
    assert isinstance(failures[1], StorageUnavailable)
    return str(failures[1])


def test_a_server_that_does_not_answer_the_probe(proxy: FaultProxy) -> None:
    """What its conditional puts are worth stays unknown; the save is none the worse."""
    place = f"s3://{proxy.server.new_bucket()}/c"
    probes: list[str] = []

    def rule(call: Call) -> str:
        if call.method != "PUT" or not call.key.endswith(".probe"):
            return "pass"
        probes.append(call.key)
        return "stall"

    proxy.rule = rule
    ckpt.save(state_of(0), place, storage_options=proxy.options, timeout_s=TIMEOUT_S)
    assert len(probes) == 1, "it was given up, not sent again"
    loaded = emptied(state_of(0))
    ckpt.load(loaded, place, storage_options=proxy.options)
    assert digest(loaded) == digest(state_of(0))


@pytest.mark.long
def test_storage_that_stops_at_the_probe(proxy: FaultProxy) -> None:
    """Then all of the commit stalls, one request after the other; both ranks say whose it was, and at what."""
    stopped = threading.Event()

    def rule(call: Call) -> str:
        if call.key.endswith(".probe"):
            stopped.set()
        return "stall" if stopped.is_set() else "pass"

    proxy.rule = rule
    place = f"s3://{proxy.server.new_bucket()}/c", proxy.options
    for message in run_ranks(2, _storage_stops, place):
        assert re.search(r"rank 0: s3://.*/c/commit.json: given up after \d+ s without progress", message)


def _storage_stops(rank: int, place: tuple[str, dict[str, Any]]) -> str:
    url, options = place
    return failure_of(lambda: ckpt.save(state_of(rank), url, storage_options=options, timeout_s=TIMEOUT_S))[0]


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be frozen: whoever writes to it is held in the kernel."""
    image, mount = tmp_path / "image", tmp_path / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    for command in (("mkfs.ext4", "-q", image), ("mount", "-o", "loop", image, mount)):
        done = subprocess.run([str(word) for word in command], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a file as a disk here: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["fsfreeze", "-u", mount], check=False, capture_output=True)
    subprocess.run(["umount", mount], check=True)


def test_a_hung_file_system(frozen_disk: Path) -> None:
    ckpt.save(state_of(0, 1), frozen_disk / "c")

    def freeze() -> None:
        subprocess.run(["fsfreeze", "-f", frozen_disk], check=False, capture_output=True)

    def save() -> None:
        ckpt.save(state_of(0, 2), frozen_disk / "c", planner=Acting(freeze), timeout_s=TIMEOUT_S)

    message, _ = failure_of(save)
    assert "without progress: writing rank-00000/" in message
    subprocess.run(["fsfreeze", "-u", frozen_disk], check=True)
    loaded = emptied(state_of(0, 1))
    ckpt.load(loaded, frozen_disk / "c")
    assert digest(loaded) == digest(state_of(0, 1))
    wait_for_threads()
    assert not list(frozen_disk.rglob("*.ckpt-tmp"))


def test_cleaning_up_takes_only_the_time_that_is_left() -> None:
    """Also on a rank that was getting on a moment before, and fails only because another did."""
    clock, released, began, ended = _Clock(), threading.Event(), threading.Event(), threading.Event()

    def hold(operation: str, key: str, when: str) -> None:
        if operation == "put" and key.endswith(".json"):
            raise AccessDenied("not this one", key=key)
        if operation == "delete" and not began.is_set():
            began.set()
            clock.now_s += 300
            released.wait(20)
            ended.set()

    memory.inject("memory://deadlines/c", hold)
    with replaced(clock), pytest.raises(SaveFailed, match="not this one"):
        ckpt.save(state_of(0), "memory://deadlines/c", timeout_s=1000)
    assert began.is_set()
    assert not ended.is_set()
    released.set()


class _Clock(Environment):
    """Time that passes when it is told to."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


# -- reads stop ------------------------------------------------------------------------------------------


def is_of_data(call: Call) -> bool:
    return call.method == "GET" and call.key.endswith(".distcp")


@pytest.mark.parametrize("action", ["stall", "hold", "dribble", "trickle"])
@pytest.mark.parametrize("scheme", ["s3", pytest.param("fsspec+s3", marks=pytest.mark.long)])
def test_a_stalled_read_is_given_up(proxy: FaultProxy, action: str, scheme: str) -> None:
    """In time, and nothing arrives late: the memory may be in use again."""
    bucket = proxy.server.new_bucket()
    ckpt.save(state_of(0, 1), f"s3://{bucket}/c", storage_options=proxy.server.options)
    proxy.rule = lambda call: action if is_of_data(call) else "pass"
    loaded = emptied(state_of(0, 1))
    options = proxy.options if scheme == "s3" else fsspec_options(proxy)
    with pytest.raises(StorageUnavailable, match=r"rank 0: .*without progress: reading rank-00000/"):
        ckpt.load(loaded, f"{scheme}://{bucket}/c", storage_options=options, timeout_s=3.0)
    memory_then = digest(loaded)
    proxy.rule = lambda call: "pass"
    proxy.settle()
    assert wait_for_threads() == []
    assert digest(loaded) == memory_then


def fsspec_options(proxy: FaultProxy) -> dict[str, Any]:
    endpoint = {"endpoint_url": proxy.options["endpoint_url"]}
    return {"key": proxy.server.access_key, "secret": proxy.server.secret_key, "client_kwargs": endpoint}


def test_a_read_that_hangs_in_a_mount_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(fault_disk(tmp_path, tmp_path / "disk"))
        except OSError as error:
            pytest.skip(str(error))
        ckpt.save(state_of(0, 1), disk.source / "c")
        disk.give(Orders("hang", reads=True, position=12, lasts=True, note=str(tmp_path / "note")))
        loaded = emptied(state_of(0, 1))
        with pytest.raises(StorageUnavailable, match=r"rank 0: .*without progress: reading "):
            ckpt.load(loaded, disk.mount / "c", timeout_s=3.0)
        memory_then = digest(loaded)
        disk.release()
        assert wait_for_threads() == []
        assert digest(loaded) == memory_then


def test_a_slow_reply_is_no_stalled_one(proxy: FaultProxy) -> None:
    bucket = proxy.server.new_bucket()
    ckpt.save(state_of(0, 1), f"s3://{bucket}/c", storage_options=proxy.server.options)
    proxy.bandwidth_bytes_per_s = 3e6  # 4 s for the tensor, in one reply
    proxy.rule = lambda call: "throttle" if is_of_data(call) else "pass"
    loaded = emptied(state_of(0, 1))
    ckpt.load(loaded, f"s3://{bucket}/c", storage_options=proxy.options, timeout_s=2.0)
    assert digest(loaded) == digest(state_of(0, 1))


# -- and what is no reason to fail -----------------------------------------------------------------------


def test_slow_is_not_stopped(tmp_path: Path) -> None:
    """A save may take longer than the deadline, as long as it gets on: here by a cap on one rank's bandwidth."""
    assert all(run_ranks(2, _one_is_slow, str(tmp_path)))


def _one_is_slow(rank: int, url: str) -> bool:
    pace = {"max_bandwidth_bytes_per_s": 3e6} if rank == 1 else {}
    began_s = time.monotonic()
    ckpt.save(state_of(rank), url, timeout_s=3.0, **pace)  # type: ignore[arg-type]
    return time.monotonic() - began_s > 3.0


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


def wait_for_threads() -> list[str]:
    """The threads of a save or load that are left after a while."""
    deadline = time.monotonic() + 10
    while True:
        names = [found.name for found in threading.enumerate()]
        left = [name for name in names if name in ("ckpt-watch", "ckpt-beat", "ckpt-store")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


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
        store, "stuck", rank=0, size=2, call=1, limits=Limits(1.0), progress=lambda: progress, break_off=told.set
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
    assert "rank 0 was told to give up, and is still waiting for all ranks to have read" in record.message


def test_the_last_words_of_a_dead_rank_are_no_sign_of_life() -> None:
    """Said before anybody asked, heard only after."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def say(number: int) -> None:
        store.set("ckpt/beat/test/1", json.dumps([1, number, 0.1 * number, False, "saving", None]))

    watch = Watch(
        store, "test", rank=0, size=2, call=1, limits=Limits(TIMEOUT_S), progress=Progress, break_off=lambda: None
    )  # fmt: skip
    say(1)
    watch.start()
    deadline = time.monotonic() + 60
    while 1 not in watch._heard and time.monotonic() < deadline:
        time.sleep(0.01)
    say(2)
    answers = watch.roll_call("lost")
    watch.close()
    assert answers is not None
    assert (answers[1].is_alive, answers[1].doing) == (False, "saving")
