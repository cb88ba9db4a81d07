"""Compute a random order of any number of items, item by item, without memory for it."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_ROUNDS = 4


class Permutation:
    """Shuffle `range(size)`, the same everywhere for the same `key`.

    Multiplying by an odd number, adding, and folding the high bits into the low ones each map the
    numbers below a power of two one to one. A number that falls outside of `range(size)` is mapped
    again until it does not: less than twice on average.
    """

    def __init__(self, size: int, *key: int | str | None) -> None:
        self._size = size
        bits = max(1, (size - 1).bit_length())
        self._mask, self._fold = (1 << bits) - 1, (bits + 1) // 2
        drawn = hashlib.blake2b(repr(key).encode(), digest_size=16 * _ROUNDS).digest()
        words = [int.from_bytes(drawn[at : at + 8], "little") for at in range(0, len(drawn), 8)]
        self._rounds = [(words[at] | 1, words[at + 1]) for at in range(0, len(words), 2)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        """Return the number at `place`. Raises IndexError beyond the end."""
        if not 0 <= place < self._size:
            raise IndexError(place)
        while True:
            for factor, addend in self._rounds:
                place = (place * factor + addend) & self._mask
                place ^= place >> self._fold
            if place < self._size:
                return place

    def many(self, places: Numbers) -> Numbers:
        """Return the numbers at many places, all of them below the size."""
        numbers = places.astype(np.uint64)
        outside = np.arange(len(numbers))
        while len(outside):
            numbers[outside] = self._mapped(numbers[outside])
            outside = outside[numbers[outside] >= self._size]
        return numbers.astype(np.int64)

    def _mapped(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        mask = np.uint64(self._mask)
        fold = np.uint64(self._fold)
        for factor, addend in self._rounds:
            numbers = (numbers * np.uint64(factor) + np.uint64(addend)) & mask
            numbers ^= numbers >> fold
        return numbers
