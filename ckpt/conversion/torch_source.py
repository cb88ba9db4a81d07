"""Read a `torch.save` file as a source: the pickle once, data when asked for."""

from __future__ import annotations

import contextlib
import pickle
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import torch

from ckpt.backends.base import ObjectStat, Store
from ckpt.conversion.source import FileSource, Location, Region, TensorFacts
from ckpt.errors import CheckpointError, ConfigurationError, FormatError, UnsafeContent
from ckpt.format.elements import StoredTensor
from ckpt.format.fqns import STRUCTURE
from ckpt.format.mistaken_files import mistaken_file
from ckpt.state.structure import encode, structure_of
from ckpt.stock.item_files import PagedFile
from ckpt.stock.payload_finder import is_plain_tensor, load_meta
from ckpt.stock.safe_load import bounded_file, checked_inert, first_line, reason
from ckpt.stock.stand_ins import StandIn, Unmade, made_real, values_in
from ckpt.torch_private import checkpoint_offset, flatten_state_dict

_MAX_FRAME_BYTES = 256 << 20
_MAX_OBJECT_BYTES = 64 << 20
_MAX_GROWTH = 16
_SLACK_BYTES = 1 << 30


class TorchFileSource(FileSource):
    """A `torch.save` file as a source.

    Raises FormatError if it does not hold a dict, or is damaged, and UnsafeContent if loading it
    would run code, or take far more memory than is stored.
    """

    def __init__(
        self, folder: Store, stat: ObjectStat, threads: Executor, *, has_folder: bool = False
    ) -> None:
        location = Location(folder, stat.key)
        super().__init__("torch", location, {stat.key: stat}, threads, has_folder)
        self._stat = stat
        self._key = stat.key
        self._size_bytes = stat.size_bytes
        self._lazy: dict[str, tuple[bool, bool]] = {}  # is_conj, is_neg
        self._refused: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._looks_left = _MAX_GROWTH * stat.size_bytes
        with self._errors_named():
            self._state = self._load()
            self._add_all(self._state)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Name the file in errors that do not name one."""
        try:
            yield
        except CheckpointError as error:
            error.url, error.key = error.url or self._store.url, error.key or self._key
            raise

    def _load(self) -> dict[str, Any]:
        def read_at(offset: int, buffer: memoryview) -> None:
            self._store.read_into(self._key, offset, [buffer])

        file = PagedFile(read_at, self._size_bytes, max_bytes=_MAX_FRAME_BYTES)
        try:
            with checked_inert(file) as reader:
                state = load_meta(reader, file, self._threads)
        except pickle.UnpicklingError as error:
            raise UnsafeContent(
                f"contains a pickle that could run code when loaded ({reason(error)})",
                advice="if you trust it, load it with torch.load, and save only tensors and plain values",
            ) from None
        except (FormatError, UnsafeContent):
            raise
        except Exception as error:
            if file.failure is not None:
                raise file.failure from error
            text = f"cannot be read as a torch.save archive (of torch 1.6 or newer): {first_line(error)}"
            raise FormatError(mistaken_file(self._store, self._stat) or text) from None
        if isinstance(state, dict):
            return state
        if isinstance(state, Unmade):
            text = f"holds an object of the class {state.name}, whose code is not run, not a dict with a model's state"
            raise UnsafeContent(
                text, advice="if you trust it, load it with torch.load, and save its state_dict()"
            )
        raise FormatError(f"holds a {type(state).__name__}, not a dict with a model's state")

    def _add_all(self, state: dict[str, Any]) -> None:
        try:
            flat, paths = flatten_state_dict(state)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"holds a state that cannot be flattened: {first_line(error)}") from None
        self.paths = dict(paths)
        names: dict[tuple[Any, ...], str] = {}
        total = 0
        for name, value in flat.items():
            if not isinstance(value, torch.Tensor):
                self.objects.append(name)
                self._values[name] = value
                self._note_unmade(name, value)
                continue
            memory = self._add(name, value)
            if memory is None:
                continue
            total += value.numel() * value.element_size()
            if value.numel() and names.setdefault(memory, name) != name:
                self.aliases[name] = names[memory]
        for name, value in state.items():
            if structure := structure_of(value, str(name)):
                noted = f"{STRUCTURE}.{name}"
                self.objects.append(noted)
                self._values[noted], self.paths[noted] = encode(structure), (STRUCTURE, str(name))
        if total > _MAX_GROWTH * self._size_bytes + _SLACK_BYTES:
            raise UnsafeContent(f"has tensors of {total} bytes in all, far more than are stored")

    def _note_unmade(self, name: str, value: Any) -> None:
        """Note an object that is, or holds, one of a class that is not known here."""
        for each in values_in(value):
            self._looks_left -= 1
            if self._looks_left < 0:  # a few bytes can name a large list once more
                raise UnsafeContent("holds the same values very many times")
            kind = each if isinstance(each, type) else type(each)
            if issubclass(kind, Unmade):
                self.unmade[name] = kind.name
                return

    def _add(self, name: str, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Note the place of a tensor, or why it is refused; return a key of its memory."""
        shape = tuple(tensor.shape)
        self.tensors[name] = TensorFacts(tensor.dtype, shape, tensor.requires_grad)
        is_strided = tensor.layout is torch.strided and not tensor.is_quantized
        offset = checkpoint_offset(tensor) if is_plain_tensor(tensor) and is_strided else None
        if offset is None:
            self._refused[name] = f"a {tensor.layout} {type(tensor).__name__} of {tensor.dtype}"
            return None
        strides = tuple(tensor.stride())
        first = offset + int(tensor.storage_offset()) * tensor.element_size()
        # A dimension without steps is one row many times.
        stored_shape = tuple(1 if step == 0 else n for n, step in zip(shape, strides, strict=True))
        stored_strides = tuple(max(step, 1) for step in strides)
        if not _is_nested(stored_shape, stored_strides):
            self._refused[name] = "a view whose elements overlap"
            return None
        reach = sum((n - 1) * step for n, step in zip(stored_shape, stored_strides, strict=True))
        if tensor.numel() and first + (reach + 1) * tensor.element_size() > self._size_bytes:
            raise FormatError(f"{name[:200]!r} reaches beyond the end of the file")
        self._stored[name] = (self._key, StoredTensor(first, tensor.dtype, stored_shape, stored_strides))
        self._lazy[name] = (tensor.is_conj(), tensor.is_neg())
        return first, tensor.dtype, shape, strides, self._lazy[name]

    def prepare(self, names: Collection[str]) -> None:
        for name, kind in self._refused.items():
            if name in names:
                text = f"{name[:200]!r} is {kind} and cannot be converted; --exclude it, or save it dense"
                raise ConfigurationError(text, url=self._store.url, key=self._key)
        for name, kind in self.unmade.items():
            if name in names:
                text = f"{name[:200]!r} is or holds an object of the class {kind}, whose code is not run"
                advice = f"leave it out: --exclude {name[:200]!r}, or --weights-only"
                raise UnsafeContent(text, advice=advice, url=self._store.url, key=self._key)

    def read(self, regions: Sequence[Region]) -> None:
        stored_regions: list[Region] = []
        later: list[tuple[Region, torch.Tensor]] = []
        for region in regions:
            stored = self._stored[region.name][1]
            shape = [1 if n == 1 else size for n, size in zip(stored.shape, region.target.shape, strict=True)]
            if tuple(shape) == tuple(region.target.shape) and not any(self._lazy[region.name]):
                stored_regions.append(region)
                continue
            offsets = [0 if n == 1 else first for n, first in zip(stored.shape, region.offsets, strict=True)]
            tensor = torch.empty(shape, dtype=stored.dtype, device="cpu")
            stored_regions.append(Region(region.name, offsets, tensor))
            later.append((region, tensor))
        super().read(stored_regions)
        for region, tensor in later:
            conj, neg = self._lazy[region.name]
            value = tensor.conj() if conj else tensor
            region.target.copy_((value.neg() if neg else value).expand(region.target.shape))

    def load_object(self, name: str) -> Any:
        with self._errors_named():
            value = self._real(self._values[name], name)
            if not any(isinstance(each, StandIn) for each in values_in(value)):
                return value
            try:
                return made_real(value, lambda: bounded_file(self._size_bytes))
            except pickle.UnpicklingError as error:
                raise UnsafeContent(
                    f"{name[:200]!r} is an object that cannot be made: {first_line(error)}"
                ) from None

    def _real(self, value: Any, name: str) -> Any:
        """Replace the meta tensors in an object, which come from tuples, by real ones."""
        if isinstance(value, torch.Tensor):
            inner = f"{name} (a tensor in it)"
            if value.numel() * value.element_size() > _MAX_OBJECT_BYTES:
                raise FormatError(
                    f"{name[:200]!r} holds a tensor of {value.numel()} elements in a tuple, too large for an object"
                )
            self._add(inner, value)
            del self.tensors[inner]
            self.prepare([inner])
            target = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            self.read([Region(inner, (0,) * value.ndim, target)])
            return target
        if type(value) in (tuple, list, set):
            return type(value)(self._real(item, name) for item in value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._real(item, name)) for key, item in value.items())
        return value

    def nested(self, values: Mapping[str, Any]) -> Any:
        return _rebuilt(self._state, (), values)


_GONE = object()


def _rebuilt(value: Any, path: tuple[str | int, ...], values: Mapping[str, Any]) -> Any:
    """Rebuild the dicts and lists around the values, which have flattened names."""
    name = ".".join(map(str, path))
    if path and name in values:
        return values[name]
    if isinstance(value, Mapping):
        parts = {key: _rebuilt(item, (*path, str(key)), values) for key, item in value.items()}
        kept = {key: part for key, part in parts.items() if part is not _GONE}
        return kept if kept or not value or not path else _GONE
    if isinstance(value, list):
        items = [_rebuilt(item, (*path, number), values) for number, item in enumerate(value)]
        kept_any = any(item is not _GONE for item in items)
        return [None if item is _GONE else item for item in items] if kept_any else _GONE
    return _GONE


def _is_nested(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether no two elements share memory: each step exceeds the smaller ones' reach."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True
