"""Decide how many ranks fit into memory at the same time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckpt.errors import ConfigurationError

BEYOND_SHARD_BYTES = 512 << 20
"""Memory of a rank's process beside its tensors: torch, the library's budget, records."""


def check_memory(shard_bytes: Sequence[int], processes: int | None) -> int:
    """Choose how many ranks run at the same time, by `processes` or by cores and memory.

    Raises:
        ConfigurationError: memory is too small for `processes` ranks, or for one.
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
            f"{processes or 1} rank(s) at a time need {(largest + BEYOND_SHARD_BYTES) / 2**30:.1f} GiB of memory each, "
            f"but only {(free_bytes or 0) / 2**30:.1f} GiB is free; choose a larger world size or fewer processes"
        )
    return min(fitting, wanted, len(shard_bytes))


def _available_bytes() -> int | None:
    """Read how much memory is available without swapping; None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
