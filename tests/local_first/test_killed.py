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
    manager.wait_durable(240)
"""


class Trainers:
    """Starts trainers that end when `lifeline` is closed, or its process is gone."""

    def __init__(self, folder: Path, lifeline: int) -> None:
        self._folder, self._lifeline = folder, lifeline
        self._all: list[subprocess.Popen[str]] = []

    def start(self, port: int, steps: int, copies: bool = False) -> list[subprocess.Popen[str]]:
        command = [sys.executable, "-c", _TRAINER, str(self._folder), str(port)]
        ranks = list[subprocess.Popen[str]]()
        for rank in range(RANKS):
            with (self._folder / f"errors-{rank}").open("w") as errors:
                process = subprocess.Popen(
                    [*command, str(rank), str(RANKS), str(steps), str(int(copies))],
                    stdin=self._lifeline,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=errors,
                    text=True,
                )
            ranks.append(process)
        self._all += ranks
        return ranks

    def first_line(self, ranks: list[subprocess.Popen[str]]) -> str:
        """Read the first line of the first rank: what it has restored."""
        assert ranks[0].stdout is not None
        line = ranks[0].stdout.readline()
        errors = [(self._folder / f"errors-{rank}").read_text() for rank in range(RANKS)]
        assert line.startswith("restored "), (line, *errors)
        return line

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def lifeline() -> Iterator[tuple[int, int]]:
    """Make a pipe from which trainers read."""
    ends = os.pipe()
    with contextlib.ExitStack() as stack:
        for end in ends:
            stack.callback(os.close, end)
        yield ends


@pytest.fixture
def trainers(tmp_path: Path, lifeline: tuple[int, int]) -> Iterator[Trainers]:
    trainers = Trainers(tmp_path, lifeline[0])
    try:
        yield trainers
    finally:
        trainers.end()


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
def test_killed_at_any_moment(tmp_path: Path, seed: int, copies: bool, trainers: Trainers) -> None:
    """With copies, a node is lost too from time to time."""
    chance, local, durable = random.Random(seed), 0, 0
    for _ in range(5):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = trainers.start(store.port, 10_000, copies)
        restored = int(trainers.first_line(ranks).split()[1])
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
    ranks = trainers.start(store.port, local + 3, copies)
    output, _ = ranks[0].communicate(timeout=300)
    assert [rank.wait() for rank in ranks] == [0] * RANKS
    assert _told(output, "restored")[0] >= local
    assert max(_told(output, "durable")) == local + 3, output  # one before it may become durable after it
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
def test_trainers_end_with_their_test(trainers: Trainers, lifeline: tuple[int, int]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = trainers.start(store.port, 10_000)
    trainers.first_line(ranks)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, lifeline[1])  # nobody can write any more
    os.close(null)
    assert [rank.wait(30) for rank in ranks] == [3] * RANKS
