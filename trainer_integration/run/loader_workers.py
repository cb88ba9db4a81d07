"""Let workers of data loaders outlive the signals that ask a whole job to end: the job needs batches until it has saved.

A batch system sends SIGTERM to all processes of a job. torch's workers die of it unless their own trainer has sent it,
and then neither the batches that they have read ahead nor the next ones can be had.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

from ckpt.torch_private import WORKER_LOOP, WORKER_LOOP_MODULE, WORKER_SIGNALS, WORKER_SIGNALS_MODULE

_LOOK_S = 1.0

_STARTS_A_PROCESS = {"subprocess.Popen", "os.posix_spawn", "os.system", "os.fork", "os.forkpty", "os.exec"}
"""Audit events. What is started inherits the signals that are blocked, and would ignore its own end."""

_worker_loop = getattr(WORKER_LOOP_MODULE, WORKER_LOOP)
_set_handlers = getattr(WORKER_SIGNALS_MODULE, WORKER_SIGNALS)

_is_outliving = False


class ProtectedWorkers:
    """Let workers of `DataLoader` that start until `close` outlive signals, however their processes start.

    Of loaders that have a loop of their own, such as torchdata's, those do whose processes are forked. Several may be open;
    torch's functions come back with the last that closes, in whatever order.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.signals = frozenset(map(int, signals))
        _open.append(self)
        _patch()

    def close(self) -> None:
        """Restore torch's functions if no other needs them replaced."""
        if self in _open:
            _open.remove(self)
            _patch()


_open: list[ProtectedWorkers] = []

_before: dict[str, Any] = {}
"""What was in the places of torch's functions."""


def _patch() -> None:
    """Replace torch's functions for the signals of all that are open, or restore them."""
    signals = frozenset[int]().union(*(workers.signals for workers in _open))
    for module, name, own in (
        (WORKER_LOOP_MODULE, WORKER_LOOP, run_worker),
        (WORKER_SIGNALS_MODULE, WORKER_SIGNALS, set_handlers),
    ):
        current = getattr(module, name)
        if not (isinstance(current, partial) and current.func is own):
            if not signals or name in _before:
                continue  # another library has replaced it since
            _before[name] = current
        setattr(module, name, partial(own, signals) if signals else _before.pop(name))
    if not signals:
        _before.clear()


def run_worker(signals: Iterable[int], *arguments: Any) -> None:
    """Run torch's loop of a worker process, which outlives signals."""
    outlive(signals)
    _worker_loop(*arguments)


def set_handlers(signals: Iterable[int]) -> None:
    """Set torch's handlers of a worker process, which outlives signals."""
    _set_handlers()
    outlive(signals)


def outlive(signals: Iterable[int] = (signal.SIGTERM,)) -> None:
    """Let this worker process outlive signals, but not its trainer, nor a SIGTERM that the trainer sends to it alone.

    A thread waits for the signals, as only that shows who has sent one. They are blocked in the other threads until the
    worker starts a process of its own. Where Python cannot wait for signals (macOS), nothing changes.
    """
    global _is_outliving
    parent = multiprocessing.parent_process()
    if _is_outliving or parent is None or not hasattr(signal, "sigtimedwait"):
        return
    _is_outliving = True
    numbers = {*map(int, signals)}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    arguments = numbers, parent, os.getppid()
    threading.Thread(target=_outlive, args=arguments, name="ckpt-outlive", daemon=True).start()

    def unblock(event: str, _: object) -> None:
        if event in _STARTS_A_PROCESS:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    sys.addaudithook(unblock)


def _outlive(signals: set[int], parent: Any, started_by: int) -> None:
    """Wait for signals; end this process on a SIGTERM of its trainer, or when the trainer is gone.

    torch's loop looks for its trainer only between two samples: a worker whose store is silent would stay for minutes.
    """
    while True:
        info = signal.sigtimedwait(signals, _LOOK_S)
        if info is not None and info.si_signo == signal.SIGTERM and info.si_pid == parent.pid:
            os._exit(0)  # as torch's handler does it: another status would be reported as a failure
        if os.getppid() != started_by or not parent.is_alive():
            os._exit(0)
