"""Send bytes from rank to rank of a gloo group, and wait no longer than the save or load lasts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt.consistency import environment
from ckpt.ranks.progress import Progress

LONGEST_WAIT = timedelta(days=1)
"""For one message: the watch ends a wait for a rank that stopped, and one that is slow may take its time."""

_CHECK_EVERY_S = 0.5
_GRACE_S = 1.0
"""For gloo to wake a wait with an error that says more."""


# Loops, not comprehensions: after an error the frame of one would keep the group, of which the end can hang.


def send_all(
    group: Any,
    messages: Sequence[bytes],
    ranks: Sequence[int],
    tag: int,
    progress: Progress,
    longest_wait: timedelta = LONGEST_WAIT,
) -> None:
    """Send a message to each of `ranks`; return when all have been received. Empty ones are not sent.

    Raises:
        ConnectionError, RuntimeError: as `finish`.
    """
    works: list[dist.Work] = []
    for data, rank in zip(messages, ranks, strict=True):
        if data:
            memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            work = dist.isend(memory, group=group, group_dst=rank, tag=tag)
            assert work is not None  # this rank is in the group
            works.append(work)
            del work
    finish(works, progress, longest_wait)


def receive_all(
    group: Any,
    sizes_bytes: Sequence[int],
    ranks: Sequence[int],
    tag: int,
    progress: Progress,
    longest_wait: timedelta = LONGEST_WAIT,
) -> list[bytes]:
    """Receive a message of known size from each of `ranks`, in this order.

    Raises:
        ConnectionError, RuntimeError: as `finish`.
    """
    works: list[dist.Work] = []
    buffers: list[torch.Tensor] = []
    for size_bytes, rank in zip(sizes_bytes, ranks, strict=True):
        buffers.append(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))
        if size_bytes:
            work = dist.irecv(buffers[-1], group=group, group_src=rank, tag=tag)
            assert work is not None  # this rank is in the group
            works.append(work)
            del work
    finish(works, progress, longest_wait)
    return [buffer.numpy().tobytes() for buffer in buffers]


def finish(works: list[dist.Work], progress: Progress, longest_wait: timedelta = LONGEST_WAIT) -> None:
    """Wait until messages have been sent, or have come.

    gloo does not always wake a rank that sends to one that is gone, nor one that has a part of a message. So a
    thread waits for the messages, and this one for that thread.

    Args:
        works: is empty afterwards: what is kept of an error must not keep the group.
        progress: of this save or load; `given_up` says why it has failed on another rank.

    Raises:
        ConnectionError: it has failed, and gloo does not end the wait.
        RuntimeError: gloo's error.
    """
    if not works:
        return
    done: Future[None] = Future()

    def carry_out() -> None:
        try:
            works.reverse()
            while works:
                works.pop().wait(longest_wait)
            done.set_result(None)
        except BaseException as error:
            works.clear()
            done.set_exception(error)

    try:
        environment.start_thread(carry_out, "ckpt-message")
    except RuntimeError:  # Python is ending, and starts no thread any more
        carry_out()
    while not wait_for([done], timeout=_CHECK_EVERY_S).done:
        reason = progress.given_up
        if reason is not None and not wait_for([done], timeout=_GRACE_S).done:
            raise ConnectionError(f"a message to or from another rank did not arrive: {reason}")
    done.result()
