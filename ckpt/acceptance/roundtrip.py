"""Save known values as some ranks, load them as others, compare every element: `ckpt.roundtrip`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ckpt.acceptance.counted_store import Counts
from ckpt.acceptance.meshes import Mesh, parse_mesh
from ckpt.acceptance.models import Parameter, parameters_of
from ckpt.acceptance.plans import save_plans, shard_nbytes, shard_on
from ckpt.acceptance.processes import Processes, Task, check_memory
from ckpt.acceptance.tasks import LoadTask, RankFigures, SaveTask, Setup
from ckpt.backends.options import options_dict, redact_url
from ckpt.backends.registry import open_store
from ckpt.consistency.commit import proves_no_commit
from ckpt.errors import CheckpointError, ConfigurationError, short_traceback
from ckpt.format.names import is_our_name
from ckpt.tools.preflight import check_place
from ckpt.tools.remove import remove, remove_folders
from ckpt.writing.writer import CheckpointWriter

_logger = logging.getLogger(__name__)

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}

_SPACE_FACTOR = 1.01
"""Size of a checkpoint with records, checksums and framing, relative to its tensors."""

ReportPhase = Callable[[str, int, int], None]
"""Called with `saving` or `loading`, the bytes moved so far and those in all."""


@dataclass
class PhaseResult:
    """Measurements of the save or of the load.

    Attributes:
        processes: how many ranks ran at the same time.
        wall_s: seconds for all ranks, including the computation of values.
        commit_s: seconds for the commit, after the ranks were done.
        counts: operations on the stores of all ranks.
    """

    ranks: list[RankFigures]
    processes: int
    wall_s: float
    commit_s: float = 0.0
    counts: Counts = field(default_factory=Counts)

    @property
    def nbytes(self) -> int:
        """Size of all ranks' tensors."""
        return sum(rank.shard_bytes for rank in self.ranks)

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second, including the computation of values and the commit."""
        return self.nbytes / max(self.wall_s + self.commit_s, 1e-9)

    @property
    def transfer_share(self) -> float:
        """Share of the ranks' time spent in the writer or reader; the rest went into values."""
        transfer_s = sum(rank.transfer_s for rank in self.ranks)
        return transfer_s / max(transfer_s + sum(rank.values_s for rank in self.ranks), 1e-9)

    @property
    def peak_beyond_shard_bytes(self) -> int:
        """Largest memory of a process, beyond the largest shard that it had memory for."""
        shard = max((rank.shard_bytes for rank in self.ranks), default=0)
        return max((rank.peak_bytes for rank in self.ranks), default=0) - shard


@dataclass
class Planned:
    """The save as DCP's planner planned it.

    Attributes:
        items: number of slices that all ranks write.
        shard_bytes: bytes that each rank writes.
    """

    items: int
    shard_bytes: list[int]
    plan_s: float


@dataclass
class Roundtrip:
    """The result of `ckpt.roundtrip`.

    Attributes:
        payload_bytes: size of all tensors, each counted once.
        plan, save, load: None if that phase was not run.
        timeline: seconds, bytes moved, resident bytes of all processes; every half second.
        kept: True if the checkpoint was left in place.
    """

    url: str
    model: str
    parameters: int
    payload_bytes: int
    plan: Planned | None = None
    save: PhaseResult | None = None
    load: PhaseResult | None = None
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    kept: bool = False

    @property
    def wrong(self) -> dict[str, int]:
        """Number of elements that were not loaded as they were saved, by FQN."""
        wrong = Counter[str]()
        for rank in self.load.ranks if self.load else ():
            wrong.update(rank.wrong)
        return wrong

    @property
    def sent_per_payload(self) -> float | None:
        """Bytes sent per byte of the tensors."""
        return None if self.save is None else self.save.counts.sent_bytes / max(self.payload_bytes, 1)

    @property
    def read_per_needed(self) -> float | None:
        """Bytes read per byte that the ranks needed."""
        return None if self.load is None else self.load.counts.read_bytes / max(self.load.nbytes, 1)


@short_traceback
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
    progress: ReportPhase | None = None,
) -> Roundtrip:
    """Save known values in a model's shapes, load them as other ranks, and compare every element.

    Ranks are simulated, a few at a time, each in a process with its own writer or reader. Plans,
    metadata and commit are those that DCP's planner and this library make for so many ranks.

    Args:
        model, optimizer: names from `ckpt.acceptance.models`.
        load_world_size: ranks that load; by default half of `world_size`.
        dtype: `bf16`, `fp16`, `fp32`, `fp64` or `fp8`, for weights and optimizer states.
        mesh, load_mesh: `fsdp`, `hsdp`, `hsdp2xfsdp4` or `tp2xfsdp4`.
        processes: ranks that run at the same time; the default depends on cores and free memory.
        threads: parallel transfers of each rank.
        phase: `both`, `save` (which keeps the checkpoint), `load` (of a kept one), or `plan`, which
            computes what each rank would save and writes nothing.
        keep: do not remove the checkpoint.
        seed: of the values, which are computed from it, the name and the place.
        progress: called with `saving` or `loading`, the bytes moved so far and those in all.

    Raises:
        ConfigurationError: an argument is wrong, or there is too little memory. Nothing was
            written.
        StorageError: the storage refused, or has too little room. Small objects were tried before
            the first shard.
        AlreadyExists: something is at `url` already.
        CheckpointError: the save or the load failed. What was saved is removed unless it was
            committed.
    """
    if phase not in ("both", "save", "load", "plan"):
        raise ConfigurationError(f"phase must be both, save, load or plan, not {phase!r}")
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    parameters = parameters_of(model, optimizer)
    half = max(1, world_size // 2) if load_world_size is None else load_world_size
    saving, loading = parse_mesh(mesh, world_size), parse_mesh(load_mesh, half)
    setup = Setup(os.fspath(url), options_dict(storage_options), threads, DTYPES[dtype], seed)
    elements = sum(parameter.elements for parameter in parameters)
    payload_bytes = elements * DTYPES[dtype].itemsize
    result = Roundtrip(redact_url(setup.url), model, elements, payload_bytes)
    report = progress or (lambda phase, done, total: None)
    run = _RoundtripRun(setup, parameters, processes, report, result.timeline)
    load_tasks = [LoadTask(rank, shard_on(parameters, loading, rank)) for rank in range(half)]
    load_count = run.count(load_tasks) if phase in ("both", "load") else 0
    if phase != "load":
        tasks, metadata, result.plan = run.plan(saving)
        if phase == "plan":
            return result
        result.save = run.save(tasks, metadata, payload_bytes)
    result.kept = phase != "both" or keep
    with contextlib.nullcontext() if result.kept else _removing(setup):
        if phase != "save":
            result.load = run.load(load_tasks, load_count)
    return result


@contextlib.contextmanager
def _removing(setup: Setup) -> Iterator[None]:
    """Remove the checkpoint at the end. After an error, a second one is only logged."""
    try:
        yield
    except BaseException:
        try:
            remove(setup.url, storage_options=setup.storage_options)
        except Exception as error:
            _logger.warning("the checkpoint could not be removed (`ckpt rm` can): %s", error)
        raise
    remove(setup.url, storage_options=setup.storage_options)


@dataclass
class _RoundtripRun:
    setup: Setup
    parameters: Sequence[Parameter]
    processes: int | None
    progress: ReportPhase
    timeline: list[tuple[float, int, int]]
    _started_s: float = field(default_factory=time.monotonic)
    _moved_bytes: int = 0
    _prefixes: list[str] = field(default_factory=list)

    def count(self, tasks: Sequence[Task]) -> int:
        """Choose how many ranks run at the same time."""
        return check_memory([*map(self._shard_bytes, tasks)], self.processes)

    def plan(self, mesh: Mesh) -> tuple[list[SaveTask], Metadata, Planned]:
        started_s = time.monotonic()
        plans, metadata = save_plans(self.parameters, mesh, self.setup.dtype)
        tasks = [SaveTask(rank, plan) for rank, plan in enumerate(plans)]
        took_s = time.monotonic() - started_s
        items = sum(len(plan.items) for plan in plans)
        return tasks, metadata, Planned(items, [*map(self._shard_bytes, tasks)], took_s)

    def save(self, tasks: Sequence[SaveTask], metadata: Metadata, payload_bytes: int) -> PhaseResult:
        count = self.count(tasks)
        url, options = self.setup.url, self.setup.storage_options
        check_place(url, storage_options=options, needed_bytes=int(_SPACE_FACTOR * payload_bytes))
        with contextlib.closing(CheckpointWriter(url, storage_options=options, overwrite=False)) as writer:
            writer.set_up_storage_writer(True, rank=0, use_collectives=True)
            writer.prepare_local_plan(SavePlan([]))
            try:
                phase = self._run(tasks, count, "saving", payload_bytes)
            except BaseException:
                self._clean()
                raise
            started_s = time.monotonic()
            try:
                writer.finish(metadata, [rank.results for rank in phase.ranks])
            except CheckpointError as error:
                if proves_no_commit(error):
                    self._clean()
                raise
            phase.commit_s = time.monotonic() - started_s
        for rank in phase.ranks:
            rank.results = []
        return phase

    def load(self, tasks: Sequence[LoadTask], count: int) -> PhaseResult:
        return self._run(tasks, count, "loading", sum(map(self._shard_bytes, tasks)))

    def _run(self, tasks: Sequence[Task], count: int, phase: str, total_bytes: int) -> PhaseResult:
        arena_bytes = max(map(self._shard_bytes, tasks))
        done = 0

        def report(news: int | str) -> None:
            nonlocal done
            if isinstance(news, str):
                self._prefixes.append(news)
                return
            done += news
            self._moved_bytes += news
            self.progress(phase, min(done, total_bytes), total_bytes)

        def tick(resident_bytes: int) -> None:
            self.timeline.append((time.monotonic() - self._started_s, self._moved_bytes, resident_bytes))

        with contextlib.closing(Processes(self.setup, count, arena_bytes)) as processes:
            started_s = time.monotonic()
            ranks = processes.run(tasks, report, tick)
            result = PhaseResult(ranks, count, time.monotonic() - started_s)
        for rank in ranks:
            result.counts.add(**vars(rank.counts))
        return result

    def _shard_bytes(self, task: Task) -> int:
        return shard_nbytes(task.shard, self.setup.dtype.itemsize)

    def _clean(self) -> None:
        """Delete what the ranks of an uncommitted save wrote; log what cannot be deleted."""
        mine = tuple(self._prefixes)
        try:
            with contextlib.closing(open_store(self.setup.url, self.setup.storage_options)) as store:
                keys = [stat.key for stat in store.list() if stat.key.startswith(mine)]
                store.delete(filter(is_our_name, keys))
                store.abandon(choose=lambda stat: stat.key.startswith(mine))
                remove_folders(store)
        except Exception as error:
            _logger.warning("files of the failed save could not be deleted (`ckpt gc` can): %s", error)
