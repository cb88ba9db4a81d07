"""DCP's `Metadata` as the pickle that stock readers expect, written straight from columns.

Python's pickler visits every object: 8 seconds for a thousand ranks. The pickle of a row is always the same
but for its numbers, so here numpy fills the numbers of all rows of a tensor into a template.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns
from ckpt.torch_private import MemoryFormat, StorageInfo

__all__ = ["pickled_metadata"]

_EMPTY_TUPLE, _EMPTY_DICT, _EMPTY_LIST, _MARK, _NONE = b")", b"}", b"]", b"(", b"N"
_NEWOBJ, _BUILD, _REDUCE, _TUPLE, _TUPLE1 = b"\x81", b"b", b"R", b"t", b"\x85"
_SETITEMS, _APPENDS, _MEMOIZE, _POP, _GET, _STOP = b"u", b"e", b"\x94", b"0", b"j", b"."
_TUPLES = {0: _EMPTY_TUPLE, 1: b"\x85", 2: b"\x86", 3: b"\x87"}
_BATCH_ROWS = 1 << 16
_FEW_ROWS = 32
"""Up to here numpy costs more than it saves. Both ways write what reads the same."""

_Bytes = npt.NDArray[np.uint8]


def pickled_metadata(columns: Columns) -> bytes:
    """What `pickle.loads` makes DCP's `Metadata` of; equal, item for item, to `columns.metadata()`."""
    return _Writer(columns).written()


class _Writer:
    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._out: list[bytes] = [b"\x80\x04"]
        self._memo: dict[object, bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}

    def written(self) -> bytes:
        columns, out = self._columns, self._out
        self._define_constants()
        out += [self._global(Metadata), _EMPTY_TUPLE, _NEWOBJ, _EMPTY_DICT, _MARK]
        out += [self._text("state_dict_metadata"), _EMPTY_DICT, _MARK]
        for fqn, entry in columns.entries.items():
            out.append(self._text(fqn))
            self._describe(entry)
        out += [_SETITEMS, self._text("planner_data"), _plain(columns.planner_data)]
        out += [self._text("storage_data"), _EMPTY_DICT]
        for fqn, entry in columns.entries.items():
            self._locate(fqn, entry)
        out += [self._text("storage_meta"), _storage_meta(columns.save_id)]
        out += [self._text("version"), _plain(columns.version)]
        out += [_SETITEMS, _BUILD, _STOP]
        return b"".join(out)

    # -- what is written once and referred to ----------------------------------------------------------

    def _define_constants(self) -> None:
        names = ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]
        names += ["properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index"]
        names += ["relative_path", "length"]
        for text in dict.fromkeys([*names, *self._columns.files, *self._columns.entries]):
            self._define(text, _pushed(text))
        for kind in (
            Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageInfo,
            torch.Size,
        ):  # fmt: skip
            module = "torch" if kind is torch.Size else kind.__module__
            self._define(kind, _class(module, kind.__name__))
        for entry in self._columns.entries.values():
            if isinstance(entry, TensorColumns):
                key = (entry.dtype, entry.requires_grad)
                if key not in self._memo:
                    self._define(key, _properties(*key))

        # What stands between the numbers of a row.
        chunk, index, info = (
            self._global(kind) + _EMPTY_TUPLE + _NEWOBJ + _EMPTY_DICT + _MARK
            for kind in (ChunkStorageMetadata, MetadataIndex, StorageInfo)
        )
        self._chunk_begin, self._chunk_middle = chunk + self._text("offsets"), self._text("sizes")
        self._index_begin, self._index_middle = index + self._text("fqn"), self._text("offset")
        self._index_number = self._text("index")
        self._place_begin = _SETITEMS + _BUILD + info + self._text("relative_path")

    def _define(self, key: object, pushed: bytes) -> None:
        number = len(self._memo)
        self._out += [pushed, _MEMOIZE, _POP]
        self._memo[key] = _GET + number.to_bytes(4, "little")

    def _global(self, kind: type) -> bytes:
        return self._memo[kind]

    def _text(self, text: str) -> bytes:
        return self._memo[text]

    # -- rows -------------------------------------------------------------------------------------------

    def _describe(self, entry: TensorColumns | ObjectRow) -> None:
        out = self._out
        if isinstance(entry, ObjectRow):
            out += [self._global(BytesStorageMetadata), _EMPTY_TUPLE, _NEWOBJ]
            return
        out += [self._global(TensorStorageMetadata), _EMPTY_TUPLE, _NEWOBJ, _EMPTY_DICT, _MARK]
        out += [self._text("properties"), self._memo[entry.dtype, entry.requires_grad]]
        out += [self._text("size"), self._one_size(entry.size)]
        out += [self._text("chunks"), _EMPTY_LIST, _MARK]
        if len(entry.file) <= _FEW_ROWS:
            for offset, size in zip(entry.offsets.tolist(), entry.sizes.tolist(), strict=True):
                out += (self._chunk_begin, self._one_size(offset), self._chunk_middle, self._one_size(size))
                out.append(_SETITEMS + _BUILD)
            out += [_APPENDS, _SETITEMS, _BUILD]
            return
        for rows in _batches(len(entry.file)):
            out.append(
                _rows(
                    self._chunk_begin, self._size(entry.offsets[rows]),
                    self._chunk_middle, self._size(entry.sizes[rows]),
                    _SETITEMS + _BUILD,
                )
            )  # fmt: skip
        out += [_APPENDS, _SETITEMS, _BUILD]

    def _locate(self, fqn: str, entry: TensorColumns | ObjectRow) -> None:
        begin = self._index_begin + self._text(fqn) + self._index_middle
        if isinstance(entry, ObjectRow):
            row = (entry.file, entry.offset, entry.length)
            self._out += [_MARK, begin, *self._one_place(_NONE, _NONE, *row), _SETITEMS]
        elif len(entry.file) <= _FEW_ROWS:
            self._out.append(_MARK)
            places = zip(entry.file.tolist(), entry.offset.tolist(), entry.length.tolist(), strict=True)
            for number, (offset, place) in enumerate(zip(entry.offsets.tolist(), places, strict=True)):
                self._out.append(begin)
                self._out += self._one_place(self._one_size(offset), _one_number(number), *place)
            self._out.append(_SETITEMS)
        else:
            for rows in _batches(len(entry.file)):
                self._out += [_MARK, self._places(begin, entry, rows), _SETITEMS]

    def _places(self, begin: bytes, entry: TensorColumns, rows: slice) -> bytes:
        return _rows(
            begin, self._size(entry.offsets[rows]),
            self._index_number, _numbers(np.arange(rows.start, rows.stop)),
            self._place_begin, self._paths(entry.file[rows]),
            self._text("offset"), _numbers(entry.offset[rows]),
            self._text("length"), _numbers(entry.length[rows]),
            _SETITEMS + _BUILD,
        )  # fmt: skip

    def _one_place(
        self, chunk_offset: bytes, index: bytes, file: int, offset: int, length: int
    ) -> tuple[bytes, ...]:
        return (
            chunk_offset, self._index_number, index, self._place_begin, self._text(self._columns.files[file]),
            self._text("offset"), _one_number(offset), self._text("length"), _one_number(length),
            _SETITEMS + _BUILD,
        )  # fmt: skip

    def _one_size(self, values: Sequence[int]) -> bytes:
        key = tuple(values)
        if (known := self._sizes.get(key)) is not None:  # most tensors share theirs with others
            return known
        mark = _MARK if len(values) > 3 else b""
        numbers = b"".join(map(_one_number, values))
        end = _TUPLES.get(len(values), _TUPLE) + _TUPLE1 + _REDUCE
        pushed = self._sizes[key] = self._global(torch.Size) + mark + numbers + end
        return pushed

    def _size(self, values: Integers) -> _Bytes:
        """`torch.Size(values[row])` for every row."""
        dimensions = values.shape[1]
        columns: list[bytes | _Bytes] = [self._global(torch.Size)]
        if dimensions > 3:
            columns.append(_MARK)
        columns += [_numbers(values[:, dimension]) for dimension in range(dimensions)]
        columns.append(_TUPLES.get(dimensions, _TUPLE) + _TUPLE1 + _REDUCE)
        return _side_by_side(columns, len(values))

    def _paths(self, file: Integers) -> _Bytes:
        gets = np.frombuffer(b"".join(self._text(path) for path in self._columns.files), dtype=np.uint8)
        chosen: _Bytes = gets.reshape(-1, 5)[file]
        return chosen


def _rows(*columns: bytes | _Bytes) -> bytes:
    count = next((len(column) for column in columns if not isinstance(column, bytes) and len(column) != 1), 1)
    return _side_by_side(columns, count).tobytes()


def _side_by_side(columns: Sequence[bytes | _Bytes], count: int) -> _Bytes:
    """Rows of bytes: constants are repeated, columns give each row its own."""
    parts = [_constant(column) if isinstance(column, bytes) else column for column in columns]
    return np.concatenate([np.broadcast_to(part, (count, part.shape[1])) for part in parts], axis=1)


def _constant(data: bytes) -> _Bytes:
    return np.frombuffer(data, dtype=np.uint8)[None, :]


def _numbers(values: Integers) -> _Bytes:
    """Non-negative integers as pickle opcodes, all of the width that the largest needs."""
    largest = int(values.max()) if len(values) else 0
    if largest < 1 << 8:
        return _opcode(b"K", values, "<u1")
    if largest < 1 << 16:
        return _opcode(b"M", values, "<u2")
    if largest < 1 << 31:
        return _opcode(b"J", values, "<i4")
    return _opcode(b"\x8a\x08", values, "<i8")


def _one_number(value: int) -> bytes:
    if value < 1 << 8:
        return b"K%c" % value
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    return b"\x8a\x08" + value.to_bytes(8, "little")


def _opcode(opcode: bytes, values: Integers, dtype: str) -> _Bytes:
    raw = np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(len(values), -1)
    return _side_by_side([opcode, raw], len(values))


def _batches(rows: int) -> list[slice]:
    return [slice(start, min(start + _BATCH_ROWS, rows)) for start in range(0, rows, _BATCH_ROWS)]


def _pushed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def _class(module: str, name: str) -> bytes:
    return _pushed(module) + _pushed(name) + b"\x93"


def _properties(dtype: torch.dtype, requires_grad: bool) -> bytes:
    kind, encoding = TensorProperties, MemoryFormat
    layout = _class("torch.serialization", "_get_layout") + _pushed("torch.strided") + _TUPLE1 + _REDUCE
    contiguous = _class(encoding.__module__, encoding.__name__)
    contiguous += _plain(encoding.TORCH_CONTIGUOUS_FORMAT.value) + _TUPLE1 + _REDUCE
    state = _MARK + _class("torch", str(dtype).removeprefix("torch.")) + layout + _plain(requires_grad)
    state += contiguous + _plain(False) + _TUPLE
    return _class(kind.__module__, kind.__name__) + _EMPTY_TUPLE + _NEWOBJ + state + _BUILD


def _storage_meta(save_id: str | None) -> bytes:
    state = _plain(vars(StorageMeta(save_id=save_id)))
    return _class(StorageMeta.__module__, StorageMeta.__name__) + _EMPTY_TUPLE + _NEWOBJ + state + _BUILD


def _plain(value: object) -> bytes:
    """A plain value, without use of the memo. Raises ValueError for anything else."""
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        data = pickle.encode_long(value)
        return (
            b"\x8b" + len(data).to_bytes(4, "little") + data
            if len(data) > 255
            else b"\x8a%c%s" % (len(data), data)
        )
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return _pushed(value)
    if isinstance(value, bytes):
        return b"B" + len(value).to_bytes(4, "little") + value
    if isinstance(value, tuple):
        return _MARK + b"".join(map(_plain, value)) + _TUPLE
    if isinstance(value, list):
        return _EMPTY_LIST + _MARK + b"".join(map(_plain, value)) + _APPENDS
    if isinstance(value, dict):
        pairs = b"".join(_plain(key) + _plain(item) for key, item in value.items())
        return _EMPTY_DICT + _MARK + pairs + _SETITEMS
    raise ValueError(f"a {type(value).__module__}.{type(value).__qualname__}")
