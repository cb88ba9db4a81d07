"""Hold the folder of a checkpoint on this node: what is saved there anew is not removed as what was there before."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

_POLL_S = 0.02


@contextlib.contextmanager
def held(folder: str, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold a folder while the block runs; yield whether nobody else does, after `patience_s` at most.

    The end of a process lets go. A folder that is not there holds nothing that could be removed; where a file system
    has no locks, nobody holds it.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        yield _locked(fd, patience_s)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have it, too
        os.close(fd)


def _locked(fd: int, patience_s: float) -> bool:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return True
