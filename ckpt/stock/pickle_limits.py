"""Refuse a pickle in a `torch.save` archive that would take far more memory or time than its size.

`weights_only=True` keeps a pickle from running code, but not from asking for `bytearray(2**60)`.
Here its opcodes are walked over with inert values before torch carries them out. Functions of
torch's safe list are known by name, and a call may ask for no more than is stored; functions that a
caller declared safe are the caller's own.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckpt.errors import UnsafeContent
from ckpt.format.planner_data import HASH_MODULUS
from ckpt.stock.inert_unpickler import opcode_text
from ckpt.stock.pickle_names import is_safe, name_of_today
from ckpt.torch_private import allowed_globals, storage_dtype

_MAX_GROWTH = 16
_SLACK = 1 << 20
_MAX_SAME_HASH = 1000
_MAX_UNKNOWN_KEYS = 20_000
_MAX_KEY_DEPTH = 32
_TENSOR_SIZE = 256
"""Of a tensor without its elements: five bytes of a pickle can make one more from the same arguments."""
_VALUE_SIZE = 128
"""Of a small object, such as a date, likewise."""
Hash = Literal["own", "chosen", "none"]
"""How the hash of a value comes about: unforeseeable (`own`), as the pickle's author likes, or none that may be asked for."""
_PLAIN = "plain"
_UNKNOWN = "unknown"
_CHOSEN = "chosen"
"""Kinds of keys."""

_PICKLE_HOOKS = frozenset(
    {"__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__"}
)
"""An instance with such an attribute would be pickled by it."""


def check_torch_pickle(
    data: bytes, storage_bytes: Callable[[str], int], made: Mapping[str, Hash], filled: dict[str, type]
) -> None:
    """Refuse `data` unless loading it takes at most a small multiple of its size and of its storages.

    `storage_bytes` returns the size of a storage's record by its key. `made` are names beyond torch's own whose values
    are made here, of arguments that are checked then, and how their hashes come about. `filled` gets those of them
    whose values get items later, with the type of such a container. Raises UnsafeContent if the pickle
    asks for more, or for what torch's pickles never have, and any exception if it is damaged.
    """
    with contextlib.suppress(_Refused):
        _Walk(storage_bytes, _MAX_GROWTH * len(data) + _SLACK, made, filled).run(data)


class _Refused(Exception):
    """The pickle names something that torch will refuse, with a better message."""


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise UnsafeContent(f"a pickle {fault}")


@dataclass(slots=True, eq=False)
class _Global:
    """A class or function that the pickle names."""

    name: str


@dataclass(slots=True, eq=False)
class _Made:
    """The result of a call, or a container.

    Attributes:
        size: bounds its elements or bytes.
        elements: of a storage.
        chosen: items of a list whose hashes the pickle's author can choose; few lists have any.
        hashes: of such keys of a dict.
        hashing: how its own hash comes about, of a value that is made here.
        name: of the class or function that makes it here.
    """

    size: int
    name: str = ""
    elements: int = 0
    hashing: Hash = "own"
    chosen: list[Any] | None = None
    hashes: Counter[int | str] | None = None


_PUSH_THEIR_ARGUMENT = frozenset(
    ["BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"]
)


class _Walk:
    """Carries out the opcodes that torch's own unpickler knows, on inert values."""

    def __init__(
        self,
        storage_bytes: Callable[[str], int],
        max_size: int,
        made: Mapping[str, Hash],
        filled: dict[str, type],
    ) -> None:
        self._storage_bytes = storage_bytes
        self._made = made
        self._filled = filled
        self._left = max_size
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> None:
        actions, stream = self._actions(), io.BytesIO(data)
        opcodes = pickletools.genops(stream)
        while True:
            try:
                opcode, argument, _ = next(opcodes)
            except StopIteration:
                return
            except ValueError as error:
                if stream.tell() == len(data):
                    raise  # it is cut
                raise UnsafeContent("a pickle with an opcode or argument that torch never writes") from error
            if opcode.name in _PUSH_THEIR_ARGUMENT:
                _require(argument not in _PICKLE_HOOKS, "that names a hook of pickling")
                self._stack.append(argument)
            elif opcode.name in actions:
                actions[opcode.name](argument)
            else:
                fault = f"a pickle with {opcode_text(ord(opcode.code))}"
                raise UnsafeContent(f"{fault}, which torch.load(weights_only=True) refuses")

    def _actions(self) -> Mapping[str, Callable[[Any], None]]:
        push = self._push
        return {
            "PROTO": lambda version: None,
            "STOP": lambda _: None,
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "EMPTY_TUPLE": lambda _: push(()),
            **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), lambda _: push(_Made(0))),
            "GLOBAL": lambda name: push(_global(*name.split(" ", 1))),
            "MARK": lambda _: self._mark(),
            "TUPLE": lambda _: push(tuple(self._pop_mark())),
            "TUPLE1": lambda _: self._join(1),
            "TUPLE2": lambda _: self._join(2),
            "TUPLE3": lambda _: self._join(3),
            "APPEND": lambda _: self._append([self._stack.pop()]),
            "APPENDS": lambda _: self._append(self._pop_mark()),
            "SETITEM": lambda _: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._set_items(self._pop_mark()),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._remember),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda index: push(self._memo[index])),
            "BINPERSID": lambda _: push(self._storage(self._stack.pop())),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda _: self._call()),
            "BUILD": lambda _: self._build(),
        }

    # -- what moves values -----------------------------------------------------------------------------

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _join(self, count: int) -> None:
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _remember(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _append(self, items: list[Any]) -> None:
        container = self._container(list)
        container.size += len(items)
        if chosen := list(filter(_has_chosen_hash, items)):
            container.chosen = container.chosen or []
            container.chosen += chosen

    def _set_items(self, items: list[Any]) -> None:
        container = self._container(OrderedDict)
        container.size += len(items)
        if chosen := list(filter(_has_chosen_hash, items[::2])):
            container.hashes = container.hashes or Counter()
            self._check_keys(container.hashes, chosen)

    def _container(self, kind: type) -> _Made:
        container = self._stack[-1]
        _require(isinstance(container, _Made), "that fills something that is not a list or dict")
        if container.name:
            self._filled[container.name] = kind
        return container  # type: ignore[no-any-return]

    def _check_keys(self, hashes: Counter[int | str], keys: Iterable[Any]) -> None:
        """Refuse many keys of one hash: their author can choose them so, and nest them deeper than the stack."""
        for key in keys:
            kind = self._kind(key)
            hashed = hash(key) if kind == _PLAIN else kind
            hashes[hashed] += 1
            limit = _MAX_UNKNOWN_KEYS if kind == _UNKNOWN else _MAX_SAME_HASH
            _require(hashes[hashed] <= limit, "with very many keys of one hash in a dict or set")

    def _kind(self, key: Any) -> str:
        """Tell whether a key's hash is known here: that of a call's result is not, and may be a chosen one."""
        kind = _PLAIN
        todo = [(key, 0)]
        while todo:
            value, depth = todo.pop()
            if type(value) is tuple:
                self._charge(1 + len(value))  # one tuple can be part of many
                _require(depth < _MAX_KEY_DEPTH, "with very deep tuples as keys")
                todo += [(item, depth + 1) for item in value]
            elif isinstance(value, _Made) and value.hashing != "own":
                _require(value.hashing == "chosen", "with a key that is a named tuple")
                kind = _CHOSEN
            elif isinstance(value, _Made | _Global) and kind == _PLAIN:
                kind = _UNKNOWN
        return kind

    # -- what allocates --------------------------------------------------------------------------------

    def _charge(self, size: int) -> None:
        self._left -= size
        _require(self._left >= 0, "that grows far beyond what is stored of it")

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        _require_call(function, arguments)
        size = 1 + sum(map(_size, arguments))
        self._charge(size + (_TENSOR_SIZE if function.name in _TENSORS else 0))
        if function.name in _VALUES:
            self._stack.append(_VALUES[function.name](arguments))
            return
        check = _CALLS.get(function.name)
        if function.name in self._made:
            self._charge(_VALUE_SIZE)
            check = _of_list if function.name == "builtins.frozenset" and arguments else None
        if check is not None:
            check(arguments)
        else:  # the caller declared it safe
            _require(function.name not in allowed_globals(), f"that calls {function.name[:80]}")
        if check is _of_list:
            self._check_keys(Counter(), (item for argument in arguments for item in argument.chosen or ()))
        hashing = self._made.get(function.name)
        name = "" if hashing is None else function.name
        self._stack.append(_Made(size, name, hashing=hashing or "own"))

    def _build(self) -> None:
        state = self._stack.pop()
        size = 1 + _size(state) + (sum(map(_size, state)) if type(state) is tuple else 0)
        self._charge(size)
        is_instance = bool(self._stack) and isinstance(self._stack[-1], _Made)
        _require(is_instance, "that changes something that is not an instance")
        self._stack[-1].size += size

    def _storage(self, place: Any) -> _Made:
        match place:
            case (_, _Global(name=kind), str(key), _, elements) if type(elements) is int and elements >= 0:
                nbytes = elements * _item_bytes(kind)
                _require(
                    nbytes <= self._storage_bytes(key), "with a storage larger than what is stored of it"
                )
                return _Made(0, elements=elements)
        raise UnsafeContent("a pickle with a reference to something that is not a storage")


def _global(module: str, name: str) -> _Global:
    full_name = name_of_today(module, name)
    if not is_safe(full_name):
        raise _Refused(full_name)
    return _Global(full_name)


def _size(value: Any) -> int:
    """Count the elements or bytes of a value, but not of the values inside it."""
    if isinstance(value, _Made):
        return value.size
    return len(value) if isinstance(value, str | bytes | tuple) else 1


def _require_call(function: Any, arguments: Any) -> None:
    is_call = isinstance(function, _Global) and type(arguments) is tuple
    _require(is_call, "that calls something that is not a function")


def _has_chosen_hash(value: Any) -> bool:
    """Tell whether the pickle's author can choose many values of this kind with one hash."""
    kind = type(value)
    if kind is _Made:
        return value.hashing != "own"  # type: ignore[no-any-return]
    return kind in (tuple, complex) or (kind is int and abs(value) >= HASH_MODULUS)


def _item_bytes(storage: str) -> int:
    module, _, name = storage.rpartition(".")
    if name == "UntypedStorage":
        return 1
    _require(module in ("torch", "torch.storage", "torch.cuda"), f"with a storage of kind {storage[:80]}")
    return storage_dtype(name).itemsize


# -- arguments that each of torch's safe functions may get ---------------------------------------------


def _anything(arguments: tuple[Any, ...]) -> None:
    """Allow all: the function copies its arguments at most."""


def _no_numbers(arguments: tuple[Any, ...]) -> None:
    has_none = not any(isinstance(argument, int) for argument in arguments)
    _require(has_none, "that sets memory aside by a number")


def _none(arguments: tuple[Any, ...]) -> None:
    _require(not arguments, "that copies a dict")


def _of_list(arguments: tuple[Any, ...]) -> None:
    """Allow `set` of a list, `Counter` of a dict."""
    is_made = all(isinstance(argument, _Made) for argument in arguments)
    _require(is_made, "with a set that is not made of a list")


def _strided(arguments: tuple[Any, ...]) -> None:
    """Allow `_rebuild_tensor*(storage, offset, size, strides, ...)` inside its storage, which torch would enlarge."""
    storage, offset, size, strides = arguments[:4]
    is_view = isinstance(storage, _Made) and all(_is_size(value) for value in ((offset,), size, strides))
    _require(is_view, "with a tensor that is not a view of a storage")
    _require(len(size) == len(strides) <= 64, "with a tensor of an absurd shape")
    last = offset + sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
    _require(0 in size or last < storage.elements, "with a tensor that is larger than its storage")


def _is_size(value: Any) -> bool:
    return type(value) is tuple and all(type(part) is int and 0 <= part < 1 << 62 for part in value)


def _quantized(arguments: tuple[Any, ...]) -> None:
    _strided(arguments)
    # Its elements are set aside before it becomes a view.
    elements = math.prod(arguments[2])
    _require(elements <= arguments[0].elements, "with a tensor that is larger than its storage")


def _of_rebuilt(arguments: tuple[Any, ...]) -> None:
    """Check the call inside `_rebuild_from_type_v2(function, type, arguments, state)`."""
    function, _, inner = arguments[:3]
    _require_call(function, inner)
    if function.name in _REBUILD:
        _REBUILD[function.name](inner)
    elif function.name in allowed_globals():
        raise UnsafeContent(f"a pickle that calls {function.name[:80]} through another function")


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    """Make bytes as `torch.save` writes them; other encodings can be slow."""
    is_latin = len(arguments) == 2 and arguments[1] in ("latin1", "latin-1")
    _require(is_latin and type(arguments[0]) is str, "that encodes a text in another way than torch")
    return arguments[0].encode("latin1")  # type: ignore[no-any-return]


def _complex(arguments: tuple[Any, ...]) -> complex:
    is_made_of_numbers = all(type(argument) in (int, float) for argument in arguments)
    _require(is_made_of_numbers, "with a complex number that is not made of numbers")
    return complex(*arguments)


def _torch_size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    is_made_of_tuple = all(type(argument) is tuple for argument in arguments) and len(arguments) <= 1
    _require(is_made_of_tuple, "with a size that is not made of a tuple")
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
_TENSORS = {*_REBUILD, "torch._tensor._rebuild_from_type_v2"}
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
