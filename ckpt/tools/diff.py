"""Compare two checkpoints, by whatever program and in whatever sharding: `ckpt.diff`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ckpt.errors import FormatError, UnsafeContent, short_traceback
from ckpt.format.columns import ObjectRow, TensorColumns
from ckpt.format.dtypes import is_quantized, item_bytes
from ckpt.format.elements import Elements, has_values, values_of
from ckpt.format.fqns import STRUCTURE
from ckpt.reading.slices import OpenCheckpoint, Region
from ckpt.stock.same_objects import same_objects
from ckpt.tools.cat import short_text
from ckpt.tools.inspect import SMALL_ELEMENTS
from ckpt.transfer.boxes import boxes_of
from ckpt.transfer.reports import ReportBytes, no_report

_MAX_ELEMENTS = 1 << 21
_MAX_REGIONS = 1024
_STEP_BYTES = 4 << 20


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints.

    Attributes:
        kind: `only_a`, `only_b`, `kind` (tensor and object), `shape`, `dtype` (and values, if
            `differing` is not 0), `values`, or `object`.
        a, b: descriptions of both.
        a_value, b_value: short texts of both, if they are small; of objects also if they are of
            torch's safe types alone.
        differing: number of elements whose values differ, or whose bytes where a dtype has no
            numbers (float4); NaN equals NaN.
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
    a_value: str = ""
    b_value: str = ""


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


@short_traceback
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    b_storage_options: Mapping[str, Any] | None = None,
    full: bool = False,
    progress: ReportBytes | None = None,
) -> Comparison:
    """Compare two checkpoints: names, shapes, dtypes, values; in bounded memory.

    Where both are this library's and stored alike, equal checksums in their records show that
    tensors were equal when they were saved, without reading.

    Args:
        a, b: the places of the two.
        storage_options: for `a`; for both, unless there are `b_storage_options`.
        full: read both all the same, so that damage is an error.
        progress: called with the bytes of elements compared so far and those in all.

    Raises:
        NotFound, NotCommitted, IntegrityError, FormatError, UnsafeContent, StorageError: one cannot
            be read.
    """
    options = storage_options if b_storage_options is None else b_storage_options
    with (
        OpenCheckpoint(a, storage_options, models=True) as first,
        OpenCheckpoint(b, options, models=True) as second,
    ):
        return _Comparing(first, second, full, progress or no_report).run()


_Entry = TensorColumns | ObjectRow


class _Comparing:
    """Compare `a` and `b`."""

    def __init__(self, a: OpenCheckpoint, b: OpenCheckpoint, full: bool, progress: ReportBytes) -> None:
        self._a, self._b, self._full, self._progress = a, b, full, progress
        self._result = Comparison(a.store.url, b.store.url)
        self._done_bytes = self._total_bytes = 0

    def run(self) -> Comparison:
        a, b = (
            {name: each.find(name)[3] for name in each.names if not name.startswith(f"{STRUCTURE}.")}
            for each in (self._a, self._b)
        )
        differences = self._result.differences
        differences += [Difference(name, "only_a", a=_described(a[name])) for name in a if name not in b]
        differences += [
            Difference(name, "only_b", b=_described(b[name])) for name in sorted(b.keys() - a.keys())
        ]
        both = [name for name in a if name in b]
        self._total_bytes = sum(_nbytes(a[name]) for name in both)
        unread: dict[str, _Values] = {}
        compared: dict[str, Difference | None] = {}
        for name in both:
            outcome = self._compare_records(name, a[name], b[name])
            if isinstance(outcome, _Values):
                unread[name] = outcome
            else:
                compared[name] = outcome
                self._count(_nbytes(a[name]))
        self._compare_values(unread)
        compared |= {name: values.difference() for name, values in unread.items()}
        differences += [difference for name in both if (difference := compared[name]) is not None]
        return self._result

    def _count(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        self._progress(self._done_bytes, self._total_bytes)

    def _compare_records(self, name: str, a: _Entry, b: _Entry) -> Difference | _Values | None:
        """Compare all but the elements of tensors, which are to be read then."""
        difference = partial(Difference, name, a=_described(a), b=_described(b))
        if isinstance(a, ObjectRow) or isinstance(b, ObjectRow):
            if not (isinstance(a, ObjectRow) and isinstance(b, ObjectRow)):
                return difference(kind="kind")
            self._result.objects += 1
            values = self._compare_objects(name, a, b)
            if values is None:
                return None
            return difference(kind="object", a_value=values[0], b_value=values[1])
        self._result.tensors += 1
        if a.size != b.size:
            return difference(kind="shape")
        same_chunks = np.array_equal(a.offsets, b.offsets) and np.array_equal(a.sizes, b.sizes)
        if a.dtype == b.dtype and same_chunks and self._same_checksums(name, a, b):
            return None
        if is_quantized(a.dtype) or is_quantized(b.dtype):  # values without scales cannot be compared
            return None if same_chunks and self._same_bytes(name, a, b) else difference(kind="values")
        if a.dtype != b.dtype and not (has_values(a.dtype) and has_values(b.dtype)):
            return difference(kind="dtype")
        return _Values(name, a, b)

    def _compare_objects(self, name: str, a: ObjectRow, b: ObjectRow) -> tuple[str, str] | None:
        """Return short texts of objects that differ, None if they are the same."""
        if self._same_checksums(name, a, b) or (not self._full and self._same_bytes(name, a, b)):
            return None
        try:
            a_value, b_value = self._a.read_object(name), self._b.read_object(name)
        except (UnsafeContent, FormatError):
            # They cannot be loaded, so their bytes decide.
            return None if self._full and self._same_bytes(name, a, b) else ("", "")
        if same_objects(a_value, b_value):
            return None
        return short_text(a_value), short_text(b_value)

    def _same_checksums(self, name: str, a: _Entry, b: _Entry) -> bool:
        """Tell whether all stored items are equal by the checksums of their blocks, without reading."""
        if self._full:
            return False
        checksums = _checksums(self._a, name, a)
        same = checksums is not None and checksums == _checksums(self._b, name, b)
        self._result.equal_by_checksum += same
        return same

    def _same_bytes(self, name: str, a: _Entry, b: _Entry) -> bool:
        """Tell whether all stored items are the same bytes."""
        a_files, b_files = self._a.find(name)[1].files, self._b.find(name)[1].files
        for a_item, b_item in zip(_items(a), _items(b), strict=True):
            if a_item.length != b_item.length:
                return False
            for start in range(0, a_item.length, _STEP_BYTES):
                a_part, b_part = (bytearray(min(_STEP_BYTES, a_item.length - start)) for _ in range(2))
                self._a.store.read_into(a_files[a_item.file], a_item.offset + start, [memoryview(a_part)])
                self._b.store.read_into(b_files[b_item.file], b_item.offset + start, [memoryview(b_part)])
                if a_part != b_part:
                    return False
        return True

    def _compare_values(self, unread: Mapping[str, _Values]) -> None:
        """Read tensors from both, box by box; small ones together."""
        batch: list[tuple[_Values, Region]] = []
        elements = 0
        for values in unread.values():
            for region in values.regions():
                size = math.prod(region[2])
                if elements + size > _MAX_ELEMENTS or len(batch) == _MAX_REGIONS:
                    self._compare_batch(batch)
                    batch, elements = [], 0
                batch.append((values, region))
                elements += size
        self._compare_batch(batch)
        for name, values in unread.items():
            if values.compared != math.prod(values.a.size):
                raise FormatError(f"{name[:200]!r}: its chunks do not cover it", url=self._a.store.url)

    def _compare_batch(self, batch: Sequence[tuple[_Values, Region]]) -> None:
        regions = [region for _, region in batch]
        for (values, _), a, b in zip(batch, self._a.read(regions), self._b.read(regions), strict=True):
            self._result.read_bytes += a.nbytes
            values.add(a, b)
            self._count(a.nbytes)


@dataclass
class _Numbers:
    """The fields of a `Difference` that tell how values differ."""

    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    nan: int = 0
    a_value: str = ""
    b_value: str = ""

    def add(self, a: Elements, b: Elements) -> None:
        """Compare two arrays of the same shape."""
        with np.errstate(all="ignore"):
            wide = _wide(a, b)
            if (a.dtype.kind in "iu") != (b.dtype.kind in "iu"):
                a, b = a.astype(wide), b.astype(wide)
            nan_a, nan_b = np.not_equal(a, a), np.not_equal(b, b)
            different = (a != b) & ~(nan_a & nan_b)
            self.nan += int((nan_a != nan_b).sum())
            self.differing += int(different.sum())
            a, b = a[different].astype(wide), b[different].astype(wide)
            finite = np.isfinite(a) & np.isfinite(b)
            a, b = a[finite], b[finite]
            if a.size:
                distance, largest = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
                # The distance may be beyond all numbers.
                far = np.abs(a / largest - b / largest)
                relative = np.where(np.isfinite(distance), distance / largest, far)
                self.max_abs = max(self.max_abs, float(distance.max()))
                self.max_rel = max(self.max_rel, float(np.nanmax(relative)))


def _wide(a: Elements, b: Elements) -> type[Any]:
    """Choose the dtype in which values of both are compared."""
    kinds = {a.dtype.kind, b.dtype.kind}
    if "c" in kinds:
        return np.complex128
    return np.longdouble if kinds & {"i", "u"} else np.float64  # it has all integers of 64 bits


@dataclass
class _Values:
    """How the elements of a tensor differ, as far as they are read."""

    name: str
    a: TensorColumns
    b: TensorColumns
    compared: int = 0
    numbers: _Numbers = field(default_factory=_Numbers)

    def regions(self) -> Iterator[Region]:
        """List the regions in which it is read."""
        for begin, end in boxes_of(self.a, [0] * len(self.a.size), self.a.size, _MAX_ELEMENTS):
            yield self.name, begin, [stop - start for start, stop in zip(begin, end, strict=True)]

    def add(self, a: Elements, b: Elements) -> None:
        """Compare stored elements of one region."""
        self.compared += a.size
        if self.a.dtype == self.b.dtype and np.array_equal(_bytes_of(a), _bytes_of(b)):
            return
        if not has_values(self.a.dtype):
            self.numbers.differing += int((a != b).sum())
            return
        a, b = values_of(a, self.a.dtype), values_of(b, self.b.dtype)
        self.numbers.add(a, b)
        if a.size == math.prod(self.a.size) <= SMALL_ELEMENTS:
            self.numbers.a_value, self.numbers.b_value = short_text(a), short_text(b)

    def difference(self) -> Difference | None:
        """Describe the difference, if there is one."""
        kind = "values" if self.a.dtype == self.b.dtype else "dtype"
        if kind == "values" and not self.numbers.differing:
            return None
        return Difference(self.name, kind, _described(self.a), _described(self.b), **vars(self.numbers))


def _bytes_of(elements: Elements) -> Elements:
    """Show elements as bytes of numpy, which are compared much faster than those of memoryviews."""
    return elements.reshape(-1).view(np.uint8)


def _items(entry: _Entry) -> list[ObjectRow]:
    """List the places of an entry's stored items."""
    if isinstance(entry, ObjectRow):
        return [entry]
    rows = zip(entry.file.tolist(), entry.offset.tolist(), entry.length.tolist(), strict=True)
    return [ObjectRow(*row) for row in rows]


def _checksums(checkpoint: OpenCheckpoint, name: str, entry: _Entry) -> list[tuple[Any, ...]] | None:
    """List the checksums of the blocks of each stored item, and how it lies in them; None if there are none."""
    part, columns, _, _ = checkpoint.find(name)
    if part.commit is None:
        return None
    items = _items(entry)
    part.prepare({columns.files[item.file] for item in items}, checkpoint.threads)
    checksums = []
    for item in items:
        stop = item.offset + item.length
        file = part.file(columns.files[item.file], item.offset, stop)
        if file.block_crcs is None:
            return None
        size = file.block_size_bytes
        blocks = slice(item.offset // size, -(-stop // size))
        checksums.append((size, item.offset % size, item.length, list(file.block_crcs[blocks])))
    return checksums


def _described(entry: _Entry) -> str:
    if isinstance(entry, ObjectRow):
        return f"object of {entry.length} bytes"
    return f"{entry.dtype} {tuple(entry.size)}"


def _nbytes(entry: _Entry) -> int:
    if isinstance(entry, ObjectRow):
        return entry.length
    return math.prod(entry.size) * item_bytes(entry.dtype)
