"""Load `torch.save` items that may be hostile: checked first, then without running anything of them."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ckpt.errors import CheckpointError, FormatError, UnsafeContent
from ckpt.stock.item_archive import check_archive
from ckpt.stock.item_files import ItemFile, MemoryFile
from ckpt.stock.pickle_limits import Hash
from ckpt.stock.pickle_names import is_safe, name_of_today
from ckpt.stock.stand_ins import made_real, unmade_kind
from ckpt.stock.standard_values import FILLED_LATER, INERT, hash_of, maker_of
from ckpt.torch_private import archive_reader

_MAX_GROWTH = 4
_SLACK_BYTES = 1 << 20
_REASONS = (
    "Trying to load unsupported GLOBAL", "Unsupported global:", "Unsupported operand", "Unsupported class", "WeightsUnpickler error:",
)  # fmt: skip
_GLOBAL = re.compile(rb"c([\w.]+)\n([\w.]+)\n")
_SEARCHED_BYTES = 64 << 10
_LOCAL_HEADER_BYTES = 30

_MAX_UNKNOWN_NAMES = 64
"""torch looks at each of them for each value that a pickle makes."""

_lock = threading.Lock()


def safe_object(
    file: MemoryFile, *, fqn: str, url: str, key: str, see: Callable[[Any], None] = lambda value: None
) -> io.BytesIO:
    """Make a pickle of the object in `file` that a load planner may unpickle freely; `see` is shown the object.

    DCP's own load planner unpickles with `weights_only=False`. So the object is loaded here with
    `weights_only=True`, and the planner gets our pickle of the result, with tensors on the CPU: no
    difference between two parsers can let anything through. Raises UnsafeContent if it needs more
    than torch's safe types, FormatError if torch did not save it, or it is far larger than stored.
    """
    value = safe_value(file, fqn=fqn, url=url, key=key)
    see(value)
    safe = bounded_file(file.nbytes)
    try:
        torch.save(value, safe)
    except Exception as error:
        raise _unreadable(safe.failure or error, fqn, url, key) from error
    safe.seek(0)
    return safe


def safe_value(file: MemoryFile, *, fqn: str, url: str, key: str) -> Any:
    """Load an object with torch's safe types alone. Raises as `safe_object`."""
    advice = (
        f"if you trust who wrote this checkpoint, pass trusted_objects=[{fqn!r}] to CheckpointReader or "
        "ckpt.load, or declare its class with torch.serialization.add_safe_globals"
    )
    return _load(file, fqn, url, key, "is a pickled object that could run code", advice)


def load_tensor_item(file: MemoryFile, *, fqn: str, url: str, key: str) -> torch.Tensor:
    """Load the tensor in a `torch.save` item that is read whole. Raises as `safe_object`."""
    advice = "if you trust its class, declare it with torch.serialization.add_safe_globals"
    value = _load(file, fqn, url, key, "is not a tensor of torch's safe types", advice)
    if not isinstance(value, torch.Tensor):
        raise FormatError(f"{fqn!r} is a {type(value).__name__} in place of a tensor", url=url, key=key)
    return value


def refused_names(pickled: memoryview) -> set[str]:
    """Search the begin of an object's pickle for names that a load may refuse; texts may look like some."""
    pairs = _GLOBAL.findall(pickled[:_SEARCHED_BYTES])
    names = {name_of_today(module.decode(), name.decode()) for module, name in pairs}
    return {name for name in names if not is_safe(name)}


def surely_refused_names(pickled: memoryview) -> set[str]:
    """List the names that a load will refuse in the begin of an object's pickle; reads no element of its tensors."""
    return set(unknown_names(_names(bytes(_record(pickled)[:_SEARCHED_BYTES]))))


def unknown_names(names: Iterable[str]) -> Iterator[str]:
    """List the names for which a load makes nothing."""
    return (name for name in names if not is_safe(name) and maker_of(name) is None)


def _names(pickled: bytes) -> set[str]:
    """List the classes and functions that a pickle names; it may be cut."""
    names: set[str] = set()
    with contextlib.suppress(ValueError, IndexError):
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "GLOBAL":
                names.add(name_of_today(*str(argument).split(" ", 1)))
    return names


def _record(archive: memoryview) -> memoryview:
    """Return an archive from its first record on, which is the pickle."""
    name_bytes, extra_bytes = (int.from_bytes(archive[at : at + 2], "little") for at in (26, 28))
    return archive[_LOCAL_HEADER_BYTES + name_bytes + extra_bytes :]


def load_fault(pickled: memoryview) -> str | None:
    """Tell why a load will not return this pickle of an object, which was made here; None if it will."""
    try:
        _load_checked(MemoryFile(pickled))
    except pickle.UnpicklingError as error:
        return reason(error)
    except CheckpointError as error:
        return error.message
    except Exception as error:
        return first_line(error)
    return None


def fault_for_torch(value: Any) -> str | None:
    """Tell why `torch.load(weights_only=True)` refuses a value; None if it loads it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        return reason(error)
    return None


def _load(file: MemoryFile, fqn: str, url: str, key: str, unsafe: str, advice: str) -> Any:
    try:
        return _load_checked(file)
    except pickle.UnpicklingError as error:
        raise UnsafeContent(f"{fqn!r} {unsafe} ({reason(error)})", advice=advice, url=url, key=key) from None
    except (UnsafeContent, FormatError) as error:
        raise type(error)(f"{fqn!r} is {error.message}", url=url, key=key) from None
    except Exception as error:
        raise _unreadable(error, fqn, url, key) from error


def _load_checked(file: MemoryFile) -> Any:
    try:
        return _load_safe(file, {})
    except pickle.UnpicklingError:
        makers = _makers(file)
        if not makers:
            raise
        with _declared(makers):
            value = _load_safe(file, {name: hash_of(name, make) for name, make in makers.items()})
        # A file in memory is shown by its bytes where it is the only one.
        return value if makers.keys() <= INERT.keys() else made_real(value, lambda: bounded_file(file.nbytes))


@contextlib.contextmanager
def checked_inert(file: ItemFile) -> Iterator[Any]:
    """Check an archive, and yield torch's reader of it; within the block a safe load makes an inert value of every class.

    That is a value of the standard library or NumPy, which is not real yet, a plain list or dict for a subclass of it, or
    an `Unmade`: no code runs of a class that the pickle names. Raises as `check_archive`.
    """
    filled: dict[str, type] = {}
    makers: dict[str, Callable[..., Any]] = {}
    for name in _record_names(file):
        if not is_safe(name):
            known = None if name in FILLED_LATER else maker_of(name)
            makers[name] = known or unmade_kind(name, filled)
    if len(makers) > _MAX_UNKNOWN_NAMES:
        raise UnsafeContent(
            f"has a pickle that names {len(makers)} classes and functions that are not known here"
        )
    hashes = {name: hash_of(name, make) for name, make in makers.items()}
    with _declared(makers):
        file.seek(0)
        yield check_archive(file, hashes, filled)


@contextlib.contextmanager
def _declared(makers: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let torch call these by their names. It keeps such a rule for all threads until it is taken back."""
    with contextlib.ExitStack() as stack:
        if makers:
            stack.enter_context(_lock)
            safe: list[Any] = [(make, name) for name, make in makers.items()]
            stack.enter_context(torch.serialization.safe_globals(safe))
        yield


def _makers(file: MemoryFile) -> dict[str, Callable[..., Any]]:
    """Return what makes the values of names in a pickle beyond torch's safe types; few names, as torch looks at each."""
    made = {name: maker_of(name) for name in _record_names(file) if not is_safe(name)}
    return {name: make for name, make in made.items() if make is not None}


def _record_names(file: ItemFile) -> set[str]:
    """List the classes and functions that the pickle of an archive names."""
    file.seek(0)
    reader = archive_reader(file)
    return _names(reader.get_record("data.pkl")) if reader.has_record("data.pkl") else set()


def _load_safe(file: MemoryFile, made: Mapping[str, Hash]) -> Any:
    file.seek(0)
    check_archive(file, made)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]


def _unreadable(error: Exception, fqn: str, url: str, key: str) -> FormatError:
    return FormatError(f"{fqn!r} cannot be read: {first_line(error)}", url=url, key=key)


class _Bounded(io.BytesIO):
    """A file of at most `max_bytes`: a few bytes can ask for a tensor of any size that nobody ever filled."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self.failure: Exception | None = None

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._max_bytes:
            self.failure = ValueError(f"it is larger than {self._max_bytes} bytes, far more than is stored")
            raise self.failure
        return super().write(data)


def bounded_file(stored_bytes: int) -> _Bounded:
    """Make a file for what is pickled of an object in a file of `stored_bytes`."""
    return _Bounded(_MAX_GROWTH * stored_bytes + _SLACK_BYTES)


def reason(error: Exception) -> str:
    """Cut torch's message to its heart: the rest is a screen of advice for another interface."""
    text = str(error)
    begin = next((text.index(reason) for reason in _REASONS if reason in text), 0)
    text = text[begin:].removeprefix(_REASONS[-1]).strip()
    return text.split("\n")[0].split(". Please")[0][:200].strip()


def first_line(error: Exception) -> str:
    """Name the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]
