"""Encode and decode the index: a checkpoint's columns as one small typed record (`docs/format.md`).

Tensors that are held as runs are written as such, in version 2. An index without such tensors is one of version 1.
"""

from __future__ import annotations

import copyreg
import functools
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ckpt.errors import ConfigurationError, FormatError
from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns, compressed, expanded
from ckpt.format.dtypes import item_bytes
from ckpt.format.names import is_path
from ckpt.format.planner_data import PlainValue, check_planner_data, pack, unpack
from ckpt.format.run_table import MAX_ROWS_OF_TENSOR, BoxCheck, PackedRuns, RunTable, pack_runs, runs_of
from ckpt.format.runs import NUMBERS, TensorRuns
from ckpt.gc_pause import no_gc

INDEX_FORMAT = "ckpt-storage index"
INDEX_VERSION = 2
_VERSION_OF_ROWS = 1
"""Of an index without runs."""

_MAX_ROWS = 1 << 27
_MAX_CHUNKS = 1 << 31
_MAX_CELLS = 1 << 29
_MAX_DIMENSIONS = 64
_MAX_EXPANSION = 64
_SLACK_BYTES = 16 << 20
_SLACK_OF_RUNS_BYTES = 64 << 20
"""Of all tensors with runs, which a load expands one by one, and a check all: 1,200,000 chunks of two dimensions."""
_MAX_EXPANSION_OF_RUNS = 64
"""Of the bytes of the manifests, for the chunks of all tensors with runs."""
_MANIFEST_GROWTH = 8
"""A row of the tables has at most so many times the bytes of its item in a manifest, which is text."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, or (dtype null) an object, which has one row and no dimensions."""

    fqn: str
    dtype: str | None
    size: list[int]
    requires_grad: bool
    chunks: int


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Entries that are `regular` have no rows in the columns."""

    format: str
    version: int
    save_id: str | None
    dcp_version: str | None
    files: list[str]
    entries: list[_Entry]
    planner_data: PlainValue
    offsets: bytes
    sizes: bytes
    file: bytes
    offset: bytes
    length: bytes
    regular: list[list[int]] = []
    column_runs: list[int] = []
    runs: bytes = b""


_RECORD = msgspec.msgpack.Decoder(_Record)  # made once, before there are threads


def encode_index(columns: Columns) -> bytes:
    """Encode columns. Raises ValueError if `planner_data` holds more than plain values."""
    tables = list(columns.entries.values())
    rows = [entry for entry in tables if not isinstance(entry, TensorRuns)]
    tensors = [entry for entry in rows if isinstance(entry, TensorColumns)]
    packed = pack_runs(tables)
    return msgspec.msgpack.encode(
        _Record(
            format=INDEX_FORMAT,
            version=INDEX_VERSION if packed.regular else _VERSION_OF_ROWS,
            save_id=columns.save_id,
            dcp_version=columns.version,
            files=columns.files,
            entries=_entries(columns),
            planner_data=pack(columns.planner_data),
            offsets=compressed([tensor.offsets for tensor in tensors]),
            sizes=compressed([tensor.sizes for tensor in tensors]),
            file=compressed([entry.file for entry in rows]),
            offset=compressed([entry.offset for entry in rows]),
            length=compressed([entry.length for entry in rows]),
            regular=packed.regular,
            column_runs=packed.column_runs,
            runs=packed.runs,
        )
    )


def check_columns(columns: Columns) -> None:
    """Raise FormatError for what `decode_index` would refuse, without the cost of encoding and decoding."""
    entries, tables = _entries(columns), list(columns.entries.values())
    _check_files(columns.files)
    _Totals.of(entries, {number for number, table in enumerate(tables) if isinstance(table, TensorRuns)})
    boxes = BoxCheck()
    for entry, table in zip(entries, tables, strict=True):
        if isinstance(table, TensorColumns):
            _check_tensor(entry, table, boxes)
    check_planner_data(columns.planner_data)


def check_count(rows: int) -> None:
    """Raise ConfigurationError if a plan has more chunks than an index can list: before anything is written."""
    if rows > _MAX_ROWS:
        raise ConfigurationError(
            f"this state has {rows:,} chunks and objects on all ranks, more than the {_MAX_ROWS:,} that an index "
            "lists: shard it over fewer ranks (HSDP), or save parts of it in checkpoints of their own"
        )


def decode_index(
    data: bytes | bytearray | memoryview,
    *,
    url: str,
    key: str,
    manifest_bytes: Callable[[int], int] | None = None,
) -> Columns:
    """Decode columns from a record that may be hostile.

    Args:
        manifest_bytes: returns how much is stored of the manifests, which list every item again; it
            need not look for more than its argument. Called if the record expands very much; None
            if the record can be trusted.

    Raises:
        FormatError: it is not a record of this format, a newer one, or contradicts itself.
    """
    try:
        with no_gc():
            return _columns(_RECORD.decode(data), len(data), manifest_bytes)
    except FormatError as error:
        raise FormatError(error.message, url=url, key=key) from None
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        text = f"not a valid index: {type(error).__name__}: {error}"
        raise FormatError(text[:500], url=url, key=key) from error


# DCP sends the metadata of a save to all ranks: as an index it has a hundredth of the size.
_unpickled = functools.partial(decode_index, url="", key="index")
copyreg.pickle(Columns, lambda columns: (_unpickled, (columns.encoded or encode_index(columns),)))


def _columns(record: _Record, nbytes: int, manifest_bytes: Callable[[int], int] | None) -> Columns:
    if record.format != INDEX_FORMAT:
        raise FormatError(f"not an index: {record.format[:40]!r}")
    if record.version > INDEX_VERSION:
        raise FormatError(
            f"an index of version {record.version}; this library reads up to {INDEX_VERSION}, update it"
        )
    _check_files(record.files)
    packed = PackedRuns()
    if record.version > _VERSION_OF_ROWS:
        packed = PackedRuns(record.regular, record.column_runs, record.runs)
    regular = _regular(packed, len(record.entries))
    totals = _Totals.of(record.entries, regular.keys())
    needed = totals.manifest_bytes(nbytes, runs_of(packed))
    if manifest_bytes is not None and needed > 0 and manifest_bytes(needed) < needed:
        raise FormatError(f"the index lists {totals.chunks:,} chunks, far more than the manifests can list")
    planner_data = unpack(record.planner_data)
    check_planner_data(planner_data)
    columns = Columns(record.files, {}, planner_data, record.save_id, record.dcp_version)
    rows, runs, boxes = _Rows(record, totals), RunTable(packed), BoxCheck()
    for number, entry in enumerate(record.entries):
        if entry.fqn in columns.entries:
            raise FormatError(f"{entry.fqn[:80]!r} twice")
        table: TensorColumns | ObjectRow
        if number in regular:
            chosen = runs.columns(regular[number], len(entry.size), entry.chunks, len(record.files))
            table = TensorRuns(str(entry.dtype), tuple(entry.size), entry.requires_grad, chosen)
        else:
            table = rows.take(entry)
        if isinstance(table, TensorColumns):
            _check_tensor(entry, table, boxes)
        columns.entries[entry.fqn] = table
    return columns


def _regular(packed: PackedRuns, entries: int) -> dict[int, list[int]]:
    """Return the numbers of the columns of each entry that has runs."""
    regular: dict[int, list[int]] = {}
    for row in packed.regular:
        if not row or not 0 <= row[0] < entries or row[0] in regular:
            raise FormatError("runs of no entry")
        regular[row[0]] = row[1:]
    return regular


class _Rows:
    """The columns that have a row for each chunk, handed out entry by entry."""

    def __init__(self, record: _Record, totals: _Totals) -> None:
        boxes = record.offsets, record.sizes
        self._offsets, self._sizes = (_integers(data, totals.cells) for data in boxes)
        places = record.file, record.offset, record.length
        self._file, self._offset, self._length = (_integers(data, totals.rows) for data in places)
        if totals.rows and int(self._file.max()) >= len(record.files):
            raise FormatError("an item in no file")
        self._row = self._cell = 0

    def take(self, entry: _Entry) -> TensorColumns | ObjectRow:
        first, last = self._row, self._row + entry.chunks
        self._row = last
        if entry.dtype is None:
            return ObjectRow(int(self._file[first]), int(self._offset[first]), int(self._length[first]))
        shape = (entry.chunks, len(entry.size))
        cells = slice(self._cell, self._cell + entry.chunks * len(entry.size))
        self._cell = cells.stop
        boxes = self._offsets[cells].reshape(shape), self._sizes[cells].reshape(shape)
        places = self._file[first:last], self._offset[first:last], self._length[first:last]
        return TensorColumns(entry.dtype, tuple(entry.size), entry.requires_grad, *boxes, *places)


def _entries(columns: Columns) -> list[_Entry]:
    return [
        _Entry(fqn, None, [], False, 1)
        if isinstance(entry, ObjectRow)
        else _Entry(fqn, entry.dtype, list(entry.size), entry.requires_grad, entry.count)
        for fqn, entry in columns.entries.items()
    ]


def _check_files(files: Sequence[str]) -> None:
    for path in files:
        if not is_path(path):
            raise FormatError(f"not a valid object key: {path[:80]!r}")


@dataclass(frozen=True)
class _Totals:
    """How much an index lists.

    Attributes:
        rows, cells: of the entries without runs; cells are rows times dimensions.
        chunks: of all entries.
        regular_bytes, largest_bytes: of all tensors with runs when they are expanded, and of the largest.
    """

    rows: int
    cells: int
    chunks: int
    regular_bytes: int
    largest_bytes: int

    @staticmethod
    def of(entries: Sequence[_Entry], regular: Collection[int]) -> _Totals:
        """Sum up. Raises FormatError if an entry, or the sum, is absurd."""
        rows = cells = chunks = regular_bytes = largest_bytes = 0
        for number, entry in enumerate(entries):
            if entry.dtype is None and (entry.chunks != 1 or entry.size or number in regular):
                raise FormatError(f"an object in parts ({entry.fqn[:80]!r})")
            if len(entry.size) > _MAX_DIMENSIONS or not 0 <= entry.chunks <= _MAX_ROWS:
                raise FormatError(f"an absurd shape ({entry.fqn[:80]!r})")
            if any(not 0 <= size < 1 << 62 for size in entry.size):
                raise FormatError(f"an absurd size ({entry.fqn[:80]!r})")
            chunks += entry.chunks
            if number not in regular:
                rows += entry.chunks
                cells += entry.chunks * len(entry.size)
            elif entry.chunks > MAX_ROWS_OF_TENSOR:
                raise FormatError(f"an absurd shape ({entry.fqn[:80]!r})")
            else:
                nbytes = 8 * entry.chunks * (3 + 2 * len(entry.size))
                regular_bytes += nbytes
                largest_bytes = max(largest_bytes, nbytes)
        if rows > _MAX_ROWS or cells > _MAX_CELLS or chunks > _MAX_CHUNKS:
            raise FormatError("more chunks than any checkpoint has")
        return _Totals(rows, cells, chunks, regular_bytes, largest_bytes)

    def manifest_bytes(self, nbytes: int, runs: int) -> int:
        """Return how much manifests must have if an index of `nbytes` lists this much, with `runs` runs in all."""
        # A thousand zeros take a byte of a column; so may the chunks of a thousand ranks, but not in manifests.
        expanded_bytes = 8 * (3 * self.rows + 2 * self.cells + NUMBERS * runs) + self.largest_bytes
        excess_bytes = expanded_bytes - _SLACK_BYTES - _MAX_EXPANSION * nbytes
        regular_bytes = self.regular_bytes - _SLACK_OF_RUNS_BYTES
        return max(0, -(-excess_bytes // _MANIFEST_GROWTH), -(-regular_bytes // _MAX_EXPANSION_OF_RUNS))


def _check_tensor(entry: _Entry, table: TensorColumns, boxes: BoxCheck) -> None:
    """Check that a tensor's dtype exists, and that no chunk of it lies outside of it."""
    if entry.dtype is None:
        raise FormatError(f"an object in parts ({entry.fqn[:80]!r})")
    item_bytes(entry.dtype)
    if isinstance(table, TensorRuns):
        inside = boxes.inside(table)
    else:
        inside = not entry.size or _inside(table.offsets, table.sizes, entry.size)
    if not inside:
        raise FormatError(f"a chunk outside of its tensor ({entry.fqn[:80]!r})")


def _inside(offsets: Integers, sizes: Integers, limits: Sequence[int]) -> bool:
    # Written so that nothing overflows. A single chunk is checked without numpy, which costs more there.
    if len(offsets) == 1:
        rows = zip(offsets[0].tolist(), sizes[0].tolist(), limits, strict=True)
        return all(0 <= size <= limit - offset <= limit for offset, size, limit in rows)
    room = np.array(limits, dtype=np.int64) - offsets
    return bool(((offsets >= 0) & (sizes >= 0) & (sizes <= room)).all())


def _integers(data: bytes, count: int) -> Integers:
    """Expand `count` sizes or offsets."""
    column = expanded(data, count)
    if count and not 0 <= int(column.min()) <= int(column.max()) < 1 << 62:
        raise FormatError("a number that is no size or offset")
    return column
