"""Write the pickle of DCP's `Metadata` that stock readers expect, straight from columns.

Python's pickler visits every object: 8 seconds for a thousand ranks. The pickle of a row is always
the same but for its numbers, so here numpy fills the numbers of all rows of a tensor into a
template. It names DCP's classes and imports none: `ckpt verify` writes one to compare with.
"""

from __future__ import annotations

import functools
import pickle as op
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns
from ckpt.format.runs import TensorRuns

_Class = tuple[str, str]
"""The module and the name of a class."""

_DCP = "torch.distributed.checkpoint.metadata"
_METADATA, _STORAGE_META = (_DCP, "Metadata"), (_DCP, "StorageMeta")
_TENSOR, _OBJECT = (_DCP, "TensorStorageMetadata"), (_DCP, "BytesStorageMetadata")
_CHUNK, _INDEX = (_DCP, "ChunkStorageMetadata"), (_DCP, "MetadataIndex")
_PROPERTIES, _MEMORY_FORMAT = (_DCP, "TensorProperties"), (_DCP, "_MEM_FORMAT_ENCODING")
_CONTIGUOUS = 0
"""The memory format of every tensor, as that enumeration numbers it."""

_INFO, _SIZE = ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size")

_TUPLES = {0: op.EMPTY_TUPLE, 1: op.TUPLE1, 2: op.TUPLE2, 3: op.TUPLE3}
_INTEGERS = (
    (1 << 8, op.BININT1, "<u1"),
    (1 << 16, op.BININT2, "<u2"),
    (1 << 31, op.BININT, "<i4"),
    (1 << 63, op.LONG1 + b"\x08", "<i8"),
)
"""Opcodes for integers below a limit, and how their arguments are stored."""

_END = op.SETITEMS + op.BUILD
_MEMOIZED = op.MEMOIZE + op.POP

_BATCH_ROWS = 1 << 16
_FEW_ROWS = 32
"""Up to here numpy costs more than it saves. Both ways write what reads the same."""

_Bytes = npt.NDArray[np.uint8]

_ROW_BYTES = 107
"""Of a row, but for its numbers: its chunk, its index and its place."""
_MOST_NUMBER_BYTES = 10
_SAMPLED_ROWS = 64


def pickled_metadata(columns: Columns) -> bytes:
    """Pickle what equals `dcp_view.metadata_of(columns)`, item for item."""
    return _Writer(columns).written()


def estimated_bytes(columns: Columns, enough_bytes: int = 0) -> int:
    """Estimate the size of that pickle without making it: by a look at each entry, not at each row.

    Below `enough_bytes` it may be estimated too high, but not beyond it.
    """
    total = 1000 + sum(len(path) + 7 for path in columns.files)
    total += sum(len(fqn) + 131 for fqn in columns.entries)  # its name once, and its place in two dicts
    tensors = [entry for entry in columns.entries.values() if not isinstance(entry, ObjectRow)]
    numbers = sum(entry.count * (3 * len(entry.size) + 3) for entry in tensors) + 2 * len(columns.entries)
    most = total + numbers * _MOST_NUMBER_BYTES + _ROW_BYTES * sum(entry.count for entry in tensors)
    if most <= enough_bytes:
        return most
    for entry in columns.entries.values():
        if isinstance(entry, ObjectRow):
            total += _number_bytes(entry.offset) + _number_bytes(entry.length)
            continue
        largest = _largest_of_runs(entry) if isinstance(entry, TensorRuns) else _largest(entry)
        total += entry.count * (_ROW_BYTES + sum(map(_number_bytes, [*largest, entry.count])))
    return total


def _largest(entry: TensorColumns) -> list[int]:
    """Return the largest of each number that a row takes, by a look at some rows."""
    some = slice(None, None, max(1, entry.count // _SAMPLED_ROWS))
    vectors = (entry.offsets[some], entry.offsets[some], entry.sizes[some])
    numbers = [vector[:, axis] for vector in vectors for axis in range(len(entry.size))]
    numbers += [entry.offset[some], entry.length[some]]
    return [int(column.max(initial=0)) for column in numbers]


def _largest_of_runs(entry: TensorRuns) -> list[int]:
    columns = *entry.offset_columns, *entry.offset_columns, *entry.size_columns, *entry.columns[1:3]
    return [column.highest for column in columns]


def _number_bytes(value: int) -> int:
    return len(_one_number(value))


class _Writer:
    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._out: list[bytes] = [b"\x80\x04"]
        self._get: dict[object, bytes] = {}  # the opcodes that push what is written once
        self._sizes: dict[tuple[int, ...], bytes] = {}

    def written(self) -> bytes:
        columns, out = self._columns, self._out
        storage_meta: dict[str, object] = {
            "checkpoint_id": None,
            "save_id": columns.save_id,
            "load_id": None,
            "modules": [],
        }
        self._define_constants()
        out += [self._get[_METADATA], op.EMPTY_TUPLE, op.NEWOBJ, op.EMPTY_DICT, op.MARK]
        out += [self._get["state_dict_metadata"], op.EMPTY_DICT, op.MARK]
        for fqn, entry in columns.entries.items():
            out.append(self._get[fqn])
            self._describe(entry)
        out += [op.SETITEMS, self._get["planner_data"], _plain(columns.planner_data)]
        out += [self._get["storage_data"], op.EMPTY_DICT]
        for fqn, entry in columns.entries.items():
            self._locate(fqn, entry)
        out += [self._get["storage_meta"], _instance(_STORAGE_META, _plain(storage_meta))]
        out += [self._get["version"], _plain(columns.version)]
        out += [op.SETITEMS, op.BUILD, op.STOP]
        return b"".join(out)

    def _define_constants(self) -> None:
        names = ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]
        names += ["properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index"]
        names += ["relative_path", "length"]
        for text in dict.fromkeys([*names, *self._columns.files, *self._columns.entries]):
            self._define(text, _pushed(text))
        for kind in (_METADATA, _TENSOR, _OBJECT, _CHUNK, _INDEX, _INFO, _SIZE):
            self._define(kind, _class(*kind))
        for entry in self._columns.entries.values():
            if isinstance(entry, TensorColumns):
                key = (entry.dtype, entry.requires_grad)
                if key not in self._get:
                    self._define(key, _properties(*key))

        # What is between the numbers of a row.
        chunk, index, info = (
            self._get[kind] + op.EMPTY_TUPLE + op.NEWOBJ + op.EMPTY_DICT + op.MARK
            for kind in (_CHUNK, _INDEX, _INFO)
        )
        self._chunk_begin, self._chunk_middle = chunk + self._get["offsets"], self._get["sizes"]
        self._index_begin, self._index_middle = index + self._get["fqn"], self._get["offset"]
        self._index_number = self._get["index"]
        self._place_begin = _END + info + self._get["relative_path"]
        self._path_gets = [self._get[path] for path in self._columns.files]
        # What is around the rows of a tensor.
        self._tensor_begin = self._get[_TENSOR] + op.EMPTY_TUPLE + op.NEWOBJ + op.EMPTY_DICT + op.MARK
        self._tensor_begin += self._get["properties"]
        self._chunks_begin = self._get["chunks"] + op.EMPTY_LIST + op.MARK

    def _define(self, key: object, pushed: bytes) -> None:
        number = len(self._get)
        self._out += (pushed, _MEMOIZED)
        self._get[key] = op.LONG_BINGET + number.to_bytes(4, "little")

    def _describe(self, entry: TensorColumns | ObjectRow) -> None:
        out = self._out
        if isinstance(entry, ObjectRow):
            out += [self._get[_OBJECT], op.EMPTY_TUPLE, op.NEWOBJ]
            return
        out += (self._tensor_begin, self._get[entry.dtype, entry.requires_grad])
        out += (self._get["size"], self._one_size(entry.size), self._chunks_begin)
        entry = entry.plain()
        if entry.count <= _FEW_ROWS:
            for offset, size in zip(entry.offsets.tolist(), entry.sizes.tolist(), strict=True):
                out += (
                    self._chunk_begin,
                    self._one_size(offset),
                    self._chunk_middle,
                    self._one_size(size),
                    _END,
                )
        else:
            for rows in _batches(entry.count):
                out.append(_rows(
                    self._chunk_begin, self._size(entry.offsets[rows]),
                    self._chunk_middle, self._size(entry.sizes[rows]),
                    _END,
                ))  # fmt: skip
        out += (op.APPENDS, _END)

    def _locate(self, fqn: str, entry: TensorColumns | ObjectRow) -> None:
        begin = self._index_begin + self._get[fqn] + self._index_middle
        if isinstance(entry, ObjectRow):
            row = (entry.file, entry.offset, entry.length)
            self._out += (op.MARK, begin, *self._one_place(op.NONE, op.NONE, *row), op.SETITEMS)
            return
        entry = entry.plain()
        if entry.count <= _FEW_ROWS:
            out = self._out
            out.append(op.MARK)
            places = zip(entry.file.tolist(), entry.offset.tolist(), entry.length.tolist(), strict=True)
            for number, (offset, place) in enumerate(zip(entry.offsets.tolist(), places, strict=True)):
                out.append(begin)
                out += self._one_place(self._one_size(offset), _one_number(number), *place)
            out.append(op.SETITEMS)
        else:
            for rows in _batches(entry.count):
                self._out += [op.MARK, self._places(begin, entry, rows), op.SETITEMS]

    def _places(self, begin: bytes, entry: TensorColumns, rows: slice) -> bytes:
        return _rows(
            begin, self._size(entry.offsets[rows]),
            self._index_number, _numbers(np.arange(rows.start, rows.stop)),
            self._place_begin, self._paths(entry.file[rows]),
            self._get["offset"], _numbers(entry.offset[rows]),
            self._get["length"], _numbers(entry.length[rows]),
            _END,
        )  # fmt: skip

    def _one_place(
        self, chunk_offset: bytes, index: bytes, file: int, offset: int, length: int
    ) -> tuple[bytes, ...]:
        return (
            chunk_offset, self._index_number, index, self._place_begin, self._path_gets[file],
            self._get["offset"], _one_number(offset), self._get["length"], _one_number(length),
            _END,
        )  # fmt: skip

    def _one_size(self, values: Sequence[int]) -> bytes:
        key = tuple(values)
        if (known := self._sizes.get(key)) is not None:  # most tensors share theirs with others
            return known
        begin, end = self._around_size(len(key))
        pushed = self._sizes[key] = begin + b"".join(map(_one_number, key)) + end
        return pushed

    def _size(self, values: Integers) -> _Bytes:
        """Push `torch.Size(values[row])` for every row."""
        begin, end = self._around_size(values.shape[1])
        return _side_by_side([begin, *map(_numbers, values.T), end], len(values))

    def _around_size(self, dimensions: int) -> tuple[bytes, bytes]:
        begin = self._get[_SIZE] + (op.MARK if dimensions > 3 else b"")
        return begin, _TUPLES.get(dimensions, op.TUPLE) + op.TUPLE1 + op.REDUCE

    def _paths(self, file: Integers) -> _Bytes:
        chosen: _Bytes = self._gets_of_paths[file]
        return chosen

    @functools.cached_property
    def _gets_of_paths(self) -> _Bytes:
        gets = np.frombuffer(b"".join(self._path_gets), dtype=np.uint8)
        return gets.reshape(-1, 5)


def _rows(*columns: bytes | _Bytes) -> bytes:
    count = next((len(column) for column in columns if not isinstance(column, bytes) and len(column) != 1), 1)
    return _side_by_side(columns, count).tobytes()


def _side_by_side(columns: Sequence[bytes | _Bytes], count: int) -> _Bytes:
    """Join columns to rows of bytes; constants are repeated in each."""
    parts = [np.frombuffer(c, dtype=np.uint8)[None, :] if isinstance(c, bytes) else c for c in columns]
    return np.concatenate([np.broadcast_to(part, (count, part.shape[1])) for part in parts], axis=1)


def _numbers(values: Integers) -> _Bytes:
    """Push non-negative integers, all in the width that the largest needs."""
    largest = int(values.max())
    opcode, dtype = next((opcode, dtype) for limit, opcode, dtype in _INTEGERS if largest < limit)
    raw = np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(len(values), -1)
    return _side_by_side([opcode, raw], len(values))


def _one_number(value: int) -> bytes:
    if value < 1 << 8:
        return op.BININT1 + bytes([value])
    if value < 1 << 16:
        return op.BININT2 + value.to_bytes(2, "little")
    if value < 1 << 31:
        return op.BININT + value.to_bytes(4, "little")
    return op.LONG1 + b"\x08" + value.to_bytes(8, "little")


def _batches(rows: int) -> list[slice]:
    return [slice(start, min(start + _BATCH_ROWS, rows)) for start in range(0, rows, _BATCH_ROWS)]


def _pushed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return op.BINUNICODE + len(data).to_bytes(4, "little") + data


def _class(module: str, name: str) -> bytes:
    return _pushed(module) + _pushed(name) + op.STACK_GLOBAL


def _instance(kind: _Class, state: bytes) -> bytes:
    return _class(*kind) + op.EMPTY_TUPLE + op.NEWOBJ + state + op.BUILD


def _properties(dtype: str, requires_grad: bool) -> bytes:
    layout = _class("torch.serialization", "_get_layout") + _pushed("torch.strided") + op.TUPLE1 + op.REDUCE
    contiguous = _class(*_MEMORY_FORMAT) + _plain(_CONTIGUOUS) + op.TUPLE1 + op.REDUCE
    state = op.MARK + _class("torch", dtype) + layout + _plain(requires_grad)
    return _instance(_PROPERTIES, state + contiguous + _plain(False) + op.TUPLE)


def _plain(value: object) -> bytes:
    """Push a plain value, without use of the memo. Raises ValueError for any other."""
    if isinstance(value, str):
        return _pushed(value)
    if isinstance(value, tuple):  # the paths of tensors, first as they are so many
        return op.MARK + b"".join(map(_plain, value)) + op.TUPLE
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
    if isinstance(value, bytes):
        return op.BINBYTES + len(value).to_bytes(4, "little") + value
    if isinstance(value, list):
        return op.EMPTY_LIST + op.MARK + b"".join(map(_plain, value)) + op.APPENDS
    if isinstance(value, dict):
        pairs = b"".join(_plain(key) + _plain(item) for key, item in value.items())
        return op.EMPTY_DICT + op.MARK + pairs + op.SETITEMS
    raise ValueError(f"a {type(value).__module__}.{type(value).__qualname__}")
