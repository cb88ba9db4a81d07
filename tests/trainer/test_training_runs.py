"""Whole training runs, in real processes that are killed, rescaled, preempted, and run out of disk."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, start
from support.servers import free_port
from support.states import digest, fsdp_model
from torch import nn

import ckpt
from ckpt.errors import SaveFailed
from ckpt.trainer_integration import saving
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource

FAST = {"fsync": False}  # processes are killed here, not machines
LENGTH, GLOBAL_BATCH, SHARDS = 9, 12, 12
STEPS = 40


@dataclass(frozen=True)
class Job:
    """One life of a run.

    Attributes:
        root: of its checkpoints.
        log: a file to which each rank appends what each step did.
        life: a number of its own.
        steps: after which it ends.
        save: when to save.
        options: further ones of the manager.
        dropout: draw random numbers in each step, which every rank has its own of.
        ballast_bytes: that each rank's state holds besides.
        killed_after_s: SIGKILL, counted from its first step.
        preempted_rank: gets SIGTERM in its third step.
    """

    root: str
    log: str
    life: int = 0
    steps: int = STEPS
    save: saving.SaveRule = field(default_factory=lambda: saving.every_steps(3))
    options: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.0
    ballast_bytes: int = 0
    killed_after_s: float | None = None
    preempted_rank: int | None = None


def train(rank: int, job: Job) -> dict[str, Any]:
    try:
        return _train(rank, job)
    except Exception:
        if job.killed_after_s is None:
            raise
        time.sleep(60)  # the other rank died first; this one is about to
        raise


def _train(rank: int, job: Job) -> dict[str, Any]:
    torch.manual_seed(rank)
    model, optimizer = fsdp_model(steps=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    loader = RescalableLoader(_dataset(), batch_size=GLOBAL_BATCH // dist.get_world_size())
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    if job.ballast_bytes:
        parts[f"ballast{rank}"] = torch.ones(job.ballast_bytes, dtype=torch.uint8)
    log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    options = {"storage_options": FAST, **dict(job.options)}
    with ckpt.CheckpointManager(job.root, save=job.save, **options) as manager:
        restored = manager.restore(**parts)
        began_s, first = time.monotonic(), restored.step + 1 if restored else 1
        if job.killed_after_s is not None:
            _after(job.killed_after_s, signal.SIGKILL)
        step = first - 1
        for step, tokens in zip(range(first, job.steps + 1), loader, strict=False):
            if rank == job.preempted_rank and step == first + 2:
                _after(0.0, signal.SIGTERM)
            logits = nn.functional.dropout(model(tokens[:, :-1]), job.dropout)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            report = {
                "life": job.life,
                "rank": rank,
                "step": step,
                "loss": float(loss.detach()).hex(),
                "rows": tokens.tolist(),
            }
            os.write(log, json.dumps(report).encode() + b"\n")
            manager.step(step, last=step == job.steps, **parts)
            if manager.preempted:
                break
        if job.killed_after_s is not None:
            time.sleep(60)
    seconds = time.monotonic() - began_s
    weights = digest({"model": model.state_dict(), "moments": list(optimizer.state.values())})
    return {"step": step, "durable_step": manager.durable_step, "seconds": seconds, "weights": weights}


def _dataset() -> ShardedDataset:
    """One epoch is more than a run reads, and no two sequences of it are equal."""
    numbers = np.random.default_rng(0)
    documents = [numbers.integers(0, 61, size=200) for _ in range(48)]
    return ShardedDataset(MapSource(documents), sequence_length=LENGTH, shards=SHARDS, seed=1)


def _after(seconds: float, number: signal.Signals) -> None:
    """Let a signal reach this process; from a thread, so that it comes between any two instructions
    of the main one.
    """

    def send() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def life(world_size: int, job: Job) -> list[dict[str, Any]]:
    killed: Collection[int] = () if job.killed_after_s is None else range(world_size)
    return run_ranks(world_size, train, job, killed=killed)


def logged(log: str) -> list[dict[str, Any]]:
    # What was killed in the middle of a line did not take that step.
    lines = Path(log).read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def committed(root: str) -> list[int]:
    return [
        checkpoint.step or 0 for checkpoint in ckpt.list_checkpoints(root) if checkpoint.state == "committed"
    ]


@pytest.mark.long
def test_killed_five_times_and_identical(tmp_path: Path) -> None:
    """Losses of every step on every rank, weights and moments: bit for bit those of a run that
    nothing interrupts.
    """
    undisturbed = Job(str(tmp_path / "a"), str(tmp_path / "a.log"), dropout=0.2)
    expected = life(2, undisturbed)
    losses = {(line["rank"], line["step"]): line["loss"] for line in logged(undisturbed.log)}
    assert len(losses) == 2 * STEPS
    disturbed = replace(undisturbed, root=str(tmp_path / "b"), log=str(tmp_path / "b.log"))
    moments = random.Random(3)
    for _ in range(5):
        life(2, replace(disturbed, killed_after_s=moments.uniform(0, 0.5) * expected[0]["seconds"]))
    ranks = life(2, disturbed)
    assert [rank["weights"] for rank in ranks] == [rank["weights"] for rank in expected]
    lines = logged(disturbed.log)
    assert len(lines) > 2 * STEPS, "no life was cut short"
    for line in lines:
        assert line["loss"] == losses[line["rank"], line["step"]], line["step"]


@pytest.mark.long
def test_other_numbers_of_ranks_see_every_sequence_once(tmp_path: Path) -> None:
    steady = Job(str(tmp_path / "a"), str(tmp_path / "a.log"))
    expected = by_step(logged(steady.log)) if life(2, steady) else {}
    changing = Job(str(tmp_path / "b"), str(tmp_path / "b.log"))
    life(2, replace(changing, life=1, steps=8))
    life(3, replace(changing, life=2, steps=20, killed_after_s=0.3))
    life(1, replace(changing, life=3, steps=30))
    life(3, replace(changing, life=4))
    lines = logged(changing.log)
    batches = by_step(lines)
    assert batches.keys() == set(range(1, STEPS + 1))
    for step, (rows, loss) in batches.items():
        assert rows == expected[step][0], step
        assert loss == pytest.approx(expected[step][1], rel=1e-4), step
    seen = [row for rows, _ in batches.values() for row in rows]
    assert len(seen) == len(set(seen)) == STEPS * GLOBAL_BATCH


def by_step(lines: list[dict[str, Any]]) -> dict[int, tuple[list[tuple[int, ...]], float]]:
    """The global batch of each step and its loss, as the last life in which all ranks took the step
    had them.
    """
    batches: dict[int, tuple[list[tuple[int, ...]], float]] = {}
    for number in sorted({line["life"] for line in lines}):
        for step in {line["step"] for line in lines}:
            ranks = [line for line in lines if (line["life"], line["step"]) == (number, step)]
            rows = sorted(tuple(row) for line in ranks for row in line["rows"])
            if len(rows) == GLOBAL_BATCH:
                batches[step] = rows, sum(float.fromhex(line["loss"]) for line in ranks) / len(ranks)
    return batches


def test_a_signal_to_one_rank_stops_all_with_one_checkpoint(tmp_path: Path) -> None:
    rule = saving.every_steps(1000) | saving.on_preemption(grace_s=60)
    job = Job(str(tmp_path / "a"), str(tmp_path / "a.log"), steps=10**6, save=rule, preempted_rank=1)
    ranks = life(3, job)
    assert len({rank["step"] for rank in ranks}) == 1
    assert all(rank["durable_step"] == rank["step"] for rank in ranks)
    assert committed(job.root) == [ranks[0]["step"]]


def test_disk_full_stops_training_within_one_interval(small_disk: Path, tmp_path: Path) -> None:
    """Three checkpoints fit. The fourth fails, the step of the fifth says so, the third loads."""
    job = Job(str(small_disk / "run"), str(tmp_path / "log"), steps=30, ballast_bytes=5_500_000)
    for rank in run_ranks(2, _train_until_it_fails, job):
        assert "No space left on device" in rank["error"]
        assert ".distcp" in rank["error"]
        assert rank["restored"] == 9
    last = max(line["step"] for line in logged(job.log))
    assert 12 <= last <= 15, "saved after step 12, next save after step 15"
    assert committed(job.root) == [3, 6, 9]


def _train_until_it_fails(rank: int, job: Job) -> dict[str, Any]:
    with pytest.raises(SaveFailed) as caught:
        _train(rank, job)
    # A state of its own: what the failed run holds is not the checkpoint's.
    with ckpt.CheckpointManager(job.root, save=job.save, preflight=False) as manager:
        restored = manager.restore(model=fsdp_model(steps=0)[0], rng=False)
    return {"error": str(caught.value), "restored": restored.step if restored else None}


def test_disk_full_need_not_stop_training(small_disk: Path, tmp_path: Path) -> None:
    options = (("on_failure", "continue"), ("events", ()))
    job = Job(
        str(small_disk / "run"), str(tmp_path / "log"), steps=20, ballast_bytes=5_500_000, options=options
    )
    for rank in life(2, job):
        assert (rank["step"], rank["durable_step"]) == (20, 9)
    assert committed(job.root) == [3, 6, 9]


@pytest.mark.long
def test_a_process_uploads_while_steps_go_on(tmp_path: Path) -> None:
    """The same run, saved by processes of their own, and gone on with by threads."""
    job = Job(
        str(tmp_path / "a"),
        str(tmp_path / "a.log"),
        steps=6,
        options=(("async_mode", "process"),),
        dropout=0.2,
    )
    assert [rank["durable_step"] for rank in life(2, job)] == [6, 6]
    assert committed(job.root) == [3, 6]
    again = life(2, replace(job, steps=9, options=()))
    steady = replace(job, root=str(tmp_path / "b"), log=str(tmp_path / "b.log"), steps=9, options=())
    assert [rank["weights"] for rank in again] == [rank["weights"] for rank in life(2, steady)]


# -- the example -----------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_manager.py"


def test_the_example_ends_well_and_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """SIGTERM to one of two processes: both end with status 0, and one alone takes the next step."""
    root = str(tmp_path / "run")
    out = tmp_path / "2-0.out"
    with _example_runs(tmp_path, 2, root, steps=10**6) as both:
        _wait_until(lambda: out.exists() and "step     3" in out.read_text(), both)
        os.kill(both[1].pid, signal.SIGTERM)
        assert _exit_codes(both) == [0, 0]
    stopped_at = int(out.read_text().split("preempted after step ")[1].split(";")[0])
    assert committed(root) == [stopped_at]
    with _example_runs(tmp_path, 1, root, steps=stopped_at + 2) as alone:
        assert _exit_codes(alone) == [0]
    lines = (tmp_path / "1-0.out").read_text().splitlines()
    assert [int(line.split()[1]) for line in lines] == [stopped_at + 1, stopped_at + 2]
    assert committed(root) == [stopped_at, stopped_at + 2]


@contextmanager
def _example_runs(folder: Path, ranks: int, root: str, steps: int) -> Iterator[list[Any]]:
    port = free_port()
    small = ["--width", "16", "--layers", "1", "--length", "8", "--save-every", "1000000"]
    arguments = ["--root", root, "--steps", str(steps), *small]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                start(_example, rank, ranks, port, str(folder / f"{ranks}-{rank}.out"), arguments)
            )
            for rank in range(ranks)
        ]


def _example(rank: int, ranks: int, port: int, out: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    sys.argv = [str(EXAMPLE), *arguments]
    with open(out, "w") as file:
        os.dup2(file.fileno(), 1)
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def _wait_until(holds: Callable[[], bool], processes: list[Any], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert all(process.is_alive() for process in processes), "a process has ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _exit_codes(processes: list[Any], timeout_s: float = 120) -> list[int | None]:
    for process in processes:
        process.join(timeout_s)
    return [process.exitcode for process in processes]
