"""Read a stored tensor or a slice of it as an array, as statistics, or into a NumPy file."""

from __future__ import annotations

import contextlib
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.consistency import environment
from ckpt.errors import CheckpointError, ConfigurationError, FormatError
from ckpt.format.dtypes import item_bytes
from ckpt.format.elements import Elements, stored_dtype, values_of
from ckpt.reading.slices import GROWTH_SLACK_BYTES, OpenCheckpoint
from ckpt.tools.inspect import SMALL_ELEMENTS
from ckpt.transfer.boxes import Box, boxes_of, tiling_fault

Progress = Callable[[int, int], None]

_MAX_ELEMENTS = 1 << 22
_MAX_SHOWN = 20_000
"""How many parts of an object are visited to show it."""

_MAX_SHORT, _MAX_TEXT = 60, 10_000
_SLICE = re.compile(r"(.*)\[([^\[\]]*)\]", re.DOTALL)


@dataclass(frozen=True)
class Selection:
    """A slice of a tensor; dimensions that were given as one number are `dropped`."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice without the dropped dimensions."""
        return tuple(n for d, n in enumerate(self.lengths) if d not in self.dropped)


@dataclass
class Statistics:
    """Statistics of a slice.

    `min`, `max` and `mean` cover finite elements, and the absolute values of complex ones; None if
    there are none.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None


def select(checkpoint: OpenCheckpoint, text: str) -> Selection:
    """Parse `FQN[slice]` in Python's notation: `w`, `w[3]`, `w[:10, -1]`, `w[..., 0]`.

    Raises NotFound for the tensor, ConfigurationError for the slice.
    """
    match = _SLICE.fullmatch(text)
    if text in checkpoint.names or match is None:
        size = checkpoint.tensor(text).size
        return Selection(text, (0,) * len(size), size, ())
    return _selection(match[1], match[2], checkpoint.tensor(match[1]).size)


def _selection(name: str, inside: str, size: Sequence[int]) -> Selection:
    parts = [part.strip() for part in inside.split(",")] if inside.strip() else []
    if parts.count("...") > 1 or len(parts) - parts.count("...") > len(size):
        raise ConfigurationError(f"[{inside}] has more dimensions than {name!r} of shape {tuple(size)}")
    at = parts.index("...") if "..." in parts else len(parts)
    missing = len(size) - len([part for part in parts if part != "..."])
    parts = [*parts[:at], *[":"] * missing, *parts[at + 1 :]]
    offsets, lengths, dropped = [], [], []
    for dimension, (part, limit) in enumerate(zip(parts, size, strict=True)):
        start, stop = _span(part, limit)
        offsets.append(start)
        lengths.append(stop - start)
        if ":" not in part:
            dropped.append(dimension)
    return Selection(name, tuple(offsets), tuple(lengths), tuple(dropped))


def _span(part: str, limit: int) -> tuple[int, int]:
    match = re.fullmatch(r"(-?\d{1,19})?(?: *(:) *(-?\d{1,19})?)?", part)
    if match is None or not part:
        raise ConfigurationError(
            f"{part!r} is not an index or slice; write 3, 2:5, :10 or -4: (steps are not supported)"
        )
    if match[2] is None:
        index = int(match[1])
        if not -limit <= index < limit:
            raise ConfigurationError(f"index {index} is out of range for a dimension of {limit}")
        return index % limit, index % limit + 1
    first, last = (None if text is None else int(text) for text in (match[1], match[3]))
    start, stop, _ = slice(first, last).indices(limit)
    return start, max(start, stop)


def read(checkpoint: OpenCheckpoint, selection: Selection) -> Elements:
    """Read the values of a slice into memory."""
    return _values(checkpoint, selection.name, selection.offsets, selection.lengths).reshape(selection.shape)


def _values(
    checkpoint: OpenCheckpoint, name: str, offsets: Sequence[int], lengths: Sequence[int]
) -> Elements:
    (elements,) = checkpoint.read([(name, offsets, lengths)])
    return _named_values(name, elements, checkpoint.tensor(name).dtype)


def _named_values(name: str, elements: Elements, dtype: str) -> Elements:
    """Convert stored elements to numbers. Raises ConfigurationError, which names the tensor."""
    try:
        return values_of(elements, dtype)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name[:200]!r}: {error.message}") from None


def _regions(
    checkpoint: OpenCheckpoint, selection: Selection, progress: Progress
) -> Iterator[tuple[Box, Elements]]:
    """Yield boxes of the slice and their values, in bounded memory; every element once."""
    entry = checkpoint.tensor(selection.name)
    if math.prod(selection.lengths) * item_bytes(entry.dtype) > GROWTH_SLACK_BYTES:
        checkpoint.prepare_region(selection.name, selection.offsets, selection.lengths)
    end = tuple(o + n for o, n in zip(selection.offsets, selection.lengths, strict=True))

    def relative(box: Box) -> Box:
        begin, stop = (tuple(a - o for a, o in zip(corner, selection.offsets, strict=True)) for corner in box)
        return begin, stop

    chunks = boxes_of(entry, selection.offsets, end, math.prod(selection.lengths))
    fault = tiling_fault([relative(chunk) for chunk in chunks], selection.lengths)
    if fault is not None:
        raise FormatError(f"{selection.name[:200]!r}: {fault}", url=checkpoint.store.url)
    done_bytes, total_bytes = 0, math.prod(selection.lengths) * item_bytes(entry.dtype)
    for box in boxes_of(entry, selection.offsets, end, _MAX_ELEMENTS):
        lengths = [stop - start for start, stop in zip(*box, strict=True)]
        yield relative(box), _values(checkpoint, selection.name, box[0], lengths)
        done_bytes += math.prod(lengths) * item_bytes(entry.dtype)
        progress(done_bytes, total_bytes)


def statistics(checkpoint: OpenCheckpoint, selection: Selection, progress: Progress) -> Statistics:
    """Compute statistics of a slice of any size, in bounded memory.

    `progress` is called with the bytes done so far and those in all.
    """
    result = Statistics()
    total, finite_count = 0.0, 0
    for _, values in _regions(checkpoint, selection, progress):
        result.count += values.size
        if values.dtype.kind == "c":
            with np.errstate(invalid="ignore", over="ignore"):
                values = np.abs(values.astype(np.complex128))
        if values.dtype.kind == "f":
            with np.errstate(invalid="ignore"):  # signalling NaNs
                values = values.astype(np.float64)
            nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
            result.nan, result.inf = result.nan + nan, result.inf + inf
            if nan or inf:
                values = values[np.isfinite(values)]
        if values.size:
            low, high = values.min().item(), values.max().item()
            result.min = low if result.min is None else min(result.min, low)
            result.max = high if result.max is None else max(result.max, high)
            with np.errstate(over="ignore"):
                total += float(values.sum(dtype=np.float64))
            finite_count += values.size
    result.mean = total / finite_count if finite_count else None
    return result


def object_text(value: object) -> str:
    """Write a value in a bounded text."""
    return _Text(items=50, characters=2000).repr(value)[:_MAX_TEXT]


def short_text(value: object) -> str:
    """Write a value in one short line; of a small array its elements."""
    limited = _Text(items=6, characters=_MAX_SHORT)
    if isinstance(value, np.ndarray) and value.size <= SMALL_ELEMENTS:
        limited.maxlevel, value = max(value.ndim, 1), value.tolist()
    text = " ".join(limited.repr(value).split())
    return text if len(text) <= _MAX_SHORT else f"{text[: _MAX_SHORT - 3]}..."


class _Text(reprlib.Repr):
    """Write values that may share parts: few bytes of a pickle can be lists of 50**6 elements."""

    def __init__(self, items: int, characters: int) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = items
        self.maxstring = self.maxother = self.maxlong = characters
        self._visited = 0

    def repr1(self, x: Any, level: int) -> str:
        self._visited += 1
        return "..." if self._visited > _MAX_SHOWN else super().repr1(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, dict):  # an OrderedDict, whose own text has no bounds
            return f"{type(x).__name__}({self.repr_dict(x, level)})"
        return super().repr_instance(x, level)


def write_npy(checkpoint: OpenCheckpoint, selection: Selection, path: str, progress: Progress) -> None:
    """Write a slice to a `.npy` file, which appears when it is complete. Raises ConfigurationError.

    `progress` is called with the bytes done so far and those in all.
    """
    stored = checkpoint.tensor(selection.name).dtype
    dtype = _named_values(selection.name, np.empty(0, stored_dtype(stored)), stored).dtype
    temporary = f"{path}.{environment.token()}.tmp"
    try:
        if math.prod(selection.lengths) == 0:
            with open(temporary, "xb") as file:
                np.save(file, read(checkpoint, selection))
        else:
            target = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=selection.shape)
            undropped = target.reshape(selection.lengths)
            for (begin, end), values in _regions(checkpoint, selection, progress):
                undropped[tuple(slice(a, b) for a, b in zip(begin, end, strict=True))] = values
            target.flush()
            del target, undropped
        os.replace(temporary, path)
    except CheckpointError:
        raise
    except OSError as error:
        raise ConfigurationError(f"cannot write {path!r}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
