"""Stand in for values of a pickle until all of it is checked, and make them real then.

torch's unpickler gives a state, items or keys to few types alone. So what a pickle makes first is a list, a dict or a
`StandIn`, which is checked; then it is pickled by us as what it stands for, and unpickled: nothing of the pickle that
was stored gets so far.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch


def require(condition: bool, fault: str) -> None:
    """Refuse a value. Raises UnpicklingError."""
    if not condition:
        raise pickle.UnpicklingError(fault)


class StandIn:
    """A value that is not real yet: `made` is what it stands for, once its state is known."""

    made: Any = None

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"a {type(self).__name__} with a state")

    def real(self) -> Any:
        require(self.made is not None, "a value that was never given its state")
        return self.made


class Name(StandIn):
    """A class or constant, which a pickle may name and not call."""

    def __init__(self, named: Any) -> None:
        self.made = named

    def __call__(self, *arguments: Any) -> Any:
        raise pickle.UnpicklingError(f"a call of {self.made!r:.100}")


class _Mark:
    """The first item of a list, or key of a dict, that stands for a container of another type."""

    def __init__(self, made: Any) -> None:
        self.made = made


_FACTORY = _Mark(None)


def list_for_deque(items: Any = (), max_length: Any = None) -> list[Any]:
    """Make the list that stands for a deque, as which it gets its items."""
    is_empty = type(items) in (tuple, list) and not items
    require(is_empty and (max_length is None or type(max_length) is int), "a deque of something else")
    require(max_length is None or 0 <= max_length < 1 << 62, "a deque of a length that is none")
    return [_Mark(max_length)]


def dict_for_defaultdict(factory: Any = None) -> dict[Any, Any]:
    """Make the dict that stands for a defaultdict, as which it gets its items."""
    named = factory.made if type(factory) is Name else factory  # torch knows `set` itself
    require(named is None or isinstance(named, type), "a factory of another kind")
    return {_FACTORY: named}


def made_real(value: Any, make_file: Callable[[], io.BytesIO]) -> Any:
    """Replace all that stands for something else, by way of a file, which may bound what is written.

    Raises UnpicklingError for what is left half made, and whatever the file raises.
    """
    file = make_file()
    torch.save(value, file, pickle_module=_OURS, pickle_protocol=4)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)  # it is what we have just written


_Python: Any = pickle._Pickler
"""The pickler in Python, as that in C asks no hook about lists and dicts."""


class _Pickler(_Python):  # type: ignore[misc]
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        require(type(obj) is not _Mark, "a list that was used before it was whole")
        super().save(obj.real() if isinstance(obj, StandIn) else obj, save_persistent_id)

    def save_list(self, obj: list[Any]) -> None:
        if obj and type(obj[0]) is _Mark:
            arguments = ((),) if obj[0].made is None else ((), obj[0].made)
            self.save_reduce(deque, arguments, None, iter(obj[1:]), obj=obj)
        else:
            super().save_list(obj)

    def save_dict(self, obj: dict[Any, Any]) -> None:
        if _FACTORY in obj:
            pairs = ((key, value) for key, value in obj.items() if key is not _FACTORY)
            arguments = () if obj[_FACTORY] is None else (obj[_FACTORY],)
            self.save_reduce(defaultdict, arguments, None, None, pairs, obj=obj)
        else:
            super().save_dict(obj)

    dispatch: ClassVar[Any] = {**_Python.dispatch, list: save_list, dict: save_dict}


_OURS: Any = SimpleNamespace(Pickler=_Pickler, __name__=__name__)
