"""When the storage stops, ranks give up in time, and say what they were doing; what is slow is waited for."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from support.deadlines import TIMEOUT_S, Acting, failure_of, state_of, wait_for_threads
from support.fault_disk import Orders, fault_disk
from support.proxy import Call, FaultProxy
from support.ranks import run_ranks
from support.states import digest, emptied
from torch.distributed.checkpoint.api import CheckpointException

import ckpt
from ckpt.backends import memory
from ckpt.backends.base import MIB
from ckpt.consistency.environment import Environment, replaced
from ckpt.errors import AccessDenied, SaveFailed, StorageUnavailable

# -- writes stop ----------------------------------------------------------------------------------------


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
    place = "s3://bucket/c", proxy.options
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


@pytest.mark.long
def test_a_server_that_does_not_answer_the_probe(proxy: FaultProxy) -> None:
    """What its conditional puts are worth stays unknown; the save is none the worse."""
    place = "s3://bucket/c"
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
    place = "s3://bucket/c", proxy.options
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


@pytest.mark.long
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


@pytest.mark.parametrize(
    "action",
    ["stall", *(pytest.param(action, marks=pytest.mark.long) for action in ("hold", "dribble", "trickle"))],
)
@pytest.mark.parametrize("scheme", ["s3", pytest.param("fsspec+s3", marks=pytest.mark.long)])
def test_a_stalled_read_is_given_up(proxy: FaultProxy, action: str, scheme: str) -> None:
    """In time, and nothing arrives late: the memory may be in use again."""
    ckpt.save(state_of(0, 1), "s3://bucket/c", storage_options=proxy.server.options)
    loaded = emptied(state_of(0, 1))
    options = proxy.options if scheme == "s3" else fsspec_options(proxy)
    ckpt.load(loaded, f"{scheme}://bucket/c", storage_options=options)  # the client's imports take time too
    proxy.rule = lambda call: action if is_of_data(call) else "pass"
    loaded = emptied(state_of(0, 1))
    with pytest.raises(StorageUnavailable, match=r"without progress: reading rank-00000/"):
        ckpt.load(loaded, f"{scheme}://bucket/c", storage_options=options, timeout_s=5.0)
    memory_then = digest(loaded)
    proxy.rule = lambda call: "pass"
    proxy.settle()
    assert wait_for_threads() == []
    assert digest(loaded) == memory_then


def fsspec_options(proxy: FaultProxy) -> dict[str, Any]:
    endpoint = {"endpoint_url": proxy.options["endpoint_url"]}
    return {"key": proxy.server.access_key, "secret": proxy.server.secret_key, "client_kwargs": endpoint}


@pytest.mark.long
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
        with pytest.raises(StorageUnavailable, match=r"without progress: reading "):
            ckpt.load(loaded, disk.mount / "c", timeout_s=5.0)
        memory_then = digest(loaded)
        disk.release()
        assert wait_for_threads() == []
        assert digest(loaded) == memory_then


@pytest.mark.long
def test_a_slow_reply_is_no_stalled_one(proxy: FaultProxy) -> None:
    ckpt.save(state_of(0, 1), "s3://bucket/c", storage_options=proxy.server.options)
    proxy.bandwidth_bytes_per_s = 3e6  # 4 s for the tensor, in one reply
    proxy.rule = lambda call: "throttle" if is_of_data(call) else "pass"
    loaded = emptied(state_of(0, 1))
    ckpt.load(loaded, "s3://bucket/c", storage_options=proxy.options, timeout_s=5.0)
    assert digest(loaded) == digest(state_of(0, 1))
