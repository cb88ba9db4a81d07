"""Pickles inside of `torch.save` items: none may take memory or time beyond what is stored of it."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import pickle
import re
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.pickles import archive, call, name, number, text
from support.states import quantized, random_tensor
from support.tiers import examples

import ckpt
from ckpt.errors import CheckpointError, UnsafeContent
from ckpt.stock.item_files import MemoryFile
from ckpt.stock.pickle_limits import _PICKLE_HOOKS
from ckpt.stock.safe_load import safe_object


def load(data: bytes) -> Any:
    safe = safe_object(MemoryFile(data), fqn="o", url="u", key="k")
    return torch.load(safe, weights_only=False)


def storage(elements: int, kind: str = "torch.FloatStorage") -> bytes:
    return b"(" + text("storage") + name(kind) + text("0") + text("cpu") + number(elements) + b"tQ"


def tensor(function: str, elements: int, offset: int, size: int, stride: int, *more: bytes) -> bytes:
    size_of = b"(" + number(size) + b"t"
    return call(function, storage(elements), number(offset), size_of, b"(" + number(stride) + b"t", *more)


def memory_file(*state: bytes) -> bytes:
    return name("_io.BytesIO") + b")\x81(" + b"".join(state) + b"tb"


HUGE = 1 << 60
LARGE = 1 << 36
HOOKS = call("collections.OrderedDict")
COLLIDING = b"".join(number(7 + n * ((1 << 61) - 1)) for n in range(50_000))
BYTES = call("_codecs.encode", text("x" * 50_000), text("latin1"))
REPEATED = b"(" + text("x" * 50_000) + b"q\x01"
_SLOW = ("a very deep key", "a key that is a tuple of a tuple twice")


@functools.cache
def _hostile() -> dict[str, bytes]:
    v2 = "torch._utils._rebuild_tensor_v2"
    encoded = call("_codecs.encode", b"h\x01", text("latin1"))
    return {
        "bytearray": call("builtins.bytearray", number(1 << 28)),
        "huge bytearray": call("builtins.bytearray", number(HUGE)),
        "bytearray by its old name": call("__builtin__.bytearray", number(HUGE)),
        "bytearray made new": name("builtins.bytearray") + b"(" + number(HUGE) + b"t\x81",
        "tensor class": call("torch.FloatTensor", number(LARGE)),
        "tensor class made new": name("torch.FloatTensor") + b"(" + number(LARGE) + b"t\x81",
        "tensor": call("torch.Tensor", number(LARGE)),
        "untyped storage": call("torch.storage.UntypedStorage", number(LARGE)),
        "typed storage": call("torch.storage.TypedStorage", number(LARGE)),
        "parameter": call("torch.nn.parameter.Parameter", number(LARGE)),
        "storage beyond its record": tensor(v2, LARGE, 0, 4, 1, b"\x89", HOOKS),
        "size beyond its storage": tensor(v2, 4, 0, LARGE, 1, b"\x89", HOOKS),
        "offset beyond its storage": tensor(v2, 4, LARGE, 1, 1, b"\x89", HOOKS),
        "stride beyond its storage": tensor(v2, 4, 0, 2, LARGE, b"\x89", HOOKS),
        "negative size": tensor(v2, 4, 0, -1, 1, b"\x89", HOOKS),
        "through another function": call(
            "torch._tensor._rebuild_from_type_v2", name("builtins.bytearray"), name("torch.Tensor"), b"(" + number(HUGE) + b"t", b"N"
        ),
        "copied to a device": call("torch._utils._rebuild_device_tensor_from_cpu_tensor", b"N", b"N", b"N", b"\x89"),
        "a text encoded again and again": REPEATED + encoded * 20_000 + b"t",
        "a list made a set again and again": b"(](" + b"K\x01" * 50_000 + b"eq\x01" + call("builtins.set", b"h\x01") * 20_000 + b"t",
        "a dict copied again and again": b"(}(" + text("a") + b"Nuq\x01" + call("collections.OrderedDict", b"h\x01") * 5 + b"t",
        "numbers of one hash as keys": b"}(" + b"".join(number(7 + n * ((1 << 61) - 1)) + b"N" for n in range(50_000)) + b"u",
        "numbers of one hash in a set": call("builtins.set", b"](" + COLLIDING + b"e"),
        "numbers of one hash in a counter": call("collections.Counter", b"](" + COLLIDING + b"e"),
        "tuples of one hash as keys": b"}(" + b"".join(number(7 + n * ((1 << 61) - 1)) + b"\x85N" for n in range(50_000)) + b"u",
        "sizes of one hash as keys": b"}(" + b"".join(call("torch.Size", number(7 + n * ((1 << 61) - 1)) + b"\x85") + b"N" for n in range(5000)) + b"u",
        "complex numbers of one hash as keys": b"}(" + b"".join(call("builtins.complex", number(-1000003 * n), number(n)) + b"N" for n in range(5000)) + b"u",
        "a key that is a tuple of a tuple twice": b"})" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(30)) + b"Ns",
        "a slow encoding": call("_codecs.encode", text("".join(map(chr, range(0x4E00, 0x9E00))) * 20), text("punycode")),
        "a deep key": b"}N" + b"\x85" * 100_000 + b"Ns",
        "a very deep key": b"}N" + b"\x85" * 1_000_000 + b"Ns",
        "a state for a tensor class": name("torch.FloatTensor") + b"Nb",
        "fills a class": name("builtins.set") + b"K\x01a",
        "a file in memory with a position far behind its end": memory_file(BYTES, number(HUGE), b"N"),
        "a file in memory with attributes": memory_file(BYTES, b"K\x00", b"}" + text("read") + b"Ns"),
        "a file in memory with a list for its state": name("_io.BytesIO") + b")\x81](" + BYTES + b"K\x00Neb",
        "a file in memory copied again and again": b"(" + BYTES + b"q\x01" + memory_file(b"h\x01", b"K\x00", b"N") * 20_000 + b"t",
    }  # fmt: skip


@pytest.mark.parametrize(
    "what",
    [pytest.param(name, marks=pytest.mark.long if name in _SLOW else ()) for name in _hostile()],
)
def test_hostile_pickles(what: str) -> None:
    data = archive(b"\x80\x02" + _hostile()[what] + b".", _0=bytes(16))
    tracemalloc.start()
    try:
        with pytest.raises(UnsafeContent):
            load(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_a_tuple_that_a_key_shares_is_counted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.stock.pickle_limits._SLACK", 1 << 12)
    with pytest.raises(UnsafeContent, match="grows far beyond"):
        load(archive(b"\x80\x02" + _hostile()["a key that is a tuple of a tuple twice"] + b"."))


def test_the_parts_of_hostile_pickles_are_valid_where_they_are_harmless() -> None:
    """What the cases above are refused for is the numbers in them."""
    v2 = "torch._utils._rebuild_tensor_v2"
    for harmless in (
        tensor(v2, 4, 0, 4, 1, b"\x89", HOOKS),
        tensor(v2, 4, 3, 1, 1, b"\x89", HOOKS),
        call("builtins.set", b"](" + number(7) + b"e"),
        b"(" + call("_codecs.encode", text("x"), text("latin1")) + b"t",
        b"}K\x01K\x02\x86Ns",
        memory_file(BYTES, b"K\x07", b"N"),
    ):
        load(archive(b"\x80\x02" + harmless + b".", _0=bytes(16)))


def test_a_checkpoint_with_a_bomb_of_memory(tmp_path: Path) -> None:
    ckpt.save({"o": [1]}, tmp_path)
    (path,) = tmp_path.rglob("*.distcp")
    stored = path.read_bytes()
    bomb = archive(b"\x80\x02" + _hostile()["bytearray"] + b".")
    path.write_bytes(bomb + bytes(max(0, len(stored) - len(bomb))))
    with pytest.raises(CheckpointError):
        ckpt.load({"o": None}, tmp_path, verify=False)


def _values() -> list[Any]:
    return [
        {"a": [1, 2.5, "x", None, True, b"abc", bytearray(b"xyz"), {1, 2}, 1j, (1, (2, "y"))], 3: "n", (1, 2): "t", 2.5: 0},
        collections.OrderedDict(a=1), collections.Counter("abca"), 2**300, {-5: 1}, {1 << 60: 2}, "ü" * 300, b"y" * 1000,
        torch.Size([1, 2]), torch.device("cpu"), torch.float32, torch.strided, torch.get_rng_state(),
        torch.nn.Linear(2, 2).state_dict(), torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).state_dict(),
        torch.nn.Parameter(torch.ones(2, 2)), torch.ones(4).expand(3, 4), torch.ones(10)[2:5], torch.empty(0), torch.empty(4, 0, 3),
        torch.ones(3, 3).to_sparse(), torch.ones(3, 3).to_sparse_csr(), torch.ones(3, dtype=torch.uint16),
        torch.ones(2, dtype=torch.float8_e4m3fn), torch.empty(3, device="meta"), (torch.ones(3) * 1j).conj(), quantized(),
        torch.ones(2).to(torch.complex32), [random_tensor(3)] * 3, {(i, i): i for i in range(30_000)}, {(i, i) for i in range(30_000)},
        {1 << 63: 1, -(1 << 64): 2}, {1 << 63, 5}, {tuple(range(200)): 1}, {1j: 2, torch.Size([3]): 4, (torch.float32, b"x"): 5},
        "def __reduce__(self): ...",
    ]  # fmt: skip


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    VALUES = _values()


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_values_that_torch_saves_still_load(number: int) -> None:
    value = VALUES[number]
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, file)
        expected = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        found = load(file.getvalue())
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)


def test_a_number_too_long_for_torch_is_called_that(tmp_path: Path) -> None:
    """torch saves it, but cannot load it with `weights_only=True`; to declare a class would not help."""
    ckpt.save({"number": 10**900, "n": 1}, tmp_path / "a")
    fault = "'number' is a pickle with a number of more than 255 bytes, which torch.load(weights_only=True)"
    with pytest.raises(UnsafeContent, match=re.escape(fault)):
        ckpt.load({"number": None, "n": 0}, tmp_path / "a")
    with pytest.raises(UnsafeContent, match=re.escape(fault)) as caught:
        ckpt.convert(tmp_path / "a", tmp_path / "a.pt")
    assert "--exclude 'number'" in caught.value.message
    assert "add_safe_globals" not in caught.value.message


@pytest.mark.parametrize("data", [b"", b"abc\xff" * 1000])
def test_files_in_memory_load(data: bytes) -> None:
    """They are bytes and a position; a train state may have one, and older TransformerEngine does."""
    original, stored = io.BytesIO(data), io.BytesIO()
    original.seek(len(data) // 2)
    torch.save({"losses": [original], "b": data}, stored)
    declared = set(torch.serialization.get_safe_globals())
    loaded = load(stored.getvalue())
    (file,) = loaded["losses"]
    assert type(file) is io.BytesIO
    assert (file.getvalue(), file.tell(), loaded["b"]) == (data, len(data) // 2, data)
    assert set(torch.serialization.get_safe_globals()) == declared
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(stored.getvalue()), weights_only=True)


# Hypothesis draws constants of the code too, and hooks of pickling are refused wherever they are named.
TEXTS = st.text().filter(lambda text: text not in _PICKLE_HOOKS)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS | st.integers(-(1 << 60), 1 << 60), inner) | st.tuples(inner, inner),
    max_leaves=20,
)  # fmt: skip


@given(PLAIN)
@settings(max_examples=examples(150))
def test_any_plain_value_loads(value: Any) -> None:
    file = io.BytesIO()
    torch.save(value, file)
    assert load(file.getvalue()) == value


@pytest.mark.long
@given(st.data())
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.too_slow])
def test_damaged_pickles_end_in_one_of_our_errors(data: st.DataObject) -> None:
    """Bytes changed in valid pickles, and hostile ones cut and joined."""
    parts = [b"\x80\x02" + part + b"." for part in _hostile().values() if len(part) < 5000]
    raw = bytearray(data.draw(st.sampled_from(parts)))
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    loading: Callable[[], Any] = lambda: load(archive(bytes(raw), _0=bytes(16)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(CheckpointError):
            loading()
