"""Read a pickle's values without doing what the pickle says.

First its opcodes are scanned: only those that plain data need, no memo index that allocates at
will, no dict key whose hash its author can choose. Then each class and function that it names is an
inert stand-in, or refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Collection, Mapping
from typing import Any

from ckpt.errors import FormatError, UnsafeContent
from ckpt.format.planner_data import HASH_MODULUS
from ckpt.stock.stored_paths import PathClasses, is_pathlib, refusal


class StandIn:
    """An object of a pickle: the name of its class, and the state that it was given."""

    __slots__ = ()
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_inert(data: bytes, classes: Mapping[str, Collection[str]], *, foreign_paths: bool = False) -> Any:
    """Load a pickle, with a `StandIn` for each instance of `classes` (module -> names).

    Paths become a `StoredPath`: those of pathlib, and with `foreign_paths` instances of every class of another
    package, so that the caller refuses them wherever no path belongs.

    Raises UnsafeContent if it asks for something else, and any exception if it is damaged.
    """
    scan(data)
    return _InertUnpickler(data, classes, foreign_paths).load()


# -- the opcodes ---------------------------------------------------------------------------------------

_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_COUNT_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _codes(names: str) -> list[int]:
    return [_CODES[name] for name in names.split()]


_JOINED = dict(
    zip(_codes("TUPLE1 TUPLE2 TUPLE3 REDUCE NEWOBJ STACK_GLOBAL"), (1, 2, 3, 2, 2, 2), strict=True)
)
"""The number of values that become one."""

# The effects of opcodes on the stack.
_PUSH, _PUSH_UNFIT, _JOIN, _POP, _POP_TO_MARK, _NOTHING, _OTHER = range(7)
_EFFECTS = {
    **dict.fromkeys(_codes("NONE NEWTRUE NEWFALSE BININT BININT1 BININT2"), _PUSH),
    **dict.fromkeys(
        _codes("BINUNICODE SHORT_BINUNICODE BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES"), _PUSH
    ),
    **dict.fromkeys(_codes("EMPTY_LIST EMPTY_TUPLE EMPTY_DICT BINFLOAT"), _PUSH_UNFIT),
    **dict.fromkeys(_JOINED, _JOIN),
    **dict.fromkeys(_codes("APPEND BUILD"), _POP),
    **dict.fromkeys(_codes("APPENDS SETITEMS TUPLE"), _POP_TO_MARK),
    **dict.fromkeys(_codes("PROTO FRAME"), _NOTHING),
    **dict.fromkeys(_codes("STOP MARK POP SETITEM BINPUT LONG_BINPUT LONG1"), _OTHER),
}

_OPCODES: list[tuple[int | None, int, int]] = [(None, 0, 0)] * 256
"""Effect, and bytes of the argument or else of the count before it; (0, 0) for lines of text."""
for _opcode in pickletools.opcodes:
    _size_bytes = 0 if _opcode.arg is None else _opcode.arg.n
    _OPCODES[ord(_opcode.code)] = (
        _EFFECTS.get(ord(_opcode.code)),
        max(_size_bytes, 0),
        _COUNT_BYTES.get(_size_bytes, 0),
    )

_HASHED_BY_IDENTITY = _codes("NEWOBJ STACK_GLOBAL")
_MEMOIZE, _GET, _LONG_GET, _MARK, _STOP = _codes("MEMOIZE BINGET LONG_BINGET MARK STOP")
_SETITEMS, _SETITEM, _TUPLE, _LONG1, _LONG4, _DROP = _codes("SETITEMS SETITEM TUPLE LONG1 LONG4 POP")


def scan(data: bytes) -> None:
    """Walk over the opcodes without carrying any out; of each value, note whether it may be a dict key.

    `LONG_BINPUT 2**31` would make the C unpickler allocate 32 GiB, and `BYTEARRAY8` any amount. A
    dict whose keys all have one hash takes years to fill, and the hash of a tuple nested a million
    times overruns the stack: keys must be texts, bytes, instances, or numbers of bounded size.
    """
    stack: list[bool] = []
    memo: list[bool] = []
    marks: list[int] = []
    position, end = 0, len(data)
    while position < end:
        opcode = data[position]
        position += 1
        if opcode == _MEMOIZE:
            memo.append(stack[-1])
            continue
        if opcode == _GET:
            stack.append(memo[data[position]])
            position += 1
            continue
        if opcode == _LONG_GET:
            stack.append(memo[int.from_bytes(data[position : position + 4], "little")])
            position += 4
            continue
        effect, size, width = _OPCODES[opcode]
        if width:
            size = width + int.from_bytes(data[position : position + width], "little")
        if effect == _PUSH:
            stack.append(True)
        elif effect == _PUSH_UNFIT:
            stack.append(False)
        elif effect == _JOIN:
            # An instance or a class, unlike the result of a call, which may be a tuple.
            stack[-_JOINED[opcode] :] = [opcode in _HASHED_BY_IDENTITY]
        elif effect == _POP:
            stack.pop()
        elif effect == _POP_TO_MARK:
            _pop_to_mark(opcode, stack, marks.pop())
        elif opcode == _MARK:
            marks.append(len(stack))
        elif opcode == _STOP:
            return
        elif opcode == _DROP:
            if len(stack) == (marks[-1] if marks else 0):
                raise UnsafeContent("a pickle that drops a mark")
            stack.pop()
        elif effect == _OTHER:
            _run(opcode, data[position : position + size], stack, memo)
        elif effect is None:
            raise UnsafeContent(f"a pickle with {opcode_text(opcode)}, which plain data never needs")
        position += size
    raise FormatError("the pickle has no end")


def _pop_to_mark(opcode: int, stack: list[bool], mark: int) -> None:
    if opcode == _SETITEMS and not all(stack[mark::2]):
        raise UnsafeContent(_UNFIT_KEY)
    del stack[mark:]
    if opcode == _TUPLE:
        stack.append(False)


def _run(opcode: int, argument: bytes, stack: list[bool], memo: list[bool]) -> None:
    if opcode == _LONG1:
        number = int.from_bytes(argument[1:], "little", signed=True)
        stack.append(-HASH_MODULUS < number < HASH_MODULUS)
    elif opcode == _SETITEM:
        if not stack[-2]:
            raise UnsafeContent(_UNFIT_KEY)
        del stack[-2:]
    else:  # BINPUT, LONG_BINPUT
        index = int.from_bytes(argument, "little")
        if index > len(memo):
            # No pickler leaves a gap; the C unpickler would allocate it, and count otherwise than here.
            raise UnsafeContent("a pickle whose memo has a gap")
        memo[index : index + 1] = [stack[-1]]


_UNFIT_KEY = "a pickle with a dict key that is no text, small number or instance"


def opcode_text(code: int) -> str:
    """Describe an opcode that a reader refuses."""
    return "a number of more than 255 bytes" if code == _LONG4 else f"opcode {code:#04x}"


# -- stand-ins -----------------------------------------------------------------------------------------

_MEMORY_FORMATS = (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
)


class _InertUnpickler(pickle.Unpickler):
    """Resolves names to stand-ins of its own, so that a pickle cannot touch the real classes."""

    def __init__(self, data: bytes, classes: Mapping[str, Collection[str]], foreign_paths: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._paths, self._has_foreign_paths = PathClasses(), foreign_paths
        self._known: dict[tuple[str, str], Any] = {
            ("torch", "Size"): _Call(_size),
            ("torch.serialization", "_get_layout"): _Call(_layout),
            ("collections", "OrderedDict"): _Call(_empty_dict),
        }
        for module, names in classes.items():
            for name in names:
                self._known[module, name] = type(name, (StandIn,), {"__slots__": ("state",)})
        self._known |= dict.fromkeys(_MEMORY_FORMATS, _Call(_number))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch":
            import torch

            if isinstance(dtype := getattr(torch, name, None), torch.dtype):
                return dtype
        if is_pathlib(module, name):
            known = self._known[module, name] = self._paths.pathlib(module, name)
            return known
        if self._has_foreign_paths:
            return self._paths.foreign(module, name)
        raise UnsafeContent(refusal(f"{module}.{name}"))


class _Call:
    """A function that a pickle may call but not change. Each returns nothing larger than its arguments."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __setstate__(self, state: Any) -> None:
        raise UnsafeContent("a pickle that changes a function")

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _size(sizes: Any = ()) -> tuple[int, ...]:
    if type(sizes) is not tuple or len(sizes) > 64 or any(type(size) is not int for size in sizes):
        raise ValueError("a size that is no tuple of numbers")
    return sizes


def _layout(name: Any) -> str:
    if type(name) is not str or len(name) > 40:
        raise ValueError("a layout that is no name")
    return name


def _empty_dict() -> dict[Any, Any]:
    return {}  # unlike `dict`, this copies nothing


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("a memory format that is no number")
    return value
