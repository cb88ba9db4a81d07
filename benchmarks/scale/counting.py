"""Count what one rank does in each phase of a save or a load: CPU seconds, bytes and messages.

The same hooks watch rank 0 of a simulation and rank 0 of a real job, so that both can be compared.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckpt.format import figures
from ckpt.load_plans import together
from ckpt.ranks.first_rank import FirstRank
from ckpt.ranks.group import Ranks
from ckpt.reading import loader, read_once
from ckpt.writing import column_save, coordinator, writer

SAVE_PHASES = ("enter", "plan", "write", "receipts", "index", "commit")
LOAD_PHASES = ("enter", "opening", "plan", "manifests", "read")


@dataclass
class Counts:
    """What a rank has done; `steps` are waits for other ranks, one after the other."""

    cpu_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    steps: int = 0

    def wire(self) -> tuple[int, int, int]:
        """Return what has to be the same in a simulation and in a job."""
        return self.sent_bytes, self.received_bytes, self.messages


@dataclass
class Phases:
    """Counts by phase. Phases may be nested: the inner one counts alone.

    Attributes:
        counts: those outside of all phases are under an empty name.
    """

    counts: dict[str, Counts] = field(default_factory=dict)
    _begin_kib: int = 0
    _peak_kib: int = 0
    _names: list[str] = field(default_factory=lambda: [""])
    _since_s: float = field(default_factory=time.process_time)

    @property
    def name(self) -> str:
        """The phase that is under way."""
        return self._names[-1]

    def reset(self) -> None:
        self.counts, self._since_s = {}, time.process_time()
        _forget_peak()
        self._begin_kib = self._peak_kib = _memory_kib("VmRSS")

    def now(self) -> Counts:
        return self.counts.setdefault(self._names[-1], Counts())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._switch()
        self._names.append(name)
        try:
            yield
        finally:
            self._switch()
            self._names.pop()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Do not count the CPU seconds and the memory of work that is not this rank's."""
        with self.phase(""):
            self._peak_kib = max(self._peak_kib, _memory_kib("VmHWM"))
            try:
                yield
            finally:
                _forget_peak()

    @property
    def peak_mib(self) -> float:
        """By how much the memory has grown at most."""
        return (max(self._peak_kib, _memory_kib("VmHWM")) - self._begin_kib) / 1024

    def _switch(self) -> None:
        now_s = time.process_time()
        self.now().cpu_s += now_s - self._since_s
        self._since_s = now_s


def _memory_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


def _forget_peak() -> None:
    """Let the largest memory be that of now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def watched(phases: Phases) -> Iterator[None]:
    """Count the phases of saves and loads, and what goes over the wire."""
    with contextlib.ExitStack() as stack:
        for target, name, phase in (
            (Ranks, "together", "enter"),
            (column_save, "save_columns", "plan"),
            (column_save, "_write", "receipts"),
            (writer.CheckpointWriter, "write_data", "write"),
            (writer.CheckpointWriter, "commit", "commit"),
            (writer.CheckpointWriter, "_records", "index"),
            (writer, "metadata_of", "index"),
            (coordinator.Coordinator, "_index", "index"),
            (coordinator, "encode_stock_metadata", "index"),
            (FirstRank, "broadcast", "commit"),
            (Ranks, "from_first", "opening"),
            (together._Load, "plan", "plan"),
            (together._Load, "read", "read"),
            (loader.Loader, "run", "read"),
            (loader.Loader, "_prepare", "plan"),
            (read_once.Replicas, "records", "manifests"),
        ):
            original = getattr(target, name)
            stack.enter_context(mock.patch.object(target, name, _in_phase(phases, phase, original)))
        for target, name, count in (
            (dist, "gather", _gathered),
            (dist, "scatter", _scattered),
            (dist, "broadcast", _told),
            (distributed_c10d, "broadcast", _told),
            (dist, "isend", _sent),
            (dist, "irecv", _received),
        ):
            stack.enter_context(
                mock.patch.object(target, name, _counted(phases, getattr(target, name), count))
            )
        # As with the clock of `Tokens`: how long a save took is in what is compressed, and is never the same twice.
        stack.enter_context(mock.patch.object(figures, "pack_ms", lambda *times_ms: bytes(4 * len(times_ms))))
        yield


def _in_phase(phases: Phases, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        with phases.phase(name):
            return work(*args, **kwargs)

    return run


def _counted(phases: Phases, work: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(work)
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        count(phases.now(), tensor, *args)
        return work(tensor, *args, **kwargs)

    return run


def _gathered(counts: Counts, own: torch.Tensor, values: Any, *_: Any) -> None:
    if values is not None:
        counts.received_bytes += own.nbytes * (len(values) - 1)
        counts.messages += len(values) - 1
        counts.steps += 1


def _scattered(counts: Counts, own: torch.Tensor, values: Any, *_: Any) -> None:
    if values is not None:
        counts.sent_bytes += own.nbytes * (len(values) - 1)
        counts.messages += len(values) - 1
        counts.steps += 1


def _told(counts: Counts, value: torch.Tensor, *_: Any) -> None:
    """Count a broadcast, which doubles the ranks that know it at each step."""
    steps = (dist.get_world_size() - 1).bit_length()
    counts.sent_bytes += steps * value.nbytes
    counts.messages += steps
    counts.steps += steps


def _sent(counts: Counts, value: torch.Tensor, *_: Any) -> None:
    counts.sent_bytes += value.nbytes
    counts.messages += 1


def _received(counts: Counts, memory: torch.Tensor, *_: Any) -> None:
    counts.received_bytes += memory.nbytes
    counts.messages += 1
