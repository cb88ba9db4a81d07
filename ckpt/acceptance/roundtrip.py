"""`ckpt.roundtrip`: save known values as some ranks, load them as others, compare every element."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ckpt.acceptance.counted_store import Counts
from ckpt.acceptance.memory_budget import check_memory
from ckpt.acceptance.meshes import Mesh, parse_mesh
from ckpt.acceptance.models import Parameter, parameters_of
from ckpt.acceptance.plans import held_by, save_plans, shard_nbytes
from ckpt.acceptance.processes import Processes, Task
from ckpt.acceptance.tasks import LoadTask, RankFigures, SaveTask, Setup
from ckpt.backends.options import redact_url
from ckpt.backends.registry import open_store
from ckpt.consistency.commit import proves_no_commit
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.names import is_our_name
from ckpt.tools.preflight import check_place
from ckpt.tools.remove import remove
from ckpt.writing.writer import CheckpointWriter

__all__ = ["DTYPES", "Part", "Roundtrip", "roundtrip"]

_logger = logging.getLogger(__name__)

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}

_SPACE_FACTOR = 1.01
"""Of a checkpoint's tensors: what it takes with records, checksums and framing."""

Progress = Callable[[str, int, int], None]


@dataclass
class Part:
    """The save, or the load.

    Attributes:
        ranks: figures of each.
        processes: how many ranks ran at the same time.
        wall_s: of all ranks, values included.
        commit_s: the coordinator's part of the save, after.
        counts: what went through the ranks' stores and the coordinator's.
    """

    ranks: list[RankFigures]
    processes: int
    wall_s: float
    commit_s: float = 0.0
    counts: Counts = field(default_factory=Counts)

    @property
    def nbytes(self) -> int:
        """Of all ranks' tensors."""
        return sum(rank.shard_bytes for rank in self.ranks)

    @property
    def bytes_per_s(self) -> float:
        """Values and commit included."""
        return self.nbytes / max(self.wall_s + self.commit_s, 1e-9)

    @property
    def transfer_share(self) -> float:
        """Of the ranks' seconds, those spent in the writer or reader, not with values."""
        transfer_s = sum(rank.transfer_s for rank in self.ranks)
        return transfer_s / max(transfer_s + sum(rank.values_s for rank in self.ranks), 1e-9)

    @property
    def peak_beyond_shard_bytes(self) -> int:
        """The most that a process held beyond the largest shard it had memory for."""
        shard = max((rank.shard_bytes for rank in self.ranks), default=0)
        return max((rank.peak_bytes for rank in self.ranks), default=0) - shard


@dataclass
class Planned:
    """What DCP's planner made of the save.

    Attributes:
        items: slices that are written, of all ranks.
        shard_bytes: that each rank writes.
    """

    items: int
    shard_bytes: list[int]
    plan_s: float


@dataclass
class Roundtrip:
    """The result of `ckpt.roundtrip`.

    Attributes:
        payload_bytes: of all tensors, once.
        plan, save, load: None for a part that was not run.
        timeline: seconds, bytes moved, resident bytes of all processes; every half second.
        kept: whether the checkpoint is still there.
    """

    url: str
    model: str
    parameters: int
    payload_bytes: int
    plan: Planned | None = None
    save: Part | None = None
    load: Part | None = None
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    kept: bool = False

    @property
    def wrong(self) -> dict[str, int]:
        """Elements that were not loaded as they were saved, by FQN."""
        found: dict[str, int] = {}
        for rank in self.load.ranks if self.load else ():
            for fqn, count in rank.wrong.items():
                found[fqn] = found.get(fqn, 0) + count
        return found

    @property
    def sent_per_payload(self) -> float | None:
        return None if self.save is None else self.save.counts.sent_bytes / max(self.payload_bytes, 1)

    @property
    def read_per_needed(self) -> float | None:
        return None if self.load is None else self.load.counts.read_bytes / max(self.load.nbytes, 1)


def roundtrip(
    url: str | os.PathLike[str],
    model: str,
    *,
    world_size: int = 8,
    load_world_size: int | None = None,
    dtype: str = "bf16",
    optimizer: str = "none",
    mesh: str = "fsdp",
    load_mesh: str = "fsdp",
    storage_options: Mapping[str, Any] | None = None,
    processes: int | None = None,
    threads: int | None = None,
    phase: str = "both",
    keep: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Roundtrip:
    """Save a model's shapes with known values as `world_size` ranks, load as others, and compare every element.

    Ranks are simulated: each in a process of its own memory, with its own writer or reader, a few at a time. Plans,
    metadata and commit are those that DCP's planner and this library make for so many ranks.

    Args:
        model, optimizer: presets of `ckpt.acceptance.models`.
        load_world_size: default half of `world_size`.
        dtype: `bf16`, `fp16`, `fp32`, `fp64` or `fp8`, of weights and optimizer states.
        mesh, load_mesh: `fsdp`, `hsdp`, `hsdp2xfsdp4`, `tp2xfsdp4`.
        processes: ranks at the same time; default by cores and free memory.
        threads: transfers at the same time of each rank.
        phase: `both`, `save` (which keeps the checkpoint), `load` (of one that was saved so), or `plan`: what each
            rank would save, and nothing is written.
        keep: leave the checkpoint there.
        seed: of the values.
        progress: called with `saving` or `loading`, the bytes moved and the bytes in all.

    Raises:
        ConfigurationError: an argument is wrong, or memory is too little. Nothing was written.
        StorageError: the storage has too little room, or refused; what it refused first was a small object.
        AlreadyExists: something is at `url` already.
        CheckpointError: the save or the load failed. What was saved is removed unless it was committed.
    """
    if phase not in ("both", "save", "load", "plan"):
        raise ConfigurationError(f"phase must be both, save, load or plan, not {phase!r}")
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    parameters = parameters_of(model, optimizer)
    half = max(1, world_size // 2) if load_world_size is None else load_world_size
    saving, loading = parse_mesh(mesh, world_size), parse_mesh(load_mesh, half)
    setup = Setup(os.fspath(url), dict(storage_options or {}), threads, DTYPES[dtype], seed)
    run = _Run(setup, parameters, processes, progress or (lambda what, done, total: None))
    elements = sum(parameter.elements for parameter in parameters)
    payload_bytes = elements * DTYPES[dtype].itemsize
    found = Roundtrip(redact_url(setup.url), model, elements, payload_bytes, timeline=run.timeline)
    load_tasks = [LoadTask(rank, held_by(parameters, loading, rank)) for rank in range(half)]
    load_count = run.count(load_tasks) if phase in ("both", "load") else 0
    if phase != "load":
        tasks, metadata, found.plan = run.plan(saving)
        if phase == "plan":
            return found
        found.save = run.save(tasks, metadata, payload_bytes)
    found.kept = phase != "both" or keep
    with contextlib.nullcontext() if found.kept else _removing(setup):
        if phase != "save":
            found.load = run.load(load_tasks, load_count)
    return found


@contextlib.contextmanager
def _removing(setup: Setup) -> Iterator[None]:
    """Remove the checkpoint at the end, also after an error, which is then the one to report."""
    try:
        yield
    except BaseException:
        try:
            remove(setup.url, storage_options=setup.storage_options)
        except Exception as error:
            _logger.warning("the checkpoint is still there (ckpt rm removes it): %s", error)
        raise
    remove(setup.url, storage_options=setup.storage_options)


class _Run:
    def __init__(
        self, setup: Setup, parameters: Sequence[Parameter], processes: int | None, progress: Progress
    ) -> None:
        self._setup, self._parameters = setup, parameters
        self._processes, self._progress = processes, progress
        self._started_s = time.monotonic()
        self._moved_bytes = 0
        self._prefixes: list[str] = []
        self.timeline: list[tuple[float, int, int]] = []

    def count(self, tasks: Sequence[Task]) -> int:
        """How many ranks run at the same time."""
        return check_memory([self._shard_bytes(task) for task in tasks], self._processes)

    def plan(self, mesh: Mesh) -> tuple[list[SaveTask], Metadata, Planned]:
        started_s = time.monotonic()
        plans, metadata = save_plans(self._parameters, mesh, self._setup.dtype)
        tasks = [SaveTask(rank, plan) for rank, plan in enumerate(plans)]
        took_s = time.monotonic() - started_s
        items = sum(len(plan.items) for plan in plans)
        return tasks, metadata, Planned(items, [self._shard_bytes(task) for task in tasks], took_s)

    def save(self, tasks: Sequence[SaveTask], metadata: Metadata, payload_bytes: int) -> Part:
        count = self.count(tasks)
        needed_bytes = int(_SPACE_FACTOR * payload_bytes)
        check_place(self._setup.url, storage_options=self._setup.storage_options, needed_bytes=needed_bytes)
        writer = CheckpointWriter(
            self._setup.url, storage_options=self._setup.storage_options, overwrite=False
        )
        try:
            writer.set_up_storage_writer(True, rank=0, use_collectives=True)
            writer.prepare_local_plan(SavePlan([]))
            try:
                part = self._run(tasks, count, "saving", payload_bytes)
            except BaseException:
                self._clean()
                raise
            self._commit(writer, metadata, part)
            return part
        finally:
            writer.close()

    def _commit(self, writer: CheckpointWriter, metadata: Metadata, part: Part) -> None:
        started_s = time.monotonic()
        try:
            writer.finish(metadata, [rank.results for rank in part.ranks])
        except CheckpointError as error:
            if proves_no_commit(error):
                self._clean()
            raise
        part.commit_s = time.monotonic() - started_s
        for rank in part.ranks:
            rank.results = []

    def load(self, tasks: Sequence[LoadTask], count: int) -> Part:
        total = sum(self._shard_bytes(task) for task in tasks)
        return self._run(tasks, count, "loading", total)

    def _run(self, tasks: Sequence[Task], count: int, what: str, total_bytes: int) -> Part:
        arena_bytes = max(self._shard_bytes(task) for task in tasks)
        done = 0

        def told(news: int | str) -> None:
            nonlocal done
            if isinstance(news, str):
                self._prefixes.append(news)
                return
            done += news
            self._moved_bytes += news
            self._progress(what, min(done, total_bytes), total_bytes)

        def tick(resident_bytes: int) -> None:
            self.timeline.append((time.monotonic() - self._started_s, self._moved_bytes, resident_bytes))

        with Processes(self._setup, count, arena_bytes) as processes:
            started_s = time.monotonic()
            ranks = processes.run(tasks, told, tick)
            part = Part(ranks, count, time.monotonic() - started_s)
        for rank in ranks:
            part.counts.add(rank.counts)
        return part

    def _shard_bytes(self, task: Task) -> int:
        return shard_nbytes(task.shard, self._setup.dtype.itemsize)

    def _clean(self) -> None:
        """Delete what the ranks of a save wrote that was surely not committed. Best effort: it has an error to report."""
        mine = tuple(self._prefixes)
        try:
            store = open_store(self._setup.url, self._setup.storage_options)
            try:
                store.delete(
                    [
                        found.key
                        for found in store.list()
                        if found.key.startswith(mine) and is_our_name(found.key)
                    ]
                )
                store.abandon(choose=lambda found: found.key.startswith(mine))
                store.remove_empty()
            finally:
                store.close()
        except Exception as error:
            _logger.warning("what the failed save left could not be deleted (ckpt gc can): %s", error)
