"""Cut arrays into boxes, and tell whether boxes fill an array, each element once."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ckpt.format.columns import TensorColumns, packed

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a region begins and where it ends (exclusive), dimension by dimension."""

Slices = tuple[slice, ...]
"""One slice per dimension."""

_MAX_CORNERS = 1 << 24
_MAX_CELLS = 1 << 18


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Count the elements from the first to the last of an array, with the gaps between."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def tiled_box(boxes: Sequence[Box]) -> Box | None:
    """Find the box that `boxes` fill without gap or overlap; None if there is none, or it takes too long to tell.

    A sum of boxes is one box exactly when both have the same corners, counted with a sign for each
    dimension's begin and end. That takes one look at each box, however many there are.
    """
    if len(boxes) == 1:
        return boxes[0]
    begin = tuple(min(starts) for starts in zip(*(box[0] for box in boxes), strict=True))
    end = tuple(max(stops) for stops in zip(*(box[1] for box in boxes), strict=True))
    # Dimensions that every box spans whole do not matter.
    divided = [d for d in range(len(begin)) if any((b[d], e[d]) != (begin[d], end[d]) for b, e in boxes)]
    if len(boxes) << len(divided) > _MAX_CORNERS:
        return None
    corners: dict[bytes, int] = defaultdict(int)
    for (starts, stops), weight in itertools.chain(((box, 1) for box in boxes), [((begin, end), -1)]):
        for corner in itertools.product(*(((starts[d], 1), (stops[d], -1)) for d in divided)):
            corners[packed([position for position, _ in corner])] += weight * math.prod(
                sign for _, sign in corner
            )
    return None if any(corners.values()) else (begin, end)


def tiling_fault(boxes: Sequence[Box], size: Sequence[int]) -> str | None:
    """Say in words why `boxes` do not fill an array of `size`, each element once; None if they do."""
    end = tuple(size)
    if 0 in size:
        return None
    boxes = [box for box in boxes if all(start < stop for start, stop in zip(*box, strict=True))]
    if not boxes:
        return "nothing of it is stored"
    for starts, stops in boxes:
        if any(stop > limit for stop, limit in zip(stops, size, strict=True)):
            return f"the chunk at {_shown((starts, stops))} is not inside of {end}"
    return None if tiled_box(boxes) == ((0,) * len(size), end) else _first_fault(boxes, end)


def _first_fault(boxes: Sequence[Box], size: tuple[int, ...]) -> str | None:
    """Name a region that is not stored once; None if there is none."""
    cuts = [
        sorted({0, size[d], *(box[0][d] for box in boxes), *(box[1][d] for box in boxes)})
        for d in range(len(size))
    ]
    cells = math.prod(len(cut) - 1 for cut in cuts)
    if cells > _MAX_CELLS or len(size) > 32 or cells * len(boxes) > _MAX_CORNERS * 16:
        return "its chunks leave gaps, or overlap"
    counts = np.zeros([len(cut) - 1 for cut in cuts], dtype=np.int64)
    for starts, stops in boxes:
        ranges = zip(cuts, starts, stops, strict=True)
        counts[tuple(slice(bisect_left(cut, a), bisect_left(cut, b)) for cut, a, b in ranges)] += 1
    wrong = np.argwhere(counts != 1)
    if not len(wrong):
        return None
    cell = tuple(wrong[0].tolist())
    begin = tuple(cut[i] for cut, i in zip(cuts, cell, strict=True))
    end = tuple(cut[i + 1] for cut, i in zip(cuts, cell, strict=True))
    how = f"stored {counts[cell]} times" if counts[cell] else "not stored"
    return f"{_shown((begin, end))} is {how}"


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(*box, strict=True))}]"


def split_box(begin: Sequence[int], end: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Cut the box from `begin` to `end` into boxes of at most `max_elements`, in row-major order."""
    lengths = [stop - start for start, stop in zip(begin, end, strict=True)]
    if math.prod(lengths) <= max_elements:
        if 0 not in lengths:
            yield tuple(begin), tuple(end)
        return
    dimension = next(d for d, length in enumerate(lengths) if length > 1)
    row = math.prod(lengths[dimension + 1 :])
    step = max(1, max_elements // row)
    for start in range(begin[dimension], end[dimension], step):
        stop = min(start + step, end[dimension])
        first = [*begin[:dimension], start, *begin[dimension + 1 :]]
        last = [*end[:dimension], stop, *end[dimension + 1 :]]
        yield from split_box(first, last, max_elements)


def boxes_of(
    entry: TensorColumns, begin: Sequence[int], end: Sequence[int], max_elements: int
) -> Iterator[Box]:
    """Cut a region as it is stored, chunk by chunk, into boxes of at most `max_elements`."""
    offsets = entry.offsets
    first = np.maximum(offsets, np.array(begin, dtype=np.int64))
    last = np.minimum(offsets + entry.sizes, np.array(end, dtype=np.int64))
    for row in np.flatnonzero((first < last).all(axis=1)).tolist():
        yield from split_box(first[row].tolist(), last[row].tolist(), max_elements)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Slices]:
    """List the boxes that hold elements `[start, stop)` of a row-major array of `shape`, in that order.

    At most two per dimension, so a copy box by box is a handful of strided copies.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    row, skipped = divmod(start, inner)
    last_row, taken = divmod(stop, inner)
    if row == last_row:
        yield from ((slice(row, row + 1), *box) for box in flat_boxes(shape[1:], skipped, taken))
        return
    if skipped:
        yield from ((slice(row, row + 1), *box) for box in flat_boxes(shape[1:], skipped, inner))
        row += 1
    if row < last_row:
        yield (slice(row, last_row), *(slice(0, size) for size in shape[1:]))
    yield from ((slice(last_row, last_row + 1), *box) for box in flat_boxes(shape[1:], 0, taken))
