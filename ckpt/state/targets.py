"""Make the targets of a load: tensors in place where the program has them, as stored where it has not."""

from __future__ import annotations

import bisect
import functools
import logging
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor

from ckpt.errors import LoadFailed
from ckpt.geometry import global_shape, has_geometry, has_shape, loses_geometry, with_chunks_of
from ckpt.options import LoadOptions
from ckpt.state.stored import StoredState, StoredValue
from ckpt.torch_private import ShardedTensor, create_chunk_list, local_tensor, sharded_tensor_like
from ckpt.transfer.tensor_memory import can_cast
from ckpt.transfer.tied_tensors import memory_key
from ckpt.words import printable

_logger = logging.getLogger(__name__)

_SHOWN = 20

_DENSE = (torch.Tensor, torch.nn.Parameter, DTensor, ShardedTensor)
"""Classes of which an empty tensor can be made; others come as they are stored."""


class Region:
    """A target of a stored shape of which this rank wants some boxes: DCP plans and fills it as a sharded tensor."""

    def __init__(self, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], torch.Tensor]]) -> None:
        self._shape, self._boxes = torch.Size(shape), boxes

    def size(self) -> torch.Size:
        return self._shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), local.size()) for at, local in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offset = tuple(index.offset or ())
        return next(local for at, local in self._boxes if tuple(at) == offset)


@dataclass
class Targets:
    """What a load is to fill, on this rank.

    Attributes:
        options: of the load.
        stored: what the checkpoint holds.
        is_dry: nothing is loaded: only names, shapes and structure are compared.
        objects: of a dry plan, objects that were read before it, by stored name.
        values: target tensors by stored name, and None for objects, which the load replaces.
        asked: stored names that have a place in the program.
        missing: names that only the program has.
        lacked: tensors of the program among these: one that is filled under another name is not missing.
        notes: differences that are no error, for the log.
        faults: what cannot be loaded, and why.
        can_resize: some of these are shapes, which have a part in common.
        after: what to do when the bytes are there, before parts take their values.
        likes: the parameters of the models by name, for values that the program does not have yet.
        in_program: the tensors of the program into which what was loaded elsewhere is copied, by stored name.
        filled: tensors of the program that are asked for in place, and the first stored name of each memory.
        claimed: the memory of all targets that the program has.
        made: names whose targets were made as they are stored: what is loaded may stand for them.
        resized, cast: names whose shape or dtype differs.
        replaced: parameters that were on the meta device, by `id`, and those in their place.
        unchecked: names of each rank's own that another number of ranks saved: nothing live is what they hold.
    """

    options: LoadOptions
    stored: StoredState
    is_dry: bool = False
    objects: Mapping[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    lacked: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    can_resize: bool = False
    after: list[Callable[[], None]] = field(default_factory=list)
    likes: dict[str, torch.Tensor] = field(default_factory=dict)
    in_program: dict[str, Any] = field(default_factory=dict)
    filled: dict[Hashable, str] = field(default_factory=dict)
    claimed: ClaimedMemory = field(default_factory=lambda: ClaimedMemory())
    made: set[str] = field(default_factory=set)
    resized: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    replaced: dict[int, torch.nn.Parameter] = field(default_factory=dict)
    unchecked: set[str] = field(default_factory=set)

    def forget_values(self) -> None:
        """Keep names alone, once the values are in the program: replaced ones would live as long as this."""
        for values in (self.values, self.lacked, self.likes, self.in_program, self.replaced, self.filled):
            values.clear()

    def lack(self, name: str, live: Any) -> None:
        """Note that only the program has a value."""
        self.missing.append(name)
        if isinstance(live, torch.Tensor):
            self.lacked[name] = live

    def settle_missing(self) -> None:
        """Forget what is missing by name alone: tied tensors are filled under another name; sort the rest."""
        if self.lacked:
            tied = {name for name, live in self.lacked.items() if memory_key(live) in self.filled}
            self.missing = [name for name in self.missing if name not in tied]
        self.missing.sort()

    def object(self, value: StoredValue) -> None:
        """Ask for an object."""
        self.asked.add(value.name)
        self.values[value.name] = None

    def in_place(self, value: StoredValue, live: Any, *, may_replace: bool = False) -> None:
        """Load a tensor into one that the program has; sharded ones take their part.

        Args:
            may_replace: another tensor may stand for it, if it is one with that of another name, and their values differ.
        """
        self.asked.add(value.name)
        name = value.name
        if value.shape is None or value.dtype is None:
            self.faults.append(f"{name!r} is an object in the checkpoint, and a tensor in the program")
            return
        is_sharded = isinstance(live, ShardedTensor)
        key = memory_key(live) if isinstance(live, torch.Tensor) and not is_sharded else None
        first = name if key is None else self.filled.setdefault(key, name)
        own = live
        is_one_with_another = first != name
        if not self.is_dry:
            if is_one_with_another or (may_replace and _is_expanded(live)):
                live = empty_like(live, live.dtype)
            else:
                self.claimed.claim(live)
        if isinstance(live, torch.Tensor) and has_geometry(live):
            self._by_own_chunks(value, live, name)
            return
        shape = tuple(live.size())
        if shape != value.shape:
            if self.options.on_shape != "resize" or len(shape) != len(value.shape):
                self._note_shape(name, value.shape, shape)
                return
            self.resized.append(name)
        if self.is_dry:
            return
        if live.dtype != value.dtype:
            self.cast.append(name)
        needs_check = not self.options.allow_casts and changes_values(value.dtype, live.dtype)
        if needs_check and (value.dtype, live.dtype) == (torch.float32, torch.bfloat16):
            # The ranges all but agree: a whole model in float32 beside it would cost more than it finds.
            before = _infinite(live)
            self.after.append(lambda: _check_finite(live, before, name))
            needs_check = False
        if shape == value.shape and not needs_check:
            self.values[value.name] = live
        else:
            self._by_way_of(value, live, name)
        if is_one_with_another:
            self.after.append(lambda: self._compare(name, first, live, own, may_replace=may_replace))

    def _note_shape(self, name: str, stored: tuple[int, ...], live: tuple[int, ...]) -> None:
        """Note that a tensor has another shape in the program."""
        self.faults.append(f"{name!r} is {stored} in the checkpoint, and {live} in the program")
        self.can_resize |= len(stored) == len(live)

    def _by_own_chunks(self, value: StoredValue, live: torch.Tensor, name: str) -> None:
        """Load into a tensor that says by itself which chunks it has."""
        assert value.shape is not None
        if not has_shape(live, torch.Size(value.shape)):
            self._note_shape(name, value.shape, global_shape(live))
        elif not self.is_dry:
            self.values[value.name] = live

    def _compare(self, name: str, first: str, loaded: Any, own: Any, *, may_replace: bool) -> None:
        """Let two names stand for one tensor of the program if their values are the same."""
        if _same_bits(loaded, own):
            self.in_program[name] = own
        elif not may_replace:
            raise LoadFailed(
                f"{first!r} and {name!r} are one tensor in the program, and two of different values in the checkpoint: "
                "untie them before the load, as they were when they were saved"
            )

    def _by_way_of(self, value: StoredValue, live: Any, name: str) -> None:
        """Load the common part of two shapes into memory of the stored dtype; it is checked, and copied."""
        assert value.shape is not None
        boxes: list[tuple[tuple[int, ...], torch.Tensor]] = []
        for offsets, local in local_boxes(live):
            sizes = tuple(
                max(0, min(at + size, limit) - at)
                for at, size, limit in zip(offsets, local.shape, value.shape, strict=True)
            )
            if math.prod(sizes) == 0 and local.dim():
                continue
            part = local[tuple(slice(0, size) for size in sizes)] if local.dim() else local
            loaded = torch.empty(sizes, dtype=value.dtype, device=local.device)
            boxes.append((offsets, loaded))
            self.after.append(lambda part=part, loaded=loaded: self._copy(loaded, part, name))  # type: ignore[misc]
        self.values[value.name] = Region(value.shape, boxes)
        self.in_program[value.name] = live

    def _copy(self, loaded: torch.Tensor, part: torch.Tensor, name: str) -> None:
        if not self.options.allow_casts and not fits(loaded, part.dtype):
            raise LoadFailed(
                f"{name!r} holds values that {_named(part.dtype)} cannot hold (it is stored as "
                f"{_named(loaded.dtype)}); allow_casts=True of LoadOptions loads them all the same"
            )
        with torch.no_grad():
            part.copy_(loaded)

    def as_stored(
        self, value: StoredValue, like: Any = None, live: Any = None, device: torch.device | None = None
    ) -> None:
        """Load a tensor into one of the stored dtype.

        Args:
            like: a tensor, such as the parameter, whose sharding and device it gets if it has the stored shape.
            live: the one that the program has; it is filled in place if it is such a tensor already, and shares no
                memory with another target: an average that begins as the weights becomes one of its own.
            device: of one that is like none.
        """
        self.asked.add(value.name)
        assert value.shape is not None
        if self.is_dry:
            return
        if _is_same_kind(live, value, like) and self.claimed.claim(live):
            self.values[value.name] = live
            return
        self.made.add(value.name)
        if type(like) in _DENSE and value.shape and global_shape(like) == value.shape:
            self.values[value.name] = empty_like(like, value.dtype)
        else:
            self.values[value.name] = torch.empty(value.shape, dtype=value.dtype, device=device)


class ClaimedMemory:
    """The bytes of the program that targets have, so that no two stored values go into one place."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[torch.device, int], list[tuple[int, int]]] = {}

    def claim(self, tensor: Any) -> bool:
        """Return whether a tensor's bytes are no other target's; they are its own then."""
        extents = [*_extents(tensor)]
        for storage, begin, end in extents:
            known = self._ranges.get(storage, [])
            at = bisect.bisect_left(known, (begin, begin))
            if (at > 0 and known[at - 1][1] > begin) or (at < len(known) and known[at][0] < end):
                return False
        for storage, begin, end in extents:
            bisect.insort(self._ranges.setdefault(storage, []), (begin, end))
        return True


def _extents(tensor: Any) -> Iterator[tuple[tuple[torch.device, int], int, int]]:
    """List the storages of a tensor on this rank, and from which byte to which it reaches in each."""
    for _, local in local_boxes(tensor):
        if local.layout is not torch.strided or local.is_meta or local.numel() == 0:
            continue
        try:
            storage = local.device, local.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # of a wrapper around other tensors
            continue
        size = local.element_size()
        last = sum((n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True))
        begin = int(local.storage_offset()) * size
        yield storage, begin, begin + (int(last) + 1) * size


def _is_expanded(tensor: Any) -> bool:
    """Tell whether one element of memory stands for several."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, ShardedTensor | DTensor):
        return False
    if tensor.layout is not torch.strided:
        return False
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _same_bits(some: Any, other: Any) -> bool:
    pairs = zip(local_boxes(some), local_boxes(other), strict=True)
    return all(torch.equal(_bytes_of(one), _bytes_of(two)) for (_, one), (_, two) in pairs)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _infinite(tensor: Any) -> list[torch.Tensor | None]:
    """Return where a tensor is infinite, for each of its boxes; None if nowhere."""
    found = [torch.isinf(local) for _, local in local_boxes(tensor)]
    return [each if bool(each.any()) else None for each in found]


def _check_finite(live: Any, before: Sequence[torch.Tensor | None], name: str) -> None:
    """Refuse values that a cast has made infinite; a mask that was infinite before the load is so by itself."""
    for now, known in zip(_infinite(live), before, strict=True):
        if now is not None and (known is None or bool((now & ~known).any())):
            raise LoadFailed(
                f"{name!r} is infinite as bfloat16, in the checkpoint it is float32; allow_casts=True of LoadOptions "
                "loads it all the same"
            )


def _is_same_kind(live: Any, value: StoredValue, like: Any) -> bool:
    """Tell whether a live tensor can be filled as it is: of this shape and dtype, sharded as `like`."""
    if not isinstance(live, torch.Tensor) or live.is_meta or live.requires_grad:
        return False
    if tuple(live.size()) != value.shape or live.dtype != value.dtype or live.layout is not torch.strided:
        return False
    if type(live) not in (torch.Tensor, torch.nn.Parameter, DTensor) or _is_expanded(live):
        return False  # its class may pack the elements, or one element stands for several
    return not isinstance(like, DTensor) or tuple(like.size()) != value.shape or isinstance(live, DTensor)


def empty_like(tensor: Any, dtype: Any) -> Any:
    """Make a tensor with the shape, sharding and device of another one."""
    if isinstance(tensor, ShardedTensor):
        return sharded_tensor_like(tensor, dtype)
    with torch.no_grad():
        made = torch.empty_like(tensor.detach(), dtype=dtype, requires_grad=False)
    if loses_geometry(tensor):
        with_chunks_of(tensor, made)
    return made


def local_boxes(tensor: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """List what this rank holds of a tensor: offsets in the whole, and elements."""
    if isinstance(tensor, ShardedTensor):
        return [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in tensor.local_shards()]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        chunks = create_chunk_list(tensor)
        whole: Any = tensor
        if len(chunks) == 1:
            return [(tuple(chunks[0].offsets), local_tensor(tensor))]
        return [
            (tuple(chunk.offsets), whole.__get_tensor_shard__(MetadataIndex("", chunk.offsets)))
            for chunk in chunks
        ]
    with torch.no_grad():
        return [((0,) * tensor.dim(), tensor.detach())]


@functools.cache
def changes_values(stored: torch.dtype, live: torch.dtype) -> bool:
    """Tell whether a cast may change values beyond rounding. One that torch lacks is refused by the load."""
    if stored == live:
        return False
    if stored.is_complex or live.is_complex:
        return stored.is_complex and not (live.is_complex and live.itemsize >= stored.itemsize)
    if not can_cast(stored, live):
        return False
    if live.is_floating_point:
        if not stored.is_floating_point:
            return live.itemsize == 1 or (
                live is torch.float16 and stored not in (torch.bool, torch.uint8, torch.int8)
            )
        return torch.finfo(live).max < torch.finfo(stored).max
    if stored.is_floating_point:
        return True
    if stored is torch.bool:
        return False
    if live is torch.bool:
        return True
    try:
        low, high = torch.iinfo(live).min, torch.iinfo(live).max
        return low > torch.iinfo(stored).min or high < torch.iinfo(stored).max
    except TypeError:  # quantized
        return True


def fits(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a cast changes values by no more than rounding."""
    if values.numel() == 0:
        return True
    if values.is_complex() and not dtype.is_complex:
        return bool((values.imag == 0).all()) and fits(values.real, dtype)
    cast = values.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return bool(
            (torch.isfinite(cast.float() if dtype.itemsize == 1 else cast) | ~torch.isfinite(values)).all()
        )
    if values.is_floating_point():
        if not bool(torch.isfinite(values).all()):
            return False
        return bool((cast.to(torch.float64) == values.to(torch.float64)).all())
    return bool((cast.to(values.dtype) == values).all())


def shortened(names: Collection[str]) -> str:
    """List names, twenty at most."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} key(s): {', '.join(map(printable, [*names][:_SHOWN]))}{more}"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
