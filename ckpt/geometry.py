"""Keep the geometry that a tensor carries: chunks that its own hooks or fields give, not its shape and placements.

DCP asks such a tensor for its chunks, and for the memory of each. A copy must answer for itself, with the chunks of
when it was made: `Geometry` asks once, and takes the place of the hooks on the copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from ckpt.errors import CheckpointError
from ckpt.torch_private import create_chunk_list, create_write_items, local_tensor

WRITE_ITEMS = "__create_write_items__"
CHUNK_LIST = "__create_chunk_list__"
TENSOR_SHARD = "__get_tensor_shard__"

FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Of DCP's protocol `CheckpointableTensor`, which torch has from 2.14 on. It wants all four."""

FIELD = "global_offsets"
"""The one that is looked for: no other meaning of this name is known."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Offset = tuple[int, ...] | None


def has_geometry(tensor: Any) -> bool:
    """Tell whether a tensor says by hooks or fields which chunks it has; a DTensor may do so by its local tensor."""
    if isinstance(tensor, DTensor):
        own = type(tensor)
        is_overridden = own is not DTensor and _method(own, WRITE_ITEMS) is not _method(DTensor, WRITE_ITEMS)
        return is_overridden or is_hooked(tensor) or has_geometry(local_tensor(tensor))
    # Not by `vars`, which would give each tensor a dict: there can be very many.
    return hasattr(tensor, WRITE_ITEMS) or hasattr(tensor, FIELD) or hasattr(tensor, TENSOR_SHARD)


def is_hooked(tensor: DTensor) -> bool:
    """Tell whether hooks were set on a DTensor itself, in the place of those of its class."""
    own = vars(tensor)
    return WRITE_ITEMS in own or TENSOR_SHARD in own


def loses_geometry(tensor: torch.Tensor) -> bool:
    """Tell whether a bare copy of a tensor would have other chunks than it.

    A class that copies its tensors itself gives its copies its hooks, but not those of one tensor.
    """
    kind = type(tensor)
    if kind in _PLAIN:  # first of all, as nearly all are
        return hasattr(tensor, WRITE_ITEMS) or hasattr(tensor, FIELD) or hasattr(tensor, TENSOR_SHARD)
    if isinstance(tensor, DTensor):
        is_own = has_geometry(tensor) if kind is not DTensor else is_hooked(tensor)
        return is_own or loses_geometry(local_tensor(tensor))
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return has_geometry(tensor)
    return not {WRITE_ITEMS, TENSOR_SHARD, FIELD}.isdisjoint(vars(tensor))


def _method(kind: type, name: str) -> object:
    return getattr(kind, name, None)


class Place(NamedTuple):
    """Where in dense memory the elements of a chunk lie."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """The memory of a chunk: a tensor, or the elements at a place in one."""

    memory: torch.Tensor
    place: Place | None = None

    def tensor(self) -> torch.Tensor:
        """Return the elements, in the same memory."""
        if self.place is None:
            return self.memory
        offset, sizes, strides = self.place
        return self.memory.as_strided(sizes, strides, int(self.memory.storage_offset()) + offset)


@dataclass(frozen=True, eq=False)
class Geometry:
    """The chunks of a tensor as its hooks or fields gave them once.

    Attributes:
        name: that the hooks were asked with.
        shards: the memory of each chunk, by its offset.
        fields: of `CheckpointableTensor`, if the tensor has them.
    """

    name: str
    items: tuple[WriteItem, ...]
    chunks: tuple[ChunkStorageMetadata, ...]
    shards: Mapping[Offset, Shard]
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> Geometry:
        """Ask a tensor, as DCP would do. Raises CheckpointError, with the name, if it cannot answer."""
        with torch.no_grad():
            try:
                items = tuple(_own_item(item) for item in create_write_items(name, tensor))
                chunks = tuple(_own_chunk(chunk) for chunk in create_chunk_list(tensor))
                shards = {
                    item.index.offset: find_tensor_shard(tensor, item.index)
                    for item in items
                    if item.index.fqn == name
                }
                fields = _own_fields(tensor)
            except Exception as error:
                text = f"the chunks that {name!r} gives by its own hooks or fields cannot be found out"
                raise CheckpointError(f"{text}: {type(error).__name__}: {error}") from error
        for offset, shard in shards.items():
            if not isinstance(shard, torch.Tensor):
                raise CheckpointError(
                    f"{TENSOR_SHARD} of {name!r} gave a {type(shard).__name__} for its chunk at {offset}; it must be a tensor"
                )
        return cls(name, items, chunks, {offset: Shard(shard) for offset, shard in shards.items()}, fields)

    @property
    def key(self) -> Hashable:
        """Return all that a plan takes from it; equal if the plans are."""
        return _key(self.items, self.name)

    # -- in the place of the hooks ---------------------------------------------------------------------------

    def write_items(self, fqn: str, value: object) -> list[WriteItem]:
        """List the chunks to be written, under the name that the copy has."""
        return [
            dataclasses.replace(item, index=MetadataIndex(fqn, item.index.offset, item.index.index))
            if item.index.fqn == self.name
            else item
            for item in self.items
        ]

    def chunk_list(self) -> list[ChunkStorageMetadata]:
        """List the chunks that a load fills."""
        return list(self.chunks)

    def tensor_shard(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of a chunk. Raises ValueError if there is none at its offset."""
        shard = self.shards.get(index.offset)
        if shard is None and index.offset is None and len(self.shards) == 1:
            shard = next(iter(self.shards.values()))
        if shard is None:
            raise ValueError(
                f"the copy of {self.name!r} has no chunk at {index.offset}: its hooks gave none when it was made"
            )
        return shard.tensor()

    def attach(self, copied: Any) -> None:
        """Let a copy answer by this geometry."""
        setattr(copied, WRITE_ITEMS, self.write_items)
        setattr(copied, CHUNK_LIST, self.chunk_list)
        setattr(copied, TENSOR_SHARD, self.tensor_shard)
        for name, value in self.fields.items():
            setattr(copied, name, value)


def chunks_key(tensor: torch.Tensor) -> Hashable:
    """Return the chunks that a tensor gives by itself, equal if they are; None if its shape and placements give them."""
    return _key(create_write_items("", tensor), "") if has_geometry(tensor) else None


def has_shape(tensor: torch.Tensor, shape: torch.Size) -> bool:
    """Tell whether the chunks that a tensor gives by itself are some of a tensor of `shape`, also if its own is smaller."""
    planned = {
        torch.Size(item.tensor_data.size) for item in create_write_items("", tensor) if item.tensor_data
    }
    if planned:
        return planned == {shape}
    return all(0 in chunk.sizes for chunk in create_chunk_list(tensor))  # it holds nothing of it here


def global_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the whole of which a tensor says, by hooks or fields, that it has chunks; else its own."""
    if isinstance(tensor, torch.Tensor) and has_geometry(tensor):
        items = create_write_items("", tensor)
        planned = {tuple(item.tensor_data.size) for item in items if item.tensor_data}
        if len(planned) == 1:
            return planned.pop()
    return tuple(tensor.size())


def attached(tensor: torch.Tensor) -> Geometry | None:
    """Return the geometry that was attached to a copy; None if there is none."""
    hook = getattr(tensor, WRITE_ITEMS, None)
    geometry = getattr(hook, "__self__", None)
    return geometry if isinstance(geometry, Geometry) else None


def with_chunks_of(tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Let a tensor that was made like another one, of any dtype, have the chunks that the other gives by itself.

    Raises CheckpointError if these are not in its own memory.
    """
    geometry = Geometry.of(tensor, "")
    is_inner = isinstance(tensor, DTensor) and not is_hooked(tensor)
    source = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    memory = local_tensor(made) if isinstance(made, DTensor) else made
    shards = {}
    for offset, shard in geometry.shards.items():
        place = place_in(shard.tensor().detach(), source.detach())
        if place is None:
            raise CheckpointError(
                f"a chunk at {offset} that a parameter gives by its hooks is not in its memory"
            )
        shards[offset] = Shard(memory.detach(), place)  # not the tensor itself, which is going to hold them
    items = tuple(
        dataclasses.replace(
            item,
            tensor_data=item.tensor_data
            and dataclasses.replace(item.tensor_data, properties=TensorProperties.create_from_tensor(memory)),
        )
        for item in geometry.items
    )
    own = dataclasses.replace(geometry, items=items, shards=shards)
    own.attach(memory if is_inner else made)


def place_in(shard: torch.Tensor, whole: torch.Tensor) -> Place | None:
    """Find where in a dense copy of `whole` the elements of `shard` are; None if it has them not, or not surely.

    Both are ordinary tensors.
    """
    if shard.dtype != whole.dtype or shard.device != whole.device:
        return None
    if shard.is_conj() != whole.is_conj() or shard.is_neg() != whole.is_neg():
        return None
    sizes, strides = tuple(shard.shape), shard.stride()
    if shard.numel() == 0:
        return Place(0, sizes, strides)
    if shard.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    offset = int(shard.storage_offset()) - int(whole.storage_offset())
    if not whole.is_contiguous():  # its copy has other strides
        is_whole = offset == 0 and sizes == tuple(whole.shape) and strides == whole.stride()
        return Place(0, sizes, torch.empty(sizes, device="meta").stride()) if is_whole else None
    end = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return Place(offset, sizes, strides) if 0 <= offset <= end < whole.numel() else None


def _own_item(item: WriteItem) -> WriteItem:
    """Copy an item: the trainer may go on using what it is made of."""
    data = item.tensor_data
    if data is None:
        return item
    properties = dataclasses.replace(data.properties)
    data = dataclasses.replace(
        data, chunk=_own_chunk(data.chunk), properties=properties, size=torch.Size(data.size)
    )
    return dataclasses.replace(item, tensor_data=data)


def _own_chunk(chunk: ChunkStorageMetadata) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def _own_fields(tensor: torch.Tensor) -> dict[str, Any]:
    """Copy the fields of a tensor, if it has all: one alone may mean something else."""
    fields = {name: getattr(tensor, name) for name in FIELDS if hasattr(tensor, name)}
    return {name: _numbers(value) for name, value in fields.items()} if len(fields) == len(FIELDS) else {}


def _numbers(value: Any) -> Any:
    """Copy a shape or offset, or a sequence of them; leave alone what is none."""
    return tuple(map(_numbers, value)) if isinstance(value, list | tuple) else value


def _key(items: Iterable[WriteItem], name: str) -> Hashable:
    return tuple(
        (item.index.fqn == name or item.index.fqn, item.index.offset, item.type.value, _facts(item))
        for item in items
    )


def _facts(item: WriteItem) -> Hashable:
    data = item.tensor_data
    if data is None:
        return None
    properties = data.properties
    shapes = tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)
    return (*shapes, properties.dtype, properties.layout, properties.requires_grad)
