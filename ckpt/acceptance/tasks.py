"""What one rank does: fill its shard and save it; load its shard and compare it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ckpt.acceptance.counted_store import Counted, Counts
from ckpt.acceptance.known_values import compare, fill
from ckpt.acceptance.plans import LoadShard, SaveShard, Shard, load_plan, shard_of, views_of
from ckpt.dcp_storage import Context
from ckpt.format.names import rank_directory
from ckpt.reading.reader import CheckpointReader
from ckpt.writing.writer import CheckpointWriter

__all__ = ["LoadTask", "RankFigures", "SaveTask", "Setup"]

S = TypeVar("S", CheckpointWriter, CheckpointReader)
Tell = Callable[[int | str], None]
"""Told the bytes that were moved, as they are, and the prefix of the keys that a rank is about to write."""


@dataclass(frozen=True)
class Setup:
    """What all ranks have in common."""

    url: str
    storage_options: Mapping[str, Any]
    threads: int | None
    dtype: torch.dtype
    seed: int

    def make(self, kind: type[S], counts: Counts, tell: Tell) -> S:
        """Make a writer or reader whose store is counted."""
        context = Context(wrap=lambda store: Counted(store, counts, tell))
        options = {"storage_options": self.storage_options, "threads": self.threads}
        return context.make(kind, self.url, **options)


@dataclass
class RankFigures:
    """What one rank's part took.

    Attributes:
        shard_bytes: of its tensors.
        values_s: seconds computing values, or comparing them.
        transfer_s: seconds in the writer, or in the reader.
        counts: what went through its store.
        peak_bytes: the process's peak resident memory until then.
        wrong: elements that are not what was saved, by FQN.
        results: for DCP's `finish`.
    """

    rank: int
    shard_bytes: int = 0
    values_s: float = 0.0
    transfer_s: float = 0.0
    counts: Counts = field(default_factory=Counts)
    peak_bytes: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    results: list[WriteResult] = field(default_factory=list)


@dataclass(frozen=True)
class SaveTask:
    """Save what `plan` says, as `rank`."""

    rank: int
    plan: SavePlan

    @property
    def shard(self) -> Shard:
        return shard_of(self.plan)

    def run(self, setup: Setup, arena: torch.Tensor, tell: Tell) -> RankFigures:
        found = RankFigures(self.rank)
        shard = self.shard
        tensors = dict(views_of(shard, arena, setup.dtype))
        with _timed(found, "values_s"):
            for fqn, tensor in tensors.items():
                fill(tensor, fqn, *shard[fqn], seed=setup.seed)
        writer = setup.make(CheckpointWriter, found.counts, tell)
        try:
            with _timed(found, "transfer_s"):
                writer.set_up_storage_writer(False, rank=self.rank, use_collectives=True)
                tell(f"{rank_directory(self.rank)}/{writer.storage_meta().save_id}")
                writer.prepare_local_plan(SavePlan([]))
                found.results = writer.write_data(self.plan, SaveShard(tensors)).wait()
        finally:
            writer.close()
        found.shard_bytes = _nbytes(tensors)
        return found


@dataclass(frozen=True)
class LoadTask:
    """Load `shard`, as `rank`."""

    rank: int
    shard: Shard

    def run(self, setup: Setup, arena: torch.Tensor, tell: Tell) -> RankFigures:
        found = RankFigures(self.rank)
        tensors = dict(views_of(self.shard, arena, setup.dtype))
        reader = setup.make(CheckpointReader, found.counts, tell)
        try:
            with _timed(found, "transfer_s"):
                metadata = reader.read_metadata()
                reader.set_up_storage_reader(metadata, self.rank == 0, rank=self.rank)
                plan = reader.prepare_local_plan(load_plan(self.shard, metadata))
                reader.read_data(reader.prepare_global_plan([plan])[0], LoadShard(tensors)).wait()
        finally:
            reader.close()
        with _timed(found, "values_s"):
            for fqn, tensor in tensors.items():
                if wrong := compare(tensor, fqn, *self.shard[fqn], seed=setup.seed):
                    found.wrong[fqn] = wrong
        found.shard_bytes = _nbytes(tensors)
        return found


@contextlib.contextmanager
def _timed(figures: RankFigures, name: str) -> Iterator[None]:
    """Adds the seconds of a block to an attribute."""
    started_s = time.perf_counter()
    yield
    setattr(figures, name, getattr(figures, name) + time.perf_counter() - started_s)


def _nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
