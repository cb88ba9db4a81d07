"""`ckpt.diff`: what differs between two checkpoints, whoever wrote them and however they are sharded."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckpt.errors import FormatError, UnsafeContent
from ckpt.format.columns import ObjectRow, TensorColumns, is_quantized
from ckpt.reading.slices import OpenCheckpoint
from ckpt.tools.cat import as_numpy
from ckpt.torch_private import StorageInfo
from ckpt.transfer.boxes import boxes_of

__all__ = ["Comparison", "Difference", "diff"]

_MAX_ELEMENTS = 1 << 21
_STEP_BYTES = 4 << 20


@dataclass(frozen=True)
class Difference:
    """One name that is not the same in both.

    Attributes:
        kind: `only_a`, `only_b`, `kind` (tensor and object), `shape`, `dtype` (the values too, if `differing` is
            not 0), `values`, or `object`.
        a, b: what each has, in words.
        differing: elements whose values differ; NaN equals NaN.
        max_abs, max_rel: the largest difference of two finite elements, absolute and relative to the larger one.
        nan: elements that are NaN in one of them only.
    """

    fqn: str
    kind: str
    a: str = ""
    b: str = ""
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    nan: int = 0


@dataclass
class Comparison:
    """The result of `ckpt.diff`.

    Attributes:
        tensors, objects: names that are in both, and were compared.
        equal_by_checksum: those of them that are equal by their checksums; their data were not read.
        read_bytes: bytes of tensors' elements read from each.
    """

    a: str
    b: str
    differences: list[Difference] = field(default_factory=list)
    tensors: int = 0
    objects: int = 0
    equal_by_checksum: int = 0
    read_bytes: int = 0

    @property
    def same(self) -> bool:
        return not self.differences


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    b_storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints: names, shapes, dtypes, values; in bounded memory.

    Where both are of this library and stored alike, equal tensors are known by their checksums, without reading.

    Args:
        storage_options: of `a`; of both, without `b_storage_options`.
        progress: called with the bytes of elements compared so far and those in all.

    Raises:
        NotFound, NotCommitted, IntegrityError, FormatError, UnsafeContent, StorageError: one cannot be read.
    """
    options = storage_options if b_storage_options is None else b_storage_options
    with OpenCheckpoint(a, storage_options) as one, OpenCheckpoint(b, options) as other:
        return _Compare(one, other, progress or (lambda done, total: None)).run()


class _Compare:
    def __init__(
        self, one: OpenCheckpoint, other: OpenCheckpoint, progress: Callable[[int, int], None]
    ) -> None:
        self._one, self._other, self._progress = one, other, progress
        self._found = Comparison(one.store.url, other.store.url)

    def run(self) -> Comparison:
        names = self._one.names
        there = set(self._other.names)
        both = [name for name in names if name in there]
        add = self._found.differences.append
        for name in names:
            if name not in there:
                add(Difference(name, "only_a", a=_described(self._one.find(name)[3])))
        for name in sorted(there - set(names)):
            add(Difference(name, "only_b", b=_described(self._other.find(name)[3])))
        total = sum(_nbytes(self._one.find(name)[3]) for name in both)
        done = 0
        for name in both:
            found = self._compare(name)
            if found is not None:
                add(found)
            done += _nbytes(self._one.find(name)[3])
            self._progress(done, total)
        return self._found

    def _compare(self, name: str) -> Difference | None:
        a, b = self._one.find(name)[3], self._other.find(name)[3]
        words: dict[str, Any] = {"a": _described(a), "b": _described(b)}
        if isinstance(a, ObjectRow) or isinstance(b, ObjectRow):
            if not (isinstance(a, ObjectRow) and isinstance(b, ObjectRow)):
                return Difference(name, "kind", **words)
            self._found.objects += 1
            return None if self._same_object(name) else Difference(name, "object", **words)
        self._found.tensors += 1
        if a.size != b.size:
            return Difference(name, "shape", **words)
        if a.dtype == b.dtype and self._same_checksums(name, a, b):
            self._found.equal_by_checksum += 1
            return None
        if is_quantized(a.dtype) or is_quantized(b.dtype):
            return None if self._same_stored(name, a, b) else Difference(name, "values", **words)
        found = self._compare_values(name, a)
        if a.dtype != b.dtype:
            return Difference(name, "dtype", **words, **found)
        return Difference(name, "values", **words, **found) if found["differing"] else None

    # -- without reading -------------------------------------------------------------------------------

    def _same_checksums(self, name: str, a: TensorColumns, b: TensorColumns) -> bool:
        same_chunks = np.array_equal(a.offsets, b.offsets) and np.array_equal(a.sizes, b.sizes)
        if not same_chunks:
            return False
        rows = range(len(a.file))
        return self._same_items(name, [_place(a, row) for row in rows], [_place(b, row) for row in rows])

    def _same_items(self, name: str, a: list[tuple[int, int, int]], b: list[tuple[int, int, int]]) -> bool:
        """Whether items are equal by the checksums of the blocks that they are in."""
        items = []
        for checkpoint, places in ((self._one, a), (self._other, b)):
            part, columns, _, _ = checkpoint.find(name)
            if part.commit is None:
                return False
            infos = [StorageInfo(columns.files[file], offset, length) for file, offset, length in places]
            part.prepare(infos, checkpoint.threads)
            items.append([(part.file(info), info) for info in infos])
        for (file, info), (other_file, other_info) in zip(*items, strict=True):
            size = file.block_size_bytes
            crcs, others = file.block_crcs, other_file.block_crcs
            if crcs is None or others is None or size != other_file.block_size_bytes:
                return False
            if info.length != other_info.length or (info.offset - other_info.offset) % size:
                return False
            first, other_first = info.offset // size, other_info.offset // size
            count = (info.offset + info.length - 1) // size - first + 1 if info.length else 0
            if list(crcs[first : first + count]) != list(others[other_first : other_first + count]):
                return False
        return True

    # -- by reading ------------------------------------------------------------------------------------

    def _same_object(self, name: str) -> bool:
        a, b = self._one.find(name)[3], self._other.find(name)[3]
        assert isinstance(a, ObjectRow)
        assert isinstance(b, ObjectRow)
        if self._same_items(name, [(a.file, a.offset, a.length)], [(b.file, b.offset, b.length)]):
            self._found.equal_by_checksum += 1
            return True
        if self._same_bytes(name, a, b):
            return True
        try:
            return _pickled(self._one.read_object(name)) == _pickled(self._other.read_object(name))
        except (UnsafeContent, FormatError):
            return False  # their bytes differ, and no more can be said

    def _same_stored(self, name: str, a: TensorColumns, b: TensorColumns) -> bool:
        """Whether two tensors are stored as the same bytes: all that can be said of some kinds."""
        same_chunks = np.array_equal(a.offsets, b.offsets) and np.array_equal(a.sizes, b.sizes)
        return same_chunks and all(
            self._same_bytes(name, ObjectRow(*_place(a, row)), ObjectRow(*_place(b, row)))
            for row in range(len(a.file))
        )

    def _same_bytes(self, name: str, a: ObjectRow, b: ObjectRow) -> bool:
        if a.length != b.length:
            return False
        places = [
            (c.store, c.find(name)[1].files[row.file], row) for c, row in ((self._one, a), (self._other, b))
        ]
        for start in range(0, a.length, _STEP_BYTES):
            parts = []
            for store, file, row in places:
                part = bytearray(min(_STEP_BYTES, row.length - start))
                store.read_into(file, row.offset + start, [memoryview(part)])
                parts.append(part)
            if parts[0] != parts[1]:
                return False
        return True

    def _compare_values(self, name: str, a: TensorColumns) -> dict[str, Any]:
        differing = nan = 0
        max_abs = max_rel = 0.0
        covered = 0
        for begin, end in boxes_of(a, [0] * len(a.size), a.size, _MAX_ELEMENTS):
            lengths = [stop - start for start, stop in zip(begin, end, strict=True)]
            one, other = (c.read(name, begin, lengths) for c in (self._one, self._other))
            self._found.read_bytes += one.numel() * one.element_size()
            covered += one.numel()
            if one.dtype == other.dtype and _same_bits(one, other):
                continue
            count, nans, absolute, relative = _compared(as_numpy(one), as_numpy(other))
            differing, nan = differing + count, nan + nans
            max_abs, max_rel = max(max_abs, absolute), max(max_rel, relative)
        if covered != math.prod(a.size):
            raise FormatError(f"the chunks of {name[:200]!r} do not cover it", url=self._one.store.url)
        return {"differing": differing, "max_abs": max_abs, "max_rel": max_rel, "nan": nan}


def _compared(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[int, int, float, float]:
    """Number of elements that differ, those that are NaN in one only, the largest differences."""
    with np.errstate(all="ignore"):
        if a.dtype.kind in "fc" or b.dtype.kind in "fc":
            wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
            a, b = a.astype(wide), b.astype(wide)
            nan_a, nan_b = np.isnan(a), np.isnan(b)
            different = (a != b) & ~(nan_a & nan_b)
            nans = int((nan_a != nan_b).sum())
        else:
            different, nans = a != b, 0
        a, b = a[different], b[different]
        if a.dtype.kind in "biu":
            a, b = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(b)
        a, b = a[finite], b[finite]
        if not a.size:
            return int(different.sum()), nans, 0.0, 0.0
        distance = np.abs(a - b)
        relative = distance / np.maximum(np.abs(a), np.abs(b))
        return int(different.sum()), nans, float(distance.max()), float(np.nanmax(relative))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _place(columns: TensorColumns, row: int) -> tuple[int, int, int]:
    return int(columns.file[row]), int(columns.offset[row]), int(columns.length[row])


def _described(entry: TensorColumns | ObjectRow) -> str:
    if isinstance(entry, ObjectRow):
        return f"object of {entry.length} bytes"
    return f"{str(entry.dtype).removeprefix('torch.')} {tuple(entry.size)}"


def _nbytes(entry: TensorColumns | ObjectRow) -> int:
    if isinstance(entry, ObjectRow):
        return entry.length
    return math.prod(entry.size) * entry.dtype.itemsize
