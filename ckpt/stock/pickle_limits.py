"""The pickle inside of a `torch.save` archive, before torch carries it out: may it take that much memory and time?

`weights_only=True` keeps a pickle from running code, but not from asking for a lot: `bytearray(2**60)`, a tensor
class called with a size, a set made a million times of one list, dict keys that all have the same hash. Here the
opcodes are walked over with inert values. Functions of torch's safe list are known by name, and what each may be
asked for is bounded by what is stored; those that a caller declared safe are the caller's own.
"""

from __future__ import annotations

import contextlib
import math
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt.errors import UnsafeContent
from ckpt.format.planner_data import HASH_MODULUS
from ckpt.torch_private import allowed_globals, storage_dtype, user_allowed_globals

__all__ = ["check_torch_pickle"]

_MAX_GROWTH = 16
_SLACK = 1 << 20
_MAX_SAME_HASH = 1000
_MAX_UNKNOWN_KEYS = 20_000
_MAX_KEY_DEPTH = 32

_PICKLE_HOOKS = frozenset(
    {"__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__"}
)
"""An instance with such an attribute would be pickled by it."""


def check_torch_pickle(data: bytes, storage_bytes: Callable[[str], int]) -> None:
    """Raise unless loading `data` takes no more than a small multiple of what is stored.

    Args:
        storage_bytes: the size of the record of a storage, by its key.

    Raises:
        UnsafeContent: it asks for more, or for what no pickle of torch's has.
        Exception: whatever is wrong with a damaged pickle.
    """
    with contextlib.suppress(_Refused):
        _Walk(data, storage_bytes).run()


class _Refused(Exception):
    """The pickle names something that torch will refuse, and say so better."""


class _Global:
    """A class or function that the pickle names."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Made:
    """What a call returned, or a container: `size` bounds its elements or bytes."""

    __slots__ = ("chosen", "elements", "hashes", "size")

    def __init__(self, size: int, elements: int = 0) -> None:
        self.size = size
        self.elements = elements  # of a storage
        # Few have any, and they can be very many.
        self.chosen: list[Any] | None = None  # items of a list whose hashes the pickle's author can choose
        self.hashes: Counter[int | None] | None = None  # of such keys of a dict


_FIXED: dict[int, Callable[[bytes], Any]] = {
    ord("K"): lambda raw: raw[0],
    ord("M"): lambda raw: struct.unpack("<H", raw)[0],
    ord("J"): lambda raw: struct.unpack("<i", raw)[0],
    ord("G"): lambda raw: struct.unpack(">d", raw)[0],
}
_WIDTH = {ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8}
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}


class _Walk:
    """Carries out the opcodes that torch's own unpickler knows, on inert values."""

    def __init__(self, data: bytes, storage_bytes: Callable[[str], int]) -> None:
        self._data, self._storage_bytes = data, storage_bytes
        self._at = 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._left = _MAX_GROWTH * len(data) + _SLACK

    def run(self) -> None:
        rare = self._rare()
        while True:
            opcode = self._take(1)[0]
            if opcode in _FIXED:
                self._stack.append(_FIXED[opcode](self._take(_WIDTH[opcode])))
            elif opcode in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode])
            elif opcode in _TUPLES:
                count = _TUPLES[opcode]
                self._stack[-count:] = [tuple(self._stack[-count:])]
            elif opcode in rare:
                rare[opcode]()
            elif opcode == ord("."):
                return
            else:
                raise UnsafeContent(f"a pickle with opcode {opcode:#04x}, which torch never writes")

    def _rare(self) -> Mapping[int, Callable[[], None]]:
        push = self._stack_push
        return {
            ord("X"): lambda: push(self._text()),
            ord("U"): lambda: push(_no_hook(self._take(self._take(1)[0]).decode("latin1"))),
            0x8A: lambda: push(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True)),
            ord("]"): lambda: push(_Made(0)),
            ord("}"): lambda: push(_Made(0)),
            0x8F: lambda: push(_Made(0)),
            0x80: lambda: self._drop(self._take(1)),
            ord("c"): lambda: push(_global(self._line(), self._line())),
            ord("("): self._mark,
            ord("t"): self._push_marked,
            ord("a"): lambda: self._append([self._stack.pop()]),
            ord("e"): lambda: self._append(self._pop_mark()),
            ord("s"): lambda: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            ord("u"): lambda: self._set_items(self._pop_mark()),
            ord("q"): lambda: self._remember(self._take(1)[0]),
            ord("r"): lambda: self._remember(struct.unpack("<I", self._take(4))[0]),
            ord("h"): lambda: push(self._memo[self._take(1)[0]]),
            ord("j"): lambda: push(self._memo[struct.unpack("<I", self._take(4))[0]]),
            ord("Q"): lambda: push(self._storage(self._stack.pop())),
            ord("R"): self._call,
            0x81: self._call,
            ord("b"): self._build,
        }

    # -- what moves values -----------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise EOFError("the pickle has no end")
        self._at += count
        return found

    def _line(self) -> str:
        stop = self._data.index(b"\n", self._at)
        return self._take(stop + 1 - self._at)[:-1].decode()

    def _text(self) -> str:
        (length,) = struct.unpack("<I", self._take(4))
        return _no_hook(str(self._take(length), "utf-8", "surrogatepass"))

    def _stack_push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_marked(self) -> None:
        items = tuple(self._pop_mark())
        self._stack.append(items)

    def _drop(self, value: Any) -> None:
        pass

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _remember(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _append(self, items: list[Any]) -> None:
        found = self._container()
        found.size += len(items)
        if chosen := list(filter(_has_chosen_hash, items)):
            found.chosen = found.chosen or []
            found.chosen += chosen

    def _set_items(self, items: list[Any]) -> None:
        found = self._container()
        found.size += len(items)
        if chosen := list(filter(_has_chosen_hash, items[::2])):
            found.hashes = found.hashes or Counter()
            self._check_keys(found.hashes, chosen)

    def _container(self) -> _Made:
        found = self._stack[-1]
        if not isinstance(found, _Made):
            raise UnsafeContent("a pickle that fills something that is no list or dict")
        return found

    def _check_keys(self, hashes: Counter[int | None], keys: Iterable[Any]) -> None:
        """Keys can be chosen such that all have one hash, and nested deeper than the stack."""
        for key in keys:
            found = hash(key) if self._is_plain(key) else None
            hashes[found] += 1
            if hashes[found] > (_MAX_SAME_HASH if found is not None else _MAX_UNKNOWN_KEYS):
                raise UnsafeContent("a pickle with very many keys of one hash in a dict or set")

    def _is_plain(self, key: Any) -> bool:
        """Whether a key's hash is known here: that of what a call returned is not."""
        plain, todo = True, [(key, 0)]
        while todo:
            value, depth = todo.pop()
            if type(value) is tuple:
                self._charge(1 + len(value))  # one tuple can be part of many
                if depth == _MAX_KEY_DEPTH:
                    raise UnsafeContent("a pickle with very deep tuples as keys")
                todo += [(item, depth + 1) for item in value]
            elif isinstance(value, _Made | _Global):
                plain = False
        return plain

    # -- what allocates --------------------------------------------------------------------------------

    def _charge(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise UnsafeContent("a pickle that grows far beyond what is stored of it")

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise UnsafeContent("a pickle that calls what is no function")
        size = 1 + sum(map(_size, arguments))
        self._charge(size)
        if function.name in _VALUES:
            self._stack.append(_VALUES[function.name](arguments))
            return
        check = _CALLS.get(function.name)
        if check is not None:
            check(arguments)
        elif function.name in allowed_globals():
            raise UnsafeContent(f"a pickle that calls {function.name[:80]}")
        # The rest is what the caller declared safe.
        if check is _of_list:
            self._check_keys(Counter(), (item for found in arguments for item in found.chosen or ()))
        self._stack.append(_Made(size))

    def _build(self) -> None:
        state = self._stack.pop()
        self._charge(1 + _size(state))
        if not self._stack or not isinstance(self._stack[-1], _Made):
            raise UnsafeContent("a pickle that changes what is no instance")

    def _storage(self, place: Any) -> _Made:
        if type(place) is not tuple or len(place) != 5 or not isinstance(place[1], _Global):
            raise UnsafeContent("a pickle with a reference to what is no storage")
        _, kind, key, _, elements = place
        if type(elements) is not int or elements < 0 or type(key) is not str:
            raise UnsafeContent("a pickle with a reference to what is no storage")
        if elements * _item_bytes(kind.name) > self._storage_bytes(key):
            raise UnsafeContent("a pickle with a storage larger than what is stored of it")
        return _Made(0, elements)


def _global(module: str, name: str) -> _Global:
    """A class or function by its name today: `torch.save` writes those of Python 2."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    else:
        module = IMPORT_MAPPING.get(module, module)
    found = f"{module}.{name}"
    declared: Mapping[str, Any] = user_allowed_globals()  # type: ignore[no-untyped-call]
    if found not in allowed_globals() and found not in declared:
        raise _Refused(found)
    return _Global(found)


def _size(value: Any) -> int:
    """The elements or bytes of a value, not of those inside of it."""
    if isinstance(value, _Made):
        return value.size
    return len(value) if isinstance(value, str | bytes | tuple) else 1


def _has_chosen_hash(value: Any) -> bool:
    """Whether the pickle's author can choose many of its kind with one hash."""
    kind = type(value)
    return kind in (tuple, complex) or (kind is int and abs(value) >= HASH_MODULUS)


def _no_hook(text: str) -> str:
    if text in _PICKLE_HOOKS:
        raise UnsafeContent("a pickle that names a hook of pickling")
    return text


def _item_bytes(storage: str) -> int:
    module, _, name = storage.rpartition(".")
    if name == "UntypedStorage":
        return 1
    if module not in ("torch", "torch.storage", "torch.cuda"):
        raise UnsafeContent(f"a pickle with a storage of kind {storage[:80]}")
    return storage_dtype(name).itemsize


# -- what each of torch's safe functions may be asked for ----------------------------------------------


def _anything(arguments: tuple[Any, ...]) -> None:
    """It copies its arguments at most."""


def _no_numbers(arguments: tuple[Any, ...]) -> None:
    if any(isinstance(argument, int) for argument in arguments):
        raise UnsafeContent("a pickle that sets memory aside by a number")


def _none(arguments: tuple[Any, ...]) -> None:
    if arguments:
        raise UnsafeContent("a pickle that copies a dict")


def _of_list(arguments: tuple[Any, ...]) -> None:
    """`set` of a list, `Counter` of a dict."""
    if any(not isinstance(found, _Made) for found in arguments):
        raise UnsafeContent("a pickle with a set that is made of no list")


def _strided(arguments: tuple[Any, ...]) -> None:
    """`_rebuild_tensor*(storage, offset, size, strides, ...)`: inside of its storage, or torch would make it grow."""
    storage, offset, size, strides = arguments[:4]
    shapes = [size, strides]
    if not isinstance(storage, _Made) or not all(_is_size(value) for value in [(offset,), *shapes]):
        raise UnsafeContent("a pickle with a tensor that is no view of a storage")
    if len(size) != len(strides) or len(size) > 64:
        raise UnsafeContent("a pickle with a tensor of an absurd shape")
    steps = ((length - 1) * stride for length, stride in zip(size, strides, strict=True))
    if math.prod(size) and offset + sum(steps) >= storage.elements:
        raise UnsafeContent("a pickle with a tensor that is larger than its storage")


def _is_size(value: Any) -> bool:
    return type(value) is tuple and all(type(part) is int and 0 <= part < 1 << 62 for part in value)


def _quantized(arguments: tuple[Any, ...]) -> None:
    _strided(arguments)
    if math.prod(arguments[2]) > arguments[0].elements:  # its elements are set aside before it becomes a view
        raise UnsafeContent("a pickle with a tensor that is larger than its storage")


def _of_rebuilt(arguments: tuple[Any, ...]) -> None:
    """`_rebuild_from_type_v2(function, type, arguments, state)` calls a function itself."""
    function, _, inner = arguments[:3]
    if not isinstance(function, _Global) or type(inner) is not tuple:
        raise UnsafeContent("a pickle that calls what is no function")
    if function.name in _REBUILD:
        _REBUILD[function.name](inner)
    elif function.name in allowed_globals():
        raise UnsafeContent(f"a pickle that calls {function.name[:80]} through another function")


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    """Bytes, as `torch.save` writes them; other encodings take their time."""
    if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] not in ("latin1", "latin-1"):
        raise UnsafeContent("a pickle that encodes a text in another way than torch")
    return arguments[0].encode("latin1")


def _complex(arguments: tuple[Any, ...]) -> complex:
    if any(type(argument) not in (int, float) for argument in arguments):
        raise UnsafeContent("a pickle with a complex number that is not made of numbers")
    return complex(*arguments)


def _torch_size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(arguments) > 1 or any(type(argument) is not tuple for argument in arguments):
        raise UnsafeContent("a pickle with a size that is not made of a tuple")
    return arguments[0] if arguments else ()


_VALUES: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "_codecs.encode": _encoded,
    "builtins.complex": _complex,
    "torch.Size": _torch_size,
}
"""What returns values that can be keys."""

_REBUILD: dict[str, Callable[[tuple[Any, ...]], None]] = {
    "torch._utils._rebuild_tensor": _strided,
    "torch._utils._rebuild_tensor_v2": _strided,
    "torch._utils._rebuild_tensor_v3": _anything,  # untyped storage: bounded by torch, which cannot resize it
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_parameter": _anything,
    "torch._utils._rebuild_parameter_with_state": _anything,
    "torch._utils._rebuild_sparse_tensor": _anything,
    "torch._utils._rebuild_meta_tensor_no_storage": _anything,
    "torch._utils._rebuild_nested_tensor": _anything,
    "torch._utils._rebuild_wrapper_subclass": _anything,
}
_CALLS = {
    **_REBUILD,
    "torch._tensor._rebuild_from_type_v2": _of_rebuilt,
    "torch.nn.parameter.Parameter": _no_numbers,
    "torch.serialization._get_layout": _anything,
    "torch.device": _anything,
    "collections.OrderedDict": _none,
    "collections.Counter": _of_list,
    "builtins.bytearray": _no_numbers,
    "builtins.set": _of_list,
}
