"""Lay out a rank's files before the bytes of a tensor are touched: the plan gives all sizes."""

from __future__ import annotations

import heapq
import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from ckpt.errors import CheckpointError
from ckpt.save_plans.unplannable import layout_fault
from ckpt.stock.item_frame import frame
from ckpt.transfer.file_body import ALIGNMENT_BYTES, BytesPayload, FileItem, Payload, TensorPayload
from ckpt.transfer.tensor_memory import plain
from ckpt.writing.tensor_parts import compact

MAX_FILE_BYTES = 128 << 30
"""Beyond it a rank begins another file, so that multipart parts stay small."""

SMALL_ITEM_BYTES = 64 << 10
MIN_FILE_BYTES = 32 << 20
"""Below it one more file costs more than it gains."""


class Look(Protocol):
    """Checks a pickle of an object, or of a tensor, by its name."""

    def __call__(self, fqn: str, pickled: memoryview, *, is_tensor: bool) -> None: ...


Chunk = tuple[str, torch.Size | None]
"""A tensor's name, and the offsets of a chunk of it."""


@dataclass(frozen=True)
class Entry:
    """An item of the plan, framed; `is_plain`: the payload is dense row-major bytes, those of a `dtype`."""

    index: MetadataIndex
    head: bytes
    payload: Payload
    tail: bytes
    is_plain: bool
    dtype: torch.dtype | None = None

    @property
    def length(self) -> int:
        return len(self.head) + self.payload.nbytes + len(self.tail)


def refuse_unstorable(items: Sequence[WriteItem]) -> None:
    """Raise CheckpointError for a name that is not Unicode, and for what DCP plans but cannot load: sparse tensors."""
    names = [item.index.fqn for item in items]
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        name = next(name for name in names if re.search("[\ud800-\udfff]", name))
        raise CheckpointError(f"the name {name!r} cannot be stored: it is not valid Unicode") from None
    for item in items:
        layout = item.tensor_data.properties.layout if item.tensor_data is not None else torch.strided
        if layout is not torch.strided:
            raise CheckpointError(f"{item.index.fqn!r} {layout_fault(layout)}")


def refuse_unstorable_by_dcp(items: Sequence[WriteItem]) -> None:
    """Refuse as `refuse_unstorable`, and dtypes whose size DCP's own planner does not find, such as `torch.bits8`."""
    refuse_unstorable(items)
    unsized: dict[torch.dtype, bool] = {}
    for item in items:
        if item.tensor_data is None:
            continue
        dtype = item.tensor_data.properties.dtype
        if dtype not in unsized:
            unsized[dtype] = _is_unsized(item)
        if unsized[dtype]:
            raise CheckpointError(
                f"{item.index.fqn!r} is {dtype}, which DCP's planner cannot save: save its bytes, as "
                "tensor.view(torch.uint8) shows them"
            )


def _is_unsized(item: WriteItem) -> bool:
    try:
        item.tensor_storage_size()
    except TypeError:
        return True
    return False


def tensor_entries(
    items: Iterable[WriteItem], planner: SavePlanner, known: Collection[Chunk] = ()
) -> tuple[list[Entry], list[WriteItem]]:
    """Frame the plain tensors of a plan; return them, and the items that have to be pickled.

    Each tensor but the `known` plain ones is looked at once now and asked for again when its bytes are due. Raises
    CheckpointError if the planner failed, or gave another tensor than it planned.
    """
    entries: list[Entry] = []
    objects: list[WriteItem] = []
    others: list[WriteItem] = []
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            objects.append(item)
            continue
        is_known = item.tensor_data is not None and (item.index.fqn, item.index.offset) in known
        if not is_known and resolved_tensor(planner, item) is None:
            others.append(item)
            continue
        assert item.tensor_data is not None  # or it was refused
        try:
            framed = frame(item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
        except TypeError as error:
            raise CheckpointError(f"{item.index.fqn!r}: {error}") from error
        payload = _payload(planner, item, framed.payload_bytes)
        dtype = item.tensor_data.properties.dtype
        entries.append(Entry(item.index, framed.head, payload, framed.tail, True, dtype))
    return entries, [*objects, *others]


def pickled_entries(items: Iterable[WriteItem], planner: SavePlanner, look: Look) -> Iterator[Entry]:
    """Pickle items one at a time, and show `look` each with its FQN.

    Raises CheckpointError if the planner or torch failed.
    """
    for item in items:
        is_tensor = item.type != WriteItemType.BYTE_IO
        data = (_pickled_tensor if is_tensor else _pickled_object)(planner, item).getbuffer()
        look(item.index.fqn, data, is_tensor=is_tensor)
        yield Entry(item.index, b"", BytesPayload(data), b"", False)


def spread(entries: Sequence[Entry], files: int) -> list[list[Entry]]:
    """Spread entries over at most `files` files of about one size (more if one got too large).

    Within a file the plan's order is kept, with single numbers last: the steps of an optimizer stand between its
    tensors, which are checked together. Small items are more work for Python than for the disk, and threads only slow
    each other down with them: they count for no more files.
    """
    entries = sorted(
        entries, key=lambda entry: entry.dtype is not None and entry.payload.nbytes <= entry.dtype.itemsize
    )
    lengths = [entry.length for entry in entries]
    large = sum(length for length in lengths if length >= SMALL_ITEM_BYTES)
    files = max(min(files, large // MIN_FILE_BYTES), math.ceil(sum(lengths) / MAX_FILE_BYTES), 1)
    if files == 1:
        return [entries] if entries else []
    packed = pack(lengths, files)
    return [[entries[number] for number in numbers] for numbers in packed if numbers]


def pack(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Return the numbers of the items for each of some bins of about the same size, in order."""
    filled = [(0, number) for number in range(bins)]
    packed: list[list[int]] = [[] for _ in range(bins)]
    # The largest first, each into the smallest bin.
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        size, smallest = filled[0]
        heapq.heapreplace(filled, (size + max(sizes[item], 1), smallest))
        packed[smallest].append(item)
    return [sorted(items) for items in packed]


def place(entries: Iterable[Entry]) -> list[FileItem]:
    """Lay entries end to end, each aligned."""
    items: list[FileItem] = []
    end = 0
    for entry in entries:
        end += -end % ALIGNMENT_BYTES
        items.append(FileItem(end, entry.head, entry.payload, entry.tail))
        end += entry.length
    return items


def _payload(planner: SavePlanner, item: WriteItem, nbytes: int) -> TensorPayload:
    def resolve() -> torch.Tensor:
        tensor = resolved_tensor(planner, item)
        if tensor is None or tensor.numel() * tensor.element_size() != nbytes:
            raise CheckpointError(
                f"the planner returned {item.index.fqn!r} with another shape or dtype than before"
            )
        return tensor

    return TensorPayload(resolve, nbytes, item.index.fqn)


def _resolve(planner: SavePlanner, item: WriteItem) -> object:
    try:
        return planner.resolve_data(item)
    except Exception as error:
        raise CheckpointError(
            f"the planner failed on {item.index.fqn!r}: {type(error).__name__}: {error}"
        ) from error


def _resolve_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """Get the tensor of an item, and check it against the plan, of which the metadata is made."""
    tensor = _resolve(planner, item)
    fqn = item.index.fqn
    if item.tensor_data is None or not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"the planner planned a tensor for {fqn!r} but returned a {type(tensor).__name__}"
        )
    planned = (item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
    if (tensor.dtype, tensor.shape) != planned:
        advice = (
            "a planner with enable_plan_caching does not notice that a dtype changed, and all planners of its class "
            "share the plan: turn it off"
        )
        if tensor.dtype == planned[0]:
            advice = "the local tensor of a DTensor must have the size that its placements give it"
        text = f"{fqn!r} was planned as {planned[0]} {tuple(planned[1])} but is {tensor.dtype} {tuple(tensor.shape)}"
        raise CheckpointError(f"{text}; {advice}")
    if tensor.device.type == "meta":
        raise CheckpointError(f"{fqn!r} is on the meta device and has no values to save")
    return tensor


def resolved_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor | None:
    """Get the plain tensor of an item; None if it can only be pickled. Raises CheckpointError."""
    try:
        return plain(_resolve_tensor(planner, item))
    except ValueError as error:
        raise CheckpointError(f"{item.index.fqn!r} cannot be saved: {error}") from error


def _pickled_object(planner: SavePlanner, item: WriteItem) -> io.BytesIO:
    data = _resolve(planner, item)
    if not isinstance(data, io.BytesIO):
        raise CheckpointError(
            f"the planner planned bytes for {item.index.fqn!r} but returned a {type(data).__name__}"
        )
    return data


def _pickled_tensor(planner: SavePlanner, item: WriteItem) -> io.BytesIO:
    """Pickle a quantized tensor, or a subclass with a dispatch, as stock PyTorch would save it."""
    tensor = _resolve_tensor(planner, item)
    buffer = io.BytesIO()
    try:
        torch.save(compact(tensor.detach()), buffer)
    except Exception as error:
        raise CheckpointError(
            f"{item.index.fqn!r}, a {type(tensor).__name__} of {tensor.dtype} and {tensor.layout}, cannot be saved: "
            f"{type(error).__name__}: {error}"
        ) from error
    return buffer
