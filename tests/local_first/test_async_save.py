"""`ckpt.async_save(local=)` and `ckpt.load(local=)`: a URL by way of the node's disk, without a manager."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import TimeoutError as TooLate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.commands import flip
from support.proxy import FaultProxy, fault_proxy
from support.ranks import exit_code_of
from support.strict_s3 import strict_s3

import ckpt
from ckpt.errors import ConfigurationError, NotCommitted, NotFound, SaveFailed
from ckpt.local_first import calls
from ckpt.writing.background import SaveFuture

PATIENCE_S = 120.0


def state_of(step: int, numbers: int = 300_000) -> dict[str, Any]:
    return {"weights": torch.full((numbers,), float(step)), "step": torch.tensor(step)}


def loaded(url: Path | str, *, numbers: int = 300_000, **more: Any) -> int:
    """Return the step that is loaded; its values are checked."""
    state = state_of(0, numbers)
    ckpt.load(state, url, **more)
    step = int(state["step"])
    assert torch.equal(state["weights"], state_of(step, numbers)["weights"])
    return step


def local_of(folder: Path) -> Path:
    (run,) = (folder / "local").iterdir()
    return run


@pytest.fixture(autouse=True)
def _end(tmp_path: Path) -> Iterator[None]:
    """End what this process holds, as it does when it ends."""
    yield
    for save in calls._last:
        save.local.exception()
    for tier in calls._tiers.values():
        tier.end(time.monotonic() + PATIENCE_S if not tier.waiting() else 0.0)
    calls._forget()


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with strict_s3() as server, fault_proxy(server) as faulty:
        yield faulty


def test_staged_local_durable(tmp_path: Path) -> None:
    url = tmp_path / "durable" / "step-1"
    save = ckpt.async_save(state_of(1), url, local=tmp_path / "local", tags={"note": "a"})
    assert isinstance(save, SaveFuture)
    assert save.state in ("staged", "local", "durable")
    metadata = save.local.result(PATIENCE_S)
    assert (local_of(tmp_path) / "step-1" / "commit.json").exists()
    assert save.result(PATIENCE_S) is metadata
    assert save.state == "durable"
    assert ckpt.verify(url).ok
    assert loaded(url) == 1
    assert not save.cancel()


def test_without_local_the_states_are_two(tmp_path: Path) -> None:
    save = ckpt.async_save(state_of(1), tmp_path / "step-1")
    assert save.local is save
    save.result(PATIENCE_S)
    assert save.state == "durable"
    (tmp_path / "file").touch()
    failing = ckpt.async_save(state_of(1), tmp_path / "file" / "step-1")
    assert isinstance(failing.exception(PATIENCE_S), SaveFailed)
    assert failing.state == "failed"


def test_a_dead_store_holds_up_nothing(tmp_path: Path, proxy: FaultProxy) -> None:
    proxy.rule = lambda call: "stall"
    more: dict[str, Any] = {"storage_options": proxy.options, "local": tmp_path / "local"}
    saves = [ckpt.async_save(state_of(step), f"s3://bucket/run/step-{step}", **more) for step in (1, 2)]
    for save in saves:
        save.local.result(PATIENCE_S)
    assert [save.state for save in saves] == ["local", "local"]
    with pytest.raises(TooLate):
        saves[0].result(1.0)
    near = ckpt.LocalTier(tmp_path / "local", answer_timeout_s=1.0)
    assert loaded("s3://bucket/run/step-2", storage_options=proxy.options, local=near) == 2
    proxy.rule = lambda call: "pass"
    proxy.settle()
    for save in saves:
        save.result(PATIENCE_S)
    assert [loaded(f"s3://bucket/run/step-{n}", storage_options=proxy.server.options) for n in (1, 2)] == [
        1,
        2,
    ]


@pytest.mark.slow
def test_a_store_that_refuses_is_an_error_of_the_save(tmp_path: Path, proxy: FaultProxy) -> None:
    proxy.rule = lambda call: 403
    more: dict[str, Any] = {"storage_options": proxy.options, "local": tmp_path / "local"}
    save = ckpt.async_save(state_of(1), "s3://bucket/run/step-1", **more)
    save.local.result(PATIENCE_S)
    with pytest.raises(SaveFailed, match=r"committed on the nodes' disks \(.*step-1\), but not here"):
        save.result(PATIENCE_S)
    assert save.state == "failed"
    proxy.rule = lambda call: "pass"  # the next save finds a process that works, and the first one goes first
    again = ckpt.async_save(state_of(2), "s3://bucket/run/step-2", **more)
    again.result(PATIENCE_S)
    assert loaded("s3://bucket/run/step-1", storage_options=proxy.options) == 1


def test_loads_from_the_node_as_long_as_it_is_not_older(tmp_path: Path) -> None:
    url, more = tmp_path / "durable" / "latest", dict[str, Any](local=tmp_path / "local")
    ckpt.async_save(state_of(1), url, **more).result(PATIENCE_S)
    (file,) = url.glob("rank-*/*.distcp")
    flip(file, 600_000)
    assert loaded(url, **more) == 1
    time.sleep(1.1)  # records count seconds
    ckpt.save(state_of(2), url)  # by somebody else
    assert loaded(url, **more) == 2
    save = ckpt.async_save(state_of(3), url, **more)
    save.result(PATIENCE_S)
    shutil.rmtree(tmp_path / "durable")
    assert loaded(url, **more) == 3
    shutil.rmtree(local_of(tmp_path) / "latest")
    with pytest.raises(NotFound):
        loaded(url, **more)


def test_what_the_node_lacks_is_read_from_the_url(tmp_path: Path) -> None:
    url, more = tmp_path / "durable" / "step-1", dict[str, Any](local=tmp_path / "local")
    ckpt.async_save(state_of(1), url, **more).result(PATIENCE_S)
    (file,) = (local_of(tmp_path) / "step-1").glob("rank-*/*.distcp")
    file.unlink()
    assert loaded(url, **more) == 1
    (url / "commit.json").unlink()  # all that was carried but the commit
    assert loaded(url, **more) == 1


def test_without_room_it_is_saved_at_the_url(tmp_path: Path) -> None:
    near = ckpt.LocalTier(tmp_path / "local", budget_bytes=1_250_000)
    for step in (1, 2):
        save = ckpt.async_save(state_of(step), tmp_path / "durable" / f"step-{step}", local=near)
        save.result(PATIENCE_S)
        assert loaded(tmp_path / "durable" / f"step-{step}") == step
    assert not (local_of(tmp_path) / "step-2").exists()
    assert save.local.done()


@pytest.mark.slow
def test_other_options_are_used_from_then_on(tmp_path: Path, proxy: FaultProxy) -> None:
    proxy.rule = lambda call: 403
    near, right = tmp_path / "local", proxy.server.options
    save = ckpt.async_save(state_of(1), "s3://bucket/run/step-1", storage_options=proxy.options, local=near)
    assert isinstance(save.exception(PATIENCE_S), SaveFailed)
    save = ckpt.async_save(state_of(2), "s3://bucket/run/step-2", storage_options=right, local=near)
    save.result(PATIENCE_S)
    assert loaded("s3://bucket/run/step-1", storage_options=right) == 1


@pytest.mark.parametrize(
    "more",
    [{"format": "safetensors"}, {"digests": True}, {"overwrite": False}, {"base": "x", "frozen": ["a"]}],
)
def test_what_does_not_go_together(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="local= goes with none of"):
        ckpt.async_save(state_of(1), tmp_path / "run" / "step-1", local=tmp_path / "local", **more)


def test_options_of_the_url_are_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_bandwidth_bytes_per_s must be at least"):
        ckpt.async_save(
            state_of(1), tmp_path / "run" / "step-1", local=tmp_path / "local", max_bandwidth_bytes_per_s=5
        )


@pytest.mark.parametrize(
    ("url", "message"),
    [("s3://bucket", "has a folder above it"), ("memory://a/b", "a place that other processes see")],
)
def test_a_url_for_which_it_cannot_work(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ckpt.async_save(state_of(1), url, local=tmp_path / "local")
    with pytest.raises(ConfigurationError, match=message):
        ckpt.load(state_of(1), url, local=tmp_path / "local")


# -- processes ---------------------------------------------------------------------------------------------

_SAVES = """
import sys, torch, ckpt
folder, ends = sys.argv[1:3]
state = {"weights": torch.full((400_000,), 1.0), "step": torch.tensor(1)}
ckpt.async_save(state, folder + "/durable/step-1", local=folder + "/local", max_bandwidth_bytes_per_s=1_000_000)
if ends == "error":
    raise RuntimeError("on purpose")
"""


def _run(folder: Path, ends: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _SAVES, str(folder), ends],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, path
        time.sleep(0.05)


def test_a_program_that_ends_waits_until_it_is_durable(tmp_path: Path) -> None:
    process = _run(tmp_path, "ends")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert loaded(tmp_path / "durable" / "step-1", numbers=400_000) == 1


def _save_and_die(folder: Path, url: str, options: Mapping[str, Any]) -> None:
    save = ckpt.async_save(state_of(1), url, local=folder / "local", storage_options=options)
    save.local.result()
    if save.state == "local":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.smoke
def test_killed_after_the_local_commit(tmp_path: Path, proxy: FaultProxy) -> None:
    """The process that carries goes on without the trainer."""
    proxy.rule, url = lambda call: "stall", "s3://bucket/run/step-1"
    assert exit_code_of(_save_and_die, tmp_path, url, proxy.options) == -signal.SIGKILL
    more: dict[str, Any] = {"storage_options": proxy.options}
    assert loaded(url, local=ckpt.LocalTier(tmp_path / "local", answer_timeout_s=1.0), **more) == 1
    with pytest.raises((NotFound, NotCommitted)):
        loaded(url, storage_options=proxy.server.options)
    proxy.rule = lambda call: "pass"
    proxy.settle()
    deadline_s, is_durable = time.monotonic() + PATIENCE_S, False
    while not is_durable:
        with contextlib.suppress(NotFound, NotCommitted):
            is_durable = loaded(url, **more) == 1
        assert time.monotonic() < deadline_s


def test_an_error_is_not_held_up(tmp_path: Path) -> None:
    process = _run(tmp_path, "error")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "step-1: not durable yet" in errors
    _wait_for(tmp_path / "durable" / "step-1" / "commit.json")


_RANK = """
import json, sys, torch, torch.distributed as dist, ckpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

folder, port, rank, does = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
url, more = "s3://bucket/run/step-", {"storage_options": json.loads(sys.argv[5])}
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=2)
near = ckpt.LocalTier(f"{folder}/node{rank}", copies=1, answer_timeout_s=1)

def state_of(step):
    full = torch.arange(200_000, dtype=torch.float32) + step
    mesh = init_device_mesh("cpu", (2,))
    return {"sharded": distribute_tensor(full, mesh, [Shard(0)]), "all": full[:1000].clone()}

def check(step):
    state, expected = state_of(0), state_of(step)
    ckpt.load(state, f"{url}{step}", local=near, **more)
    assert torch.equal(state["sharded"].full_tensor(), expected["sharded"].full_tensor())
    assert torch.equal(state["all"], expected["all"])

if does == "save":
    save = ckpt.async_save(state_of(1), url + "1", local=near, **more)
    save.local.result()
    check(1)
    print("local", flush=True)
    sys.stdin.read()
else:
    check(1)
    ckpt.async_save(state_of(2), url + "2", local=near, **more).result()
    print("durable", flush=True)
"""


def _ranks(folder: Path, port: int, does: str, options: Mapping[str, Any]) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(folder), str(port), str(rank), does, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.long
@pytest.mark.parametrize("lost", [None, 0, 1])
def test_two_nodes_are_killed_with_what_they_carry(
    tmp_path: Path, proxy: FaultProxy, lost: int | None
) -> None:
    """Nothing is durable: the nodes have it, with copies also when one of them is lost; and it becomes durable."""
    proxy.rule = lambda call: "stall"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = _ranks(tmp_path, store.port, "save", proxy.options)
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "local\n"
    for pid in [rank.pid for rank in ranks] + _carriers(tmp_path):
        os.kill(pid, signal.SIGKILL)
    for rank in ranks:
        rank.communicate()
    proxy.rule = lambda call: "pass"
    proxy.settle()
    with pytest.raises(NotFound):
        ckpt.verify("s3://bucket/run/step-1", storage_options=proxy.options)
    if lost is not None:
        shutil.rmtree(tmp_path / f"node{lost}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in _ranks(tmp_path, store.port, "load", proxy.options):
        output, _ = rank.communicate(timeout=PATIENCE_S)
        assert rank.returncode == 0
        assert output == "durable\n"
    for step in (1, 2):
        assert ckpt.verify(f"s3://bucket/run/step-{step}", storage_options=proxy.options).ok


def _carriers(folder: Path) -> list[int]:
    pids: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ckpt.local_first.drain_process" in words and str(folder).encode() in words[-2]:
            pids.append(int(path.name))
    return pids
