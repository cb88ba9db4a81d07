"""Run ranks in worker processes, one after another in the same memory."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ckpt.acceptance.tasks import LoadTask, RankFigures, Report, SaveTask, Setup
from ckpt.errors import CheckpointError

_TICK_S = 0.5
_END_TIMEOUT_S = 10.0

Task = SaveTask | LoadTask


class Processes:
    """Hold `count` processes, each with memory for one shard of up to `arena_bytes`.

    It is a context manager; its end kills the processes.
    """

    def __init__(self, setup: Setup, count: int, arena_bytes: int) -> None:
        self._setup, self._count, self._arena_bytes = setup, count, arena_bytes
        self._processes: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> Processes:  # noqa: PYI034 (typing.Self is of Python 3.11)
        context = multiprocessing.get_context("spawn")
        try:
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, self._setup, self._arena_bytes), daemon=True
                )
                process.start()
                theirs.close()
                self._processes[ours] = process
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, tasks: Sequence[Task], report: Report, tick: Callable[[int], None]) -> list[RankFigures]:
        """Run tasks, one at a time in each process; return their figures in the order of the tasks.

        Args:
            report: called for the tasks, in this process.
            tick: called every half second with the resident bytes of all processes.

        Raises:
            CheckpointError: a rank failed, or its process ended. Others may still be running.
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
                tick(sum(resident_bytes(process.pid) for process in self._processes.values()))
        return [figures[number] for number in range(len(tasks))]

    def _receive(self, connection: Connection, task: Task) -> int | str | RankFigures:
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            process = self._processes[connection]
            process.join(_END_TIMEOUT_S)
            reason = (
                " (killed, perhaps because the system ran out of memory)" if process.exitcode == -9 else ""
            )
            text = f"the process of rank {task.rank} ended with status {process.exitcode}{reason}"
            raise CheckpointError(text, rank=task.rank) from None
        if isinstance(answer, CheckpointError):
            raise answer
        assert isinstance(answer, int | str | RankFigures)
        return answer

    def _end(self) -> None:
        for connection, process in self._processes.items():
            process.kill()
            process.join(_END_TIMEOUT_S)
            connection.close()
        self._processes.clear()


def resident_bytes(pid: int | None, name: str = "VmRSS") -> int:
    """Read a process's resident memory, or its peak (`VmHWM`); 0 if the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


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
            figures.peak_bytes = resident_bytes(os.getpid(), "VmHWM")
            send(figures)
        except CheckpointError as error:
            error.rank = task.rank if error.rank is None else error.rank
            send(error)
        except Exception as error:
            send(CheckpointError(f"{type(error).__name__}: {error}", url=setup.url, rank=task.rank))
