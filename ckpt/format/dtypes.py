"""Know torch's dtypes by name and size, as records name them: to read a record, torch is not imported."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ckpt.errors import FormatError

if TYPE_CHECKING:
    import torch

_NAMES = {
    1: "bool int8 uint8 qint8 quint8 quint4x2 quint2x4 bits8 bits1x8 bits2x4 bits4x2 float4_e2m1fn_x2 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int1 int2 int3 int4 int5 int6 int7 "
    "uint1 uint2 uint3 uint4 uint5 uint6 uint7",
    2: "float16 bfloat16 int16 uint16 bits16",
    4: "float32 int32 uint32 complex32 bcomplex32 qint32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
_ITEM_BYTES = {name: nbytes for nbytes, names in _NAMES.items() for name in names.split()}


def item_bytes(dtype: str) -> int:
    """Return the size of an element. Raises FormatError if there is no such dtype."""
    nbytes = _ITEM_BYTES.get(dtype)
    return torch_dtype(dtype).itemsize if nbytes is None else nbytes  # that of a newer torch


def is_quantized(dtype: str) -> bool:
    """Tell whether tensors of a dtype have no values without their scales."""
    return dtype.startswith(("qint", "quint"))


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as records do: `float32`, without `torch.`."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of this name. Raises FormatError if this torch has none."""
    import torch

    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name:
        raise FormatError(f"an unknown dtype {name[:40]!r}")
    return dtype
