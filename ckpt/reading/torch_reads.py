"""Read regions into tensors through the loader: for conversions, and for what only torch can read."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ckpt.format.dtypes import torch_dtype
from ckpt.format.elements import Elements
from ckpt.reading.checkpoint import Checkpoint
from ckpt.reading.loader import Loader
from ckpt.reading.plain_reads import RegionPlan
from ckpt.transfer.array_pieces import bytes_of
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.tensor_memory import tensor_over


def tensor_of(elements: Elements, dtype: str) -> torch.Tensor:
    """Show the memory of an array as a tensor."""
    return tensor_over(bytes_of(elements)).view(torch_dtype(dtype)).reshape(elements.shape)


def read_tensors(
    checkpoint: Checkpoint,
    pool: StagingPool,
    threads: Executor,
    wanted: Sequence[tuple[RegionPlan, torch.Tensor]],
) -> None:
    """Fill tensors with regions, cast to their dtypes."""
    items = [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(str(number)),
            torch.Size(part.begin),
            MetadataIndex(plan.fqn, torch.Size(plan.entry.offsets_at(part.row)), part.row),
            torch.Size(part.inside),
            torch.Size(part.lengths),
        )
        for number, (plan, _) in enumerate(wanted)
        for part in plan.parts
    ]
    Loader(checkpoint, _Planner([target for _, target in wanted]), pool, threads, ()).run(items)


def read_objects(
    checkpoint: Checkpoint, pool: StagingPool, threads: Executor, fqns: Iterable[str]
) -> dict[str, bytes]:
    """Read objects as they are stored, unchecked."""
    planner, nothing = _Planner([]), torch.Size([0])
    indices = [MetadataIndex(fqn) for fqn in fqns]
    items = [ReadItem(LoadItemType.BYTE_IO, i, nothing, i, nothing, nothing) for i in indices]
    Loader(checkpoint, planner, pool, threads, trusted_objects=("*",)).run(items)
    return planner.objects


def is_transformed(checkpoint: Checkpoint, fqn: str) -> bool:
    """Tell whether an object of a stock checkpoint is compressed."""
    return bool(checkpoint.metadata.storage_data[MetadataIndex(fqn)].transform_descriptors)


class _Planner(DefaultLoadPlanner):
    """Give the loader tensors by their number, and keep the bytes of objects."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.objects: dict[str, bytes] = {}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._targets[int(index.fqn)]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = value.getvalue()
