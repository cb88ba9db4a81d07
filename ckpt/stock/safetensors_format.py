"""Read and write headers of safetensors files; those that are read may be hostile.

A file is the header's length (8 bytes, little endian), the header in JSON, and the data.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.format.dtypes import dtype_name
from ckpt.format.elements import StoredTensor
from ckpt.format.model_index import strict_json

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20
"""Enough for 250,000 tensors in a file. The format's own limit, 100 MB, can parse to 1 GB."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of an element of dtypes that are packed; the bytes of a tensor are whole. Shapes in headers count elements, but
those of torch's `float4_e2m1fn_x2` count bytes of two."""

_DTYPE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
_MAX_DIMENSIONS = 64
_ALIGNMENT_BYTES = 64
"""Where the data begin, for loads into memory that is mapped, or by direct I/O."""

METADATA = "__metadata__"


_DCP_OFFSETS = "DCP_SHARDING_INFO"
"""Metadata of DCP's HuggingFaceStorageWriter: where in its tensor each stored one begins."""


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor as headers describe it: the format's name of its dtype, and the shape in elements of that."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @staticmethod
    def of(dtype: torch.dtype, shape: Sequence[int]) -> DescribedTensor:
        """Describe a tensor of torch, which `unfit_text` found to be fit."""
        name, nbytes = _NAMES[dtype], math.prod(shape) * dtype.itemsize
        shape = (*shape[:-1], 2 * shape[-1]) if name == "F4" else tuple(shape)
        return DescribedTensor(name, shape, nbytes)


@dataclass(frozen=True)
class UnreadableTensor:
    """A tensor that torch cannot hold, with the dtype and shape that the header gives it: `F6_E2M3`, an odd `F4`."""

    first_byte: int
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int

    def described(self) -> DescribedTensor:
        """Describe it as its header did."""
        return DescribedTensor(self.dtype, self.shape, self.payload_bytes)

    def as_bytes(self) -> StoredTensor:
        """Describe its bytes, which are kept as they are where nothing needs its elements."""
        return StoredTensor.row_major(self.first_byte, torch.uint8, [self.payload_bytes])

    def error_text(self, name: str) -> str:
        """Say why no load can give this tensor."""
        text = f"{name[:200]!r} has the dtype {self.dtype!r}"
        if self.dtype == "F4":
            return f"{text} and the shape {self.shape}, but torch's holds two elements a byte in the last dimension"
        return f"{text}, which this torch does not have"


@dataclass(frozen=True)
class Header:
    """The tensors of a file, those that cannot be read, and its metadata."""

    tensors: Mapping[str, StoredTensor]
    unreadable: Mapping[str, UnreadableTensor]
    metadata: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """List all tensors, those that cannot be read last."""
        return [*self.tensors, *self.unreadable]

    def chunk_offsets(self) -> dict[str, tuple[int, ...]] | None:
        """Return where in the whole tensors those of this file begin; None if they are whole. Raises ValueError."""
        if _DCP_OFFSETS not in self.metadata:
            return None
        described = strict_json(self.metadata[_DCP_OFFSETS].encode(), brackets=2 * len(self.tensors))
        offsets: dict[str, tuple[int, ...]] = {}
        for name, tensor in self.tensors.items():
            place = described.get(name)
            begin = place.get("saved_offsets") if isinstance(place, dict) else None
            if not isinstance(begin, list) or not _are_sizes(begin) or len(begin) != len(tensor.shape):
                raise ValueError(f"{_DCP_OFFSETS} does not say where {name[:200]!r} begins")
            offsets[name] = tuple(begin)
        return offsets


def header_bytes(raw: bytes | bytearray, file_bytes: int) -> int:
    """Read the length of the header from the first 8 bytes of a file. Raises ValueError."""
    if len(raw) < LENGTH_BYTES:
        raise ValueError(f"it has only {file_bytes} bytes")
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise ValueError(f"it declares a header of {length} bytes in a file of {file_bytes}")
    return length


def parse_header(raw: bytes | bytearray, data_start: int, file_bytes: int) -> Header:
    """Read a header, whose tensors fill the data one after the other. Raises ValueError."""
    # Three brackets a tensor: its own, and those of shape and place.
    header = strict_json(raw, brackets=3 * raw.count(b"data_offsets"))
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
    return Header(
        {name: tensor for name, tensor in tensors if isinstance(tensor, StoredTensor)},
        {name: tensor for name, tensor in tensors if isinstance(tensor, UnreadableTensor)},
        metadata,
    )


def _stored_tensor(name: str, described: Any, data_start: int) -> StoredTensor | UnreadableTensor:
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:200]!r} is not described by dtype, shape and data_offsets")
    dtype, shape, places = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or _DTYPE_NAME.fullmatch(dtype) is None:
        raise ValueError(f"{name[:200]!r} has an impossible dtype: {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name[:200]!r} has an impossible shape")
    if not _are_sizes(places) or len(places) != 2:
        raise ValueError(f"{name[:200]!r} has impossible data_offsets")
    if places[0] > places[1]:
        raise ValueError(f"{name[:200]!r} has impossible data_offsets")
    nbytes = places[1] - places[0]
    bits = _PACKED_BITS.get(dtype) or (8 * DTYPES[dtype].itemsize if dtype in DTYPES else None)
    if bits is not None and 8 * nbytes != math.prod(shape) * bits:
        raise ValueError(f"{name[:200]!r} has data_offsets that do not fit its shape and dtype")
    if math.prod(n or 1 for n in shape) >= 1 << 62:  # an empty tensor, but its strides overflow
        raise ValueError(f"{name[:200]!r} has an impossible shape")
    if dtype == "F4" and shape and shape[-1] % 2 == 0:
        shape = [*shape[:-1], shape[-1] // 2]
    elif dtype not in DTYPES or dtype == "F4":
        return UnreadableTensor(data_start + places[0], dtype, tuple(shape), nbytes)
    return StoredTensor.row_major(data_start + places[0], DTYPES[dtype], shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def unfit_text(dtype: torch.dtype, shape: Sequence[int]) -> str | None:
    """Return why no safetensors file can hold such a tensor; None if one can."""
    if dtype not in _NAMES:
        return f"is {dtype_name(dtype)}, which safetensors files cannot hold"
    if _NAMES[dtype] == "F4" and not shape:
        return f"is a single {dtype_name(dtype)}, which safetensors files hold in a dimension of pairs only"
    return None


def encode_header(tensors: Mapping[str, DescribedTensor]) -> bytes:
    """Encode the header of a file that holds `tensors` in this order, with its length."""
    described: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        described[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]
        }  # fmt: skip
    header = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % _ALIGNMENT_BYTES)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header
