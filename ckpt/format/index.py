"""Encode and decode the index: a checkpoint's columns as one small typed record (`docs/format.md`)."""

from __future__ import annotations

import copyreg
import functools
import zlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ckpt.errors import ConfigurationError, FormatError
from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns
from ckpt.format.dtypes import item_bytes
from ckpt.format.names import is_path
from ckpt.format.planner_data import PlainValue, check_planner_data, pack, unpack
from ckpt.gc_pause import no_gc

INDEX_FORMAT = "ckpt-storage index"
INDEX_VERSION = 1

_MAX_ROWS = 1 << 27
_MAX_CELLS = 1 << 29
_MAX_DIMENSIONS = 64
_MAX_EXPANSION = 64
_SLACK_BYTES = 16 << 20
_MANIFEST_GROWTH = 8
"""A row of the tables has at most so many times the bytes of its item in a manifest, which is text."""
_COMPRESSION_LEVEL = 1


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, or (dtype null) an object, which has one row and no dimensions."""

    fqn: str
    dtype: str | None
    size: list[int]
    requires_grad: bool
    chunks: int


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    format: str = INDEX_FORMAT
    version: int = INDEX_VERSION
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


_RECORD = msgspec.msgpack.Decoder(_Record)  # made once, before there are threads


def encode_index(columns: Columns) -> bytes:
    """Encode columns. Raises ValueError if `planner_data` holds more than plain values."""
    tables = list(columns.entries.values())
    tensors = [entry for entry in tables if isinstance(entry, TensorColumns)]
    return msgspec.msgpack.encode(
        _Record(
            save_id=columns.save_id,
            dcp_version=columns.version,
            files=columns.files,
            entries=_entries(columns),
            planner_data=pack(columns.planner_data),
            offsets=_compressed([tensor.offsets for tensor in tensors]),
            sizes=_compressed([tensor.sizes for tensor in tensors]),
            file=_compressed([entry.file for entry in tables]),
            offset=_compressed([entry.offset for entry in tables]),
            length=_compressed([entry.length for entry in tables]),
        )
    )


def check_columns(columns: Columns) -> None:
    """Raise FormatError for what `decode_index` would refuse, without the cost of encoding and decoding."""
    entries = _entries(columns)
    _check_files(columns.files)
    _checked_totals(entries)
    for entry, table in zip(entries, columns.entries.values(), strict=True):
        if isinstance(table, TensorColumns):
            _check_tensor(entry, table.offsets, table.sizes)
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
copyreg.pickle(Columns, lambda columns: (_unpickled, (encode_index(columns),)))


def _columns(record: _Record, nbytes: int, manifest_bytes: Callable[[int], int] | None) -> Columns:
    if record.format != INDEX_FORMAT:
        raise FormatError(f"not an index: {record.format[:40]!r}")
    if record.version > INDEX_VERSION:
        raise FormatError(
            f"an index of version {record.version}; this library reads up to {INDEX_VERSION}, update it"
        )
    _check_files(record.files)
    rows, cells = _checked_totals(record.entries)
    # A thousand zeros take a byte of a column; so may the chunks of a thousand ranks, but not in manifests.
    excess = 8 * (3 * rows + 2 * cells) - _SLACK_BYTES - _MAX_EXPANSION * nbytes
    needed = -(-excess // _MANIFEST_GROWTH)
    if manifest_bytes is not None and needed > 0 and manifest_bytes(needed) < needed:
        raise FormatError(f"the index lists {rows:,} chunks, far more than the manifests can list")
    offsets, sizes = _integers(record.offsets, cells), _integers(record.sizes, cells)
    file, offset, length = (_integers(data, rows) for data in (record.file, record.offset, record.length))
    if rows and int(file.max()) >= len(record.files):
        raise FormatError("an item in no file")
    planner_data = unpack(record.planner_data)
    check_planner_data(planner_data)
    columns = Columns(record.files, {}, planner_data, record.save_id, record.dcp_version)
    row = cell = 0
    for entry in record.entries:
        if entry.fqn in columns.entries:
            raise FormatError(f"{entry.fqn[:80]!r} twice")
        if entry.dtype is None:
            columns.entries[entry.fqn] = ObjectRow(int(file[row]), int(offset[row]), int(length[row]))
            row += 1
            continue
        shape = (entry.chunks, len(entry.size))
        end, cell_end = row + entry.chunks, cell + entry.chunks * len(entry.size)
        boxes = offsets[cell:cell_end].reshape(shape), sizes[cell:cell_end].reshape(shape)
        places = file[row:end], offset[row:end], length[row:end]
        _check_tensor(entry, *boxes)
        columns.entries[entry.fqn] = TensorColumns(
            entry.dtype, tuple(entry.size), entry.requires_grad, *boxes, *places
        )
        row, cell = end, cell_end
    return columns


def _entries(columns: Columns) -> list[_Entry]:
    return [
        _Entry(fqn, None, [], False, 1)
        if isinstance(entry, ObjectRow)
        else _Entry(fqn, entry.dtype, list(entry.size), entry.requires_grad, len(entry.file))
        for fqn, entry in columns.entries.items()
    ]


def _check_files(files: Sequence[str]) -> None:
    for path in files:
        if not is_path(path):
            raise FormatError(f"not a valid object key: {path[:80]!r}")


def _checked_totals(entries: Sequence[_Entry]) -> tuple[int, int]:
    """Return the rows and the cells (rows times dimensions) of all entries, unless one is absurd."""
    rows = cells = 0
    for entry in entries:
        if entry.dtype is None and (entry.chunks != 1 or entry.size):
            raise FormatError(f"an object in parts ({entry.fqn[:80]!r})")
        if len(entry.size) > _MAX_DIMENSIONS or not 0 <= entry.chunks <= _MAX_ROWS:
            raise FormatError(f"an absurd shape ({entry.fqn[:80]!r})")
        if any(not 0 <= size < 1 << 62 for size in entry.size):
            raise FormatError(f"an absurd size ({entry.fqn[:80]!r})")
        rows += entry.chunks
        cells += entry.chunks * len(entry.size)
    if rows > _MAX_ROWS or cells > _MAX_CELLS:
        raise FormatError("more chunks than any checkpoint has")
    return rows, cells


def _check_tensor(entry: _Entry, offsets: Integers, sizes: Integers) -> None:
    """Check that a tensor's dtype exists, and that no chunk of it lies outside of it."""
    assert entry.dtype is not None
    item_bytes(entry.dtype)
    if entry.size and not _inside(offsets, sizes, entry.size):
        raise FormatError(f"a chunk outside of its tensor ({entry.fqn[:80]!r})")


def _inside(offsets: Integers, sizes: Integers, limits: Sequence[int]) -> bool:
    # Written so that nothing overflows. A single chunk is checked without numpy, which costs more there.
    if len(offsets) == 1:
        rows = zip(offsets[0].tolist(), sizes[0].tolist(), limits, strict=True)
        return all(0 <= size <= limit - offset <= limit for offset, size, limit in rows)
    room = np.array(limits, dtype=np.int64) - offsets
    return bool(((offsets >= 0) & (sizes >= 0) & (sizes <= room)).all())


def _compressed(values: Sequence[Integers | int]) -> bytes:
    """Compress integers: first the lowest byte of each, then the next of each, and so on."""
    parts = [np.asarray(value, dtype="<i8").reshape(-1) for value in values]
    column = np.concatenate(parts) if parts else np.empty(0, dtype="<i8")
    return zlib.compress(column.view(np.uint8).reshape(-1, 8).T.tobytes(), _COMPRESSION_LEVEL)


def _integers(data: bytes, count: int) -> Integers:
    """Expand `count` integers in no more memory than they need."""
    unpacker = zlib.decompressobj()
    planes = unpacker.decompress(data, 8 * count + 1)
    if len(planes) != 8 * count or not unpacker.eof:
        raise FormatError("a column of another length than its entries")
    rows = np.frombuffer(planes, dtype=np.uint8).reshape(8, count).T.copy()
    column: Integers = rows.view("<i8").reshape(count).astype(np.int64, copy=False)
    if count and not 0 <= int(column.min()) <= int(column.max()) < 1 << 62:
        raise FormatError("a number that is no size or offset")
    return column
