"""Plan the reads of this rank as DCP does, without looking at each stored chunk in Python."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from ckpt.format.columns import Integers, TensorColumns
from ckpt.format.dcp_view import Chunks
from ckpt.geometry import CHUNK_LIST, has_shape
from ckpt.torch_private import create_chunk_list

_WITH_FIELDS = getattr(dcp, "CheckpointableTensor", ())
"""The protocol of tensors that say by fields which chunks they hold, where torch has it."""

_FEW_CHUNKS = 32
"""Up to so many chunks of a tensor, DCP's planner is as fast."""


@contextmanager
def planned_by_columns(planner: LoadPlanner) -> Iterator[None]:
    """Let a planner that plans as DCP's own do so by `local_plan`; leave any other as it is."""
    if not _plans_like_dcp(planner):
        yield
        return
    assert isinstance(planner, DefaultLoadPlanner)
    vars(planner)["create_local_plan"] = lambda: local_plan(planner)
    try:
        yield
    finally:
        del vars(planner)["create_local_plan"]


def local_plan(planner: DefaultLoadPlanner) -> LoadPlan:
    """Return the plan that DCP's `create_local_plan` makes, item by item, and raise its errors.

    But a tensor may be smaller than the stored one if its hooks say which chunks of that it holds. DCP saves such a
    tensor, and then refuses to load it.
    """
    metadata = planner.metadata
    stored = {} if metadata is None else metadata.state_dict_metadata
    many = {
        fqn: tensor
        for fqn, tensor in stored.items()
        if isinstance(tensor, TensorStorageMetadata)
        and isinstance(tensor.chunks, Chunks)
        and len(tensor.chunks) > _FEW_CHUNKS
    }
    bare = {fqn: dataclasses.replace(tensor, chunks=[]) for fqn, tensor in many.items()}
    for fqn, value in planner.state_dict.items():
        tensor = bare.get(fqn, stored.get(fqn))
        if isinstance(tensor, TensorStorageMetadata) and _is_part(value, tensor.size):
            bare[fqn] = dataclasses.replace(tensor, size=value.size())
    if metadata is None or not bare:
        return DefaultLoadPlanner.create_local_plan(planner)
    planner.metadata = dataclasses.replace(metadata, state_dict_metadata={**stored, **bare})
    try:  # DCP checks names, shapes and types, and plans the rest
        plan = DefaultLoadPlanner.create_local_plan(planner)
    finally:
        planner.metadata = metadata
    rest: dict[str, list[ReadItem]] = defaultdict(list)
    for item in plan.items:
        rest[item.dest_index.fqn].append(item)
    items: list[ReadItem] = []
    for fqn, value in planner.state_dict.items():
        if fqn not in many:
            items += rest[fqn]
        elif not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None:
            items += read_items(fqn, many[fqn].chunks.tensor, create_chunk_list(value))  # type: ignore[attr-defined]
    return dataclasses.replace(plan, items=items)


def _is_part(value: object, stored: torch.Size) -> bool:
    """Tell whether a tensor of another size says by hooks that it holds chunks of a stored one."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.size() == stored:
        return False
    if isinstance(value, _WITH_FIELDS):  # DCP knows their shape
        return False
    return hasattr(value, CHUNK_LIST) and has_shape(value, stored)


def read_items(fqn: str, stored: TensorColumns, local: Sequence[ChunkStorageMetadata]) -> list[ReadItem]:
    """Find the stored chunks that local ones overlap: DCP's `create_read_items_for_chunk_list`, in its order."""
    if not local or not stored.count:
        return []
    begins = stored.offsets
    ends = begins + stored.sizes
    sweep = _sweep_dimension(ends, local)
    starts = [chunk.offsets[sweep] if chunk.offsets else 0 for chunk in local]
    items: list[ReadItem] = []
    for number in sorted(range(len(local)), key=starts.__getitem__):
        chunk = local[number]
        first, last = np.array(chunk.offsets, dtype=np.int64), np.array(chunk.sizes, dtype=np.int64)
        last += first
        rows = _overlapping(begins, ends, first, last)
        if len(first):
            rows = rows[np.argsort(ends[rows, sweep], kind="stable")]
        low = np.maximum(begins[rows], first)
        columns = (begins[rows], low - first, low - begins[rows], np.minimum(ends[rows], last) - low)
        dest_index = MetadataIndex(fqn, chunk.offsets, number)
        for row, *found in zip(rows.tolist(), *(column.tolist() for column in columns), strict=True):
            offset, dest_offsets, storage_offsets, lengths = map(torch.Size, found)
            storage_index = MetadataIndex(fqn, offset, row)
            items.append(
                ReadItem(
                    LoadItemType.TENSOR, dest_index, dest_offsets, storage_index, storage_offsets, lengths
                )
            )
    return items


def _overlapping(begins: Integers, ends: Integers, first: Integers, last: Integers) -> Integers:
    """Find the rows whose boxes overlap one box."""
    rows = np.arange(len(begins))
    for dimension, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if len(rows) == len(begins):  # no copies as long as nothing is left out
            overlap = (begins[:, dimension] < end) & (ends[:, dimension] > begin)
        else:
            overlap = (begins[rows, dimension] < end) & (ends[rows, dimension] > begin)
        if not overlap.all():
            rows = rows[overlap]
    return rows


def _sweep_dimension(ends: Integers, local: Sequence[ChunkStorageMetadata]) -> int:
    """Find the dimension by whose ends DCP orders the chunks: the first of those that are largest."""
    if ends.shape[1] == 0:
        return 0
    local_ends = [[o + n for o, n in zip(c.offsets, c.sizes, strict=True)] for c in local]
    return int(np.maximum(ends.max(axis=0), np.array(local_ends, dtype=np.int64).max(axis=0)).argmax())


def _plans_like_dcp(planner: LoadPlanner) -> bool:
    """Tell whether this is DCP's own planner, or one that leaves the local plan to it."""
    return (
        isinstance(planner, DefaultLoadPlanner)
        and type(planner).create_local_plan is DefaultLoadPlanner.create_local_plan
        and "create_local_plan" not in vars(planner)
    )
