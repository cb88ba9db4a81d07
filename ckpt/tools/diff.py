"""Compare two checkpoints, by whatever program and in whatever sharding: `ckpt.diff`."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckpt.errors import FormatError, UnsafeContent
from ckpt.format.columns import ObjectRow, TensorColumns, is_quantized
from ckpt.format.stored_tensor import dtype_name
from ckpt.reading.slices import OpenCheckpoint
from ckpt.tools.cat import as_numpy
from ckpt.torch_private import StorageInfo
from ckpt.transfer.boxes import boxes_of
from ckpt.transfer.reports import ReportBytes, no_report

_MAX_ELEMENTS = 1 << 21
_STEP_BYTES = 4 << 20


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints.

    Attributes:
        kind: `only_a`, `only_b`, `kind` (tensor and object), `shape`, `dtype` (and values, if
            `differing` is not 0), `values`, or `object`.
        a, b: descriptions of both.
        differing: number of elements whose values differ; NaN equals NaN.
        max_abs, max_rel: largest difference of finite elements, absolute and relative to the larger
            of the two.
        nan: number of elements that are NaN in one of them only.
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
        tensors, objects: number of names in both, which were compared.
        equal_by_checksum: number of those whose checksums are equal; their data was not read.
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
        """True if nothing differs."""
        return not self.differences


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    b_storage_options: Mapping[str, Any] | None = None,
    progress: ReportBytes | None = None,
) -> Comparison:
    """Compare two checkpoints: names, shapes, dtypes, values; in bounded memory.

    Where both are this library's and stored alike, equal checksums show that tensors are equal,
    without reading.

    Args:
        storage_options: for `a`; for both, unless there are `b_storage_options`.
        progress: called with the bytes of elements compared so far and those in all.

    Raises:
        NotFound, NotCommitted, IntegrityError, FormatError, UnsafeContent, StorageError: one cannot
            be read.
    """
    options = storage_options if b_storage_options is None else b_storage_options
    with OpenCheckpoint(a, storage_options) as first, OpenCheckpoint(b, options) as second:
        return _Comparing(first, second, progress or no_report).run()


class _Comparing:
    """Compare `a` and `b`."""

    def __init__(self, a: OpenCheckpoint, b: OpenCheckpoint, progress: ReportBytes) -> None:
        self._a, self._b, self._progress = a, b, progress
        self._result = Comparison(a.store.url, b.store.url)

    def run(self) -> Comparison:
        names, b_names = self._a.names, set(self._b.names)
        both = [name for name in names if name in b_names]
        add = self._result.differences.append
        for name in names:
            if name not in b_names:
                add(Difference(name, "only_a", a=_described(self._a.find(name)[3])))
        for name in sorted(b_names - set(names)):
            add(Difference(name, "only_b", b=_described(self._b.find(name)[3])))
        total = sum(_nbytes(self._a.find(name)[3]) for name in both)
        done = 0
        for name in both:
            difference = self._compare(name)
            if difference is not None:
                add(difference)
            done += _nbytes(self._a.find(name)[3])
            self._progress(done, total)
        return self._result

    def _compare(self, name: str) -> Difference | None:
        a, b = self._a.find(name)[3], self._b.find(name)[3]
        words: dict[str, Any] = {"a": _described(a), "b": _described(b)}
        if isinstance(a, ObjectRow) or isinstance(b, ObjectRow):
            if not (isinstance(a, ObjectRow) and isinstance(b, ObjectRow)):
                return Difference(name, "kind", **words)
            self._result.objects += 1
            return None if self._same_object(name) else Difference(name, "object", **words)
        self._result.tensors += 1
        if a.size != b.size:
            return Difference(name, "shape", **words)
        if a.dtype == b.dtype and self._same_checksums(name, a, b):
            self._result.equal_by_checksum += 1
            return None
        if is_quantized(a.dtype) or is_quantized(b.dtype):
            return None if self._same_stored(name, a, b) else Difference(name, "values", **words)
        numbers = self._compare_values(name, a)
        if a.dtype != b.dtype:
            return Difference(name, "dtype", **words, **numbers)
        return Difference(name, "values", **words, **numbers) if numbers["differing"] else None

    # -- without reading -------------------------------------------------------------------------------

    def _same_checksums(self, name: str, a: TensorColumns, b: TensorColumns) -> bool:
        if not _same_chunks(a, b):
            return False
        rows = range(len(a.file))
        return self._same_items(name, [_item(a, row) for row in rows], [_item(b, row) for row in rows])

    def _same_items(self, name: str, a: list[tuple[int, int, int]], b: list[tuple[int, int, int]]) -> bool:
        """Tell whether items (file, offset, length) are equal by the checksums of their blocks."""
        items = []
        for checkpoint, stored in ((self._a, a), (self._b, b)):
            part, columns, _, _ = checkpoint.find(name)
            if part.commit is None:
                return False
            infos = [StorageInfo(columns.files[file], offset, length) for file, offset, length in stored]
            part.prepare(infos, checkpoint.threads)
            items.append([(part.file(info), info) for info in infos])
        for (a_file, a_info), (b_file, b_info) in zip(*items, strict=True):
            size = a_file.block_size_bytes
            a_crcs, b_crcs = a_file.block_crcs, b_file.block_crcs
            if a_crcs is None or b_crcs is None or size != b_file.block_size_bytes:
                return False
            if a_info.length != b_info.length or (a_info.offset - b_info.offset) % size:
                return False
            a_first, b_first = a_info.offset // size, b_info.offset // size
            count = (a_info.offset + a_info.length - 1) // size - a_first + 1 if a_info.length else 0
            if list(a_crcs[a_first : a_first + count]) != list(b_crcs[b_first : b_first + count]):
                return False
        return True

    # -- by reading ------------------------------------------------------------------------------------

    def _same_object(self, name: str) -> bool:
        a, b = self._a.find(name)[3], self._b.find(name)[3]
        assert isinstance(a, ObjectRow)
        assert isinstance(b, ObjectRow)
        if self._same_items(name, [(a.file, a.offset, a.length)], [(b.file, b.offset, b.length)]):
            self._result.equal_by_checksum += 1
            return True
        if self._same_bytes(name, a, b):
            return True
        try:
            return _pickled(self._a.read_object(name)) == _pickled(self._b.read_object(name))
        except (UnsafeContent, FormatError):
            return False  # their bytes differ, and they cannot be loaded

    def _same_stored(self, name: str, a: TensorColumns, b: TensorColumns) -> bool:
        """Tell whether two tensors are stored as the same bytes; their values cannot be compared."""
        return _same_chunks(a, b) and all(
            self._same_bytes(name, ObjectRow(*_item(a, row)), ObjectRow(*_item(b, row)))
            for row in range(len(a.file))
        )

    def _same_bytes(self, name: str, a: ObjectRow, b: ObjectRow) -> bool:
        if a.length != b.length:
            return False
        stored = [(c.store, c.find(name)[1].files[row.file], row) for c, row in ((self._a, a), (self._b, b))]
        for start in range(0, a.length, _STEP_BYTES):
            parts = []
            for store, file, row in stored:
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
            values, b_values = (c.read(name, begin, lengths) for c in (self._a, self._b))
            self._result.read_bytes += values.numel() * values.element_size()
            covered += values.numel()
            if values.dtype == b_values.dtype and _same_bits(values, b_values):
                continue
            count, nans, absolute, relative = _compare_arrays(as_numpy(values), as_numpy(b_values))
            differing, nan = differing + count, nan + nans
            max_abs, max_rel = max(max_abs, absolute), max(max_rel, relative)
        if covered != math.prod(a.size):
            raise FormatError(f"{name[:200]!r}: its chunks do not cover it", url=self._a.store.url)
        return {"differing": differing, "max_abs": max_abs, "max_rel": max_rel, "nan": nan}


def _compare_arrays(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[int, int, float, float]:
    """Count elements that differ, and that are NaN in one only; find the largest differences."""
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


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _same_chunks(a: TensorColumns, b: TensorColumns) -> bool:
    return np.array_equal(a.offsets, b.offsets) and np.array_equal(a.sizes, b.sizes)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _item(columns: TensorColumns, row: int) -> tuple[int, int, int]:
    return int(columns.file[row]), int(columns.offset[row]), int(columns.length[row])


def _described(entry: TensorColumns | ObjectRow) -> str:
    if isinstance(entry, ObjectRow):
        return f"object of {entry.length} bytes"
    return f"{dtype_name(entry.dtype)} {tuple(entry.size)}"


def _nbytes(entry: TensorColumns | ObjectRow) -> int:
    if isinstance(entry, ObjectRow):
        return entry.length
    return math.prod(entry.size) * entry.dtype.itemsize
