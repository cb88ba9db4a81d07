"""Check that a load plan fills all of its destinations.

DCP plans a read wherever a destination and a stored chunk overlap. Where the metadata lacks a chunk,
it plans nothing, and the destination would silently keep its values from before the load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from ckpt.errors import FormatError
from ckpt.torch_private import create_chunk_list
from ckpt.transfer.boxes import Box, tiled_box


def box_of(item: ReadItem) -> Box:
    """Return the box of its destination that a read fills."""
    begin = tuple(item.dest_offsets)
    return begin, tuple(o + n for o, n in zip(begin, item.lengths, strict=True))


def filled_boxes(items: Iterable[ReadItem]) -> dict[MetadataIndex, Box | None]:
    """Find the box of each destination that its reads fill, each element once; None if none."""
    boxes: dict[MetadataIndex, list[Box]] = defaultdict(list)
    for item in items:
        if item.type != LoadItemType.BYTE_IO:
            boxes[item.dest_index].append(box_of(item))
    return {index: tiled_box(parts) for index, parts in boxes.items()}


def check_coverage(
    planner: LoadPlanner, metadata: Metadata, filled: Mapping[MetadataIndex, Box | None], *, url: str
) -> None:
    """Check that every destination of DCP's own planner is filled whole, each element by one read.

    Raises FormatError if not. Other planners may leave parts out on purpose, unless their class says `fills_all = True`.
    """
    for index, sizes in _destinations(planner, metadata):
        if 0 in sizes or filled.get(index) == ((0,) * len(sizes), sizes):
            continue
        lack = "holds no chunk" if index not in filled else "has no chunks that together make up the part"
        raise FormatError(
            f"the checkpoint {lack} of {index.fqn!r} at {tuple(index.offset or ())} of size {sizes}", url=url
        )


def _destinations(
    planner: LoadPlanner, metadata: Metadata
) -> Iterator[tuple[MetadataIndex, tuple[int, ...]]]:
    """List the chunks that DCP's own planner has to fill on this rank, and their sizes."""
    if not isinstance(planner, DefaultLoadPlanner) or not all(map(_fills_all, _owners(type(planner)))):
        return
    for fqn, value in getattr(planner, "state_dict", {}).items():  # there once `set_up_planner` has run
        stored = metadata.state_dict_metadata.get(fqn)
        if not isinstance(stored, TensorStorageMetadata):
            continue
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            continue  # this rank has no part in it
        for chunk in create_chunk_list(value):
            yield MetadataIndex(fqn, chunk.offsets), tuple(chunk.sizes)


def _owners(kind: type) -> set[type]:
    """Find the classes of a planner that make its plans."""
    planning = ("create_local_plan", "create_global_plan", "finish_plan")
    return {next(each for each in kind.__mro__ if name in vars(each)) for name in planning}


def _fills_all(kind: type) -> bool:
    return kind is DefaultLoadPlanner or vars(kind).get("fills_all") is True
