"""Know how each rank has laid out its files: what many have in common once."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.format.columns import Integers

_COLUMNS = 4
_LEVEL = 1


@dataclass(frozen=True)
class PlacedItems:
    """Where a rank has put its items: numbers of the items, which are sorted, and of files, offsets and lengths."""

    item: Integers
    file: Integers
    offset: Integers
    length: Integers


def pack_placed(rows: Iterable[tuple[int, int, int, int]]) -> bytes:
    """Pack numbers of items, their files, offsets and lengths."""
    table = np.array(sorted(rows), dtype="<i8").reshape(-1, _COLUMNS).T
    planes = np.ascontiguousarray(table).view(np.uint8).reshape(-1, 8).T
    return zlib.compress(planes.tobytes(), _LEVEL)


def unpack_placed(packed: bytes) -> PlacedItems:
    planes = np.frombuffer(zlib.decompress(packed), dtype=np.uint8).reshape(8, -1)
    table = np.ascontiguousarray(planes.T).view("<i8").reshape(_COLUMNS, -1).astype(np.int64, copy=False)
    return PlacedItems(*table)


class FileLayouts:
    """The layouts of all ranks.

    Attributes:
        number: of each rank's layout.
        first_file: of each rank, the number of its first file among those of all.
        placed: of each layout, where it puts items.
    """

    def __init__(self, packed: Sequence[bytes], files: Sequence[int]) -> None:
        """`packed` by `pack_placed`, and how many files there are, of each rank."""
        numbers: dict[bytes, int] = {}
        of_rank = [numbers.setdefault(each, len(numbers)) for each in packed]
        self.number = np.array(of_rank, dtype=np.int64)
        self.first_file = np.cumsum([0, *files[:-1]])
        self.placed = [unpack_placed(each) for each in numbers]
        self._width = 1 + max((int(each.item[-1]) for each in self.placed if len(each.item)), default=0)
        keys = [number * self._width + each.item for number, each in enumerate(self.placed)]
        self._keys = np.concatenate(keys)
        self.file = np.concatenate([each.file for each in self.placed])
        self.offset = np.concatenate([each.offset for each in self.placed])
        self.length = np.concatenate([each.length for each in self.placed])

    def keys(self, ranks: Integers, number: Integers) -> Integers:
        """Return a key for an item of this number on each of the ranks; the next number has the next key.

        It is the same on ranks whose layouts are.
        """
        keys: Integers = self.number[ranks] * self._width + number
        return keys

    def find(self, keys: Integers) -> Integers:
        """Find items in `file`, `offset` and `length` by keys; each is there."""
        return np.searchsorted(self._keys, keys)
