"""Measure this process: wall time, CPU time of all threads, memory beyond the start."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Reading", "metered"]


@dataclass
class Reading:
    """A measurement; complete once the `metered` block has ended."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0


@contextmanager
def metered() -> Iterator[Reading]:
    """Measure the block. CPU time is that of this process and of processes it has started."""
    gc.collect()
    _give_memory_back()
    resident_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    reading = Reading()
    cpu_s, started_s = _cpu_s(), time.perf_counter()
    yield reading
    reading.wall_s = time.perf_counter() - started_s
    reading.cpu_s = _cpu_s() - cpu_s
    reading.peak_bytes = max(0, _status_bytes("VmHWM") - resident_bytes)


def _give_memory_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _cpu_s() -> float:
    times = os.times()
    ended_s = times.children_user + times.children_system
    return time.process_time() + ended_s + sum(_ticks_s(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = listed.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            yield int(child)
            yield from _descendants(int(child))


def _ticks_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # utime and stime, and those of its children that have ended.
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
