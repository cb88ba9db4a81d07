"""Copy windows of the tensors of a file on their way, and look for what is not finite when there are enough of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ckpt.consistency.checksums import BLOCK_SIZE_BYTES

SMALL_BYTES = 64 << 10
_STRIDE_BYTES, _SEEN_BYTES = 256 << 10, 2 << 10
_LARGE_BYTES, _LARGE_STRIDE_BYTES = 2 << 20, 512 << 10
BEGINNING_BYTES = 64
"""Looked at first where a value is looked for."""

_MAYBE_ZERO = b"\0\x80"  # the bytes of which zeros are made
_TURNS = 1 << 31
INFINITY = 1
NAN = 2
"""Faults of windows and tensors, the worse one higher; 0 is none."""

_GATHERED_BYTES = 256 << 10


@dataclass(frozen=True)
class Kind:
    """How the bits of a dtype are read, as unsigned integers of `width` bytes.

    Without its sign a value above `largest` is no number, and `largest` is the infinity, if the dtype has one. Other
    dtypes have one value that is no number, `nan`.
    """

    width: int
    largest: int
    has_infinity: bool = True
    nan: int | None = None

    @cached_property
    def integers(self) -> Any:
        return np.dtype(f"<u{self.width}")

    @cached_property
    def _without_sign(self) -> Any:
        return np.asarray((1 << 8 * self.width - 1) - 1, self.integers)

    def faults(self, elements: Any, firsts: Any, out: Any = None) -> Any:
        """Return the worst fault of the integers from each of `firsts` on; `out` is memory of their size."""
        if self.nan is not None:
            return NAN * _any(elements == self.nan, firsts).astype(np.uint8)
        found = np.maximum.reduceat(np.bitwise_and(elements, self._without_sign, out), firsts)
        infinite = INFINITY * (found == self.largest).astype(np.uint8) if self.has_infinity else 0
        return NAN * (found > self.largest).astype(np.uint8) + infinite

    def has_values(self, elements: Any, firsts: Any) -> Any:
        """Tell of the integers from each of `firsts` on whether one is not zero."""
        if self.nan is not None:  # there is no negative zero
            return _any(elements != 0, firsts)
        return _any(elements << np.asarray(1, self.integers), firsts)


KINDS = {
    "float64": Kind(8, 0x7FF << 52),
    "float32": Kind(4, 0xFF << 23),
    "bfloat16": Kind(2, 0xFF << 7),
    "float16": Kind(2, 0x1F << 10),
    "float8_e5m2": Kind(1, 0x7C),
    "float8_e4m3fn": Kind(1, 0x7E, has_infinity=False),
    "float8_e4m3fnuz": Kind(1, 0, nan=0x80),
    "float8_e5m2fnuz": Kind(1, 0, nan=0x80),
    "complex32": Kind(2, 0x1F << 10),
    "bcomplex32": Kind(2, 0xFF << 7),
    "complex64": Kind(4, 0xFF << 23),
    "complex128": Kind(8, 0x7FF << 52),
}


class _Gathered:
    """Copies of windows, and which they are."""

    def __init__(self, sample: Samples) -> None:
        self._sample = sample
        self._data = np.empty(_GATHERED_BYTES, dtype=np.uint8)  # fresh memory would cost more than the look
        self._view, self._used = self._data.data, 0
        self._windows: list[int] = []

    def add(self, position: int, piece: memoryview) -> None:
        """Copy the windows in a piece, and note tensors that are seen to have a value."""
        sample = self._sample
        places, lengths, owners, is_empty = sample.places, sample.lengths, sample.owners, sample.is_empty
        for window in range(bisect.bisect_left(places, position), len(places)):
            begin, length = places[window] - position, lengths[window]
            if begin >= piece.nbytes:
                break
            end = self._used + length
            if end > _GATHERED_BYTES:
                self.look()
                end = length
            self._view[end - length : end] = piece[begin : begin + length]
            self._used = end
            self._windows.append(window)
            if is_empty[owners[window]] and has_value(piece[begin : begin + min(length, BEGINNING_BYTES)]):
                is_empty[owners[window]] = False

    def look(self) -> None:
        """Look at what is gathered, and forget it."""
        if self._windows:
            elements = self._data[: self._used].view(self._sample.kind.integers)
            self._sample.look(np.array(self._windows), elements)
            self._windows, self._used = [], 0


class Samples:
    """Windows in the tensors of one kind of a file, which are looked at together.

    A call of numpy for each would cost more than the look, and at each threads wait for each other.
    """

    def __init__(
        self,
        kind: Kind,
        numbers: Any,
        starts: Sequence[int],
        stops: Sequence[int],
        small_bytes: int,
        turn: int,
        faults: Any,
        is_empty: bytearray,
    ) -> None:
        """Of a small tensor `small_bytes` are seen, and of each 256 or 512 KiB of a larger one 2 KiB."""
        self.kind = kind
        self._faults = faults
        self.is_empty = is_empty
        begins = np.array(starts, dtype=np.int64)[numbers]
        ends = np.array(stops, dtype=np.int64)[numbers]
        sizes = ends - begins
        is_small = sizes < SMALL_BYTES
        strides = np.where(sizes >= _LARGE_BYTES, _LARGE_STRIDE_BYTES, _STRIDE_BYTES)
        seen = np.where(is_small, small_bytes, _SEEN_BYTES)
        slots = -(-np.minimum(strides, sizes) // seen)
        leads = turn % _TURNS % slots * seen
        counts = -(-sizes // strides)
        owners = np.repeat(np.arange(len(numbers)), counts)
        turns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = begins[owners] + leads[owners] + turns * strides[owners]
        last = np.minimum(first + seen[owners], ends[owners])
        is_there = first < last
        first, last, owners = first[is_there], last[is_there], owners[is_there]
        # None is of two blocks, which may be in two buffers.
        edges = (first // BLOCK_SIZE_BYTES + 1) * BLOCK_SIZE_BYTES
        is_cut = last > edges
        places = np.concatenate([first, edges[is_cut]])
        order = np.argsort(places, kind="stable")
        lengths = np.concatenate([np.minimum(last, edges) - first, (last - edges)[is_cut]])[order]
        self._numbers = numbers[np.concatenate([owners, owners[is_cut]])[order]]
        self.owners: list[int] = self._numbers.tolist()
        self._widths = lengths // kind.width
        self.places: list[int] = places[order].tolist()
        self.lengths: list[int] = lengths.tolist()
        self._gathered: list[_Gathered] = []  # one for each thread that was here at a time

    def gather(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Copy the windows that are here, to be looked at when there are enough."""
        try:
            gathered = self._gathered.pop()
        except IndexError:  # as many threads as never before are here at a time
            gathered = _Gathered(self)
        for position, piece in pieces:
            gathered.add(position, piece)
        self._gathered.append(gathered)

    def look(self, windows: Any, elements: Any) -> None:
        """Look at the elements of windows, which are changed, and note what is not finite."""
        widths = self._widths[windows]
        faults = self.kind.faults(elements, np.cumsum(widths) - widths, elements)
        if faults.any():
            np.maximum.at(self._faults, self._numbers[windows], faults)

    def rest(self) -> None:
        """Look at what is left."""
        while self._gathered:
            self._gathered.pop().look()


def has_value(beginning: memoryview) -> bool:
    """Tell at a glance whether there surely is a value."""
    return bool(bytes(beginning).strip(_MAYBE_ZERO))


def _any(flags: Any, firsts: Any) -> Any:
    return np.logical_or.reduceat(flags, firsts)


def elements_of(data: memoryview | bytearray, kind: Kind) -> Any:
    return np.frombuffer(data, np.uint8).view(kind.integers)
