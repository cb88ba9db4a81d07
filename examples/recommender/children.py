"""Run work in a forked process, and leave none behind."""

from __future__ import annotations

import multiprocessing
import os
import select
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LAST_GASP_S = 90.0


class ChildFailed(Exception):
    """A process has failed, or hangs."""


def in_child(work: Callable[[], T], timeout_s: float, *, dies: bool = False) -> T:
    """Run `work` in a forked process, as it may start threads; then wait until that and all of its own are gone.

    `dies`: it may be killed; the result is None then.

    Raises:
        ChildFailed: it raised, or has not ended in time; or a process that it started is left.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    gone, alive = os.pipe()  # its other end is open as long as one of the processes is there

    def run() -> None:
        try:
            sender.send((True, work()))
        except BaseException as error:
            sender.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        finally:
            os._exit(0)

    process = context.Process(target=run)
    try:
        process.start()
        os.close(alive)
        sender.close()
        if not receiver.poll(timeout_s):
            raise ChildFailed(f"a process has not ended in {timeout_s:g} s")
        try:
            worked, value = receiver.recv()
        except EOFError:
            if not dies:
                raise ChildFailed("a process was killed that should not be") from None
            worked, value = True, None
        if not worked:
            raise ChildFailed(value)
        if not select.select([gone], [], [], _LAST_GASP_S)[0]:
            raise ChildFailed(f"a process is left {_LAST_GASP_S:g} s after the one that started it")
        return value  # type: ignore[no-any-return]
    finally:
        process.kill()
        process.join()
        os.close(gone)
        receiver.close()
