"""Measure what a save of one consistent cut takes from the training: trainers and servers of embeddings.

    python -m benchmarks.studies.cut [--megabytes-per-s 10] [--rounds 7]

Two trainers step together (a dense network, gradients summed over gloo) and send updates asynchronously to two
servers, each of which keeps half of a table (64 floats and a row-wise Adagrad state a row, Zipf touches). All
processes save together again and again; between two saves the same time passes without one. Steps per second
during saves and between them are compared, round by round. With `--idle` a trainer sleeps for a part of each
step, as one does that waits for a GPU; without, training takes all the cores there are.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import statistics
import tempfile
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed import rpc

from benchmarks.report.results import machine
from benchmarks.studies.tables import zipf
from ckpt.embeddings import DenseRows, Tables, TableShard, UpdateGate
from ckpt.embeddings.rows import Ids

WIDTH = 64
TRAINERS = SERVERS = 2
STALENESS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1024, help="ids in a trainer's batch")
    parser.add_argument("--hidden", type=int, default=512, help="width of the dense network")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds that a trainer sleeps in a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="between two saves")
    parser.add_argument("--megabytes-per-s", type=float, help="bandwidth of the storage, for each process")
    parser.add_argument("--folder")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(dir=options.folder)
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    processes = [
        context.Process(target=_process, args=(rank, options, folder, results), daemon=True)
        for rank in range(TRAINERS + SERVERS)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
            if process.exitcode != 0:
                raise SystemExit(f"a process ended with {process.exitcode}")
        parts: dict[str, Any] = {}
        while not results.empty():
            parts |= results.get()
        print(json.dumps({"machine": machine(), "options": vars(options), **summary(parts)}, indent=1))
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Window:
    """Some steps of training: CPU time is that of all processes."""

    steps_per_s: float
    longest_s: float
    seconds: float
    cpu_per_step_s: float


def extra_cpu_s(between: Window, during: Window) -> float:
    """Tell the CPU time that was not spent on the steps: that of the save."""
    return (during.cpu_per_step_s - between.cpu_per_step_s) * during.steps_per_s * during.seconds


def cpu_s(pids: list[int]) -> float:
    """Read the CPU time that processes have used."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def summary(parts: dict[str, Any]) -> dict[str, Any]:
    rounds, median = parts["rounds"], statistics.median
    ratios = [during.steps_per_s / between.steps_per_s for between, during, _ in rounds]
    return {
        "throughput_during_saves": {"median": median(ratios), "each": [round(ratio, 3) for ratio in ratios]},
        "steps_per_s_between": median(between.steps_per_s for between, _, _ in rounds),
        "cpu_per_step_s": median(between.cpu_per_step_s for between, _, _ in rounds),
        "cpu_of_save_s": median(extra_cpu_s(between, during) for between, during, _ in rounds),
        "save_s": median(during.seconds for _, during, _ in rounds),
        "trainer_stopped_s": median(stopped_s for _, _, stopped_s in rounds),
        "longest_step_in_saves_s": median(during.longest_s for _, during, _ in rounds),
        "longest_step_between_s": median(between.longest_s for between, _, _ in rounds),
        "server_gate_and_cut_s": median(parts["server_call_s"]),
        "save_megabytes": median(parts["megabytes"]),
    }


def _process(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=TRAINERS + SERVERS
    )
    trainers = dist.new_group(list(range(TRAINERS)), backend="gloo")
    pids: list[int] = [0] * (TRAINERS + SERVERS)
    dist.all_gather_object(pids, os.getpid())
    if rank >= TRAINERS:
        Server.here = Server(rank - TRAINERS, options)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"rank{rank}",
        rank=rank,
        world_size=TRAINERS + SERVERS,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc"),
    )
    if rank < TRAINERS:
        result = Trainer(rank, options, trainers, pids).run(folder)
    else:
        result = Server.here.run(folder, options)
    if rank in (0, TRAINERS):
        results.put(result)
    rpc.shutdown()


def saving(options: argparse.Namespace, epoch: int) -> dict[str, Any]:
    """Make the options of a save; the first one, of all rows, need not wait for a slow storage."""
    limit = options.megabytes_per_s
    return {"max_bandwidth_bytes_per_s": limit * 1e6 if limit and epoch else None, "timeout_s": 120.0}


class Server:
    """Half of the table."""

    here: Server

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self._rows = options.rows // SERVERS
        self.values, self.state = torch.randn(self._rows, WIDTH), torch.zeros(self._rows)
        rows = DenseRows(number * self._rows, values=self.values, adagrad=self.state)
        self.first_id = number * self._rows
        self.shard = TableShard("table", rows, shard=number, shards=SERVERS)
        self.gate = UpdateGate(range(TRAINERS))
        self.commands: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def update(self, ids: Ids, gradients: torch.Tensor) -> None:
        with self.shard.writing(ids):
            index = torch.from_numpy(ids - self.first_id)
            state = self.state[index] + gradients.square().mean(1)
            self.state[index] = state
            self.values[index] -= 0.01 * gradients / (state.sqrt() + 1e-6).unsqueeze(1)

    def run(self, folder: str, options: argparse.Namespace) -> dict[str, Any]:
        tables = Tables(self.shard)
        call_s = []
        while (epoch := self.commands.get()) is not None:
            begun_s = time.perf_counter()
            future = tables.async_save({}, f"{folder}/run/{epoch}", gate=self.gate, **saving(options, epoch))
            call_s.append(time.perf_counter() - begun_s)
            future.result()
        return {"server_call_s": call_s[2:]}


def lookup(ids: Ids) -> torch.Tensor:
    server = Server.here
    return server.values[torch.from_numpy(ids - server.first_id)]


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def update(trainer: int, epoch: int, ids: Ids, gradients: torch.Tensor) -> torch.futures.Future[None]:
    later: torch.futures.Future[None] = torch.futures.Future()
    future = Server.here.gate.submit(trainer, epoch, lambda: Server.here.update(ids, gradients))
    future.add_done_callback(lambda done: later.set_result(done.result()))
    return later


def mark(trainer: int, epoch: int, updates: int) -> None:
    Server.here.gate.mark(trainer, epoch, updates)
    if trainer == 0:
        Server.here.commands.put(epoch)


def stop() -> None:
    Server.here.commands.put(None)


class Trainer:
    """A dense network on the rows of a batch, in step with the other trainer's."""

    def __init__(self, rank: int, options: argparse.Namespace, group: Any, pids: list[int]) -> None:
        torch.manual_seed(0)
        self._rank, self._options, self._group, self._pids = rank, options, group, pids
        hidden = options.hidden
        self.network = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU(),
            torch.nn.Linear(hidden, 1),
        )  # fmt: skip
        self._optimizer = torch.optim.Adam(self.network.parameters())
        self._draw = zipf(options.rows, 1.05, np.random.default_rng(rank))
        self._ahead: deque[tuple[list[Ids], list[Any]]] = deque()
        self._under_way: deque[Any] = deque()
        self._sent = self._epoch = 0

    def run(self, folder: str) -> dict[str, Any]:
        tables, options = Tables(), self._options
        rounds: list[tuple[Window, Window, float]] = []
        megabytes = []
        for number in range(options.rounds + 2):  # the first writes a base, the second warms up
            between = self._steps(lambda begun_s: time.perf_counter() - begun_s > options.seconds)
            for server in range(SERVERS):
                rpc.rpc_sync(f"rank{TRAINERS + server}", mark, (self._rank, self._epoch, self._sent))
            begun_s = time.perf_counter()
            state = {"model": self.network.state_dict(), "optimizer": self._optimizer.state_dict()}
            future: Future[Any] = tables.async_save(
                state, f"{folder}/run/{self._epoch}", **saving(options, number)
            )
            stopped_s = time.perf_counter() - begun_s
            self._epoch, self._sent = self._epoch + 1, 0
            during = self._steps(lambda _, future=future: future.done(), begun_s)
            future.result()
            place = f"{folder}/run/{self._epoch - 1}"
            megabytes.append(
                sum(e.stat().st_size for d, _, _ in os.walk(place) for e in os.scandir(d) if e.is_file())
                / 1e6
            )
            if number > 1:
                rounds.append((between, during, stopped_s))
                if self._rank == 0:
                    print(
                        f"save {number}: {megabytes[-1]:.1f} MB in {during.seconds:.2f} s, which stopped trainers "
                        f"for {stopped_s * 1e3:.0f} ms; {during.steps_per_s:.1f} steps per s, "
                        f"{between.steps_per_s:.1f} before it: {during.steps_per_s / between.steps_per_s:.3f}; "
                        f"{extra_cpu_s(between, during):.2f} s of CPU time more",
                        flush=True,
                    )
        for reply in self._under_way:
            reply.wait()
        dist.barrier(self._group)
        if self._rank == 0:
            for server in range(SERVERS):
                rpc.rpc_sync(f"rank{TRAINERS + server}", stop)
        return {"rounds": rounds, "megabytes": megabytes[2:]}

    def _steps(self, is_over: Any, begun_s: float | None = None) -> Window:
        """Train until the first trainer finds that it is over."""
        begun_s, begun_cpu_s = time.perf_counter() if begun_s is None else begun_s, cpu_s(self._pids)
        steps, longest_s, last_s = 0, 0.0, begun_s
        while not self._step(is_over(begun_s) and self._rank == 0):
            now_s = time.perf_counter()
            steps, longest_s, last_s = steps + 1, max(longest_s, now_s - last_s), now_s
        seconds, used_s = time.perf_counter() - begun_s, cpu_s(self._pids) - begun_cpu_s
        return Window((steps + 1) / seconds, longest_s, seconds, used_s / (steps + 1))

    def _step(self, is_last: bool) -> bool:
        while len(self._ahead) <= STALENESS:
            ids = np.unique(self._draw(self._options.batch))
            half = self._options.rows // SERVERS
            parts = [ids[ids // half == server] for server in range(SERVERS)]
            self._ahead.append(
                (parts, [rpc.rpc_async(f"rank{TRAINERS + n}", lookup, (p,)) for n, p in enumerate(parts)])
            )
        parts, replies = self._ahead.popleft()
        rows = torch.cat([reply.wait() for reply in replies]).requires_grad_()
        self._optimizer.zero_grad()
        self.network(rows).square().mean().backward()
        if self._options.idle:
            time.sleep(self._options.idle)
        parameters = [p for p in self.network.parameters() if p.grad is not None]
        flat = torch.cat(
            [*[p.grad.flatten() for p in parameters if p.grad is not None], torch.tensor([float(is_last)])]
        )
        dist.all_reduce(flat, group=self._group)
        offset = 0
        for parameter in parameters:
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self._optimizer.step()
        assert rows.grad is not None
        gradients = torch.split(rows.grad, [len(part) for part in parts])
        for number, part in enumerate(parts):
            arguments = self._rank, self._epoch, part, gradients[number]
            self._under_way.append(rpc.rpc_async(f"rank{TRAINERS + number}", update, arguments))
        self._sent += 1
        while len(self._under_way) > STALENESS * SERVERS:
            self._under_way.popleft().wait()
        return bool(flat[-1])


if __name__ == "__main__":
    main()
