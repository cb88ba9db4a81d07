"""Look at the bytes of a file on their way: for NaNs, for zeros, and for a digest of each part.

By default a sample is looked at, in each save another one: of a tensor 2 KiB of each 64 KiB (of a large one 256 KiB), of a
small one all, of many small ones some elements. The digest is of all bytes: it is made of the checksums of blocks, which are computed anyway.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, joined
from ckpt.content.counters import Seen, counter_of, format_of, keep_highest, read_number
from ckpt.content.parts import is_trained

_STRIDE_BYTES, _SEEN_BYTES = 64 << 10, 2 << 10
_SAMPLED_BYTES = 2 * _STRIDE_BYTES
_LARGE_BYTES, _LARGE_STRIDE_BYTES = 2 << 20, 256 << 10
_WHOLE_BYTES = 256 << 10
_FULL_BYTES = 1 << 20
_GATHERED_BYTES = 96 << 10  # what malloc would map anew each time costs more than it saves
_SPOTS = 16
_SMALL_BYTES = 64 << 10
_FEW_BYTES_PER_ITEM = 256 << 10
"""In a file with more bytes than this for each tensor, small tensors are looked at as a whole."""


@dataclass(frozen=True)
class _Kind:
    """How the bits of a dtype are read, as unsigned integers of `width` bytes.

    A value is not finite if all bits of `mask` are set; or if it is just `nan`, the one such value of some dtypes.
    """

    width: int
    mask: int
    nan: int | None = None

    @cached_property
    def integers(self) -> Any:
        return np.dtype(f"<u{self.width}")

    @cached_property
    def _bits(self) -> Any:
        return np.asarray(self.mask, self.integers)

    def look(self, elements: Any, firsts: Any) -> tuple[Any, Any]:
        """Tell of the integers from each of `firsts` on whether one is not finite, and whether one is not zero."""
        if self.nan is not None:
            is_nan = elements == self.nan
            return _any(is_nan, firsts), _any((elements != 0) & ~is_nan, firsts)
        top = np.maximum.reduceat(np.bitwise_and(elements, self._bits), firsts)
        has_values = top != 0
        if not has_values.all():  # else they may be smaller than normal numbers
            has_values |= _any(elements << np.asarray(1, self.integers), firsts)
        return top == self.mask, has_values


_KINDS = {
    "float64": _Kind(8, 0x7FF << 52),
    "float32": _Kind(4, 0xFF << 23),
    "bfloat16": _Kind(2, 0xFF << 7),
    "float16": _Kind(2, 0x1F << 10),
    "float8_e5m2": _Kind(1, 0x7C),
    "float8_e4m3fn": _Kind(1, 0x7F),
    "float8_e4m3fnuz": _Kind(1, 0, 0x80),
    "float8_e5m2fnuz": _Kind(1, 0, 0x80),
    "complex64": _Kind(4, 0xFF << 23),
    "complex128": _Kind(8, 0x7FF << 52),
}


class Payloads(NamedTuple):
    """The payloads of the plain tensors in a file, in order: one entry for each in every list.

    Attributes:
        names: their FQNs.
        parts: the parts of the state that they are of.
        starts, stops: their places, aligned as their elements are.
        widths: bytes of an element.
    """

    names: list[str]
    parts: list[str]
    dtypes: list[str]
    starts: list[int]
    stops: list[int]
    widths: list[int]


@dataclass
class _Range:
    """Neighbours of one part, with the gaps and frames between them, which never change."""

    part: str
    start: int
    stop: int


class FileLook:
    """Look at one file, in any order of its parts, each once or more.

    Attributes:
        cuts: where a checksum has to end, for the digests of parts.
        counters: those that were met, by part and name.
    """

    def __init__(self, payloads: Payloads, nbytes: int, turn: int | None = 0) -> None:
        """The file has `nbytes`. `turn` chooses the sample; None: all is looked at."""
        self._names, self._parts, dtypes, self._starts, self._stops, widths = payloads
        self._turn = turn
        self._kinds = [_KINDS.get(dtype) for dtype in dtypes]
        count = len(self._names)
        sizes = np.array(self._stops, dtype=np.int64) - np.array(self._starts, dtype=np.int64)
        # Counters of steps go on also where nothing else does.
        self._is_array = sizes > np.array(widths, dtype=np.int64)
        self._not_finite, self._has_values = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        self._ranges = _ranges(self._parts, self._starts, self._stops, self._is_array)
        self._pieces: dict[int, tuple[int, int]] = {}
        self.cuts = [edge for each in self._ranges for edge in (each.start, each.stop)]
        few = turn is not None and nbytes < _FEW_BYTES_PER_ITEM * max(count, 1)
        self._spotted = ((sizes < _SMALL_BYTES) & few).tolist()
        self._counters = [
            (self._starts[number], counter, layout, number)
            for number in np.flatnonzero(~self._is_array & (sizes > 0)).tolist()
            if (counter := counter_of(self._names[number], self._parts[number]))
            and (layout := format_of(dtypes[number]))
        ]
        self.counters: dict[str, dict[str, Seen]] = {}
        self._lock = threading.Lock()

    def note(self, position: int, nbytes: int, crc: int) -> None:
        """Note the checksum of a piece of a block; those of whole blocks are known at the end."""
        if nbytes < BLOCK_SIZE_BYTES:
            self._pieces[position] = nbytes, crc

    def look(self, position: int, buffers: Iterable[memoryview]) -> None:
        """Look at bytes that begin at `position`, once."""
        samples: dict[_Kind, _Samples] = {}
        for data in buffers:
            stop = position + data.nbytes
            first = bisect.bisect_right(self._stops, position)
            last = bisect.bisect_left(self._starts, stop, first)
            if last - first == 1:
                self._look_at(first, position, stop, data, samples)
            elif last > first:
                self._look_at_many(first, last, position, stop, data, samples)
            if self._counters:
                self._count(position, stop, data)
            position = stop
        for kind, sample in samples.items():
            self._look_at_samples(kind, sample)

    def _count(self, position: int, stop: int, data: memoryview) -> None:
        """Read the counters that are here."""
        first, last = (bisect.bisect_left(self._counters, (place,)) for place in (position, stop))
        for start, counter, layout, number in self._counters[first:last]:
            value = read_number(data, layout, start - position)
            with self._lock:
                own = self.counters.setdefault(self._parts[number], {})
                keep_highest(own, [(counter, (value, self._names[number]))])

    def _look_at(
        self, number: int, position: int, stop: int, data: memoryview, samples: dict[_Kind, _Samples]
    ) -> None:
        """Look at a sample of a tensor, or of what is here of it."""
        kind, start, end = self._kinds[number], self._starts[number], self._stops[number]
        if kind is None or start == end:
            return
        payload = data[max(start, position) - position : min(end, stop) - position]
        if self._turn is None:
            # A little at a time, as it takes memory of the same size; but not very little, as threads wait at each look.
            for begin in range(0, payload.nbytes, _FULL_BYTES):
                elements = _elements(payload[begin : begin + _FULL_BYTES], kind)
                self._note_values([number], kind.look(elements, [0]))
            self._look_for_any(number, payload, kind)
            return
        sample = samples.setdefault(kind, _Samples())
        sample.add(number, payload, self._turn)
        if len(sample.data) >= _GATHERED_BYTES:
            self._look_at_samples(kind, samples.pop(kind))

    def _look_at_samples(self, kind: _Kind, sample: _Samples) -> None:
        firsts = np.array(sample.firsts) // kind.width
        self._note_values(sample.numbers, kind.look(_elements(sample.data, kind), firsts))
        for number, payload in zip(sample.numbers, sample.payloads, strict=True):
            self._look_for_any(number, payload, kind)

    def _note_values(self, numbers: Any, seen: tuple[Any, Any]) -> None:
        """Set the flags of tensors. None is ever taken back: other threads look at other bytes of the same tensors."""
        for flags, are_set in zip((self._not_finite, self._has_values), seen, strict=True):
            if are_set.any():
                flags[np.asarray(numbers)[are_set]] = True

    def _look_for_any(self, number: int, payload: memoryview, kind: _Kind) -> None:
        """Look at all of it if only zeros were seen: a sample of a sparse tensor may have none else in one save."""
        if not self._has_values[number] and _has_any(payload, kind):
            self._has_values[number] = True

    def _look_at_many(
        self,
        first: int,
        last: int,
        position: int,
        stop: int,
        data: memoryview,
        samples: dict[_Kind, _Samples],
    ) -> None:
        spotted: dict[_Kind, list[int]] = {}
        for number in range(first, last):
            kind, start, end = self._kinds[number], self._starts[number], self._stops[number]
            if kind is not None and self._spotted[number] and start >= position and start < end <= stop:
                spotted.setdefault(kind, []).append(number)
            else:
                self._look_at(number, position, stop, data, samples)
        for kind, numbers in spotted.items():
            self._spot(kind, np.array(numbers), position, data)

    def _spot(self, kind: _Kind, numbers: Any, position: int, piece: memoryview) -> None:
        """Look at some elements of each of many small tensors."""
        first, last = int(numbers[0]), int(numbers[-1]) + 1
        starts = np.array(self._starts[first:last])[numbers - first] - position
        stops = np.array(self._stops[first:last])[numbers - first] - position
        last_elements = (stops - starts) // kind.width - 1
        spots = starts[:, None] + (np.arange(_SPOTS) * last_elements[:, None]) // (_SPOTS - 1) * kind.width
        data = np.frombuffer(piece, np.uint8)
        elements = data[spots[..., None] + np.arange(kind.width)].reshape(len(numbers), -1)
        firsts = np.arange(0, len(numbers) * _SPOTS, _SPOTS)
        bad, values = kind.look(elements.view(kind.integers).reshape(-1), firsts)
        self._note_values(numbers, (bad, values))
        for number in numbers[~values].tolist():
            payload = piece[self._starts[number] - position : self._stops[number] - position]
            self._look_for_any(number, payload, kind)

    def parts(self, blocks: Sequence[int]) -> dict[str, list[int]]:
        """Return the checksums of each part's ranges, in order; `blocks` are those of all blocks of the file."""
        parts: dict[str, list[int]] = {}
        for each in self._ranges:
            crc, position = 0, each.start
            while position < each.stop:
                block = position // BLOCK_SIZE_BYTES
                nbytes, own = self._pieces.get(position) or (BLOCK_SIZE_BYTES, blocks[block])
                crc = joined(crc, own, nbytes)
                position += nbytes
            parts.setdefault(each.part, []).append(crc)
        return parts

    def looked_at(self) -> list[str]:
        """Return the part of each tensor of floats that has more than one element."""
        return [
            part
            for part, kind, is_array in zip(self._parts, self._kinds, self._is_array.tolist(), strict=True)
            if kind is not None and is_array
        ]

    def not_finite(self) -> list[tuple[str, str]]:
        """Return part and name of the tensors in which something that is not finite was seen.

        Single numbers count only where they are trained: the best loss so far may be infinite.
        """
        trained = {part: is_trained(part) for part in {*self._parts}}
        counts = np.array([trained[part] for part in self._parts], dtype=bool)
        return self._chosen(self._not_finite & (self._is_array | counts))

    def zero(self) -> list[tuple[str, str]]:
        """Return part and name of the tensors in which only zeros were seen."""
        looked_at = np.array([kind is not None for kind in self._kinds], dtype=bool)
        return self._chosen(looked_at & self._is_array & ~self._has_values)

    def _chosen(self, flags: Any) -> list[tuple[str, str]]:
        return [(self._parts[number], self._names[number]) for number in np.flatnonzero(flags).tolist()]


@dataclass
class _Samples:
    """Samples of tensors of one kind, to be looked at together: at each call of numpy threads wait for each other."""

    data: bytearray = field(default_factory=bytearray)
    numbers: list[int] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)  # where in `data` each begins

    def add(self, number: int, payload: memoryview, turn: int) -> None:
        """Add the windows of a tensor, or of what is here of it; all of a small one."""
        self.numbers.append(number)
        self.payloads.append(payload)
        self.firsts.append(len(self.data))
        if payload.nbytes < _SAMPLED_BYTES:
            self.data += payload
            return
        stride = _STRIDE_BYTES if payload.nbytes < _LARGE_BYTES else _LARGE_STRIDE_BYTES
        first = turn % (stride // _SEEN_BYTES) * _SEEN_BYTES
        for start in range(first, payload.nbytes // stride * stride, stride):
            self.data += payload[start : start + _SEEN_BYTES]


def _any(flags: Any, firsts: Any) -> Any:
    return np.logical_or.reduceat(flags, firsts)


def _elements(data: memoryview | bytearray, kind: _Kind) -> Any:
    return np.frombuffer(data, np.uint8).view(kind.integers)


def _has_any(data: memoryview, kind: _Kind) -> bool:
    """Tell whether one of all values is not zero."""
    for begin in range(0, data.nbytes, _WHOLE_BYTES):
        elements = _elements(data[begin : begin + _WHOLE_BYTES], kind)
        if elements.any() and kind.look(elements, [0])[1]:
            return True
    return False


def _ranges(parts: Sequence[str], starts: Sequence[int], stops: Sequence[int], is_array: Any) -> list[_Range]:
    ranges: list[_Range] = []
    is_open = False
    for part, start, stop, is_wanted in zip(parts, starts, stops, is_array.tolist(), strict=True):
        if not is_wanted:
            is_open = is_open and start == stop
        elif is_open and ranges[-1].part == part:
            ranges[-1].stop = stop
        else:
            ranges.append(_Range(part, start, stop))
            is_open = True
    return ranges
