"""Values of a stored tensor, or of a slice of it: as they are, as statistics, or as a NumPy file."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckpt.errors import ConfigurationError, FormatError
from ckpt.reading.slices import OpenCheckpoint
from ckpt.transfer.boxes import Box, boxes_of, tiling_fault

__all__ = ["Selection", "Statistics", "as_numpy", "select", "statistics", "write_npy"]

_MAX_ELEMENTS = 1 << 22
_SLICE = re.compile(r"(.*)\[([^\[\]]*)\]", re.DOTALL)


@dataclass(frozen=True)
class Selection:
    """A slice of a tensor: where it is, and which dimensions were given as one number and are dropped."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for d, n in enumerate(self.lengths) if d not in self.dropped)


@dataclass
class Statistics:
    """Of the elements of a slice. `min`, `max` and `mean` are those of the finite ones; of complex ones, of their
    absolute values. None if there are none."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None


def select(checkpoint: OpenCheckpoint, text: str) -> Selection:
    """The slice that `FQN[slice]` names, in Python's notation: `w`, `w[3]`, `w[:10, -1]`, `w[..., 0]`. Steps are 1.

    Raises:
        NotFound: there is no such tensor.
        ConfigurationError: not a slice, or not inside of the tensor.
    """
    found = _SLICE.fullmatch(text)
    if text in checkpoint.names or found is None:
        size = checkpoint.tensor(text).size
        return Selection(text, (0,) * len(size), size, ())
    return _selection(found[1], found[2], checkpoint.tensor(found[1]).size)


def _selection(name: str, inside: str, size: Sequence[int]) -> Selection:
    parts = [part.strip() for part in inside.split(",")] if inside.strip() else []
    if parts.count("...") > 1 or len(parts) - parts.count("...") > len(size):
        raise ConfigurationError(f"[{inside}] has more dimensions than {name!r} of shape {tuple(size)}")
    place = parts.index("...") if "..." in parts else len(parts)
    missing = len(size) - len([part for part in parts if part != "..."])
    parts = [*parts[:place], *[":"] * missing, *parts[place + 1 :]]
    offsets, lengths, dropped = [], [], []
    for dimension, (part, limit) in enumerate(zip(parts, size, strict=True)):
        start, stop = _span(part, limit)
        offsets.append(start)
        lengths.append(stop - start)
        if ":" not in part:
            dropped.append(dimension)
    return Selection(name, tuple(offsets), tuple(lengths), tuple(dropped))


def _span(part: str, limit: int) -> tuple[int, int]:
    found = re.fullmatch(r"(-?\d{1,19})?(?: *(:) *(-?\d{1,19})?)?", part)
    if found is None or not part:
        raise ConfigurationError(
            f"{part!r} is no index or slice; write 3, 2:5, :10 or -4: (steps are not offered)"
        )
    if found[2] is None:
        index = int(found[1])
        if not -limit <= index < limit:
            raise ConfigurationError(f"index {index} is outside of a dimension of {limit}")
        return index % limit, index % limit + 1
    start, stop, _ = slice(
        None if found[1] is None else int(found[1]), None if found[3] is None else int(found[3])
    ).indices(limit)
    return start, max(start, stop)


def read(checkpoint: OpenCheckpoint, selection: Selection) -> torch.Tensor:
    """The values of a slice, all in memory."""
    return checkpoint.read(selection.name, selection.offsets, selection.lengths).reshape(selection.shape)


def _regions(checkpoint: OpenCheckpoint, selection: Selection) -> Iterator[tuple[Box, npt.NDArray[Any]]]:
    """The slice piece by piece, in bounded memory; every element once."""
    entry = checkpoint.tensor(selection.name)
    end = tuple(o + n for o, n in zip(selection.offsets, selection.lengths, strict=True))
    first = np.maximum(entry.offsets, np.array(selection.offsets, dtype=np.int64)) - np.array(
        selection.offsets
    )
    last = np.minimum(entry.offsets + entry.sizes, np.array(end, dtype=np.int64)) - np.array(
        selection.offsets
    )
    inside = (first < last).all(axis=1)
    boxes = [(tuple(a), tuple(b)) for a, b in zip(first[inside].tolist(), last[inside].tolist(), strict=True)]
    fault = tiling_fault(boxes, selection.lengths)
    if fault is not None:
        raise FormatError(f"of {selection.name[:200]!r} {fault}", url=checkpoint.store.url)
    for begin, stop in boxes_of(entry, selection.offsets, end, _MAX_ELEMENTS):
        lengths = [b - a for a, b in zip(begin, stop, strict=True)]
        values = as_numpy(checkpoint.read(selection.name, begin, lengths))
        place = tuple(a - o for a, o in zip(begin, selection.offsets, strict=True))
        yield (place, tuple(a + n for a, n in zip(place, lengths, strict=True))), values


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same numbers for NumPy, which knows fewer dtypes: those that it lacks become wider ones, exactly."""
    if tensor.dtype in (torch.complex32,):
        return tensor.to(torch.complex64).numpy()
    if tensor.dtype.is_floating_point and tensor.dtype not in (torch.float64, torch.float32, torch.float16):
        return tensor.to(torch.float32).numpy()
    try:
        found: npt.NDArray[Any] = tensor.numpy()
    except TypeError:
        raise ConfigurationError(f"values of dtype {tensor.dtype} cannot be shown") from None
    return found


def statistics(checkpoint: OpenCheckpoint, selection: Selection) -> Statistics:
    """Statistics of a slice of any size, in bounded memory."""
    found = Statistics()
    total, finite_count = 0.0, 0
    for _, values in _regions(checkpoint, selection):
        found.count += values.size
        if values.dtype.kind == "c":
            with np.errstate(invalid="ignore", over="ignore"):
                values = np.abs(values.astype(np.complex128))
        if values.dtype.kind == "f":
            with np.errstate(invalid="ignore"):  # signalling NaNs
                values = values.astype(np.float64)
            nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
            found.nan, found.inf = found.nan + nan, found.inf + inf
            if nan or inf:
                values = values[np.isfinite(values)]
        if values.size:
            low, high = values.min().item(), values.max().item()
            found.min = low if found.min is None else min(found.min, low)
            found.max = high if found.max is None else max(found.max, high)
            with np.errstate(over="ignore"):
                total += float(values.sum(dtype=np.float64))
            finite_count += values.size
    found.mean = total / finite_count if finite_count else None
    return found


def write_npy(checkpoint: OpenCheckpoint, selection: Selection, path: str) -> None:
    """Write a slice to a `.npy` file, which appears when it is complete.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    dtype = as_numpy(torch.empty(0, dtype=checkpoint.tensor(selection.name).dtype)).dtype
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        if math.prod(selection.lengths) == 0:
            with open(temporary, "xb") as file:
                np.save(file, np.empty(selection.shape, dtype=dtype))
        else:
            target = np.lib.format.open_memmap(
                temporary, mode="w+", dtype=dtype, shape=selection.lengths or (1,)
            )
            for (begin, end), values in _regions(checkpoint, selection):
                target[tuple(slice(a, b) for a, b in zip(begin, end, strict=True)) or ...] = values
            target.flush()
            del target
            _set_shape(temporary, dtype, selection.shape)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigurationError(f"{path!r} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _set_shape(path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Write the header again: dropped dimensions had a length of 1. Headers are padded to the same size."""
    with open(path, "r+b") as file:
        version = np.lib.format.read_magic(file)
        assert version == (1, 0)
        np.lib.format.read_array_header_1_0(file)
        before = file.tell()
        file.seek(0)
        np.lib.format.write_array_header_1_0(
            file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        )
        assert file.tell() == before
