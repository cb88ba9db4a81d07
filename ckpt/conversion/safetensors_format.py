"""The safetensors format: a header of JSON, then the tensors' bytes. Headers are read as if they came from an enemy.

A file is the header's length (8 bytes, little endian), the header, and the data. The header maps names to dtype, shape
and place in the data; `__metadata__` holds texts. A model in several files has an index, JSON too, that says which
tensor is in which file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.backends.base import is_key
from ckpt.errors import FormatError

__all__ = [
    "DTYPES",
    "INDEX_SUFFIX",
    "LENGTH_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_INDEX_BYTES",
    "METADATA",
    "HeaderEntry",
    "encode_header",
    "encode_index",
    "header_bytes",
    "parse_header",
    "parse_index",
]

INDEX_SUFFIX = ".safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20
"""A quarter of a million tensors in one file. The format's own limit is 100 MB; parsed, that can be a gigabyte."""
MAX_INDEX_BYTES = 64 << 20

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


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor; `start` and `stop` count from the beginning of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def header_bytes(raw: bytes | bytearray, file_bytes: int) -> int:
    """The length of the header, from the first 8 bytes of a file. Raises ValueError."""
    if len(raw) < LENGTH_BYTES:
        raise ValueError(f"a file of {file_bytes} bytes is no safetensors file")
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
    return length


def parse_header(raw: bytes | bytearray, data_bytes: int) -> dict[str, HeaderEntry]:
    """The tensors of a file whose header is `raw` and whose data have `data_bytes`, in the order of their places.

    Raises:
        ValueError: it is not valid. Tensors must fill the data, one after the other.
    """
    # Three brackets a tensor: its own, and those of shape and place.
    found = _strict_json(raw, brackets=3 * raw.count(b"data_offsets"))
    metadata = found.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the header's metadata are no texts")
    entries = {name: _entry(name, described) for name, described in found.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    end = 0
    for name, entry in ordered:
        if entry.start != end:
            fault = "overlaps the one before" if entry.start < end else "leaves a gap before it"
            raise ValueError(f"{name[:200]!r} {fault}")
        end = entry.stop
    if end != data_bytes:
        raise ValueError(f"the tensors take {end} bytes, the data have {data_bytes}")
    return dict(ordered)


def _entry(name: str, described: Any) -> HeaderEntry:
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:200]!r} is not described by dtype, shape and data_offsets")
    dtype, shape, places = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name[:200]!r} has the dtype {str(dtype)[:40]!r}, which torch has no equal of")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name[:200]!r} has an absurd shape")
    if not _are_sizes(places) or len(places) != 2:
        raise ValueError(f"{name[:200]!r} has no place")
    found = DTYPES[dtype]
    if places[1] - places[0] != math.prod(shape) * found.itemsize:
        raise ValueError(f"{name[:200]!r} has a place of another size than its shape and dtype take")
    return HeaderEntry(found, tuple(shape), *places)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def encode_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """What comes before the data of a file that holds `tensors` in this order.

    Raises:
        KeyError: a dtype that the format does not have.
    """
    described: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # the data begin aligned
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def encode_index(files: Mapping[str, str], total_bytes: int, parameters: int) -> bytes:
    """The index of a model in several files; `files` maps tensors to them."""
    metadata = {"total_parameters": parameters, "total_size": total_bytes}
    return (
        json.dumps(
            {"metadata": metadata, "weight_map": dict(sorted(files.items()))}, indent=2, ensure_ascii=False
        )
        + "\n"
    ).encode()


def parse_index(raw: bytes | bytearray, *, url: str, key: str) -> dict[str, str]:
    """Which file each tensor is in.

    Raises:
        FormatError: it is not valid, or names a file outside of the folder.
    """
    try:
        files = _strict_json(raw, brackets=0).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ValueError("it has no weight_map")
        for file in files.values():
            if not isinstance(file, str) or "/" in file or not is_key(file):
                raise ValueError(f"its weight_map names {str(file)[:80]!r}, which is no file of this folder")
    except ValueError as error:
        raise FormatError(f"not a valid index: {error}", url=url, key=key) from None
    return files


def _strict_json(raw: bytes | bytearray, brackets: int) -> dict[str, Any]:
    """An object in which no name comes twice. Raises ValueError.

    Args:
        brackets: about how many lists and objects it may hold; an empty one takes thirty times as much memory as text.
    """
    if raw.count(b"[") + raw.count(b"{") > brackets + _SPARE_BRACKETS:
        raise ValueError("JSON with far more lists and objects than it needs")
    try:
        found = json.loads(raw.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("JSON that is nested without end") from None
    except UnicodeDecodeError:
        raise ValueError("no UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no valid JSON ({error.msg} at character {error.pos})") from None
    if isinstance(found, dict):
        return found
    raise ValueError("no JSON object")


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:200]!r} comes twice")
        found[name] = value
    return found
