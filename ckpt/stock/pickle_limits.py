"""Refuse a pickle in a `torch.save` archive that would take far more memory or time than its size.

`weights_only=True` keeps a pickle from running code, but not from asking for a lot: `bytearray(2**60)`, a tensor
class called with a size, a set made a million times of one list, dict keys that all have the same hash. Here the
opcodes are walked over with inert values before torch carries them out. Functions of torch's safe list are known
by name, and a call may ask for no more than is stored; functions that a caller declared safe are the caller's own.
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
from ckpt.stock.pickle_opcodes import ARGUMENTS, code, codes
from ckpt.torch_private import allowed_globals, storage_dtype, user_allowed_globals

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
    """Refuse `data` unless loading it takes at most a small multiple of its size and of its storages.

    Args:
        storage_bytes: returns the size of a storage's record by its key.

    Raises:
        UnsafeContent: it asks for more, or for something that torch's pickles never have.
        Exception: the pickle is damaged, in any way.
    """
    with contextlib.suppress(_Refused):
        _Walk(data, storage_bytes).run()


class _Refused(Exception):
    """The pickle names something that torch will refuse, with a better message."""


class _Global:
    """A class or function that the pickle names."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Made:
    """The result of a call, or a container: `size` bounds its elements or bytes."""

    __slots__ = ("chosen", "elements", "hashes", "size")

    def __init__(self, size: int, elements: int = 0) -> None:
        self.size = size
        self.elements = elements  # of a storage
        # Few have any, and they can be very many.
        self.chosen: list[Any] | None = None  # items of a list whose hashes the pickle's author can choose
        self.hashes: Counter[int | None] | None = None  # of such keys of a dict


_PUSHED: dict[int, Callable[[bytes], Any]] = {
    **dict.fromkeys(codes("BININT1 BININT2"), lambda raw: int.from_bytes(raw, "little")),
    **dict.fromkeys(codes("BININT LONG1"), lambda raw: int.from_bytes(raw, "little", signed=True)),
    code("BINFLOAT"): lambda raw: struct.unpack(">d", raw)[0],
    code("BINUNICODE"): lambda raw: _no_hook(str(raw, "utf-8", "surrogatepass")),
    code("SHORT_BINSTRING"): lambda raw: _no_hook(raw.decode("latin1")),
    code("NONE"): lambda raw: None,
    code("NEWTRUE"): lambda raw: True,
    code("NEWFALSE"): lambda raw: False,
    code("EMPTY_TUPLE"): lambda raw: (),
    **dict.fromkeys(codes("EMPTY_LIST EMPTY_DICT EMPTY_SET"), lambda raw: _Made(0)),
}
"""The values that opcodes push, made of their arguments."""

_OPCODES = [(*ARGUMENTS[opcode], _PUSHED.get(opcode)) for opcode in range(256)]

_STOP = code("STOP")


class _Walk:
    """Carries out the opcodes that torch's own unpickler knows, on inert values."""

    def __init__(self, data: bytes, storage_bytes: Callable[[str], int]) -> None:
        self._data, self._storage_bytes = data, storage_bytes
        self._position = 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._left = _MAX_GROWTH * len(data) + _SLACK

    def run(self) -> None:
        actions = self._actions()
        while (opcode := self._take(1)[0]) != _STOP:
            size, count_bytes, pushed = _OPCODES[opcode]
            if pushed is not None:
                if count_bytes:
                    size = int.from_bytes(self._take(count_bytes), "little")
                self._stack.append(pushed(self._take(size) if size else b""))
            elif opcode in actions:
                actions[opcode](self._take(size) if size else b"")
            else:
                raise UnsafeContent(f"a pickle with opcode {opcode:#04x}, which torch never writes")

    def _actions(self) -> Mapping[int, Callable[[bytes], None]]:
        push = self._push
        return {
            code("PROTO"): lambda raw: None,
            code("GLOBAL"): lambda raw: push(_global(self._line(), self._line())),
            code("MARK"): lambda raw: self._mark(),
            code("TUPLE"): lambda raw: self._push_marked(),
            code("TUPLE1"): lambda raw: self._join(1),
            code("TUPLE2"): lambda raw: self._join(2),
            code("TUPLE3"): lambda raw: self._join(3),
            code("APPEND"): lambda raw: self._append([self._stack.pop()]),
            code("APPENDS"): lambda raw: self._append(self._pop_mark()),
            code("SETITEM"): lambda raw: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            code("SETITEMS"): lambda raw: self._set_items(self._pop_mark()),
            **dict.fromkeys(codes("BINPUT LONG_BINPUT"), self._remember),
            **dict.fromkeys(codes("BINGET LONG_BINGET"), lambda raw: push(self._memo[_index(raw)])),
            code("BINPERSID"): lambda raw: push(self._storage(self._stack.pop())),
            **dict.fromkeys(codes("REDUCE NEWOBJ"), lambda raw: self._call()),
            code("BUILD"): lambda raw: self._build(),
        }

    # -- what moves values -----------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        data = self._data[self._position : self._position + count]
        if len(data) < count:
            raise EOFError("the pickle has no end")
        self._position += count
        return data

    def _line(self) -> str:
        stop = self._data.index(b"\n", self._position)
        return self._take(stop + 1 - self._position)[:-1].decode()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_marked(self) -> None:
        items = tuple(self._pop_mark())
        self._stack.append(items)

    def _join(self, count: int) -> None:
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _remember(self, index: bytes) -> None:
        self._memo[_index(index)] = self._stack[-1]

    def _append(self, items: list[Any]) -> None:
        container = self._container()
        container.size += len(items)
        if chosen := list(filter(_has_chosen_hash, items)):
            container.chosen = container.chosen or []
            container.chosen += chosen

    def _set_items(self, items: list[Any]) -> None:
        container = self._container()
        container.size += len(items)
        if chosen := list(filter(_has_chosen_hash, items[::2])):
            container.hashes = container.hashes or Counter()
            self._check_keys(container.hashes, chosen)

    def _container(self) -> _Made:
        container = self._stack[-1]
        if not isinstance(container, _Made):
            raise UnsafeContent("a pickle that fills something that is not a list or dict")
        return container

    def _check_keys(self, hashes: Counter[int | None], keys: Iterable[Any]) -> None:
        """Refuse many keys of one hash: their author can choose them so, and nest them deeper than the stack."""
        for key in keys:
            hashed = hash(key) if self._is_plain(key) else None
            hashes[hashed] += 1
            if hashes[hashed] > (_MAX_SAME_HASH if hashed is not None else _MAX_UNKNOWN_KEYS):
                raise UnsafeContent("a pickle with very many keys of one hash in a dict or set")

    def _is_plain(self, key: Any) -> bool:
        """Tell whether a key's hash is known here: that of a call's result is not."""
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
            raise UnsafeContent("a pickle that calls something that is not a function")
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
        # All others were declared safe by the caller.
        if check is _of_list:
            self._check_keys(Counter(), (item for argument in arguments for item in argument.chosen or ()))
        self._stack.append(_Made(size))

    def _build(self) -> None:
        state = self._stack.pop()
        self._charge(1 + _size(state))
        if not self._stack or not isinstance(self._stack[-1], _Made):
            raise UnsafeContent("a pickle that changes something that is not an instance")

    def _storage(self, place: Any) -> _Made:
        if type(place) is not tuple or len(place) != 5 or not isinstance(place[1], _Global):
            raise UnsafeContent("a pickle with a reference to something that is not a storage")
        _, kind, key, _, elements = place
        if type(elements) is not int or elements < 0 or type(key) is not str:
            raise UnsafeContent("a pickle with a reference to something that is not a storage")
        if elements * _item_bytes(kind.name) > self._storage_bytes(key):
            raise UnsafeContent("a pickle with a storage larger than what is stored of it")
        return _Made(0, elements)


def _global(module: str, name: str) -> _Global:
    """Look up a class or function by its name of today: `torch.save` writes those of Python 2."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    else:
        module = IMPORT_MAPPING.get(module, module)
    full_name = f"{module}.{name}"
    declared: Mapping[str, Any] = user_allowed_globals()  # type: ignore[no-untyped-call]
    if full_name not in allowed_globals() and full_name not in declared:
        raise _Refused(full_name)
    return _Global(full_name)


def _index(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _size(value: Any) -> int:
    """Count the elements or bytes of a value, but not of the values inside it."""
    if isinstance(value, _Made):
        return value.size
    return len(value) if isinstance(value, str | bytes | tuple) else 1


def _has_chosen_hash(value: Any) -> bool:
    """Tell whether the pickle's author can choose many values of this kind with one hash."""
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


# -- arguments that each of torch's safe functions may get ---------------------------------------------


def _anything(arguments: tuple[Any, ...]) -> None:
    """Allow all: the function copies its arguments at most."""


def _no_numbers(arguments: tuple[Any, ...]) -> None:
    if any(isinstance(argument, int) for argument in arguments):
        raise UnsafeContent("a pickle that sets memory aside by a number")


def _none(arguments: tuple[Any, ...]) -> None:
    if arguments:
        raise UnsafeContent("a pickle that copies a dict")


def _of_list(arguments: tuple[Any, ...]) -> None:
    """Allow `set` of a list, `Counter` of a dict."""
    if not all(isinstance(argument, _Made) for argument in arguments):
        raise UnsafeContent("a pickle with a set that is not made of a list")


def _strided(arguments: tuple[Any, ...]) -> None:
    """Allow `_rebuild_tensor*(storage, offset, size, strides, ...)` inside its storage, which torch would enlarge."""
    storage, offset, size, strides = arguments[:4]
    shapes = [size, strides]
    if not isinstance(storage, _Made) or not all(_is_size(value) for value in [(offset,), *shapes]):
        raise UnsafeContent("a pickle with a tensor that is not a view of a storage")
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
    """Check the call inside `_rebuild_from_type_v2(function, type, arguments, state)`."""
    function, _, inner = arguments[:3]
    if not isinstance(function, _Global) or type(inner) is not tuple:
        raise UnsafeContent("a pickle that calls something that is not a function")
    if function.name in _REBUILD:
        _REBUILD[function.name](inner)
    elif function.name in allowed_globals():
        raise UnsafeContent(f"a pickle that calls {function.name[:80]} through another function")


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    """Make bytes as `torch.save` writes them; other encodings can be slow."""
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
"""Functions whose results can be keys."""

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
