"""Hold a checkpoint's metadata as integer columns, at a tenth of the size and cost of DCP's `Metadata`.

DCP keeps an object per chunk and two per stored item: millions at a thousand ranks, and making them
takes longer than moving the tensors of a rank. `dcp_view` makes those that DCP's planners look at.
"""

from __future__ import annotations

import array
import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import FormatError

Integers = npt.NDArray[np.int64]

_LEVEL = 1


@dataclass(frozen=True, eq=False)
class TensorColumns:
    """A tensor and its stored chunks.

    Attributes:
        dtype, size, requires_grad: of the whole tensor; the dtype by its name, `float32`.
        offsets, sizes: of each chunk, shape (chunks, dimensions).
        file: index of the file of each chunk.
        offset, length: of each chunk's item in its file, in bytes.
    """

    dtype: str
    size: tuple[int, ...]
    requires_grad: bool
    offsets: Integers
    sizes: Integers
    file: Integers
    offset: Integers
    length: Integers

    @property
    def count(self) -> int:
        """Number of its chunks."""
        return len(self.file)

    def offsets_at(self, row: int) -> list[int]:
        """Return the offsets of a chunk."""
        offsets: list[int] = self.offsets[row].tolist()
        return offsets

    def sizes_at(self, row: int) -> list[int]:
        """Return the sizes of a chunk."""
        sizes: list[int] = self.sizes[row].tolist()
        return sizes

    def box(self, row: int) -> tuple[list[int], list[int]]:
        """Return the offsets and the sizes of a chunk."""
        return self.offsets_at(row), self.sizes_at(row)

    def place(self, row: int) -> tuple[int, int, int]:
        """Return the file, the offset and the length of a chunk's item."""
        return int(self.file[row]), int(self.offset[row]), int(self.length[row])

    def plain(self) -> TensorColumns:
        """Return the same with arrays that are not made anew at each access."""
        return self

    def renumbered(self, numbers: Integers, requires_grad: bool) -> TensorColumns:
        """Return the tensor with `numbers[file]` in the place of each file."""
        return dataclasses.replace(self, file=numbers[self.file], requires_grad=requires_grad)

    def row_of(self, offset: Sequence[int] | None, hint: int | None) -> int:
        """Find the row of the chunk at `offset`. Raises KeyError."""
        if offset is None or len(offset) != len(self.size):
            raise KeyError(offset)
        if hint is not None and 0 <= hint < self.count and self.offsets_at(hint) == list(offset):
            return hint
        rows = np.flatnonzero((self.offsets == np.array(offset, dtype=np.int64)).all(axis=1))
        if not len(rows):
            raise KeyError(offset)
        return int(rows[0])


@dataclass(frozen=True)
class ObjectRow:
    """A stored item that is not a tensor: index of its file, and its offset and length there in bytes."""

    file: int
    offset: int
    length: int


@dataclass(eq=False)
class Columns:
    """All tensors and objects of a checkpoint, by FQN in DCP's order, and the files they are in."""

    files: list[str] = field(default_factory=list)
    entries: dict[str, TensorColumns | ObjectRow] = field(default_factory=dict)
    planner_data: Any = None
    save_id: str | None = None
    version: str | None = None
    encoded: bytes | None = field(default=None, init=False, repr=False)
    """The index of just these columns, where it is known."""


def packed(offsets: Sequence[int]) -> bytes:
    """Make a dict key of offsets: an attacker who knows the hashes of numbers can make a dict slow."""
    return array.array("q", offsets).tobytes()


def compressed(values: Sequence[Integers | int]) -> bytes:
    """Compress integers of 64 bits, array after array: the lowest byte of each, then the next of each, and so on."""
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
