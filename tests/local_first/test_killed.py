"""Trainers and the processes that carry, killed at any moment: what was local is restored, what is durable is whole."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import ckpt
from ckpt.errors import CheckpointError

RANKS = 2
_TRAINER = """
import os, sys, threading, time
import torch, torch.distributed as dist
import ckpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

def end_with_the_test():
    sys.stdin.read()  # until nobody can write to it any more
    os._exit(3)

threading.Thread(target=end_with_the_test, daemon=True).start()
folder, port, rank, world = sys.argv[1], *map(int, sys.argv[2:5])
tier = ckpt.LocalTier(f"{folder}/node{rank}", copies=int(sys.argv[6]))
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=world)

def state_of(step):
    full = torch.arange(200_000, dtype=torch.float32) + step
    mesh = init_device_mesh("cpu", (world,))
    return {"sharded": distribute_tensor(full, mesh, [Shard(0)]), "all": full[:1000].clone(), "step": torch.tensor(step)}

alone = set()  # steps that have no copy, as the other rank was killed while it was made

def tell(event):
    if event.kind == "not_copied":
        alone.add(event.step)
    if event.kind == "durable" or (event.kind == "local" and event.step not in alone):
        print(event.kind, event.step, flush=True)

with ckpt.CheckpointManager(
    folder + "/durable", save=1, keep=3, local=tier, preflight=False, events=[tell]
) as manager:
    state = state_of(0)
    restored = manager.restore(state)
    step = restored.step if restored else 0
    expected = state_of(step)
    assert torch.equal(state["sharded"].full_tensor(), expected["sharded"].full_tensor()), step
    assert torch.equal(state["all"], expected["all"]) and int(state["step"]) == step
    print("restored", step, flush=True)
    while step < int(sys.argv[5]):
        step += 1
        manager.step(step, state_of(step))
        time.sleep(0.05)
    manager.wait_durable(120)
"""


@pytest.fixture
def lifeline() -> Iterator[int]:
    """Make a pipe from which trainers read: when the test is over, or its process is gone, they end."""
    reads, writes = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, reads)
        stack.callback(os.close, writes)
        yield reads


def _start(folder: Path, port: int, steps: int, copies: bool, lifeline: int) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _TRAINER, str(folder), str(port)]
    return [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(steps), str(int(copies))],
            stdin=lifeline,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]


def _carriers(folder: Path) -> list[int]:
    """Find the processes that carry from a folder below this one."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"ckpt.local_first.drain_process" in words and str(folder).encode() in words[-2]:
                found.append(int(path.name))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _told(output: str, kind: str) -> list[int]:
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith(f"{kind} ")]


@pytest.mark.long
@pytest.mark.parametrize(("seed", "copies"), [(0, False), (1, False), (2, False), (3, True), (4, True)])
def test_killed_at_any_moment(tmp_path: Path, seed: int, copies: bool, lifeline: int) -> None:
    """With copies, a node is lost too from time to time."""
    chance, local, durable = random.Random(seed), 0, 0
    for _ in range(5):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = _start(tmp_path, store.port, 10_000, copies, lifeline)
        assert ranks[0].stdout is not None
        first = ranks[0].stdout.readline()
        assert first.startswith("restored "), first
        restored = int(first.split()[1])
        assert restored >= local, "what every node had was not restored"
        time.sleep(chance.uniform(0.0, 2.5))
        victims = chance.choice(["trainers", "all"] if copies else ["trainers", "carriers", "all"])
        if victims != "trainers":
            for pid in _carriers(tmp_path):
                _kill(pid)
            time.sleep(chance.uniform(0.0, 1.5))
        for rank in chance.sample(ranks, RANKS):
            rank.kill()
            time.sleep(chance.choice([0.0, 0.0, 0.2]))
        output, _ = ranks[0].communicate()
        ranks[1].wait()
        local = max([restored, *_told(output, "local")])
        durable = max([durable, *_told(output, "durable")])
        if victims == "all":
            for pid in _carriers(tmp_path):
                _kill(pid)
            if (
                copies and local > restored
            ):  # else what was restored has no copies on the node that came back empty
                shutil.rmtree(tmp_path / f"node{chance.randrange(RANKS)}")
        _check_durable(tmp_path / "durable", durable)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = _start(tmp_path, store.port, local + 3, copies, lifeline)
    output, _ = ranks[0].communicate(timeout=300)
    assert [rank.wait() for rank in ranks] == [0] * RANKS
    assert _told(output, "restored")[0] >= local
    assert _told(output, "durable")[-1] == local + 3
    _check_durable(tmp_path / "durable", local + 3)


def _check_durable(root: Path, newest: int) -> None:
    """Nothing that is committed is torn, and the newest that was told durable is there, or a newer one."""
    steps = [0]
    for path in root.glob("step-*"):
        if (path / "commit.json").exists():
            try:
                found = ckpt.verify(path)
            except CheckpointError:
                if (path / "commit.json").exists():  # else it was removed meanwhile
                    raise
                continue
            assert found.ok or not (path / "commit.json").exists(), (path, found)
            steps.append(int(path.name.partition("-")[2]))
    assert max(steps) >= newest


@pytest.mark.long
def test_trainers_end_with_their_test(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = _start(tmp_path, store.port, 10_000, False, reads)
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.readline().startswith("restored ")
    os.close(writes)
    ranks[0].stdout.read()
    assert [rank.wait(30) for rank in ranks] == [3] * RANKS
    for rank in ranks:
        if rank.stdout is not None:
            rank.stdout.close()
    os.close(reads)
