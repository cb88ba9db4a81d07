"""Rank processes that serve one call after another. Starting new ones for each call would take longer."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ckpt.torch_private import forget_async_save_process
from support.ranks import Job

_GRACE_S = 3.0
"""How long other ranks may still work when one has failed: they may wait for it."""


class WorldFailed(RuntimeError):
    """A rank raised, died, or did not answer before the deadline."""


class World:
    """Ranks with a default gloo group, in processes that live until `close`."""

    def __init__(self, ranks: int) -> None:
        ends = [multiprocessing.Pipe() for _ in range(ranks)]
        self._pipes = [own for own, _ in ends]
        self._job = Job(ranks, _serve, [theirs for _, theirs in ends])
        for _, theirs in ends:
            theirs.close()

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        """Return `function(*args)` of each rank. Raises WorldFailed, and then this world is of no more use."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting := [
            rank for rank in range(len(self._pipes)) if rank not in results and rank not in failures
        ]:
            pipes = [self._pipes[rank] for rank in waiting]
            ready = multiprocessing.connection.wait(pipes, _GRACE_S if failures else timeout_s)
            if not ready:
                break
            for rank, pipe in zip(waiting, pipes, strict=True):
                if pipe in ready:
                    worked, value = _answer(pipe)
                    (results if worked else failures)[rank] = value
        if len(results) == len(self._pipes):
            return [results[rank] for rank in sorted(results)]
        texts = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
        raise WorldFailed("\n".join([*texts, *([f"no answer of ranks {waiting}"] if waiting else [])]))

    def close(self) -> None:
        """End the processes, and those that they began."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._job.processes:
            process.join(_GRACE_S)
        self._job.kill()


def _answer(pipe: multiprocessing.connection.Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except (EOFError, ConnectionError):
        return False, "the process died"
    return answer


class Worlds:
    """One world for each number of ranks, made when it is first needed, or when the last one failed."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def call(
        self, ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0
    ) -> list[Any]:
        """Return `function(*args)` of each of so many ranks. Raises WorldFailed."""
        if ranks not in self._worlds:
            self._worlds[ranks] = World(ranks)
        try:
            return self._worlds[ranks].call(function, *args, timeout_s=timeout_s)
        except WorldFailed:
            self._worlds.pop(ranks).close()
            raise

    def close(self) -> None:
        """End all worlds; a later call makes them again."""
        while self._worlds:
            self._worlds.popitem()[1].close()


def _serve(rank: int, pipes: list[multiprocessing.connection.Connection]) -> None:
    """Answer calls until the other end of the pipe is closed."""
    pipe = pipes[rank]
    for number, other in enumerate(pipes):
        if number != rank:
            other.close()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the test alone
    warnings.simplefilter("ignore")  # torch's, of its own FSDP1
    gc.freeze()
    while True:
        gc.collect()  # models and managers of the call before
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    forget_async_save_process()  # it ends with its last reference
