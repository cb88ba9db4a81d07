"""SIGTERM to all processes of a job, its data loaders' workers too: the emergency save is made, and real crashes show."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.ranks import is_alive

import ckpt

_TIMEOUT_S = 120.0
TRIALS = 20


@dataclass
class Job:
    """A training in a process group of its own."""

    process: subprocess.Popen[str]

    def read_until(self, word: str, times: int) -> None:
        """Wait until lines with a word have come, one from each rank."""
        assert self.process.stdout is not None
        lines: list[str] = []
        while times:
            line = self.process.stdout.readline()
            assert line, f"it ended before: {''.join(lines)}"
            lines.append(line)
            times -= word in line

    def workers(self) -> list[int]:
        """List the processes that a trainer of one rank has started."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def end(self) -> tuple[int, str]:
        """Return the exit status, and the output that is left."""
        text, _ = self.process.communicate(timeout=_TIMEOUT_S)
        return self.process.returncode, text


@contextmanager
def training(root: Path, kind: str, ranks: int = 1, *options: str) -> Iterator[Job]:
    command = [sys.executable, "-m", "support.preempted_run", str(root), kind, str(ranks), *options]
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )
    try:
        job = Job(process)
        job.read_until("READY", ranks)
        yield job
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def committed(root: Path) -> list[int | None]:
    return [each.step for each in ckpt.list_checkpoints(root) if each.state == "committed"]


def preempt(root: Path, kind: str, ranks: int, after_s: float) -> None:
    with training(root, kind, ranks) as job:
        time.sleep(after_s)
        os.killpg(job.process.pid, signal.SIGTERM)
        status, text = job.end()
    assert status == 0, text
    steps = [int(line.split()[1]) for line in text.splitlines() if line.startswith("PREEMPTED")]
    assert len(steps) == ranks, text
    assert committed(root) == [*{*steps}], text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "torch", pytest.param("torchdata", marks=pytest.mark.long)])
def test_a_signal_to_the_whole_group_saves_once(tmp_path: Path, kind: str) -> None:
    preempt(tmp_path / "run", kind, 1, random.Random(kind).uniform(0, 0.2))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_signal_to_the_group_of_two_ranks_saves_once(tmp_path: Path, kind: str) -> None:
    preempt(tmp_path / "run", kind, 2, random.Random(kind).uniform(0, 0.2))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ours", "torch", "torchdata", "torch-spawn"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trial", range(TRIALS))
def test_every_one_of_many_preemptions_saves(tmp_path: Path, kind: str, ranks: int, trial: int) -> None:
    preempt(tmp_path / "run", kind, ranks, random.Random(f"{kind}{ranks}{trial}").uniform(0, 0.3))


@pytest.mark.slow
def test_workers_that_ran_before_the_manager_may_die(tmp_path: Path) -> None:
    """torch's handler of their death does not break the save; the loader raises only if it needs them before that."""
    with training(tmp_path / "run", "torch", 1, "--early") as job:
        workers = job.workers()
        os.kill(job.process.pid, signal.SIGTERM)
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        status, text = job.end()
    assert (status, "PREEMPTED" in text) == (0, True), text
    assert len(committed(tmp_path / "run")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_worker_that_is_killed_is_an_error_as_before(tmp_path: Path, kind: str) -> None:
    for attempt in range(5):
        with training(tmp_path / str(attempt), kind) as job:
            os.kill(job.workers()[0], signal.SIGKILL)
            status, text = job.end()
        assert status == 1
        # That error is torch's, of a batch that was on its way: kill once more.
        if "ConnectionResetError" not in text:
            break
    assert "is killed by signal: Killed" in text or "exited unexpectedly" in text
    assert "PREEMPTED" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_workers_end_with_a_trainer_that_is_killed(tmp_path: Path, kind: str) -> None:
    """Also after a signal that they have outlived."""
    with training(tmp_path / "run", kind) as job:
        workers = job.workers()
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        time.sleep(0.2)
        assert all(map(is_alive, workers)), "they outlive it"
        job.process.kill()
        deadline_s = time.monotonic() + 60
        while any(map(is_alive, workers)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not any(map(is_alive, workers))
