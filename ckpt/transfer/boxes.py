"""Cut arrays into boxes, and tell whether boxes fill an array, each element once."""

from __future__ import annotations

import array
import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ckpt.format.columns import TensorColumns

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a region begins and where it ends (exclusive), dimension by dimension."""


Slices = tuple[slice, ...]
"""One slice per dimension."""

_MAX_CORNERS = 1 << 24
_MAX_CELLS = 1 << 18


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


def split_box(begin: Sequence[int], end: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Boxes of at most `max_elements` that make up the box from `begin` to `end`, in row-major order."""
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
        yield from split_box(
            [*begin[:dimension], start, *begin[dimension + 1 :]],
            [*end[:dimension], stop, *end[dimension + 1 :]],
            max_elements,
        )


def boxes_of(
    entry: TensorColumns, begin: Sequence[int], end: Sequence[int], max_elements: int
) -> Iterator[Box]:
    """A region cut as it is stored, chunk by chunk, into boxes of at most `max_elements`."""
    first = np.maximum(entry.offsets, np.array(begin, dtype=np.int64))
    last = np.minimum(entry.offsets + entry.sizes, np.array(end, dtype=np.int64))
    for row in np.flatnonzero((first < last).all(axis=1)).tolist():
        yield from split_box(first[row].tolist(), last[row].tolist(), max_elements)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Slices]:
    """The boxes that hold elements `[start, stop)` of a row-major array of `shape`, in that order.

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
