"""Start the processes of a run, and see to it that none outlives it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkProcess
from typing import NoReturn

import torch._dynamo  # noqa: F401  (optimizers import it: once here, and not in each process)
import torch.distributed as dist

from examples.recommender.board import Board
from examples.recommender.ledger import Ledger, LedgerWrong
from examples.recommender.options import Options
from examples.recommender.worker import work

FAILED, WRONG = 1, 3
"""Exit codes of a process that could not go on, and of one that has found rows that are wrong."""

Watch = Callable[[Sequence[ForkProcess]], None]


def launch(
    options: Options,
    *,
    board: Board | None = None,
    ledger: Ledger | None = None,
    watch: Watch = lambda processes: None,
    patience_s: float = 0.0,
    deadline_s: float = float("inf"),
) -> list[int | None]:
    """Run all processes; return their exit codes by rank, negative for signals.

    They are forked, so that they begin at once; call this before there are threads. When one fails, the others have
    `patience_s` to notice.

    Args:
        watch: called every millisecond or so.
        deadline_s: after which all are killed.
    """
    board = board or Board(options.processes)
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        alive, ours = os.pipe()
        processes = [
            context.Process(target=_process, args=(rank, options, board, ledger, listener, alive, ours))
            for rank in range(options.processes)
        ]
        store = None
        try:
            for process in processes:
                process.start()
            os.close(alive)
            port = listener.getsockname()[1]
            # Held here, as torchrun's agent holds it.
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            _wait(processes, watch, patience_s, time.monotonic() + deadline_s)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
            os.close(ours)
            del store
    return [process.exitcode for process in processes]


def _wait(processes: Sequence[ForkProcess], watch: Watch, patience_s: float, deadline: float) -> None:
    """Wait until all have ended, or one has failed and the others had time to notice."""
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + patience_s)
        watch(processes)
        time.sleep(0.001)


def _process(
    rank: int, options: Options, board: Board, ledger: Ledger | None, listener: socket.socket, *pipe: int
) -> NoReturn:
    alive, theirs = pipe
    code = FAILED
    try:
        os.close(theirs)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this
        _end_with(alive)
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process holds no store, whatever its rank
            "GLOO_SOCKET_IFNAME": "lo",
            "TP_SOCKET_IFNAME": "lo",
        }
        listener.close()
        work(rank, options, board, ledger)
        code = 0
    except LedgerWrong as error:
        print(error, file=sys.stderr)
        code = WRONG
    except BaseException:
        traceback.print_exc()
    finally:
        # Destructors of process groups wait for processes that may be gone.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with(alive: int) -> None:
    """End this process when the one that started it is gone, however."""

    def wait() -> None:
        os.read(alive, 1)
        os._exit(FAILED)

    threading.Thread(target=wait, name="end-with-launcher", daemon=True).start()
