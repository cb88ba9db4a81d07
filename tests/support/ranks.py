"""Real ranks for the tests: processes that talk over gloo."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import select
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# Imported once, by the server that forks the ranks: a job begins in a twentieth of a second, and every rank is
# a fresh process. torch imports torch._dynamo at the first use of a DTensor, which would take each rank a second.
_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "ckpt.api",
    "ckpt.cli.app",
    "boto3",
    "hypothesis",
    "pytest",
    "support.servers",
    "support.states",
]


class Job:
    """`function(rank, *args)` in `world_size` processes with a default gloo group.

    The rendezvous store is held by this process, as torchrun's agent holds it.
    """

    def __init__(self, world_size: int, function: Callable[..., Any], *args: Any) -> None:
        context = fork_context()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self.processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(sender, rank, world_size, self._store.port, function, args)
            )
            process.start()
            sender.close()
            self._pipes.append(receiver)
            self.processes.append(process)

    def result(self, rank: int, timeout_s: float) -> Any:
        """What the rank returned.

        Raises:
            TimeoutError: it has not ended after `timeout_s`.
            RankDied: it ended without returning or raising anything.
            RuntimeError: it raised.
        """
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, timeout_s)):
            raise TimeoutError(f"rank {rank} did not finish in time")
        try:
            worked, value = pipe.recv()
        except EOFError:
            raise RankDied(f"rank {rank} died") from None
        if not worked:
            raise RuntimeError(f"rank {rank} failed:\n{value}")
        return value

    def kill(self) -> None:
        """SIGKILL whoever is left, stopped ranks too."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


class RankDied(RuntimeError):
    """A rank was killed."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    killed: Collection[int] = (),
    stopped: Collection[int] = (),
    timeout_s: float = 120,
) -> list[Any]:
    """What `function(rank, *args)` returned on each rank of a `Job`.

    A rank in `killed` is expected to die of SIGKILL, one in `stopped` to be stopped by SIGSTOP; their results
    are None.
    """
    job, results = Job(world_size, function, *args), dict.fromkeys(range(world_size))
    try:
        deadline = time.monotonic() + timeout_s
        for rank in range(world_size):
            if rank not in killed and rank not in stopped:
                results[rank] = job.result(rank, deadline - time.monotonic())
        for rank in killed:
            process = job.processes[rank]
            process.join(max(0.1, deadline - time.monotonic()))
            assert process.exitcode == -9, f"rank {rank} ended with {process.exitcode}, not of SIGKILL"
        for rank in stopped:
            assert is_stopped(job.processes[rank].pid), f"rank {rank} is not stopped"
    finally:
        job.kill()
    return [results[rank] for rank in range(world_size)]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False  # it has ended


def is_alive(pid: int) -> bool:
    """Whether a process runs, of whatever parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def start(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """`function(*args)` in a process of its own, which ends with the block at the latest."""
    process = fork_context().Process(target=function, args=args)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def exit_code_of(function: Callable[..., Any], *args: Any, timeout_s: float = 240) -> int | None:
    """The exit code of `function(*args)` in a process of its own; None if it did not end in time."""
    with start(function, *args) as process:
        process.join(timeout_s)
        code: int | None = process.exitcode
        return code


def fork_from_here() -> None:
    """Fork ranks from this process as it is now: a server of their own would import everything once more.

    To be called before there are any threads that the ranks might miss.
    """
    if sys.version_info >= (3, 14):
        return  # its servers want to be shown a secret
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(multiprocessing.connection.arbitrary_address("AF_UNIX"))  # type: ignore[attr-defined]
        listener.listen()
        alive, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            _serve_forks(listener.fileno(), alive)
        os.close(alive)
        server: Any = forkserver._forkserver
        server._forkserver_address, server._forkserver_alive_fd = listener.getsockname(), ours
        server._forkserver_pid = pid


def _serve_forks(listener: int, alive: int) -> NoReturn:
    """Fork processes until all that hold the other end of `alive` are gone."""
    try:
        # Whoever waits for the end of a pipe that this process has inherited would wait for it too.
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/dev/fd"):
            if int(name) > 2 and int(name) not in (listener, alive, nothing):
                with contextlib.suppress(OSError):
                    os.dup2(nothing, int(name))
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        logging.root.handlers.clear()
        warnings.resetwarnings()  # pytest turns them into errors
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        select.select([listener, alive], [], [])  # there may be nothing to fork
        forkserver.main(listener, alive, _PRELOADED)
    finally:
        os._exit(0)


def fork_context() -> Any:
    """How `multiprocessing` starts ranks: forked from a server that has imported everything.

    A fresh interpreter would take seconds each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _rank(
    pipe: multiprocessing.connection.Connection,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # a rank that leaves while another connects makes that fail
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        del os.environ["TORCH_DIST_INIT_BARRIER"]
        pipe.send((True, function(rank, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Destructors of process groups can wait for ranks that are gone.
    pipe.close()
    os._exit(0)
