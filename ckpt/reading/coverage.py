"""Whether a load plan fills everything that it is meant to fill.

DCP's planner plans a read wherever a destination and a stored chunk overlap. Where the metadata lack a chunk
it plans nothing, and the destination would silently keep what it held before the load.
"""

from __future__ import annotations

import array
import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from ckpt.errors import FormatError

__all__ = ["Box", "check_coverage", "filled_boxes", "tiled_box", "tiling_fault"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a region begins and where it ends (exclusive), dimension by dimension."""

_MAX_CORNERS = 1 << 24
_MAX_CELLS = 1 << 18


def filled_boxes(items: Iterable[ReadItem]) -> dict[MetadataIndex, Box | None]:
    """For each destination of a plan, the box of it that its reads fill, each element once; None if there is none."""
    boxes: dict[MetadataIndex, list[Box]] = defaultdict(list)
    for item in items:
        if item.type != LoadItemType.BYTE_IO:
            begin = tuple(item.dest_offsets)
            end = tuple(o + n for o, n in zip(begin, item.lengths, strict=True))
            boxes[item.dest_index].append((begin, end))
    return {index: tiled_box(found) for index, found in boxes.items()}


def check_coverage(
    planner: LoadPlanner, metadata: Metadata, filled: Mapping[MetadataIndex, Box | None], *, url: str
) -> None:
    """See that every destination of DCP's own planner is filled whole, each element by one read.

    A planner that makes another plan than DCP's knows itself what it leaves out.

    Raises:
        FormatError: the checkpoint lacks a part of a tensor, or has it twice.
    """
    for index, sizes in _destinations(planner, metadata):
        if 0 in sizes or filled.get(index) == ((0,) * len(sizes), sizes):
            continue
        what = "holds no chunk" if index not in filled else "has no chunks that together make up the part"
        raise FormatError(
            f"the checkpoint {what} of {index.fqn!r} at {tuple(index.offset or ())} of size {sizes}", url=url
        )


def tiled_box(boxes: Sequence[Box]) -> Box | None:
    """The box that `boxes` fill without gap or overlap; None if they do not, or if it would take too long to tell.

    A sum of boxes is one box exactly when both have the same corners, counted with a sign for each
    dimension's begin and end. That takes one look at each box, however many there are.
    """
    if len(boxes) == 1:
        return boxes[0]
    begin = tuple(min(starts) for starts in zip(*(box[0] for box in boxes), strict=True))
    end = tuple(max(stops) for stops in zip(*(box[1] for box in boxes), strict=True))
    # Dimensions that every box spans whole have no say.
    divided = [d for d in range(len(begin)) if any((b[d], e[d]) != (begin[d], end[d]) for b, e in boxes)]
    if len(boxes) << len(divided) > _MAX_CORNERS:
        return None
    # As bytes: the hashes of tuples of numbers are no secret.
    corners: dict[bytes, int] = defaultdict(int)
    for (starts, stops), weight in itertools.chain(((box, 1) for box in boxes), [((begin, end), -1)]):
        for corner in itertools.product(*(((starts[d], 1), (stops[d], -1)) for d in divided)):
            place = array.array("q", [position for position, _ in corner]).tobytes()
            corners[place] += weight * math.prod(sign for _, sign in corner)
    return None if any(corners.values()) else (begin, end)


def tiling_fault(boxes: Sequence[Box], size: Sequence[int]) -> str | None:
    """What keeps `boxes` from filling an array of `size`, each element once, in words; None if they do."""
    begin, end = (0,) * len(size), tuple(size)
    if 0 in size:
        return None
    boxes = [box for box in boxes if all(start < stop for start, stop in zip(*box, strict=True))]
    if not boxes:
        return "nothing of it is stored"
    for starts, stops in boxes:
        if any(stop > limit for stop, limit in zip(stops, size, strict=True)):
            return f"the chunk at {_span((starts, stops))} is not inside of {end}"
    if tiled_box(boxes) == (begin, end):
        return None
    found = _first_fault(boxes, end)
    if found is None:
        return "its chunks leave gaps, or overlap"
    count, box = found
    return f"{_span(box)} is not stored" if count == 0 else f"{_span(box)} is stored {count} times"


def _first_fault(boxes: Sequence[Box], size: tuple[int, ...]) -> tuple[int, Box] | None:
    """A region that is stored never or more than once, and how often; None if it would take too long to find."""
    cuts = [
        sorted({0, size[d], *(box[0][d] for box in boxes), *(box[1][d] for box in boxes)})
        for d in range(len(size))
    ]
    cells = math.prod(len(cut) - 1 for cut in cuts)
    if cells > _MAX_CELLS or len(size) > 32 or cells * len(boxes) > _MAX_CORNERS * 16:
        return None
    counts = np.zeros([len(cut) - 1 for cut in cuts], dtype=np.int64)
    for starts, stops in boxes:
        counts[
            tuple(
                slice(bisect_left(c, a), bisect_left(c, b))
                for c, a, b in zip(cuts, starts, stops, strict=True)
            )
        ] += 1
    wrong = np.argwhere(counts != 1)
    if not len(wrong):
        return None
    cell = wrong[0].tolist()
    box = (
        tuple(c[i] for c, i in zip(cuts, cell, strict=True)),
        tuple(c[i + 1] for c, i in zip(cuts, cell, strict=True)),
    )
    return int(counts[tuple(cell)]), box


def _span(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(*box, strict=True))}]"


def _destinations(
    planner: LoadPlanner, metadata: Metadata
) -> Iterator[tuple[MetadataIndex, tuple[int, ...]]]:
    """What DCP's own planner has to fill on this rank: every chunk and its size."""
    if not isinstance(planner, DefaultLoadPlanner) or any(
        getattr(type(planner), name) is not getattr(DefaultLoadPlanner, name) for name in _PLANNING
    ):
        return
    for fqn, value in getattr(planner, "state_dict", {}).items():  # there once `set_up_planner` has run
        stored = metadata.state_dict_metadata.get(fqn)
        if not isinstance(stored, TensorStorageMetadata):
            continue
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            continue  # this rank has no part in it
        for chunk in _create_chunk_list(value):
            yield MetadataIndex(fqn, chunk.offsets), tuple(chunk.sizes)


_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan")
