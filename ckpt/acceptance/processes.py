"""Run ranks in worker processes, as many as memory allows, one after another in the same memory."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from ckpt.acceptance.tasks import LoadTask, RankFigures, Report, SaveTask, Setup
from ckpt.child_processes import isolate_children
from ckpt.errors import CheckpointError, ConfigurationError

_TICK_S = 0.5
_END_TIMEOUT_S = 10.0
_BEYOND_SHARD_BYTES = 512 << 20
"""Memory of a rank's process beside its tensors: torch, the library's budget, records."""

Task = SaveTask | LoadTask


class Processes:
    """Hold `count` processes, each with memory for one shard of up to `arena_bytes`."""

    def __init__(self, setup: Setup, count: int, arena_bytes: int) -> None:
        self._processes: dict[Connection, BaseProcess] = {}
        isolate_children()
        context = multiprocessing.get_context("spawn")
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, setup, arena_bytes), daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process
        except BaseException:
            self.close()
            raise

    def run(self, tasks: Sequence[Task], report: Report, tick: Callable[[int], None]) -> list[RankFigures]:
        """Run tasks, one at a time in each process; return their figures in the order of the tasks.

        Args:
            report: called for the tasks, in this process.
            tick: called every half second with the resident bytes of all processes.
        """
        waiting = list(enumerate(tasks))
        busy: dict[Connection, int] = {}
        idle = list(self._processes)
        figures: dict[int, RankFigures] = {}
        next_tick_s = time.monotonic()
        while waiting or busy:
            while waiting and idle:
                number, task = waiting.pop(0)
                connection = idle.pop()
                connection.send(task)
                busy[connection] = number
            for ready in wait(list(busy), timeout=max(0.0, next_tick_s - time.monotonic())):
                assert isinstance(ready, Connection)
                answer = self._receive(ready, tasks[busy[ready]])
                if isinstance(answer, int | str):
                    report(answer)
                else:
                    figures[busy.pop(ready)] = answer
                    idle.append(ready)
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + _TICK_S
                resident = (_proc_bytes(f"{p.pid}/status", "VmRSS") or 0 for p in self._processes.values())
                tick(sum(resident))
        return [figures[number] for number in range(len(tasks))]

    def _receive(self, connection: Connection, task: Task) -> int | str | RankFigures:
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            process = self._processes[connection]
            process.join(_END_TIMEOUT_S)
            text = f"the process of rank {task.rank} ended with status {process.exitcode}"
            if process.exitcode == -9:
                text += " (killed, perhaps because the system ran out of memory)"
            raise CheckpointError(text, rank=task.rank) from None
        if isinstance(answer, CheckpointError):
            raise answer
        assert isinstance(answer, int | str | RankFigures)
        return answer

    def close(self) -> None:
        """Kill the processes."""
        for connection, process in self._processes.items():
            process.kill()
            process.join(_END_TIMEOUT_S)
            connection.close()
        self._processes.clear()


def check_memory(shard_bytes: Sequence[int], processes: int | None) -> int:
    """Choose how many ranks run at the same time, by `processes` or by cores and memory.

    Raises ConfigurationError if memory is too small for `processes` ranks, or for one.
    """
    if processes is not None and processes < 1:
        raise ConfigurationError(f"processes must be at least 1, not {processes}")
    rank_bytes, free_bytes = max(shard_bytes) + _BEYOND_SHARD_BYTES, _available_bytes()
    fitting = len(shard_bytes) if free_bytes is None else int(0.95 * free_bytes) // rank_bytes
    wanted = processes or len(os.sched_getaffinity(0))
    if fitting < 1 or (processes is not None and fitting < min(processes, len(shard_bytes))):
        raise ConfigurationError(
            f"{processes or 1} rank(s) at a time need {rank_bytes / 2**30:.1f} GiB of memory each, "
            f"but only {(free_bytes or 0) / 2**30:.1f} GiB is free; choose a larger world size or fewer processes"
        )
    return min(fitting, wanted, len(shard_bytes))


def _available_bytes() -> int | None:
    """Read how much memory is available without swapping; None if the system does not tell."""
    return _proc_bytes("meminfo", "MemAvailable")


def _proc_bytes(file: str, name: str) -> int | None:
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _serve(connection: Connection, setup: Setup, arena_bytes: int) -> None:
    torch.set_num_threads(1)  # tensors are compared in small pieces, which threads only slow down
    arena = torch.empty(arena_bytes, dtype=torch.uint8)
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            connection.send(message)

    while True:
        try:
            task: Task = connection.recv()
        except EOFError:  # the parent is gone
            return
        try:
            figures = task.run(setup, arena, send)
            figures.peak_bytes = _proc_bytes("self/status", "VmHWM") or 0
            send(figures)
        except CheckpointError as error:
            error.rank = task.rank if error.rank is None else error.rank
            send(error)
        except Exception as error:
            send(CheckpointError(f"{type(error).__name__}: {error}", url=setup.url, rank=task.rank))
