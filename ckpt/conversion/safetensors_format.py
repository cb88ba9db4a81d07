"""Read and write headers and indices of safetensors files; those that are read may be hostile.

A file is the header's length (8 bytes, little endian), the header in JSON, and the data. A model in
several files has an index, JSON too, that maps tensors to files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpt.backends.base import is_key
from ckpt.errors import FormatError
from ckpt.format.stored_tensor import StoredTensor

INDEX_SUFFIX = ".safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20
"""Enough for 250,000 tensors in a file. The format's own limit, 100 MB, can parse to 1 GB."""
MAX_INDEX_BYTES = 64 << 20
_MAX_TEXTS = 3 << 19
_MAX_VALUES = 4 << 20
"""Of a header or index. A text takes a dozen times as much memory as the few bytes it can have."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_DIMENSIONS = 64
_SPARE_BRACKETS = 100_000
METADATA = "__metadata__"


def header_bytes(raw: bytes | bytearray, file_bytes: int) -> int:
    """Read the length of the header from the first 8 bytes of a file. Raises ValueError."""
    if len(raw) < LENGTH_BYTES:
        raise ValueError(f"it has only {file_bytes} bytes")
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise ValueError(f"it declares a header of {length} bytes in a file of {file_bytes}")
    return length


def parse_header(raw: bytes | bytearray, data_start: int, file_bytes: int) -> dict[str, StoredTensor]:
    """Read the tensors of a header, which fill the data one after the other. Raises ValueError."""
    # Three brackets a tensor: its own, and those of shape and place.
    header = _strict_json(raw, brackets=3 * raw.count(b"data_offsets"))
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} in the header does not map to texts")
    tensors = [(name, _stored_tensor(name, described, data_start)) for name, described in header.items()]
    tensors.sort(key=lambda item: (item[1].first_byte, item[1].payload_bytes))
    end = data_start
    for name, tensor in tensors:
        if tensor.first_byte != end:
            fault = "overlaps the one before" if tensor.first_byte < end else "leaves a gap before it"
            raise ValueError(f"{name[:200]!r} {fault}")
        end += tensor.payload_bytes
    if end != file_bytes:
        raise ValueError(f"the tensors take {end - data_start} bytes, but the data {file_bytes - data_start}")
    return dict(tensors)


def _stored_tensor(name: str, described: Any, data_start: int) -> StoredTensor:
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:200]!r} is not described by dtype, shape and data_offsets")
    dtype, shape, places = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name[:200]!r} has the dtype {str(dtype)[:40]!r}, which torch does not have")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name[:200]!r} has an impossible shape")
    if not _are_sizes(places) or len(places) != 2:
        raise ValueError(f"{name[:200]!r} has impossible data_offsets")
    if places[1] - places[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name[:200]!r} has data_offsets that do not fit its shape and dtype")
    if math.prod(n or 1 for n in shape) >= 1 << 62:  # an empty tensor, but its strides overflow
        raise ValueError(f"{name[:200]!r} has an impossible shape")
    return StoredTensor.row_major(data_start + places[0], DTYPES[dtype], shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def encode_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """Encode the header of a file that holds `tensors` in this order, with its length."""
    described: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # the data begin aligned
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def encode_index(files: Mapping[str, str], total_bytes: int, parameters: int) -> bytes:
    """Encode the index of a model in several files; `files` maps tensors to them."""
    metadata = {"total_parameters": parameters, "total_size": total_bytes}
    index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def parse_index(raw: bytes | bytearray, *, url: str, key: str) -> dict[str, str]:
    """Read the file of each tensor from an index. Raises FormatError, also for other folders."""
    try:
        files = _strict_json(raw, brackets=0).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ValueError("it has no weight_map")
        for file in files.values():
            if not isinstance(file, str) or "/" in file or not is_key(file):
                raise ValueError(
                    f"its weight_map names {str(file)[:80]!r}, which is not a name in this folder"
                )
    except ValueError as error:
        raise FormatError(f"not a valid index: {error}", url=url, key=key) from None
    return files


def _strict_json(raw: bytes | bytearray, brackets: int) -> dict[str, Any]:
    """Parse an object in which no name comes twice. Raises ValueError."""
    # An empty list takes thirty times as much memory as text.
    if raw.count(b"[") + raw.count(b"{") > brackets + _SPARE_BRACKETS:
        raise ValueError("JSON with far more lists and objects than it needs")
    if raw.count(b'"') > 2 * _MAX_TEXTS or raw.count(b",") > _MAX_VALUES:
        raise ValueError("JSON with more names and values than any model needs")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at character {error.pos})") from None
    if isinstance(value, dict):
        return value
    raise ValueError("not a JSON object")


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in pairs:
        if name in named:
            raise ValueError(f"{name[:200]!r} comes twice")
        named[name] = value
    return named
