"""What is looked at before anything is written: memory, space, permissions."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.backends.base import put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import ConfigurationError, IntegrityError
from ckpt.manifest import rank_directory

__all__ = ["BEYOND_SHARD_BYTES", "check_memory", "check_place", "check_space"]

BEYOND_SHARD_BYTES = 512 << 20
"""What a rank's process takes beside its tensors: torch, the library's budget, records."""

_SPACE_FACTOR = 1.01


def check_memory(shard_bytes: Sequence[int], processes: int | None) -> int:
    """How many ranks fit into memory at the same time: at most `processes`, else as many as there are cores.

    Raises:
        ConfigurationError: not even one, or not so many.
    """
    if processes is not None and processes < 1:
        raise ConfigurationError(f"processes must be at least 1, not {processes}")
    largest, free_bytes = max(shard_bytes), _available_bytes()
    fitting = len(shard_bytes)
    if free_bytes is not None:
        fitting = int(0.95 * free_bytes) // (largest + BEYOND_SHARD_BYTES)
    wanted = processes or len(os.sched_getaffinity(0))
    if fitting < 1 or (processes is not None and fitting < min(processes, len(shard_bytes))):
        raise ConfigurationError(
            f"{processes or 'one'} rank(s) at a time need {(largest + BEYOND_SHARD_BYTES) / 2**30:.1f} GiB each, "
            f"and {(free_bytes or 0) / 2**30:.1f} GiB of memory are free: take a larger world size, or fewer processes"
        )
    return min(fitting, wanted, len(shard_bytes))


def check_space(url: str, storage_options: Mapping[str, Any], payload_bytes: int) -> None:
    """Raises ConfigurationError: the storage has less room than the checkpoint needs, as far as it tells."""
    store = open_store(url, storage_options)
    free_bytes = store.free_bytes()
    store.close()
    if free_bytes is not None and free_bytes < _SPACE_FACTOR * payload_bytes:
        raise ConfigurationError(
            f"the checkpoint needs {payload_bytes / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB are free at "
            f"{store.url}: choose another place, a smaller model or dtype"
        )


def check_place(url: str, storage_options: Mapping[str, Any]) -> None:
    """Write, read and delete a small object: who may not, learns it before the first shard is written.

    Raises:
        StorageError: the storage refused, or cannot be reached.
        IntegrityError: it gave back something else than it was given.
    """
    store = open_store(url, storage_options)
    token = secrets.token_hex(8)
    key = f"{rank_directory(0)}/{token}.json"  # if it cannot be deleted, `ckpt gc` knows the name
    try:
        store.prepare(rank_directory(0))
        put_bytes(store, key, token.encode())
        if read_bytes(store, key) != token.encode():
            raise IntegrityError("the storage gave back something else than was put", url=store.url, key=key)
        store.delete([key])
    finally:
        store.close()


def _available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
