"""Plan each rank's save and load as DCP's planners do for FSDP's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ckpt.acceptance.meshes import Mesh
from ckpt.acceptance.models import Parameter
from ckpt.errors import FormatError
from ckpt.transfer.boxes import Box

_ALIGNMENT_BYTES = 64

RankShard = dict[str, tuple[tuple[int, ...], Box]]
"""By FQN: the shape of the whole tensor, and the slice that a rank holds."""


def save_plans(
    parameters: Sequence[Parameter], mesh: Mesh, dtype: torch.dtype
) -> tuple[list[SavePlan], Metadata]:
    """Make the plan of every rank and the metadata, with DCP's own planner."""
    properties = TensorProperties(dtype=dtype)
    plans = []
    for rank in range(mesh.world_size):
        shard = shard_on(parameters, mesh, rank)
        items = [_write_item(fqn, shape, box, properties) for fqn, (shape, box) in shard.items()]
        plans.append(SavePlan(items, planner_data={}))
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    return planner.create_global_plan(plans)


def shard_of(plan: SavePlan) -> RankShard:
    """List the slices that a rank saves."""
    shard: RankShard = {}
    for item in plan.items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        end = tuple(o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        shard[item.index.fqn] = tuple(item.tensor_data.size), (tuple(chunk.offsets), end)
    return shard


def shard_on(parameters: Sequence[Parameter], mesh: Mesh, rank: int) -> RankShard:
    """List the slices that a rank holds."""
    boxes = ((parameter, mesh.box(parameter, rank)) for parameter in parameters)
    return {parameter.fqn: (parameter.shape, box) for parameter, box in boxes if box is not None}


def load_plan(shard: RankShard, metadata: Metadata) -> LoadPlan:
    """Plan the reads of a shard. Raises FormatError if a tensor of this shape is missing."""
    items = []
    for fqn, (shape, (begin, end)) in shard.items():
        stored = metadata.state_dict_metadata.get(fqn)
        if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != shape:
            raise FormatError(f"the checkpoint has no tensor {fqn!r} of shape {shape}")
        chunk = ChunkStorageMetadata(torch.Size(begin), torch.Size(_lengths(begin, end)))
        items += create_read_items_for_chunk_list(fqn, stored, [chunk])
    return LoadPlan(items)


def shard_nbytes(shard: RankShard, itemsize: int) -> int:
    """Compute the memory for a shard, each tensor aligned."""
    return sum(_aligned(math.prod(_lengths(*box)) * itemsize) for _, box in shard.values())


def views_of(shard: RankShard, arena: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Make the shard's tensors, by FQN, in the memory of `arena` (uint8)."""
    views = {}
    at = 0
    for fqn, (_, box) in shard.items():
        lengths = _lengths(*box)
        nbytes = math.prod(lengths) * dtype.itemsize
        views[fqn] = arena[at : at + nbytes].view(dtype).view(lengths)
        at += _aligned(nbytes)
    return views


class _Tensors:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors


class SaveShard(_Tensors, DefaultSavePlanner):
    """Find the tensor of a write item by its name."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._tensors[write_item.index.fqn]


class LoadShard(_Tensors, DefaultLoadPlanner):
    """Find the tensor of a read item by its name."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensors[index.fqn]


def _write_item(fqn: str, shape: tuple[int, ...], box: Box, properties: TensorProperties) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box[0]), torch.Size(_lengths(*box)))
    return WriteItem(
        index=MetadataIndex(fqn, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shape)),
    )


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT_BYTES


def _lengths(begin: Sequence[int], end: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in zip(begin, end, strict=True)]
