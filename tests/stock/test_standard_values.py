"""Plain values of the standard library and NumPy load as they were; what a hostile pickle makes of them is refused."""

from __future__ import annotations

import datetime
import enum
import functools
import io
import pathlib
import random
import struct
import sys
import tracemalloc
import types
import uuid
from collections import defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.pickles import archive, call, name, number, text

from ckpt.errors import CheckpointError, UnsafeContent
from ckpt.stock.item_files import MemoryFile
from ckpt.stock.safe_load import load_fault, safe_object, safe_value

HUGE = 1 << 60


class Colour(enum.Enum):
    RED = 1
    PAIR = (1, "b")


class Level(enum.IntEnum):
    LOW = 0


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Asked(enum.Enum):
    ONE = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise SystemExit("a checkpoint has run code of the program")


class Pair(NamedTuple):
    first: Any
    second: int = 2


Old = namedtuple("Old", "a b")


class Counted(Old):
    __slots__ = ()


class Making(Old):
    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls, *args)


class Reduced(Old):
    __slots__ = ()

    def __reduce__(self) -> Any:
        return Reduced, tuple(self)


def _values() -> dict[str, Any]:
    zone = datetime.timezone(datetime.timedelta(hours=1), "x")
    moment = datetime.datetime(2026, 11, 28, 7, 49, 38, 5)
    return {
        "date": moment.date(), "datetime": moment, "datetime in UTC": moment.replace(tzinfo=datetime.timezone.utc), "datetime in a zone": moment.replace(tzinfo=zone),
        "time": moment.time(), "timedelta": datetime.timedelta(-3, 5, 7), "timezone": zone,
        "decimal": Decimal("1.10"), "infinite decimal": Decimal("-Infinity"), "fraction": Fraction(-1, 3), "uuid": uuid.uuid4(),
        "path": pathlib.Path("/a/b"), "pure path": pathlib.PureWindowsPath("c:/x"), "range": range(0, 10, 3), "slice": slice(1, None, 2), "ellipsis": ...,
        "enum": Colour.RED, "enum of a tuple": Colour.PAIR, "int enum": Level.LOW, "flag": Access.READ, "enum with a method": Asked.ONE,
        "frozenset": frozenset({1, (2, "a")}), "empty frozenset": frozenset(), "set of fractions": {Fraction(1, 3)},
        "deque": deque([1, {"a": 2}], maxlen=5), "endless deque": deque("abc"), "empty deque": deque(), "deque in a deque": deque([deque([1]), deque()]),
        "defaultdict": defaultdict(list, {"a": [1]}), "defaultdict of sets": defaultdict(set, a={1}), "defaultdict without": defaultdict(None, a=1),
        "named tuple": Pair(torch.ones(2)), "old named tuple": Old(1, [2]), "named tuple with methods": Counted(1, 2), "type": int,
        "float64": np.float64(1.5), "float32": np.float32(1.5), "float16": np.float16(1.5), "int64": np.int64(-3), "uint8": np.uint8(3), "bool": np.bool_(True),
        "numpy text": np.str_("aé\U0001f600"), "numpy bytes": np.bytes_(b"ab"), "datetime64": np.datetime64("2026-11-28"), "timedelta64": np.timedelta64(3, "s"),
        "array": np.arange(6).reshape(2, 3), "array of Fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "array of one": np.array(3.0), "bools": np.array([True, False]),
        "empty array": np.zeros((0, 3), np.float32), "texts": np.array(["a", "bc"]), "bytes": np.array([b"a", b"bc"]), "complex numbers": np.array([1 + 2j]), "dates": np.array(["2026-11-28T07"], "M8[h]"),
        "dtype": np.dtype(np.float32), "generator": random.Random(3).getstate(), "NumPy's generator": np.random.default_rng(3).bit_generator.state, "NumPy's old generator": np.random.RandomState(3).get_state(),
        "mixed": {"a": [np.float64(1), (Pair(deque([np.arange(2)])),)], Decimal(1): {uuid.UUID(int=3)}, "t": torch.ones(2), (1, Fraction(1, 2)): 1},
    }  # fmt: skip


def load(data: bytes) -> Any:
    return torch.load(safe_object(MemoryFile(data), fqn="o", url="u", key="k"), weights_only=False)


def stored(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", _values())
def test_plain_values_load(kind: str) -> None:
    value = _values()[kind] if kind != "uuid" else uuid.UUID(int=5)
    declared = set(torch.serialization.get_safe_globals())
    data = stored(value)
    for found in (load(data), safe_value(MemoryFile(data), fqn="o", url="u", key="k")):
        assert type(found) is type(value)
        assert repr(found) == repr(value)
    assert set(torch.serialization.get_safe_globals()) == declared


def test_parts_that_are_shared_stay_so() -> None:
    array = np.arange(3)
    queue = deque[Any]([1])
    queue.append(queue)
    (first, second), loaded = load(stored([(array, array), queue]))
    assert first is second
    assert loaded[1] is loaded
    generator = load(stored(random.Random(3)))
    assert generator.random() == random.Random(3).random()
    first[0] = 5  # it can be written


def test_classes_that_a_program_declared_are_its_own() -> None:
    with torch.serialization.safe_globals([np.dtype, np.dtypes.Int64DType, Pair]):
        assert load(stored({"a": np.arange(3), "b": Pair(deque([1]))}))["b"] == Pair(deque([1]))


REFUSED: dict[str, Any] = {
    "objects": np.array([object()]), "fields": np.zeros(2, [("a", "i4")]), "object dtype": np.dtype(object), "complex scalar": np.complex64(1),
    "two flags": Access.READ | Access.WRITE, "named tuple that is made": Making(1, 2), "named tuple that is reduced": Reduced(1, 2),
    "function": len, "object": object(), "NumPy's generator": np.random.default_rng(1), "namespace": types.SimpleNamespace(a=1),
    "keys that are named tuples": {Old(1, 2): 3}, "very many fractions": {Fraction(1, n) for n in range(1, 1200)},
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_other_values_are_refused(kind: str) -> None:
    data = stored(REFUSED[kind])
    with pytest.raises(UnsafeContent):
        load(data)
    assert load_fault(memoryview(data))


# -- hostile ---------------------------------------------------------------------------------------------------


def encoded(data: bytes) -> bytes:
    return call("_codecs.encode", text(data.decode("latin1")), text("latin1"))


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def dtype(of: str, *, order: str = "<", names: bytes = b"N", size: int = -1, more: bytes = b"") -> bytes:
    state = number(3), text(order), b"N", names, b"N", number(size), number(-1), number(0)
    return call("numpy.dtype", text(of), b"\x89", b"\x88") + tuple_of(*state, more) + b"b"


def array(shape: bytes, of: bytes, data: bytes, *, kind: str = "numpy.ndarray", at: int = 0) -> bytes:
    made = call("numpy._core.multiarray._reconstruct", name(kind), tuple_of(number(at)), encoded(b"b"))
    return made + tuple_of(number(1), shape, of, b"\x89", data) + b"b"


def scalar(of: bytes, data: bytes) -> bytes:
    return call("numpy._core.multiarray.scalar", of, data)


EIGHT = encoded(bytes(8))


@functools.cache
def _hostile() -> dict[str, bytes]:
    here = __name__
    i8 = dtype("i8")
    words = tuple_of(*[number(1)] * 625)
    return {
        "a huge array": array(tuple_of(number(HUGE)), i8, EIGHT),
        "a huge array of none": array(tuple_of(number(HUGE)), i8, encoded(b"")),
        "an array with a huge side and none": array(tuple_of(number(0), number(HUGE)), i8, encoded(b"")),
        "an array with a negative side": array(tuple_of(number(-1), number(-1)), i8, EIGHT),
        "an array of many dimensions": array(tuple_of(*[number(1)] * 60), i8, EIGHT),
        "an array made huge": array(tuple_of(number(1)), i8, EIGHT, at=HUGE),
        "an array of another class": array(tuple_of(number(1)), i8, EIGHT, kind="builtins.bytearray"),
        "an array of objects": array(tuple_of(number(1)), dtype("O8", order="|"), b"](" + b"Ne"),
        "an array of a list": array(tuple_of(number(1)), i8, b"](Ne"),
        "an array without a state": call("numpy._core.multiarray._reconstruct", name("numpy.ndarray"), tuple_of(number(0)), encoded(b"b")),
        "an array with two states": array(tuple_of(number(1)), i8, EIGHT) + tuple_of(number(1), tuple_of(number(1)), i8, b"\x89", EIGHT) + b"b",
        "the class of arrays called": call("numpy.ndarray", tuple_of(number(HUGE))),
        "the class of arrays made new": name("numpy.ndarray") + tuple_of(tuple_of(number(HUGE))) + b"\x81",
        "characters that do not exist": array(tuple_of(number(2)), dtype("U1", size=4), encoded(b"\xff" * 8)),
        "a bool that is neither": scalar(dtype("b1", order="|"), encoded(b"\x07")),
        "a dtype of objects": dtype("O8", order="|"),
        "a dtype of void": dtype("V8", order="|"),
        "a dtype by a list": dtype("i4,O"),
        "a dtype with fields": dtype("i8", names=tuple_of(text("a"))),
        "a dtype of another size": dtype("U2", size=HUGE),
        "a dtype of a huge size": dtype("U999999999", size=-1),
        "a dtype of another order": dtype("i8", order="x"),
        "a dtype without a state": call("numpy.dtype", text("i8"), b"\x89", b"\x88"),
        "a date of an unknown unit": dtype("M8", more=tuple_of(b"N", tuple_of(encoded(b"x" * 9), number(1), number(1), number(1)))),
        "a scalar of objects": scalar(dtype("O8", order="|"), EIGHT),
        "a scalar larger than its bytes": scalar(dtype("U99999", size=4 * 99999), EIGHT),
        "a scalar of a text": scalar(i8, text("x" * 8)),
        "a scalar of what is no dtype": scalar(text("i8"), EIGHT),
        "a deque made of a list": call("collections.deque", b"](" + b"K\x01" * 50 + b"e", number(1)),
        "a deque of a huge length": call("collections.deque", b")", number(1 << 70)),
        "a deque in a set before it is whole": call("builtins.set", call("collections.deque")),
        "a defaultdict of a call": call("collections.defaultdict", name("torch._utils._rebuild_tensor_v2")),
        "a class called": call("builtins.int", text("1" * 4000)),
        "a list called": call("builtins.list", b"](" + b"K\x01" * 50_000 + b"e"),
        "a range of texts": call("builtins.range", text("x")),
        "a slice of tuples": call("builtins.slice", b"N\x85" * 1),
        "a frozenset of a text": call("builtins.frozenset", text("abc")),
        "a frozenset of itself": b"](" + b"K\x01" * 50_000 + b"eq\x01" + call("builtins.frozenset", b"h\x01") * 20_000,
        "numbers of one hash in a frozenset": call("builtins.frozenset", b"](" + b"".join(number(7 + n * ((1 << 61) - 1)) for n in range(5000)) + b"e"),
        "fractions of one hash in a set": call("builtins.set", b"](" + b"".join(call("fractions.Fraction", number(7 + n * ((1 << 61) - 1)), number(1)) for n in range(5000)) + b"e"),
        "decimals of one hash as keys": b"}(" + b"".join(call("decimal.Decimal", text(str(7 + n * ((1 << 61) - 1)))) + b"N" for n in range(5000)) + b"u",
        "ranges in tuples as keys": b"}(" + b"".join(call("builtins.range", number(n)) + b"\x85N" for n in range(5000)) + b"u",
        "a decimal of a number": call("decimal.Decimal", number(5)),
        "a decimal that signals": call("decimal.Decimal", text("sNaN")),
        "a decimal of nonsense": call("decimal.Decimal", text("x")),
        "a fraction with an exponent": call("fractions.Fraction", text("1e999999999")),
        "a fraction of a long text": call("fractions.Fraction", text("1" * 100_000)),
        "a fraction by zero": call("fractions.Fraction", number(1), number(0)),
        "a date of a month that is none": call("datetime.date", encoded(b"\x07\xe4\x0d\x01")),
        "a date of a day that is none": call("datetime.datetime", encoded(b"\x07\xe4\x01\xff\xff\xff\xff\xff\xff\xff")),
        "a time by numbers": call("datetime.time", number(1)),
        "a time in a zone of another kind": call("datetime.time", encoded(bytes(6)), b"}"),
        "a span that is too long": call("datetime.timedelta", number(HUGE), number(0), number(0)),
        "a zone that is none": call("datetime.timezone", call("datetime.timedelta", number(9), number(0), number(0))),
        "a path of numbers": call("pathlib.PurePosixPath", number(1)),
        "a uuid that is none": name("uuid.UUID") + b")\x81}" + text("int") + number(-1) + b"sb",
        "a uuid with more": name("uuid.UUID") + b")\x81}(" + text("int") + number(1) + text("is_safe") + text("x") + b"ub",
        "a uuid without a state": name("uuid.UUID") + b")\x81",
        "a generator with few words": call("random.Random") + tuple_of(number(3), tuple_of(number(1)), b"N") + b"b",
        "a generator of another version": call("random.Random") + tuple_of(number(2), words, b"N") + b"b",
        "a generator from a seed": call("random.Random", text("x")),
        "a member that is none": call(f"{here}.Colour", number(7)),
        "a member by a method": call(f"{here}.Asked", number(7)),
        "a member by a deep tuple": call(f"{here}.Colour", b"N" + b"\x85" * 100_000),
        "a member by a list": call(f"{here}.Colour", b"]"),
        "members at once": call(f"{here}.Colour", text("X"), text("A B")),
        "a named tuple of another length": name(f"{here}.Old") + tuple_of(number(1)) + b"\x81",
        "a named tuple with a state": name(f"{here}.Old") + tuple_of(number(1), number(2)) + b"\x81}" + text("x") + b"Nsb",
        "a key that is a named tuple": b"}" + name(f"{here}.Old") + tuple_of(number(1), number(2)) + b"\x81Ns",
        "a set of named tuples": call("builtins.set", b"](" + name(f"{here}.Old") + tuple_of(number(1), number(2)) + b"\x81e"),
        "a named tuple that is made by a method": name(f"{here}.Making") + tuple_of(number(1), number(2)) + b"\x81",
        "a class of the program": call(f"{here}.MemoryFile", b"N"),
        "an enum that is not imported": call("not_imported_at_all.Colour", number(1)),
    }  # fmt: skip


@pytest.mark.parametrize("what", _hostile())
def test_hostile_pickles(what: str) -> None:
    data = archive(b"\x80\x02" + _hostile()[what] + b".")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_the_parts_of_hostile_pickles_are_valid_where_they_are_harmless() -> None:
    for harmless in (
        array(tuple_of(number(1)), dtype("i8"), EIGHT),
        array(tuple_of(number(2)), dtype("U1", size=4), encoded(struct.pack("<II", 65, 66))),
        scalar(dtype("b1", order="|"), encoded(b"\x01")),
        call("collections.deque", b")", number(5)) + b"K\x01a",
        call("datetime.datetime", encoded(b"\x07\xe4\x01\x01\x00\x00\x00\x00\x00\x00")),
        call(f"{__name__}.Asked", number(1)),
        name(f"{__name__}.Old") + tuple_of(number(1), number(2)) + b"\x81",
        name("uuid.UUID") + b")\x81}" + text("int") + number(1) + b"sb",
        call("random.Random") + tuple_of(number(3), tuple_of(*[number(1)] * 624, number(624)), b"N") + b"b",
    ):
        load(archive(b"\x80\x02" + harmless + b"."))


def test_a_pickle_imports_and_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may make its attributes when they are asked for."""

    class Lazy(types.ModuleType):
        def __getattr__(self, attribute: str) -> Any:
            raise SystemExit(f"a checkpoint has asked for {attribute}")

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    for module in ("lazy_module", "antigravity"):
        with pytest.raises(UnsafeContent):
            load(archive(b"\x80\x02" + call(f"{module}.Colour", number(1)) + b"."))
    assert "antigravity" not in sys.modules


def test_small_values_made_again_and_again_are_counted() -> None:
    repeated = (
        b"(" + text("1") + b"\x85q\x01" + name("decimal.Decimal") + b"q\x02" + b"h\x02h\x01R" * 200_000 + b"t"
    )
    with pytest.raises(UnsafeContent, match="grows far beyond"):
        load(archive(b"\x80\x02" + repeated + b"."))
