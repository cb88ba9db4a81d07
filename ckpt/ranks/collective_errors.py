"""Tell the errors of torch's collectives apart. gloo raises RuntimeError for all, so there its text decides."""

from __future__ import annotations

import torch.distributed as dist

_WORDS = ("gloo", "connection", "timed out", "timeout")


def is_connection_error(error: BaseException) -> bool:
    """Return True if a collective failed because of another rank, or of the network between them."""
    if isinstance(error, ConnectionError | TimeoutError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).casefold() for word in _WORDS)


def is_gloo_timeout(error: BaseException) -> bool:
    """Return True if a wait in gloo reached its timeout, which closes all connections of the group."""
    return isinstance(error, RuntimeError) and "timed out" in str(error).casefold()
