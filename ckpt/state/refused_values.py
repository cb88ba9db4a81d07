"""Name the objects of a state that would be saved, and that a load would refuse to unpickle."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import torch

from ckpt.stock.safe_load import load_fault

_MAX_BITS = 2000
"""Of a number that torch loads, nearly."""
_MAX_LOOKED_AT = 1000
_LOCAL = re.compile(r'\["enum","([^"]*<locals>[^"]*)"')
_SCALARS = (int, float, bool, str, bytes, complex)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NO_ELEMENTS: Any = torch.empty(0).__reduce_ex__(2)  # type: ignore[no-untyped-call]
_HOOKS = (b"__reduce", b"__get")
"""Texts that a load refuses begin so."""


def refusals(name: str, value: Any, trusted: Collection[str]) -> Iterator[str]:
    """Tell why a load would refuse an object, unless that is trusted; nothing if it would not."""
    left = [_MAX_LOOKED_AT]
    if _is_plain(value, left) or any(fnmatchcase(name, pattern) for pattern in trusted):
        return
    file = io.BytesIO()
    classes = list[Any]()
    try:
        torch.save(value, file, pickle_module=SimpleNamespace(Pickler=_pickler(classes), __name__=__name__))
    except Exception:  # the save itself will name it
        return
    if left[0] < 0 and not classes and not any(hook in file.getbuffer().tobytes() for hook in _HOOKS):
        return  # a large one of plain values, which take torch long to load
    if (fault := load_fault(file.getbuffer())) is not None:
        yield (
            f"{name!r} is a {type(value).__module__}.{type(value).__qualname__} that a load refuses ({fault}): save plain "
            f"values in its place, or, if you trust all who can write there, say trusted_objects=[{name!r}] in "
            "SaveOptions, and to each load"
        )


def local_enums(text: str) -> Iterator[str]:
    """Name the enums among the keys in a structure, as text, that a load could not find by their names."""
    yield from (
        f"keys are members of {name}, which is made in a function: make it in a module"
        for name in _LOCAL.findall(text)
    )


def _is_plain(value: Any, left: list[int]) -> bool:
    """Tell whether a value surely loads, of which no more than a few parts are looked at."""
    kind = type(value)
    left[0] -= 1
    if value is None or kind in _TENSORS:
        return True
    if kind in _SCALARS:
        if kind is int:
            return bool(value.bit_length() < _MAX_BITS)
        return kind is not str or not value.startswith("__")  # hooks of pickling are refused
    if left[0] < 0:
        return False
    if kind in (tuple, list):
        return all(_is_plain(item, left) for item in value)
    return kind is dict and all(_is_plain(key, left) and _is_plain(item, left) for key, item in value.items())


def _pickler(classes: list[Any]) -> type[pickle.Pickler]:
    """Make a pickler of tensors without their elements; all else that is more than plain it notes in `classes`."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) in _TENSORS:
                return _NO_ELEMENTS
            classes.append(type(obj))
            return NotImplemented

    return Pickler
