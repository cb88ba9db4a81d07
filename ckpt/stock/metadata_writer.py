"""DCP's `Metadata` as the pickle that stock readers expect, written straight from columns.

Python's pickler visits every object: 8 seconds for a thousand ranks. The pickle of a row is always the same
but for its numbers, so here numpy fills the numbers of all rows of a tensor into a template.
"""

from __future__ import annotations

import pickle as op
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
from ckpt.format.stored_tensor import dtype_name
from ckpt.torch_private import MemoryFormat, StorageInfo

_TUPLES = {0: op.EMPTY_TUPLE, 1: op.TUPLE1, 2: op.TUPLE2, 3: op.TUPLE3}
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
        out += [self._global(Metadata), op.EMPTY_TUPLE, op.NEWOBJ, op.EMPTY_DICT, op.MARK]
        out += [self._text("state_dict_metadata"), op.EMPTY_DICT, op.MARK]
        for fqn, entry in columns.entries.items():
            out.append(self._text(fqn))
            self._describe(entry)
        out += [op.SETITEMS, self._text("planner_data"), _plain(columns.planner_data)]
        out += [self._text("storage_data"), op.EMPTY_DICT]
        for fqn, entry in columns.entries.items():
            self._locate(fqn, entry)
        out += [self._text("storage_meta"), _storage_meta(columns.save_id)]
        out += [self._text("version"), _plain(columns.version)]
        out += [op.SETITEMS, op.BUILD, op.STOP]
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
            self._global(kind) + op.EMPTY_TUPLE + op.NEWOBJ + op.EMPTY_DICT + op.MARK
            for kind in (ChunkStorageMetadata, MetadataIndex, StorageInfo)
        )
        self._chunk_begin, self._chunk_middle = chunk + self._text("offsets"), self._text("sizes")
        self._index_begin, self._index_middle = index + self._text("fqn"), self._text("offset")
        self._index_number = self._text("index")
        self._place_begin = op.SETITEMS + op.BUILD + info + self._text("relative_path")

    def _define(self, key: object, pushed: bytes) -> None:
        number = len(self._memo)
        self._out += [pushed, op.MEMOIZE, op.POP]
        self._memo[key] = op.LONG_BINGET + number.to_bytes(4, "little")

    def _global(self, kind: type) -> bytes:
        return self._memo[kind]

    def _text(self, text: str) -> bytes:
        return self._memo[text]

    # -- rows -------------------------------------------------------------------------------------------

    def _describe(self, entry: TensorColumns | ObjectRow) -> None:
        out = self._out
        if isinstance(entry, ObjectRow):
            out += [self._global(BytesStorageMetadata), op.EMPTY_TUPLE, op.NEWOBJ]
            return
        out += [self._global(TensorStorageMetadata), op.EMPTY_TUPLE, op.NEWOBJ, op.EMPTY_DICT, op.MARK]
        out += [self._text("properties"), self._memo[entry.dtype, entry.requires_grad]]
        out += [self._text("size"), self._one_size(entry.size)]
        out += [self._text("chunks"), op.EMPTY_LIST, op.MARK]
        if len(entry.file) <= _FEW_ROWS:
            for offset, size in zip(entry.offsets.tolist(), entry.sizes.tolist(), strict=True):
                out += (self._chunk_begin, self._one_size(offset), self._chunk_middle, self._one_size(size))
                out.append(op.SETITEMS + op.BUILD)
            out += [op.APPENDS, op.SETITEMS, op.BUILD]
            return
        for rows in _batches(len(entry.file)):
            out.append(
                _rows(
                    self._chunk_begin, self._size(entry.offsets[rows]),
                    self._chunk_middle, self._size(entry.sizes[rows]),
                    op.SETITEMS + op.BUILD,
                )
            )  # fmt: skip
        out += [op.APPENDS, op.SETITEMS, op.BUILD]

    def _locate(self, fqn: str, entry: TensorColumns | ObjectRow) -> None:
        begin = self._index_begin + self._text(fqn) + self._index_middle
        if isinstance(entry, ObjectRow):
            row = (entry.file, entry.offset, entry.length)
            self._out += [op.MARK, begin, *self._one_place(op.NONE, op.NONE, *row), op.SETITEMS]
        elif len(entry.file) <= _FEW_ROWS:
            self._out.append(op.MARK)
            places = zip(entry.file.tolist(), entry.offset.tolist(), entry.length.tolist(), strict=True)
            for number, (offset, place) in enumerate(zip(entry.offsets.tolist(), places, strict=True)):
                self._out.append(begin)
                self._out += self._one_place(self._one_size(offset), _one_number(number), *place)
            self._out.append(op.SETITEMS)
        else:
            for rows in _batches(len(entry.file)):
                self._out += [op.MARK, self._places(begin, entry, rows), op.SETITEMS]

    def _places(self, begin: bytes, entry: TensorColumns, rows: slice) -> bytes:
        return _rows(
            begin, self._size(entry.offsets[rows]),
            self._index_number, _numbers(np.arange(rows.start, rows.stop)),
            self._place_begin, self._paths(entry.file[rows]),
            self._text("offset"), _numbers(entry.offset[rows]),
            self._text("length"), _numbers(entry.length[rows]),
            op.SETITEMS + op.BUILD,
        )  # fmt: skip

    def _one_place(
        self, chunk_offset: bytes, index: bytes, file: int, offset: int, length: int
    ) -> tuple[bytes, ...]:
        return (
            chunk_offset, self._index_number, index, self._place_begin, self._text(self._columns.files[file]),
            self._text("offset"), _one_number(offset), self._text("length"), _one_number(length),
            op.SETITEMS + op.BUILD,
        )  # fmt: skip

    def _one_size(self, values: Sequence[int]) -> bytes:
        key = tuple(values)
        if (known := self._sizes.get(key)) is not None:  # most tensors share theirs with others
            return known
        mark = op.MARK if len(values) > 3 else b""
        numbers = b"".join(map(_one_number, values))
        end = _TUPLES.get(len(values), op.TUPLE) + op.TUPLE1 + op.REDUCE
        pushed = self._sizes[key] = self._global(torch.Size) + mark + numbers + end
        return pushed

    def _size(self, values: Integers) -> _Bytes:
        """`torch.Size(values[row])` for every row."""
        dimensions = values.shape[1]
        columns: list[bytes | _Bytes] = [self._global(torch.Size)]
        if dimensions > 3:
            columns.append(op.MARK)
        columns += [_numbers(values[:, dimension]) for dimension in range(dimensions)]
        columns.append(_TUPLES.get(dimensions, op.TUPLE) + op.TUPLE1 + op.REDUCE)
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
        return _opcode(op.BININT1, values, "<u1")
    if largest < 1 << 16:
        return _opcode(op.BININT2, values, "<u2")
    if largest < 1 << 31:
        return _opcode(op.BININT, values, "<i4")
    return _opcode(op.LONG1 + b"\x08", values, "<i8")


def _one_number(value: int) -> bytes:
    if value < 1 << 8:
        return op.BININT1 + bytes([value])
    if value < 1 << 16:
        return op.BININT2 + value.to_bytes(2, "little")
    if value < 1 << 31:
        return op.BININT + value.to_bytes(4, "little")
    return op.LONG1 + b"\x08" + value.to_bytes(8, "little")


def _opcode(opcode: bytes, values: Integers, dtype: str) -> _Bytes:
    raw = np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(len(values), -1)
    return _side_by_side([opcode, raw], len(values))


def _batches(rows: int) -> list[slice]:
    return [slice(start, min(start + _BATCH_ROWS, rows)) for start in range(0, rows, _BATCH_ROWS)]


def _pushed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return op.BINUNICODE + len(data).to_bytes(4, "little") + data


def _class(module: str, name: str) -> bytes:
    return _pushed(module) + _pushed(name) + op.STACK_GLOBAL


def _properties(dtype: torch.dtype, requires_grad: bool) -> bytes:
    kind, encoding = TensorProperties, MemoryFormat
    layout = _class("torch.serialization", "_get_layout") + _pushed("torch.strided") + op.TUPLE1 + op.REDUCE
    contiguous = _class(encoding.__module__, encoding.__name__)
    contiguous += _plain(encoding.TORCH_CONTIGUOUS_FORMAT.value) + op.TUPLE1 + op.REDUCE
    state = op.MARK + _class("torch", dtype_name(dtype)) + layout + _plain(requires_grad)
    state += contiguous + _plain(False) + op.TUPLE
    return _class(kind.__module__, kind.__name__) + op.EMPTY_TUPLE + op.NEWOBJ + state + op.BUILD


def _storage_meta(save_id: str | None) -> bytes:
    state = _plain(vars(StorageMeta(save_id=save_id)))
    return (
        _class(StorageMeta.__module__, StorageMeta.__name__) + op.EMPTY_TUPLE + op.NEWOBJ + state + op.BUILD
    )


def _plain(value: object) -> bytes:
    """A plain value, without use of the memo. Raises ValueError for anything else."""
    if value is None:
        return op.NONE
    if isinstance(value, bool):
        return op.NEWTRUE if value else op.NEWFALSE
    if isinstance(value, int):
        data = op.encode_long(value)
        if len(data) > 255:
            return op.LONG4 + len(data).to_bytes(4, "little") + data
        return op.LONG1 + bytes([len(data)]) + data
    if isinstance(value, float):
        return op.BINFLOAT + struct.pack(">d", value)
    if isinstance(value, str):
        return _pushed(value)
    if isinstance(value, bytes):
        return op.BINBYTES + len(value).to_bytes(4, "little") + value
    if isinstance(value, tuple):
        return op.MARK + b"".join(map(_plain, value)) + op.TUPLE
    if isinstance(value, list):
        return op.EMPTY_LIST + op.MARK + b"".join(map(_plain, value)) + op.APPENDS
    if isinstance(value, dict):
        pairs = b"".join(_plain(key) + _plain(item) for key, item in value.items())
        return op.EMPTY_DICT + op.MARK + pairs + op.SETITEMS
    raise ValueError(f"a {type(value).__module__}.{type(value).__qualname__}")
