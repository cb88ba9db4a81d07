"""Compress columns of integers: first the lowest byte of each, then the next of each, and so on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ckpt.errors import FormatError
from ckpt.format.columns import Integers

_LEVEL = 1


def compressed(values: Sequence[Integers | int]) -> bytes:
    """Compress integers of 64 bits, array after array."""
    parts = [np.asarray(value, dtype="<i8").reshape(-1) for value in values]
    column = np.concatenate(parts) if parts else np.empty(0, dtype="<i8")
    return zlib.compress(column.view(np.uint8).reshape(-1, 8).T.tobytes(), _LEVEL)


def expanded(data: bytes, count: int) -> Integers:
    """Expand `count` integers in no more memory than they need. Raises FormatError, zlib.error."""
    unpacker = zlib.decompressobj()
    planes = unpacker.decompress(data, 8 * count + 1)
    if len(planes) != 8 * count or not unpacker.eof:
        raise FormatError("a column of another length than its entries")
    rows = np.frombuffer(planes, dtype=np.uint8).reshape(8, count).T.copy()
    column: Integers = rows.view("<i8").reshape(count).astype(np.int64, copy=False)
    return column
