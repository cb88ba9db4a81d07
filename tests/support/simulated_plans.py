"""What the ranks of a job of any size hold, without the job: for plans that are made in one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt.format.columns import Columns
from ckpt.format.dtypes import dtype_name
from ckpt.format.names import data_key
from ckpt.planning.layout import ALIGNMENT_BYTES, FRAME_BYTES
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.exchange import _chosen
from ckpt.save_plans.file_layouts import pack_placed
from ckpt.save_plans.local import Structure, assemble
from ckpt.save_plans.placing import columns_of
from ckpt.save_plans.rules import WHOLE, Rule, box_at
from ckpt.save_plans.sections import OBJECT, Held, decode_section

T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a job: on the mesh of all ranks, or, without placements, whole on `ranks` (None: all)."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float32
    ranks: range | None = None
    is_object: bool = False
    as_rows: bool = False


def structure_of(tensors: Sequence[Tensor], mesh: tuple[int, ...], rank: int) -> Structure:
    """Describe what a rank holds, with the chunks that torch says."""
    coordinate = tuple(int(each) for each in np.unravel_index(rank, mesh))
    items: list[WriteItem] = []
    helds: list[Held] = []
    rows: list[int] = []
    for tensor in tensors:
        if tensor.ranks is not None and rank not in tensor.ranks:
            continue
        if tensor.is_object:
            items.append(WriteItem(MetadataIndex(tensor.name, None, len(items)), WriteItemType.BYTE_IO))
            helds.append(OBJECT)
            continue
        offsets: tuple[int, ...] = (0,) * len(tensor.shape)
        sizes, rule = tensor.shape, WHOLE
        if tensor.placements:
            sizes, offsets = _compute_local_shape_and_global_offset(
                tensor.shape, mesh, list(coordinate), tensor.placements
            )
            rule = rule_of(tensor.placements, mesh)
        fits = box_at(tensor.shape, rule, coordinate) == (tuple(offsets), tuple(sizes)) and not tensor.as_rows
        if not fits:
            rows += *offsets, *sizes
        items.append(item(tensor, offsets, sizes, len(items)))
        helds.append(Held(dtype_name(tensor.dtype), tensor.shape, False, rule if fits else None))
    paths = [(each.index.fqn,) for each in items]
    return assemble(items, helds, paths, [coordinate], rows)


def item(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int], number: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(tensor.dtype), torch.Size(tensor.shape))
    kind = WriteItemType.SHARD if tensor.placements else WriteItemType.TENSOR
    return WriteItem(MetadataIndex(tensor.name, torch.Size(offsets), number), kind, tensor_data=data)


def rule_of(placements: Sequence[Any], mesh: tuple[int, ...]) -> Rule:
    dims = tuple(each.dim if isinstance(each, Shard | _StridedShard) else -1 for each in placements)
    strided = tuple(n for n, each in enumerate(placements) if isinstance(each, _StridedShard))
    return Rule(0, mesh, dims, strided)


def placements_for(mesh: tuple[int, ...], dims: Sequence[int | None]) -> tuple[Any, ...]:
    """Make placements; where two dimensions of a mesh shard the same one, the first is strided, as FSDP over TP."""
    made: list[Any] = []
    for number, dim in enumerate(dims):
        later = [n for n in range(number + 1, len(dims)) if dims[n] == dim]
        if dim is None:
            made.append(Replicate())
        elif later:
            made.append(_StridedShard(dim, split_factor=math.prod(mesh[n] for n in later)))
        else:
            made.append(Shard(dim))
    return tuple(made)


def placed_plan(structures: Sequence[Structure]) -> tuple[CentralPlan, Columns]:
    """Plan, and make the columns of it when each rank has written one file, as `docs/format.md` lays it out."""
    sections = {d: decode_section(c) for each in structures for d, c in each.contents.items()}
    plan = CentralPlan([each.message for each in structures], sections)
    packed, files = [], []
    for rank, (structure, answer) in enumerate(zip(structures, plan.answers, strict=True)):
        rows: list[tuple[int, int, int, int]] = []
        end = 0
        for each in _chosen(structure, answer):
            assert each.tensor_data is not None
            assert each.index.index is not None
            length = FRAME_BYTES + 4 * each.tensor_data.chunk.sizes.numel()
            rows.append((each.index.index, 0, end, length))
            end += -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        packed.append(pack_placed(rows))
        files.append([data_key(rank, f"{rank:016x}", 0)] if rows else [])
    return plan, columns_of(plan, packed, files)


class Rendezvous:
    """The collectives of threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[str] = []
        self.sent_bytes = 0
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    def all(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait(60)
        values = list(self._slots)
        self._barrier.wait(60)
        return values


class ThreadRanks:
    """Stand in for `ckpt.ranks.first_rank.FirstRank`."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous, self.rank, self.size = rendezvous, rank, rendezvous.size

    def _count(self, call: str, nbytes: int) -> None:
        if self.rank == 1 % self.size:
            self._rendezvous.calls.append(call)
            self._rendezvous.sent_bytes += nbytes

    def decide(self, number: int, join: Callable[[int, int], int], decide: Callable[[int], int]) -> int:
        self._count("decide", 8)
        values = self._rendezvous.all(self.rank, number)
        decided = decide(reduce(join, values)) if self.rank == 0 else None
        return int(self._rendezvous.all(self.rank, decided)[0])

    def join(self, value: T, join: Callable[[T, T], T]) -> T:
        self._count("join", 0)
        values: list[T] = self._rendezvous.all(self.rank, value)
        return reduce(join, values)

    def first_number(self, number: int) -> int:
        self._count("first_number", 0)
        return int(self._rendezvous.all(self.rank, number)[0])

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        self._count("gather_bytes", len(data))
        values = self._rendezvous.all(self.rank, data)
        return values if self.rank == 0 else None

    def scatter_bytes(self, values: Sequence[bytes] | None) -> bytes:
        self._count("scatter_bytes", 0)
        return bytes(self._rendezvous.all(self.rank, values)[0][self.rank])

    def broadcast(self, value: Any) -> Any:
        return self._rendezvous.all(self.rank, value)[0]


def on_ranks(rendezvous: Rendezvous, work: Callable[[ThreadRanks], T]) -> list[T | Exception]:
    """Run work on all ranks, each in a thread; return results, or errors."""
    results: list[Any] = [None] * rendezvous.size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rendezvous, rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(rendezvous.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
