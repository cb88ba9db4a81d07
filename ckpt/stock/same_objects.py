"""Compare objects by their parts: whether two names share one part, or have one each, does not matter."""

from __future__ import annotations

import cmath
import io
import itertools
from collections.abc import Iterator
from typing import Any


def same_objects(a: Any, b: Any) -> bool:
    """Tell whether two objects are of the same types and values; NaN is the same as NaN.

    Objects may be hostile: nested deeply, or with parts that are shared very many times.
    """
    todo: list[Iterator[tuple[Any, Any]]] = [iter([(a, b)])]
    compared: set[tuple[int, int]] = set()
    while todo:
        pair = next(todo[-1], None)
        if pair is None:
            todo.pop()
            continue
        a, b = pair
        if type(a) is not type(b):
            return False
        if a is None or isinstance(a, str | bytes | bytearray | int | float | complex):
            if a != b and not (isinstance(a, float | complex) and cmath.isnan(a) and cmath.isnan(b)):
                return False
        elif (id(a), id(b)) not in compared:
            compared.add((id(a), id(b)))
            parts = _parts(a, b)
            if parts is None:
                return False
            todo.append(parts)
    return True


def _parts(a: Any, b: Any) -> Iterator[tuple[Any, Any]] | None:
    """List the parts of two objects that are to be compared, if all else is the same."""
    if isinstance(a, list | tuple):
        return zip(a, b, strict=True) if len(a) == len(b) else None
    if isinstance(a, dict):
        attributes = getattr(a, "__dict__", None), getattr(b, "__dict__", None)
        values = zip(a.values(), map(b.__getitem__, a), strict=True)
        return itertools.chain([attributes], values) if _same_keys(a, b) else None
    if isinstance(a, set | frozenset):
        is_same = _same_keys(a, b)
    elif isinstance(a, io.BytesIO):
        is_same = a.getbuffer() == b.getbuffer()
    else:
        is_same = _saved(a) == _saved(b)
    return iter(()) if is_same else None


def _same_keys(a: Any, b: Any) -> bool:
    """Compare keys, of which 1 and True are not the same."""
    return {(type(key), key) for key in a} == {(type(key), key) for key in b}


def _saved(value: Any) -> bytes:
    """Save a tensor or another value of torch, which does it in the same way each time."""
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
