"""Stand in for values of a pickle until all of it is checked, and make them real then.

torch's unpickler gives a state, items or keys to few types alone. So what a pickle makes first is a list, a dict or a
`StandIn`, which is checked; then it is pickled by us as what it stands for, and unpickled: nothing of the pickle that
was stored gets so far.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch


def require(condition: bool, fault: str) -> None:
    """Refuse a value. Raises UnpicklingError."""
    if not condition:
        raise pickle.UnpicklingError(fault)


def values_in(value: Any) -> Iterator[Any]:
    """List a value and all that is in its lists, dicts, tuples and sets."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        yield each
        if isinstance(each, list | tuple | set | frozenset | Mapping) and id(each) not in seen:
            seen.add(id(each))
            todo += [*each, *each.values()] if isinstance(each, Mapping) else each


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


class Unmade:
    """A value of a class that is not known here: its name alone. Neither its arguments nor its state are kept.

    Subclasses, one for each name, are made by `unmade_kind`.
    """

    name: ClassVar[str]
    thread: ClassVar[int]
    filled: ClassVar[Mapping[str, type]]

    def __new__(cls, *arguments: Any) -> Any:
        # torch lets all threads make a value that one declared safe; and what is made of a tensor may be a weight.
        given = [*arguments, *(item for each in arguments if type(each) in (tuple, list) for item in each)]
        is_allowed = threading.get_ident() == cls.thread and not any(
            isinstance(each, torch.Tensor) for each in given
        )
        require(is_allowed, f"Unsupported global: GLOBAL {cls.name}")
        return cls.filled[cls.name]() if cls.name in cls.filled else super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Drop the state."""


def unmade_kind(name: str, filled: Mapping[str, type]) -> type[Unmade]:
    """Make the class that stands for the class or function `name`, in this thread.

    Where `filled` has the name, a plain list or dict stands for it, which keeps its items.
    """
    return type("Unmade", (Unmade,), {"name": name, "thread": threading.get_ident(), "filled": filled})


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
