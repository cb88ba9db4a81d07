"""Run one rank: fill its shard and save it, or load its shard and compare it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ckpt.acceptance.counted_store import CountedStore, Counts
from ckpt.acceptance.known_values import compare, fill
from ckpt.acceptance.plans import LoadShard, RankShard, SaveShard, load_plan, shard_of, views_of
from ckpt.format.names import rank_directory
from ckpt.reading.reader import CheckpointReader
from ckpt.writing.writer import CheckpointWriter

S = TypeVar("S", CheckpointWriter, CheckpointReader)
Report = Callable[[int | str], None]
"""Called with bytes as they are moved, and once with the prefix of the keys to be written."""


@dataclass(frozen=True)
class Setup:
    """Settings that all ranks share."""

    url: str = field(repr=False)  # it may carry a password
    storage_options: Mapping[str, Any] = field(repr=False)
    threads: int | None
    dtype: torch.dtype
    seed: int

    def make(self, kind: type[S], counts: Counts, report: Report) -> S:
        """Make a writer or reader whose store is counted."""
        storage = kind(self.url, storage_options=self.storage_options, threads=self.threads)
        storage.use(storage.progress, wrap=lambda store: CountedStore(store, counts, report))
        return storage


@dataclass
class RankFigures:
    """Measurements of one rank.

    Attributes:
        values_s: seconds spent computing values, or comparing them.
        transfer_s: seconds spent in the writer or reader.
        peak_bytes: peak resident memory of its process until its end.
        wrong: number of elements that differ from what was saved, by FQN.
        results: arguments of DCP's `finish`.
    """

    rank: int
    shard_bytes: int
    values_s: float = 0.0
    transfer_s: float = 0.0
    counts: Counts = field(default_factory=Counts)
    peak_bytes: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    results: list[WriteResult] = field(default_factory=list)


@dataclass(frozen=True)
class SaveTask:
    """Save the items of `plan` as `rank`."""

    rank: int
    plan: SavePlan

    @property
    def shard(self) -> RankShard:
        return shard_of(self.plan)

    def run(self, setup: Setup, arena: torch.Tensor, report: Report) -> RankFigures:
        shard = self.shard
        tensors = views_of(shard, arena, setup.dtype)
        figures = RankFigures(self.rank, sum(tensor.nbytes for tensor in tensors.values()))
        with _timed(figures, "values_s"):
            for fqn, tensor in tensors.items():
                fill(tensor, fqn, *shard[fqn], seed=setup.seed)
        writer = setup.make(CheckpointWriter, figures.counts, report)
        with contextlib.closing(writer), _timed(figures, "transfer_s"):
            writer.set_up_storage_writer(False, rank=self.rank, use_collectives=True)
            report(f"{rank_directory(self.rank)}/{writer.storage_meta().save_id}")
            writer.prepare_local_plan(SavePlan([]))
            figures.results = writer.write_data(self.plan, SaveShard(tensors)).wait()
        return figures


@dataclass(frozen=True)
class LoadTask:
    """Load `shard` as `rank`, and compare it."""

    rank: int
    shard: RankShard

    def run(self, setup: Setup, arena: torch.Tensor, report: Report) -> RankFigures:
        tensors = views_of(self.shard, arena, setup.dtype)
        figures = RankFigures(self.rank, sum(tensor.nbytes for tensor in tensors.values()))
        reader = setup.make(CheckpointReader, figures.counts, report)
        with contextlib.closing(reader), _timed(figures, "transfer_s"):
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, self.rank == 0, rank=self.rank)
            plan = reader.prepare_local_plan(load_plan(self.shard, metadata))
            reader.read_data(reader.prepare_global_plan([plan])[0], LoadShard(tensors)).wait()
        with _timed(figures, "values_s"):
            for fqn, tensor in tensors.items():
                if wrong := compare(tensor, fqn, *self.shard[fqn], seed=setup.seed):
                    figures.wrong[fqn] = wrong
        return figures


@contextlib.contextmanager
def _timed(figures: RankFigures, name: str) -> Iterator[None]:
    """Add the seconds of a block to an attribute."""
    started_s = time.perf_counter()
    yield
    setattr(figures, name, getattr(figures, name) + time.perf_counter() - started_s)
