"""Look at the bytes of a file on their way: for NaNs, for zeros, and for a digest of each part.

By default a sample is looked at, in each save another one: of a tensor 2 KiB of each 256 KiB (of a large one 512 KiB), of a
small one all, of many small ones in a file that is not small 64 bytes. The digest is of all bytes: it is made of the checksums of
blocks, which are computed anyway.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, Piece, combine_blocks, joined
from ckpt.content.counters import Seen, counter_of, format_of, keep_highest, read_number
from ckpt.content.parts import is_moment, is_trained
from ckpt.content.samples import (
    BEGINNING_BYTES,
    INFINITY,
    KINDS,
    NAN,
    SMALL_BYTES,
    Kind,
    Samples,
    elements_of,
    has_value,
)

_WHOLE_BYTES = 256 << 10
_FULL_BYTES = 1 << 20
_SPOT_BYTES = 64
_FEW_BYTES_PER_ITEM = 256 << 10
"""In a file with more bytes than this for each tensor, small tensors are looked at as a whole; else at a spot."""
_LITTLE_BYTES = 4 << 20
"""A file of so few bytes is looked at as if it held few tensors: that takes a millisecond or two."""


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
        self._looks_at_all = turn is None
        self._kinds = [KINDS.get(dtype) for dtype in dtypes]
        count = len(self._names)
        sizes = np.array(self._stops, dtype=np.int64) - np.array(self._starts, dtype=np.int64)
        # Counters of steps go on also where nothing else does.
        self._is_array = sizes > np.array(widths, dtype=np.int64)
        self._faults = np.zeros(count, dtype=np.uint8)
        # Single numbers count only where they are trained: the best loss so far may be infinite.
        trained = {part: is_trained(part) for part in {*self._parts}}
        self._counts = self._is_array | np.array([trained[part] for part in self._parts], dtype=bool)
        self._ranges = _ranges(self._parts, self._starts, self._stops, self._is_array)
        self._pieces: dict[int, tuple[int, int]] = {}
        self.cuts = [edge for each in self._ranges for edge in (each.start, each.stop)]
        is_looked_at = np.array([kind is not None for kind in self._kinds], dtype=bool) & (sizes > 0)
        self._is_looked_at = is_looked_at.tobytes()
        self._is_empty = bytearray(self._is_looked_at)  # until a value was seen
        of_dtype: dict[str, list[int]] = {}
        for number in [] if turn is None else np.flatnonzero(is_looked_at).tolist():
            of_dtype.setdefault(dtypes[number], []).append(number)
        has_many = _LITTLE_BYTES < nbytes < _FEW_BYTES_PER_ITEM * count
        seen_bytes = _SPOT_BYTES if has_many else SMALL_BYTES
        self._samples = [
            Samples(
                KINDS[dtype],
                np.array(numbers),
                self._starts,
                self._stops,
                seen_bytes,
                turn or 0,
                self._faults,
                self._is_empty,
            )
            for dtype, numbers in of_dtype.items()
        ]
        self._counters = [
            (self._starts[number], counter, layout, number)
            for number in np.flatnonzero(~self._is_array & (sizes > 0)).tolist()
            if (counter := counter_of(self._names[number], self._parts[number]))
            and (layout := format_of(dtypes[number]))
        ]
        self.counters: dict[str, dict[str, Seen]] = {}
        self._lock = threading.Lock()

    def note(self, start: int, pieces: Iterable[Piece]) -> None:
        """Note the pieces of the bytes that begin at `start`, but for whole blocks, which are known at the end."""
        for position, nbytes, crc in pieces:
            if nbytes < BLOCK_SIZE_BYTES:
                self._pieces[start + position] = nbytes, crc

    def look(self, position: int, buffers: Iterable[memoryview]) -> None:
        """Look at bytes that begin at `position`. None of the buffers ends within a block of a tensor."""
        start, pieces = position, []
        for data in buffers:
            pieces.append((position, data))
            position += data.nbytes
        for sample in self._samples:
            sample.gather(pieces)
        if self._looks_at_all:
            self._look_at_all(pieces)
        first, last = self._between(start, position)
        if self._is_empty.find(True, first, last) >= 0:
            self._look_for_values(pieces)
        if self._counters:
            self._count(pieces, position)

    def _between(self, start: int, stop: int) -> tuple[int, int]:
        """Return the numbers of the first tensor that has bytes here, and of the first one after those."""
        first = bisect.bisect_right(self._stops, start)
        return first, bisect.bisect_left(self._starts, stop, first)

    def _payloads(
        self, wanted: bytes | bytearray, pieces: Iterable[tuple[int, memoryview]]
    ) -> Iterator[tuple[int, Kind, memoryview]]:
        """List tensors that are `wanted` and have bytes here, with those bytes."""
        for position, data in pieces:
            stop = position + data.nbytes
            number, last = self._between(position, stop)
            while (number := wanted.find(True, number, last)) >= 0:
                start, end, kind = self._starts[number], self._stops[number], self._kinds[number]
                assert kind is not None
                yield number, kind, data[max(start, position) - position : min(end, stop) - position]
                number += 1

    def _count(self, pieces: Sequence[tuple[int, memoryview]], stop: int) -> None:
        """Read the counters that are here."""
        begins = [position for position, _ in pieces]
        first, last = (bisect.bisect_left(self._counters, (place,)) for place in (begins[0], stop))
        for start, counter, layout, number in self._counters[first:last]:
            position, data = pieces[bisect.bisect_right(begins, start) - 1]
            value = read_number(data, layout, start - position)
            with self._lock:
                own = self.counters.setdefault(self._parts[number], {})
                keep_highest(own, [(counter, (value, self._names[number]))])

    def _look_at_all(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        for number, kind, payload in self._payloads(self._is_looked_at, pieces):
            # A little at a time, as it takes memory of the same size; but not very little, as threads wait at each look.
            for begin in range(0, payload.nbytes, _FULL_BYTES):
                (fault,) = kind.faults(elements_of(payload[begin : begin + _FULL_BYTES], kind), [0])
                self._faults[number] = max(self._faults[number], fault)
                if fault == NAN:
                    break

    def _look_for_values(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Look for a value in those that had none so far: at the beginning, then at all, as a tensor may be sparse."""
        for number, kind, payload in self._payloads(self._is_empty, pieces):
            if has_value(payload[:BEGINNING_BYTES]) or _has_any(payload, kind):
                self._is_empty[number] = False

    def parts(self, blocks: Sequence[int]) -> dict[str, list[int]]:
        """Return the checksums of each part's ranges, in order; `blocks` are those of all blocks of the file."""
        parts: dict[str, list[int]] = {}
        for each in self._ranges:
            crc, position = 0, each.start
            while position < each.stop:
                block, offset = divmod(position, BLOCK_SIZE_BYTES)
                whole = (each.stop - position) // BLOCK_SIZE_BYTES
                if offset or not whole:
                    nbytes, own = self._pieces[position]
                else:
                    nbytes = whole * BLOCK_SIZE_BYTES
                    own = combine_blocks(blocks[block : block + whole], nbytes, BLOCK_SIZE_BYTES)
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
        """Return part and name of the tensors in which a NaN was seen, or an infinity among an optimizer's moments."""
        found = self._found()
        has_infinity = np.flatnonzero(found == INFINITY).tolist()
        found[[n for n in has_infinity if is_moment(self._parts[n], self._names[n])]] = NAN
        return self._chosen(found == NAN)

    def infinite(self) -> list[tuple[str, str]]:
        """Return part and name of the other tensors in which an infinity was seen: masks and bounds may be meant so."""
        wrong = {*self.not_finite()}
        return [each for each in self._chosen(self._found() > 0) if each not in wrong]

    def _found(self) -> Any:
        """Return the fault of each tensor that counts."""
        for sample in self._samples:
            sample.rest()
        return self._faults * self._counts

    def zero(self) -> list[tuple[str, str]]:
        """Return part and name of the tensors in which only zeros were seen."""
        return self._chosen(np.frombuffer(self._is_empty, bool) & self._is_array)

    def _chosen(self, flags: Any) -> list[tuple[str, str]]:
        return [(self._parts[number], self._names[number]) for number in np.flatnonzero(flags).tolist()]


def _has_any(data: memoryview, kind: Kind) -> bool:
    """Tell whether one of all values is not zero."""
    for begin in range(0, data.nbytes, _WHOLE_BYTES):
        elements = elements_of(data[begin : begin + _WHOLE_BYTES], kind)
        if elements.any() and kind.has_values(elements, [0])[0]:
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
