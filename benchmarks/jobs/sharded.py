"""Save and load as several ranks, without processes: each rank's writer and reader is driven in
turn.

Tensors are split by rows, as FSDP2 splits them. The calls and their order are those of `dcp.save`
and `dcp.load` with collectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benchmarks.contenders.through_dcp import ThroughDcp
from benchmarks.jobs.transfer import counted, figures_of
from benchmarks.run.meter import metered
from benchmarks.run.task import Task

__all__ = ["load", "rows_of", "save", "write_item"]


def save(task: Task) -> dict[str, float]:
    """Save the state as `parameters["ranks"]` ranks."""
    contender: Any = task.make_contender()
    state, ranks = task.state.filled(), task.parameters["ranks"]
    writers = [contender.writer(task.place) for _ in range(ranks)]
    plans = []
    for rank, writer in enumerate(writers):
        writer.reset(task.place)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        items = [write_item(name, tensor, rows_of(tensor, rank, ranks)) for name, tensor in state.items()]
        plans.append(writer.prepare_local_plan(SavePlan(items)))
    plans, metadata = create_default_global_save_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    planner = _SavePlanner(state)
    written = [writer.write_data(plan, planner).wait() for writer, plan in zip(writers, plans, strict=True)]
    writers[0].finish(metadata, written)
    return {}


def load(task: Task) -> dict[str, float]:
    """Load its rows as each of `parameters["ranks"]` ranks; with `rows` only that many, from the
    middle.
    """
    contender: Any = task.make_contender()
    ranks, some_rows = task.parameters["ranks"], task.parameters.get("rows", 0)
    expected = task.state.filled()
    needed_bytes, wrong = 0, []
    with counted(task.endpoint) as counts, metered() as reading:
        for rank in range(ranks):
            planner = _LoadPlanner()
            for name, tensor in expected.items():
                first, last = rows_of(tensor, rank, ranks)
                if some_rows:
                    # Half-way into a shard of eighths: the rows lie across a border of checksum blocks.
                    first = (first + last) // 2 + tensor.shape[0] // 16 - some_rows // 2
                    last = first + some_rows
                planner.wanted[name] = (first, torch.empty(last - first, tensor.shape[1]))
            _load_rank(contender, task.place, planner)
            for name, (first, rows) in planner.wanted.items():
                needed_bytes += rows.nbytes
                if not _same(rows, expected[name][first : first + rows.shape[0]]):
                    wrong.append(name)
    if wrong:
        raise ValueError(f"loaded wrong: {wrong[:3]}")
    figures = {**figures_of(reading, needed_bytes), **counts, "needed_bytes": needed_bytes}
    if "read_bytes" in counts:
        figures["read_per_needed"] = counts["read_bytes"] / needed_bytes
        figures["data_read_per_needed"] = counts["read_data_bytes"] / needed_bytes
    return figures


def rows_of(tensor: torch.Tensor, rank: int, ranks: int) -> tuple[int, int]:
    """Return the rows of a rank: equal runs, the last one shorter."""
    each = -(-tensor.shape[0] // ranks)
    return min(rank * each, tensor.shape[0]), min((rank + 1) * each, tensor.shape[0])


def write_item(name: str, tensor: torch.Tensor, rows: tuple[int, int]) -> WriteItem:
    """Make the plan's item for these rows of a tensor."""
    chunk = _chunk(tensor, rows)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(tensor), size=tensor.shape
        ),
    )


def _load_rank(contender: ThroughDcp, place: str, planner: _LoadPlanner) -> None:
    reader = contender.reader(place)
    reader.reset(place)
    metadata: Metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    items: list[ReadItem] = []
    for name, (first, rows) in planner.wanted.items():
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        chunk = _chunk(rows, (0, rows.shape[0]))
        chunk = ChunkStorageMetadata(torch.Size((first, 0)), chunk.sizes)
        items += create_read_items_for_chunk_list(name, stored, [chunk])
    plan = reader.prepare_global_plan([reader.prepare_local_plan(LoadPlan(items))])[0]
    reader.read_data(plan, planner).wait()


def _chunk(tensor: torch.Tensor, rows: tuple[int, int]) -> ChunkStorageMetadata:
    first, last = rows
    return ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((last - first, tensor.shape[1])))


def _same(loaded: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(loaded.view(torch.int32), expected.view(torch.int32))


class _SavePlanner(DefaultSavePlanner):
    """Find the rows of an item in the whole tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        first = chunk.offsets[0]
        return self._tensors[write_item.index.fqn][first : first + chunk.sizes[0]]


class _LoadPlanner(DefaultLoadPlanner):
    """Return the rows that a rank wants, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: dict[str, tuple[int, torch.Tensor]] = {}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.wanted[index.fqn][1]
