"""Tell the errors of torch's collectives apart, and let go of a group that broke.

gloo raises RuntimeError for all errors, so there the text decides.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
from typing import Any

import torch.distributed as dist

from ckpt.consistency import environment

_WORDS = ("gloo", "connection", "timed out", "timeout")


def is_connection_error(error: BaseException) -> bool:
    """Return True if a collective failed because of another rank, or of the network between them."""
    if isinstance(error, ConnectionError | TimeoutError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).casefold() for word in _WORDS)


def is_gloo_timeout(error: BaseException) -> bool:
    """Return True if a wait in gloo reached its timeout, which closes all connections of the group."""
    return isinstance(error, RuntimeError) and "timed out" in str(error).casefold()


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
