"""Tell the errors of torch's collectives apart, and let go of a group that broke.

gloo raises RuntimeError for all errors, so there the text decides.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt.consistency import environment

_BREAK_OFF_TAG = 0x636B7074
_WORDS = ("gloo", "connection", "timed out", "timeout")


def is_connection_error(error: BaseException) -> bool:
    """Return True if a collective failed because of another rank, or of the network between them."""
    if isinstance(error, ConnectionError | TimeoutError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).casefold() for word in _WORDS)


def is_gloo_timeout(error: BaseException) -> bool:
    """Return True if a wait in gloo reached its timeout, which closes all connections of the group."""
    return isinstance(error, RuntimeError) and "timed out" in str(error).casefold()


def end_waits(group: Any, others: Iterable[int]) -> None:
    """End what a gloo group waits for, from another thread.

    gloo closes all connections of a group when any wait in it times out. So this waits for a message that no rank
    sends, from the first of `others` to which there is a connection.
    """
    for other in others:
        try:
            work = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_BREAK_OFF_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
        except Exception as error:  # also where the connection to this one was closed before
            if is_gloo_timeout(error):
                return


def let_go(groups: list[Any], error: BaseException, timeout_s: float) -> None:
    """End broken groups, to which nothing refers but the list and the frames of `error`: that closes connections.

    In a thread of its own: gloo may wait there, for ever, for a rank that died in the middle of a message.
    """
    ended = threading.Event()

    def end() -> None:
        while groups:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(groups.pop())
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        gc.collect()
        ended.set()

    try:
        environment.start_thread(end, "ckpt-group")
    except RuntimeError:  # Python starts no thread any more once it is ending
        end()
    environment.wait(ended, timeout_s)
