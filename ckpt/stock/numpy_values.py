"""Make NumPy's scalars and arrays of numbers and texts from a pickle that may be hostile."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckpt.stock.stand_ins import Name, StandIn, require

_DTYPE = re.compile(r"b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[US][1-9][0-9]{0,8}|[Mm]8")
_UNITS = frozenset(
    ["generic", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"],
)
_MAX_UNITS = 1 << 30
_MAX_DIMENSIONS = 32
_MAX_LENGTH = 1 << 62
_MAX_CHARACTER = 0x10FFFF
_SCALAR_KINDS = "biufUSMm"
"""Without complex ones, of which very many with one hash can be chosen."""
_MAX_SCALAR_FLOAT_BYTES = 8


class _DType(StandIn):
    """A dtype by its name, which has neither objects nor fields."""

    def __init__(self, text: Any, align: Any = False, copy: Any = True) -> None:
        require(type(text) is str and _DTYPE.fullmatch(text) is not None, f"a NumPy dtype {text!r:.40}")
        require(align in (False, 0) and copy in (True, 1, False, 0), "a NumPy dtype that is aligned")
        self._text = text

    def __setstate__(self, state: Any) -> None:
        is_state = type(state) is tuple and len(state) in (8, 9) and self.made is None
        require(
            is_state and type(state[1]) is str and state[1] in tuple("<>|="), "a NumPy dtype of another kind"
        )
        require(state[2:5] == (None, None, None), "a NumPy dtype with fields")
        unit = ""
        if len(state) == 9 and self._text in ("M8", "m8"):
            unit = _unit(state[8])
        try:
            self.made = np.dtype(state[1] + self._text + unit)
        except (TypeError, ValueError):  # such as a long double of another machine
            raise pickle.UnpicklingError(f"a NumPy dtype {self._text!r} that is not known here") from None
        require(state[5] in (-1, self.made.itemsize), "a NumPy dtype of another size")


def _unit(metadata: Any) -> str:
    match metadata:
        case (_, (bytes(name), int(number), 1, 1)) if 0 < number < _MAX_UNITS:
            unit = name.decode("latin1")
            require(unit in _UNITS, "a NumPy date of an unknown unit")
            return "" if unit == "generic" else f"[{number}{unit}]"
    raise pickle.UnpicklingError("a NumPy date of an unknown unit")


def _checked(dtype: Any) -> np.dtype[Any]:
    """Return the dtype that a pickle gives; where a program has declared NumPy's own as safe, that."""
    real = dtype.real() if type(dtype) is _DType else dtype
    is_plain = isinstance(real, np.dtype) and real.kind in "biufcUSMm" and real.itemsize > 0
    require(is_plain, "a NumPy dtype of objects")
    return real  # type: ignore[no-any-return]


def _elements(
    dtype: np.dtype[Any], shape: tuple[int, ...], data: Any, order: Any = "C"
) -> np.ndarray[Any, Any]:
    """View bytes as an array that takes all of them. Raises UnpicklingError for any other."""
    require(type(data) is bytes, "a NumPy array of objects")
    is_shape = type(shape) is tuple and len(shape) <= _MAX_DIMENSIONS
    is_shape = is_shape and all(type(length) is int and 0 <= length < _MAX_LENGTH for length in shape)
    require(is_shape, "a NumPy array of an absurd shape")
    require(
        math.prod(shape) * dtype.itemsize == len(data),
        "a NumPy array that is larger than what is stored of it",
    )
    require(math.prod(filter(None, shape)) * dtype.itemsize < _MAX_LENGTH, "a NumPy array of an absurd shape")
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=data, order=order)
    if dtype.kind == "U" and array.size:
        code_points = np.frombuffer(data, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        require(int(code_points.max()) <= _MAX_CHARACTER, "a NumPy text with characters that do not exist")
    if dtype.kind == "b" and array.size:
        require(int(np.frombuffer(data, np.uint8).max()) <= 1, "a NumPy bool that is neither")
    return array


class _Array(StandIn):
    """An array that gets shape, dtype and elements together."""

    def __init__(self, kind: Any, shape: Any, code: Any) -> None:
        is_array = kind is np.ndarray or (type(kind) is Name and kind.made is np.ndarray)
        require(
            is_array and shape == (0,) and code in (b"b", "b"),
            "a NumPy array of another class, or with a size",
        )

    def __setstate__(self, state: Any) -> None:
        require(
            type(state) is tuple and len(state) == 5 and self.made is None, "a NumPy array of another kind"
        )
        version, shape, dtype, is_fortran, data = state
        require(version == 1 and type(is_fortran) is bool, "a NumPy array of another version")
        order: Any = "F" if is_fortran else "C"
        self.made = _elements(_checked(dtype), shape, data, order).copy(order)


def _scalar(dtype: Any, data: Any) -> Any:
    real = _checked(dtype)
    is_long = real.kind == "f" and real.itemsize > _MAX_SCALAR_FLOAT_BYTES
    require(real.kind in _SCALAR_KINDS and not is_long, f"a NumPy scalar of {real}")
    return _elements(real, (), data)[()]


NUMPY: Mapping[str, Callable[..., Any]] = {
    "numpy.ndarray": Name(np.ndarray),
    "numpy.dtype": _DType,
    **dict.fromkeys(("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"), _Array),
    **dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), _scalar),
}
"""What makes the values of a pickle, by the name in it."""
