"""Make values of Python's standard library from a pickle that may be hostile: dates, numbers, paths, containers."""

from __future__ import annotations

import datetime
import io
import pathlib
import pickle
import random
import sys
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

from ckpt.stock.numpy_values import NUMPY
from ckpt.stock.pickle_limits import Hash
from ckpt.stock.stand_ins import Name, StandIn, Unmade, dict_for_defaultdict, list_for_deque, require

_SHOWN_BYTES = 100
_MAX_FRACTION_TEXT = 1000
_STATE_WORDS = 624
_CHILD_MAIN = "__mp_main__"
_MAIN = "__main__"
"""What the module of the program is called in a process that `multiprocessing` spawned."""


def maker_of(name: str) -> Callable[..., Any] | None:
    """Return what makes the value for a name in a pickle; None if it is none that may be made."""
    return _MAKERS.get(name) or _maker_of_class(name)


def hash_of(name: str, make: Callable[..., Any]) -> Hash:
    """Tell how the hash of such a value comes about; a named tuple's overruns the stack if it is nested deeply."""
    if make in _FUNCTIONS_WITH_CHOSEN_HASH:
        return "chosen"
    is_named_tuple = isinstance(make, type) and name not in _MAKERS and not issubclass(make, Unmade)
    return "none" if is_named_tuple else "own"


class _InertFile(io.BytesIO):
    """An `io.BytesIO` of a pickle, and pickled as one: nothing but bytes and a position within them."""

    def __setstate__(self, state: Any) -> None:
        # A tuple alone: the walk over the pickle counts what is in it.
        data, position, attributes = state if type(state) is tuple and len(state) == 3 else (None, 0, None)
        is_inert = type(data) is bytes and type(position) is int and not attributes
        if not is_inert or not 0 <= position <= len(data or b""):
            raise pickle.UnpicklingError("an io.BytesIO with more than bytes and a position in them")
        self.write(data or b"")
        self.seek(position)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return io.BytesIO, (), (self.getvalue(), self.tell(), None)

    def __repr__(self) -> str:
        data = self.getvalue()
        more = "..." if len(data) > _SHOWN_BYTES else ""
        return f"BytesIO({data[:_SHOWN_BYTES]!r}{more})"


_InertFile.__name__ = "BytesIO"  # as users see it


def _no_bytes() -> bytes:
    """Make `b""`, which protocol 2 of pickle writes as a call."""
    return b""


INERT: Mapping[str, Callable[..., Any]] = {"_io.BytesIO": _InertFile, "builtins.bytes": _no_bytes}
"""What can be used as it was made."""


def _are(kind: type, *values: Any) -> bool:
    return all(type(value) is kind for value in values)


def _fails(error: Exception) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"a value that is none: {error!r:.100}")


# -- times -----------------------------------------------------------------------------------------------------


def _bytes(state: Any, length: int) -> bytes:
    """Check the state of a time; its class would take most bytes unseen."""
    require(type(state) is bytes and len(state) == length, "a time of another form")
    return state  # type: ignore[no-any-return]


def _date(state: Any) -> datetime.date:
    year_high, year_low, month, day = _bytes(state, 4)
    return datetime.date((year_high << 8) + year_low, month, day)


def _datetime(state: Any, zone: Any = None) -> datetime.datetime:
    fields = _bytes(state, 10)
    require(zone is None or type(zone) is datetime.timezone, "a time in a zone of another kind")
    year, month, fold = (fields[0] << 8) + fields[1], fields[2] & 0x7F, fields[2] >> 7
    day, hour, minute, second = fields[3:7]
    micros = int.from_bytes(fields[7:], "big")
    return datetime.datetime(year, month, day, hour, minute, second, micros, zone, fold=fold)


def _time(state: Any, zone: Any = None) -> datetime.time:
    fields = _bytes(state, 6)
    require(zone is None or type(zone) is datetime.timezone, "a time in a zone of another kind")
    micros = int.from_bytes(fields[3:], "big")
    return datetime.time(fields[0] & 0x7F, fields[1], fields[2], micros, zone, fold=fields[0] >> 7)


def _timedelta(days: Any, seconds: Any, micros: Any) -> datetime.timedelta:
    require(_are(int, days, seconds, micros), "a span of time that is not made of numbers")
    return datetime.timedelta(days, seconds, micros)


def _timezone(offset: Any, *name: Any) -> datetime.timezone:
    is_zone = type(offset) is datetime.timedelta and len(name) <= 1 and _are(str, *name)
    require(is_zone, "a zone of another kind")
    return datetime.timezone(offset, *name)


# -- numbers and others ----------------------------------------------------------------------------------------


def _decimal(text: Any) -> Decimal:
    require(type(text) is str, "a Decimal that is not made of a text")
    made = Decimal(text)
    require(not made.is_snan(), "a Decimal that cannot be compared")
    return made


def _fraction(*parts: Any) -> Fraction:
    if len(parts) == 1 and type(parts[0]) is str and len(parts[0]) <= _MAX_FRACTION_TEXT:
        numerator, _, denominator = parts[0].partition("/")  # an exponent would make it any size
        parts = int(numerator), int(denominator or "1")
    require(
        len(parts) == 2 and _are(int, *parts) and parts[1] > 0, "a Fraction that is not made of two numbers"
    )
    return Fraction(*parts)


def _range(*bounds: Any) -> range:
    require(_are(int, *bounds) and len(bounds) in (1, 2, 3), "a range that is not made of numbers")
    return range(*bounds)


def _slice(*bounds: Any) -> slice:
    is_made_of_numbers = all(bound is None or type(bound) is int for bound in bounds)
    require(is_made_of_numbers and len(bounds) in (1, 2, 3), "a slice that is not made of numbers")
    return slice(*bounds)


def _frozenset(*items: Any) -> frozenset[Any]:
    require(len(items) <= 1 and _are(list, *items), "a frozenset that is not made of a list")
    return frozenset(*items)


def _path(kind: str) -> Callable[..., pathlib.PurePath]:
    def make(*parts: Any) -> pathlib.PurePath:
        require(_are(str, *parts), "a path that is not made of texts")
        made: pathlib.PurePath = getattr(pathlib, kind)(*parts)
        return made

    return make


class _UUID(StandIn):
    def __setstate__(self, state: Any) -> None:
        number = state.get("int") if type(state) is dict and self.made is None else None
        require(type(number) is int and 0 <= number < 1 << 128, "a UUID that is no number")
        safe = state.get("is_safe")
        require(safe is None or (type(safe) is int and safe in (0, -1)), "a UUID of another kind")
        self.made = uuid.UUID(int=number, is_safe=uuid.SafeUUID(safe))


class _Random(StandIn):
    def __setstate__(self, state: Any) -> None:
        require(type(state) is tuple and len(state) == 3 and self.made is None, "a generator of another kind")
        version, words, gauss = state
        is_known = (
            version == 3 and type(words) is tuple and len(words) == _STATE_WORDS + 1 and _are(int, *words)
        )
        require(is_known and all(0 <= word < 1 << 32 for word in words), "a generator of another version")
        require(
            words[-1] <= _STATE_WORDS and (gauss is None or type(gauss) is float),
            "a generator of another kind",
        )
        self.made = random.Random(0)
        self.made.setstate(state)


def _checked(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises UnpicklingError for all that it is not to be given."""

    def make_checked(*arguments: Any) -> Any:
        try:
            return make(*arguments)
        except (ArithmeticError, TypeError, ValueError, NotImplementedError) as error:
            raise _fails(error) from None

    return make_checked


_PATHS = ("Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "builtins.frozenset": _frozenset,
    "builtins.range": _range,
    "builtins.slice": _slice,
    "collections.deque": list_for_deque,
    "collections.defaultdict": dict_for_defaultdict,
    "datetime.date": _date,
    "datetime.datetime": _datetime,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "decimal.Decimal": _decimal,
    "fractions.Fraction": _fraction,
    **{f"{module}.{kind}": _path(kind) for module in ("pathlib", "pathlib._local") for kind in _PATHS},
}
FILLED_LATER = frozenset({"collections.deque", "collections.defaultdict"})
"""Values that stand as a list or dict until they are real."""

_MAKERS: Mapping[str, Callable[..., Any]] = {
    **INERT,
    "builtins.Ellipsis": Name(...),
    "random.Random": _Random,
    "uuid.UUID": _UUID,
    **{f"builtins.{kind.__name__}": Name(kind) for kind in (int, float, bool, str, tuple, list, dict)},
    **{name: _checked(make) for name, make in _FUNCTIONS.items()},
    **NUMPY,
}
_FUNCTIONS_WITH_CHOSEN_HASH = frozenset(
    _MAKERS[name]
    for name in ("builtins.frozenset", "builtins.range", "builtins.slice", "decimal.Decimal", "fractions.Fraction", "uuid.UUID")
)  # fmt: skip


# -- classes of the program ------------------------------------------------------------------------------------


def _maker_of_class(name: str) -> Callable[..., Any] | None:
    """Return what makes members of an enum, or named tuples, of a class that the program has imported."""
    module_name, _, class_name = name.rpartition(".")
    module = sys.modules.get(module_name) or (sys.modules.get(_MAIN) if module_name == _CHILD_MAIN else None)
    kind = getattr(module, "__dict__", {}).get(
        class_name
    )  # no attribute that a module makes when it is asked
    if not isinstance(kind, type):
        return None
    if issubclass(kind, Enum):
        return _member_maker(kind)
    return _tuple_maker(kind) if _is_named_tuple(kind) else None


def _member_maker(kind: type[Enum]) -> Callable[[Any], Any]:
    """Return a look-up of a member: the call of its class could run a method of the program."""

    def member(value: Any) -> Enum:
        parts = value if type(value) is tuple else (value,)
        is_plain = all(part is None or type(part) in (bool, int, float, str, bytes) for part in parts)
        require(is_plain, f"a member of {kind.__qualname__} that is no plain value")
        found = kind.__dict__["_value2member_map_"].get(value)
        # What is made of several flags is known to the program that made it alone.
        is_member = isinstance(found, kind) and kind._member_map_.get(found._name_) is found
        require(is_member, f"{value!r:.40}, which is no member of {kind.__qualname__}")
        return found  # type: ignore[no-any-return]

    return member


def _is_named_tuple(kind: type) -> bool:
    """Tell whether instances are made and pickled by what `namedtuple` has written, and nothing else."""
    make = getattr(kind.__new__, "__globals__", {}).get("_tuple_new")
    is_plain = all(getattr(kind, hook) is getattr(object, hook) for hook in ("__reduce__", "__reduce_ex__"))
    return (
        issubclass(kind, tuple) and make is tuple.__new__ and is_plain and not hasattr(kind, "__setstate__")
    )


def _tuple_maker(kind: type[Any]) -> type:
    def make(_: type, *items: Any) -> Any:
        require(len(items) == len(kind._fields), f"a {kind.__qualname__} of another length")
        return tuple.__new__(kind, items)

    return type(kind.__name__, (), {"__new__": make})
