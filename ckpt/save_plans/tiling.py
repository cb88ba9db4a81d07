"""Prove, for any number of chunks at once, that they fill a tensor, each element once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from ckpt.format.columns import Integers

_MAX_CORNERS = 1 << 26


def tiles(offsets: Integers, sizes: Integers, shape: Sequence[int]) -> bool:
    """Tell whether boxes, one a row, fill an array of `shape`, each element once; also False if it takes too much.

    Boxes without elements do not matter, as long as they lie inside.
    """
    limits = np.array(shape, dtype=np.int64)
    if not bool(((offsets >= 0) & (sizes >= 0) & (sizes <= limits - offsets)).all()):
        return False
    has_elements = (sizes > 0).all(axis=1)
    if not has_elements.all():
        offsets, sizes = offsets[has_elements], sizes[has_elements]
    if 0 in shape or not len(shape):
        return len(offsets) == (0 if 0 in shape else 1)
    if not len(offsets):
        return False
    divided = np.flatnonzero(((offsets != 0) | (sizes != limits)).any(axis=0)).tolist()
    if not divided:
        return len(offsets) == 1
    begins, ends = offsets[:, divided], offsets[:, divided] + sizes[:, divided]
    extent = [shape[dimension] for dimension in divided]
    return (
        _follow(begins[:, 0], ends[:, 0], extent[0]) if len(divided) == 1 else _add_up(begins, ends, extent)
    )


def _follow(begins: Integers, ends: Integers, extent: int) -> bool:
    """Tell whether intervals follow one another from 0 to `extent`."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    return bool(begins[0] == 0 and ends[-1] == extent and (begins[1:] == ends[:-1]).all())


def _add_up(begins: Integers, ends: Integers, extent: Sequence[int]) -> bool:
    """Tell whether boxes have the corners of the whole, counted with a sign (`transfer.boxes.tiled_box`)."""
    count, dimensions = begins.shape
    steps = [size + 1 for size in extent]
    if count << dimensions > _MAX_CORNERS or math.prod(steps) >= 1 << 62:
        return False
    whole = np.zeros((1, dimensions), dtype=np.int64), np.array([extent], dtype=np.int64)
    corners, signs = [], []
    for (begin, end), weight in (((begins, ends), 1), (whole, -1)):
        for sides in itertools.product((0, 1), repeat=dimensions):
            corner = np.where(np.array(sides, dtype=bool), end, begin)
            corners.append(np.ravel_multi_index(tuple(corner.T), steps))
            signs.append(np.full(len(corner), weight * (-1) ** sum(sides), dtype=np.int64))
    place, sign = np.concatenate(corners), np.concatenate(signs)
    order = np.argsort(place, kind="stable")
    place, sign = place[order], sign[order]
    first = np.flatnonzero(np.r_[True, place[1:] != place[:-1]])
    return not np.add.reduceat(sign, first).any()


def chunks_tile(chunks: Sequence[ChunkStorageMetadata], shape: Sequence[int]) -> bool:
    """Tell it of chunks as DCP has them."""
    if len(chunks) == 1:
        chunk = chunks[0]
        return tuple(chunk.sizes) == tuple(shape) and not any(chunk.offsets)
    offsets = np.array([chunk.offsets for chunk in chunks], dtype=np.int64).reshape(len(chunks), -1)
    sizes = np.array([chunk.sizes for chunk in chunks], dtype=np.int64).reshape(len(chunks), -1)
    if offsets.shape[1] != len(shape) or sizes.shape != offsets.shape:
        return False
    return tiles(offsets, sizes, shape)
