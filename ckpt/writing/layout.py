"""Lay out a rank's files: frame items, spread them over files, give each its place.

The plan gives all sizes, so files are laid out before any tensor's bytes are touched.
"""

from __future__ import annotations

import heapq
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from ckpt.errors import CheckpointError
from ckpt.stock.item_frame import frame
from ckpt.transfer.file_body import ALIGNMENT_BYTES, BytesPayload, FileItem, Payload, TensorPayload
from ckpt.transfer.tensor_memory import plain

MAX_FILE_BYTES = 128 << 30
"""Beyond it a rank begins another file, so that multipart parts stay small."""

SMALL_ITEM_BYTES = 64 << 10
MIN_FILE_BYTES = 32 << 20
"""Below it one more file costs more than it gains."""


@dataclass(frozen=True)
class Entry:
    """An item of the plan, framed; `is_plain`: the payload is dense row-major bytes."""

    index: MetadataIndex
    head: bytes
    payload: Payload
    tail: bytes
    is_plain: bool

    @property
    def length(self) -> int:
        return len(self.head) + self.payload.nbytes + len(self.tail)


def refuse_layouts(items: Iterable[WriteItem]) -> None:
    """DCP plans sparse tensors like dense ones, writes them, and then cannot load them.

    Raises:
        CheckpointError: there is one.
    """
    for item in items:
        layout = item.tensor_data.properties.layout if item.tensor_data is not None else torch.strided
        if layout is not torch.strided:
            raise CheckpointError(
                f"{item.index.fqn!r} has the layout {layout}, which could not be loaded again; "
                "save it dense, or its parts as tensors of their own"
            )


def tensor_entries(items: Iterable[WriteItem], planner: SavePlanner) -> tuple[list[Entry], list[WriteItem]]:
    """Frame the plain tensors of a plan; return them, and the items that have to be pickled.

    Each is looked at once now and asked for again when its bytes are due.

    Raises:
        CheckpointError: the planner failed, or gave another tensor than it planned.
    """
    entries: list[Entry] = []
    others: list[WriteItem] = []
    for item in items:
        tensor = _plain(_resolve_tensor(planner, item), item)
        if tensor is None:
            others.append(item)
            continue
        try:
            framed = frame(tensor.dtype, tensor.shape)
        except TypeError as error:
            raise CheckpointError(f"{item.index.fqn!r}: {error}") from error
        payload = _payload(planner, item, framed.payload_bytes)
        entries.append(Entry(item.index, framed.head, payload, framed.tail, True))
    return entries, others


def pickled_entries(items: Iterable[WriteItem], planner: SavePlanner) -> Iterator[Entry]:
    """Pickle, one at a time, tensors that are not plain (quantized, subclasses with a dispatch).

    Raises:
        CheckpointError: the planner failed, or torch cannot save one.
    """
    for item in items:
        data = _pickled(_resolve_tensor(planner, item), item)
        yield Entry(item.index, b"", BytesPayload(data), b"", False)


def object_entries(items: Iterable[WriteItem], planner: SavePlanner) -> Iterator[Entry]:
    """Let the planner pickle the non-tensor objects of a plan, one at a time.

    Raises:
        CheckpointError: the planner failed.
    """
    for item in items:
        data = _resolve(planner, item)
        if not isinstance(data, io.BytesIO):
            raise CheckpointError(
                f"the planner planned bytes for {item.index.fqn!r} but returned a {type(data).__name__}"
            )
        yield Entry(item.index, b"", BytesPayload(data.getbuffer()), b"", False)


def spread(entries: Sequence[Entry], files: int) -> list[list[Entry]]:
    """Spread entries over at most `files` files of about one size (more if one got too large).

    Within a file the plan's order is kept. Small items are more work for Python than for the disk,
    and threads
    only slow each other down with them: they count for no more files.
    """
    lengths = [entry.length for entry in entries]
    large = sum(length for length in lengths if length >= SMALL_ITEM_BYTES)
    files = max(min(files, large // MIN_FILE_BYTES), math.ceil(sum(lengths) / MAX_FILE_BYTES), 1)
    if files == 1:
        return [list(entries)] if entries else []
    packed = pack(lengths, files)
    return [[entries[number] for number in numbers] for numbers in packed if numbers]


def pack(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Pack items into bins of about the same size: the largest first, each into the smallest bin.

    Returns the numbers of the items in each bin, in order.
    """
    filled = [(0, number) for number in range(bins)]
    packed: list[list[int]] = [[] for _ in range(bins)]
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
        tensor = _plain(_resolve_tensor(planner, item), item)
        if tensor is None or tensor.numel() * tensor.element_size() != nbytes:
            raise CheckpointError(
                f"the planner returned {item.index.fqn!r} with another shape or dtype than before"
            )
        return tensor

    return TensorPayload(resolve, nbytes)


def _resolve(planner: SavePlanner, item: WriteItem) -> object:
    try:
        return planner.resolve_data(item)
    except Exception as error:
        raise CheckpointError(
            f"the planner failed on {item.index.fqn!r}: {type(error).__name__}: {error}"
        ) from error


def _resolve_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """Get the tensor of an item and check it against the plan, which the metadata is made of."""
    tensor = _resolve(planner, item)
    fqn = item.index.fqn
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None or not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"the planner planned a tensor for {fqn!r} but returned a {type(tensor).__name__}"
        )
    planned = (item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
    if (tensor.dtype, tensor.shape) != planned:
        raise CheckpointError(
            f"{fqn!r} was planned as {planned[0]} {tuple(planned[1])} but is {tensor.dtype} {tuple(tensor.shape)}; "
            "a planner with enable_plan_caching does not notice that a dtype changed: turn it off or use a new planner"
        )
    if tensor.device.type == "meta":
        raise CheckpointError(f"{fqn!r} is on the meta device and has no values to save")
    return tensor


def _plain(tensor: torch.Tensor, item: WriteItem) -> torch.Tensor | None:
    try:
        return plain(tensor)
    except ValueError as error:
        raise CheckpointError(f"{item.index.fqn!r} cannot be saved: {error}") from error


def _pickled(tensor: torch.Tensor, item: WriteItem) -> memoryview:
    """Pickle a tensor that is not plain, as stock PyTorch would save it."""
    buffer = io.BytesIO()
    try:
        torch.save(tensor.detach().cpu().clone(), buffer)
    except Exception as error:
        raise CheckpointError(
            f"{item.index.fqn!r}, a {type(tensor).__name__} of {tensor.dtype} and {tensor.layout}, cannot be saved: "
            f"{type(error).__name__}: {error}"
        ) from error
    return buffer.getbuffer()
