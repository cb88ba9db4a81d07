"""Describe a tensor as it lies in a file; show its elements as numbers of numpy, which lacks some of torch's dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import ConfigurationError
from ckpt.format.dtypes import item_bytes

if TYPE_CHECKING:
    import torch

Elements = npt.NDArray[Any]

_SAME = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)
_WIDENED = frozenset({"bfloat16", "complex32", "bcomplex32", "float8_e8m0fnu"})
_FLOAT8 = {
    "float8_e4m3fn": (3, 7, (0x7F, 0xFF), ()),
    "float8_e4m3fnuz": (3, 8, (0x80,), ()),
    "float8_e5m2": (2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), (0x7C, 0xFC)),
    "float8_e5m2fnuz": (2, 16, (0x80,), ()),
}
"""Bits of the mantissa, bias of the exponent, and which bytes are NaN and which infinite."""


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for elements as they are stored: the same, or else bytes of that size."""
    return np.dtype(dtype) if dtype in _SAME else np.dtype((np.void, item_bytes(dtype)))


def has_values(dtype: str) -> bool:
    """Tell whether `values_of` knows a dtype."""
    return dtype in _SAME or dtype in _FLOAT8 or dtype in _WIDENED


def values_of(elements: Elements, dtype: str) -> Elements:
    """Convert stored elements to numbers of the same values, of a wider dtype where numpy lacks theirs.

    Raises ConfigurationError for a dtype whose values numpy cannot show.
    """
    if dtype in _SAME:
        return elements
    values: Elements
    flat = elements.reshape(-1)
    if dtype == "bfloat16":
        values = _bfloat16(flat)
    elif dtype == "bcomplex32":
        values = _bfloat16(flat).view(np.complex64)
    elif dtype == "complex32":
        values = flat.view(np.float16).astype(np.float32).view(np.complex64)
    elif dtype == "float8_e8m0fnu":
        powers = np.ldexp(np.float32(1), np.arange(-127, 128))
        values = np.append(powers, np.float32(np.nan))[flat.view(np.uint8)]
    elif dtype in _FLOAT8:
        values = _float8(*_FLOAT8[dtype])[flat.view(np.uint8)]
    else:
        raise ConfigurationError(f"values of dtype {dtype} cannot be shown; NumPy has no such dtype")
    return values.reshape(elements.shape)


def _bfloat16(elements: Elements) -> Elements:
    widened: Elements = (elements.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return widened


def _float8(mantissa_bits: int, bias: int, nan: tuple[int, ...], infinite: tuple[int, ...]) -> Elements:
    """List the values of all bytes."""
    sign, magnitude = np.divmod(np.arange(256), 128)
    exponent, mantissa = np.divmod(magnitude, 1 << mantissa_bits)
    # Subnormals have the smallest exponent, and lack the leading one.
    mantissa += np.where(exponent > 0, 1 << mantissa_bits, 0)
    values: Elements = np.ldexp(mantissa.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits)
    values[list(infinite)] = np.inf
    values[list(nan)] = np.nan
    values[sign == 1] *= -1
    return values


@dataclass(frozen=True)
class StoredTensor:
    """A dense tensor in a file.

    Attributes:
        first_byte: where in the file element (0, 0, ...) is.
        dtype, shape, strides: as of a torch tensor; strides in elements, positive.
    """

    first_byte: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def row_major(first_byte: int, dtype: torch.dtype, shape: Sequence[int]) -> StoredTensor:
        """Describe a tensor without gaps, its last dimension nearest."""
        strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        return StoredTensor(first_byte, dtype, tuple(shape), tuple(strides))

    @property
    def payload_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
