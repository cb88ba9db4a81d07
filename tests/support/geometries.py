"""Tensors that carry their own geometry, cut unevenly over ranks, and what a checkpoint of them must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

ROWS, COLUMNS = 12, 3
HAS_PROTOCOL = hasattr(dcp, "CheckpointableTensor")

CUTS = {
    1: {"a": [[(0, 5), (5, 7)]], "b": [[(0, 12)]]},
    2: {"a": [[(0, 5), (9, 3)], [(5, 4)]], "b": [[(0, 2)], [(2, 3), (5, 7)]]},
    4: {
        "a": [[(0, 5)], [(5, 1), (11, 1)], [], [(6, 5)]],
        "b": [[], [(0, 2), (2, 2)], [(4, 7)], [(11, 1)]],
    },
}
"""By the number of ranks, for two ways of cutting: the first row of each chunk of each rank, and its rows."""

CUTS_OF_ONE_CHUNK = {
    1: {"a": [[(0, 12)]], "b": [[(0, 12)]]},
    2: {"a": [[(0, 5)], [(5, 7)]], "b": [[(0, 11)], [(11, 1)]]},
    4: {"a": [[(0, 5)], [(5, 1)], [], [(6, 6)]], "b": [[], [(0, 4)], [(4, 7)], [(11, 1)]]},
}
"""For DTensors, as Megatron-FSDP cuts them."""

Cut = list[tuple[int, int]]


def whole(seed: int = 0) -> torch.Tensor:
    """Return all elements of the tensor."""
    return torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS) + 1000 * seed


class Carried:
    """A tensor of this rank that carries its geometry.

    Attributes:
        value: it, as a state dict has it.
        cut: of this rank; the hooks of the tensor read it at each call.
    """

    def __init__(self, local: torch.Tensor, cut: Cut) -> None:
        self.value: Any = local
        self.local, self.cut = local, cut

    def _begins(self) -> list[int]:
        return [sum(rows for _, rows in self.cut[:number]) for number in range(len(self.cut))]

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """List the first row of each chunk, and its memory."""
        begins = zip(self.cut, self._begins(), strict=True)
        return [(first, self.local[begin : begin + rows]) for (first, rows), begin in begins]

    def fill(self, values: torch.Tensor) -> None:
        """Set all elements, those of `values` that this rank has."""
        for first, part in self.parts():
            part.copy_(values[first : first + len(part)])

    def spoil(self) -> None:
        """Change all that a trainer may change once a copy was made: elements, and where they belong."""
        self.local.fill_(-1)
        self.cut[:] = [(0, rows) for _, rows in self.cut]

    def holds(self, values: torch.Tensor) -> bool:
        """Tell whether this rank has its part of `values`."""
        return all(torch.equal(part, values[first : first + len(part)]) for first, part in self.parts())

    # -- the hooks -------------------------------------------------------------------------------------------

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([o, 0]), torch.Size([n, COLUMNS])) for o, n in self.cut]

    def items(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size([ROWS, COLUMNS])),
            )
            for chunk in self.chunks()
        ]

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return next(part for first, part in self.parts() if first == index.offset[0])


def hooked(cut: Cut) -> Carried:
    """Make a plain tensor with closures over it, smaller than the tensor of which it has chunks."""
    carried = Carried(torch.zeros(sum(rows for _, rows in cut), COLUMNS), cut)
    _set_hooks(carried.local, carried)
    carried.local.__get_tensor_shard__ = lambda index: carried.shard(index)  # type: ignore[attr-defined]
    return carried


def hooked_in_dtensor(cut: Cut) -> Carried:
    """Make a DTensor whose local tensor has hooks, as Megatron-FSDP: two hooks, and items by the DTensor."""
    carried = Carried(torch.zeros(sum(rows for _, rows in cut), COLUMNS), cut)
    carried.value = DTensor.from_local(
        carried.local,
        mesh_of_all(),
        [Shard(0)],
        run_check=False,
        shape=torch.Size([ROWS, COLUMNS]),
        stride=(COLUMNS, 1),
    )
    # `from_local` makes another tensor over the same memory.
    with torch.no_grad():
        carried.local = carried.value.to_local()

    def items(fqn: str, value: DTensor) -> list[WriteItem]:
        assert value.shape == (ROWS, COLUMNS), "a hook of a local tensor is asked with the DTensor"
        return carried.items(fqn, value)

    _set_hooks(carried.local, carried, items)
    return carried


def _set_hooks(local: Any, carried: Carried, items: Callable[..., list[WriteItem]] | None = None) -> None:
    local.__create_write_items__ = items or (lambda fqn, value: carried.items(fqn, value))
    local.__create_chunk_list__ = lambda: carried.chunks()


class WithFields(Carried):
    """A plain tensor with the fields of `CheckpointableTensor`, which are lists."""

    def __init__(self, cut: Cut) -> None:
        super().__init__(torch.zeros(sum(rows for _, rows in cut), COLUMNS), cut)
        self.describe()

    def describe(self) -> None:
        local: Any = self.local
        local.global_shape = (ROWS, COLUMNS)
        local.global_offsets = [[first, 0] for first, _ in self.cut]
        local.local_offsets = [[begin, 0] for begin in self._begins()]
        local.local_sizes = [[rows, COLUMNS] for _, rows in self.cut]

    def spoil(self) -> None:
        super().spoil()
        local: Any = self.local
        for offset in local.global_offsets:  # the lists themselves
            offset[0] = 0


def with_fields(cut: Cut) -> Carried:
    return WithFields(cut)


KINDS: dict[str, Callable[[Cut], Carried]] = {
    "hooks": hooked,
    "DTensor": hooked_in_dtensor,
    **({"fields": with_fields} if HAS_PROTOCOL else {}),
}


def carried_by(kind: str, way: str) -> Carried:
    """Make the tensor of this rank, cut in a way; its elements are zero."""
    cuts = CUTS_OF_ONE_CHUNK if kind == "DTensor" else CUTS
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return KINDS[kind](list(cuts[size][way][rank]))


def chunks_of(kind: str, way: str, size: int) -> list[tuple[int, int]]:
    """List first row and rows of all chunks that a checkpoint of the tensor has."""
    cuts = CUTS_OF_ONE_CHUNK if kind == "DTensor" else CUTS
    return sorted(chunk for cut in cuts[size][way] for chunk in cut)


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))
