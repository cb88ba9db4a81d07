"""Digest what a rank holds: all values of a kind at once, and, where ranks differ, each value by its name.

Nearly all saves end after the first: ranks hold the same. So that it costs little with very many small tensors, those of
one dtype and shape are digested together.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from ckpt.format.fqns import OWN_BUFFERS
from ckpt.geometry import FIELD, TENSOR_SHARD, WRITE_ITEMS, has_geometry
from ckpt.state.parts import VALUES_OF_MODEL, VALUES_OF_OPTIMIZER
from ckpt.state.structure import children, is_flattened
from ckpt.torch_private import ShardedTensor, create_chunk_list, create_write_items, local_tensor
from ckpt.transfer.tensor_memory import has_memory_view, memory_of

_WHOLE_BYTES = 1 << 20
"""Smaller tensors are compared whole in each save."""
_PIECES, _PIECE_BYTES = 64, 1024

_ALONE_BYTES = 64 << 10
"""From here on a copy costs more than a call for each tensor."""
_BATCH_BYTES = 1 << 20

_PARAMETER = re.compile(r"(^|_)(weight|bias)(_|$)")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
GROUPS = "param_groups"
PLACED = ("sharded", "chunk")
"""Kinds of values that have places: each rank, or group of ranks, has some of its own, and shares others."""

Key = tuple[str, int, int]
"""A kind; and, of one with places, numbers of all names and of all their places that a rank has."""


@dataclass
class _Kind:
    """The values of a kind: plain tensors by dtype and shape, with their names, and digests of all others by key."""

    alike: dict[tuple[torch.dtype, torch.Size], tuple[list[str], list[torch.Tensor]]] = field(
        default_factory=dict
    )
    others: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


class RankDigests:
    """The digests of a rank's values.

    Args:
        turn: the number of the save, the same on all ranks. Of large tensors it compares a sample that changes with it.
        is_whole: compare large tensors whole instead.

    Attributes:
        groups: of optimizers, by part.
    """

    def __init__(self, turn: int, *, is_whole: bool) -> None:
        self._turn, self._is_whole = turn, is_whole
        self._kinds: dict[str, _Kind] = {}
        self.groups: dict[str, Any] = {}

    def add(self, part: str, value: Any, kind: str, buffers: AbstractSet[str]) -> None:
        """Take the values of a part; `buffers` are the names that are of a kind of their own."""
        if kind == "optimizer" and isinstance(value, Mapping) and isinstance(value.get(GROUPS), list):
            self.groups[part] = value[GROUPS]
            for key, item in value.items():
                if key != GROUPS:
                    self._take(f"{part}.{key}", item, kind, buffers)
        else:
            self._take(part, value, kind, buffers)

    def digests(self) -> dict[Key, int]:
        """Return a digest for each kind, equal if ranks hold the same values in the same order."""
        return {self._key(name): self._digest(kind) for name, kind in self._kinds.items()}

    def _key(self, name: str) -> Key:
        """Return the key of a kind: of one with places also which names and places this rank has."""
        if name not in PLACED:
            return name, 0, 0
        kind = self._kinds[name]
        return name, digest([*sorted({*kind.names.values()})]), digest([*sorted(kind.names)])

    def names_below(self, part: str, kind: str) -> list[str]:
        """List the values of a kind, at a name and below it, of which one rank's stand for all."""
        own = self._kinds.get(kind, _Kind())
        names = [*own.others, *(name for some, _ in own.alike.values() for name in some)]
        return [name for name in names if name == part or name.startswith(f"{part}.")]

    def names(self, kinds: AbstractSet[str]) -> dict[int, int]:
        """Return, by a number for each name of some kinds with places, the number of all names that this rank has."""
        return {
            number_of(name): own[1]
            for own in map(self._key, kinds & self._kinds.keys())
            for name in self._kinds[own[0]].names.values()
        }

    def details(
        self, differing: AbstractSet[Key], shared: AbstractSet[int] = frozenset()
    ) -> tuple[dict[int, int], dict[int, tuple[str, str]]]:
        """Return digests of values by a number for each name, or name and place; and the names and kinds by it.

        These are all values whose key, of `digests`, is among the `differing` ones, and those of the `shared` names.
        """
        digests: dict[int, int] = {}
        names: dict[int, tuple[str, str]] = {}
        for each, kind in self._kinds.items():
            is_asked = self._key(each) in differing
            if not is_asked and not (each in PLACED and shared):
                continue
            for key, found in self._each(kind):
                name = kind.names.get(key, key)
                if is_asked or number_of(name) in shared:
                    digests[number_of(key)] = found
                    names[number_of(key)] = name, each
        return digests, names

    def _take(self, name: str, value: Any, kind: str, buffers: AbstractSet[str]) -> None:
        if type(value) is not dict and not is_flattened(value):
            self._leaf(name, value, self._kind_of(name, kind, buffers, isinstance(value, torch.Tensor)))
            return
        alike = self._kinds.setdefault("optimizer" if kind == VALUES_OF_OPTIMIZER else kind, _Kind()).alike
        for key, item in value.items() if type(value) is dict else children(value):
            below = f"{name}.{key}"
            # All in one loop: there can be very many, and each call would cost as much as a digest.
            is_plain = type(item) in _PLAIN and below not in buffers and not below.endswith(OWN_BUFFERS)
            if is_plain and not (
                hasattr(item, WRITE_ITEMS) or hasattr(item, FIELD) or hasattr(item, TENSOR_SHARD)
            ):
                try:
                    facts = item.dtype, item.shape
                except RuntimeError:  # nested, without a shape; the plan of the save says so
                    continue
                if kind == VALUES_OF_MODEL:
                    alike = self._kinds.setdefault(self._kind_of(below, kind, buffers), _Kind()).alike
                known = alike.get(facts)
                if known is None:
                    known = alike[facts] = [], []
                known[0].append(below)
                known[1].append(item)
            else:
                self._take(below, item, kind, buffers)

    def _kind_of(self, name: str, kind: str, buffers: AbstractSet[str], is_tensor: bool = True) -> str:
        last = name.rpartition(".")[2]
        if name in buffers or (kind in ("value", VALUES_OF_MODEL) and last in OWN_BUFFERS):
            return "buffer"
        if kind == VALUES_OF_MODEL:  # of the other tensors in a plain dict no one knows which are buffers
            return "model" if is_tensor and _PARAMETER.search(last) else "value"
        return "optimizer" if kind == VALUES_OF_OPTIMIZER else kind

    def _leaf(self, name: str, value: Any, kind: str) -> None:
        """Digest what is no plain tensor in a container."""
        if isinstance(value, ShardedTensor):
            return
        if isinstance(value, DTensor):
            self._shard(name, value)
        elif has_geometry(value):
            self._chunks(name, value)
        else:
            is_tensor = isinstance(value, torch.Tensor)
            self._kinds.setdefault(kind, _Kind()).others[name] = (
                self._tensor(value) if is_tensor else digest(value)
            )

    def _shard(self, name: str, value: DTensor) -> None:
        """Digest the shard of a DTensor whose mesh has a part of the ranks: others may hold the same of their own."""
        mesh = value.device_mesh
        if has_geometry(value):
            self._chunks(name, value)
        elif mesh.size() < torch.distributed.get_world_size() and mesh.get_coordinate() is not None:
            chunk = create_chunk_list(value)[0]
            self._place(
                "sharded",
                name,
                f"{tuple(value.shape)}{tuple(chunk.offsets)}",
                self._tensor(local_tensor(value)),
            )

    def _chunks(self, name: str, value: Any) -> None:
        """Digest the chunks that a tensor gives by itself: another rank may give the same one."""
        try:
            with torch.no_grad():
                for item in create_write_items(name, value):
                    data = item.tensor_data
                    if data is not None and item.index.fqn == name:
                        place = f"{tuple(data.size)}{tuple(data.chunk.offsets)}{tuple(data.chunk.sizes)}"
                        self._place("chunk", name, place, self._tensor(find_tensor_shard(value, item.index)))
        except Exception:  # the plan of the save says so
            return

    def _place(self, kind: str, name: str, place: str, found: int) -> None:
        own = self._kinds.setdefault(kind, _Kind())
        own.others[f"{name}@{place}"] = found
        own.names[f"{name}@{place}"] = name

    # -- digests -------------------------------------------------------------------------------------------

    def _digest(self, kind: _Kind) -> int:
        hashed = xxhash.xxh3_64()
        hashed.update(repr(sorted(kind.others.items())).encode(errors="surrogatepass"))
        for facts, (names, tensors) in sorted(kind.alike.items(), key=lambda item: repr(item[0])):
            hashed.update(repr(facts).encode())
            hashed.update("\0".join(names).encode(errors="surrogatepass"))
            for batch in self._batches(facts, tensors):
                data: Any = batch.to_bytes(8, "little") if isinstance(batch, int) else batch
                hashed.update(data)
        return int(hashed.intdigest())

    def _each(self, kind: _Kind) -> Iterator[tuple[str, int]]:
        """List the digests of all values by key."""
        yield from kind.others.items()
        for facts, (names, tensors) in kind.alike.items():
            number, seed = 0, _seed(*facts)
            for batch in self._batches(facts, tensors):
                if isinstance(batch, int):
                    yield names[number], batch
                    number += 1
                    continue
                size = _size_bytes(*facts)
                for start in range(0, len(batch), size):
                    yield names[number], xxhash.xxh3_64_intdigest(batch[start : start + size], seed=seed)
                    number += 1

    def _batches(
        self, facts: tuple[torch.dtype, torch.Size], tensors: list[torch.Tensor]
    ) -> Iterator[memoryview | int]:
        """List, in order, the bytes of several tensors of one dtype and shape, or the digest of one."""
        size = _size_bytes(*facts)
        count = 1 if size == 0 or size >= _ALONE_BYTES else max(1, _BATCH_BYTES // size)
        for first in range(0, len(tensors), count):
            some = tensors[first : first + count]
            joined = _joined(some) if count > 1 else None
            if joined is None:
                yield from map(self._tensor, some)
            else:
                yield joined

    def _tensor(self, tensor: torch.Tensor) -> int:
        if tensor.is_nested:
            return 0
        if type(tensor) not in _PLAIN:
            if not hasattr(tensor, "__tensor_flatten__"):
                return 0
            names, _ = tensor.__tensor_flatten__()
            return digest([self._tensor(getattr(tensor, name)) for name in names])
        seed = _seed(tensor.dtype, tensor.shape)
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized or tensor.numel() == 0:
            return seed
        with torch.no_grad():
            tensor = tensor.detach()
            if tensor.nbytes >= _WHOLE_BYTES and not self._is_whole:
                tensor = _sample(tensor, self._turn)
            # Not by way of NumPy: a tensor that has shown its memory to it cannot be resized any more.
            return xxhash.xxh3_64_intdigest(memory_of(_in_memory(tensor)), seed=seed)


def _joined(tensors: list[torch.Tensor]) -> memoryview | None:
    """Return the bytes of tensors of one dtype and shape; None if torch does not put these together."""
    try:
        with torch.no_grad():
            joined = torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors)
            if joined.is_meta or joined.layout is not torch.strided or joined.is_quantized:
                return None
            return memory_of(_in_memory(joined))
    except RuntimeError:  # on several devices, or of a dtype that it only moves
        return None


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    return tensor if has_memory_view(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def _sample(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return pieces of the bytes of a tensor, at equal distances; the next ones in the next save."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    flat = tensor.reshape(-1).view(torch.uint8)
    apart = flat.numel() // _PIECES // 16 * 16
    steps = -(-apart // _PIECE_BYTES)
    first = min(turn % steps * _PIECE_BYTES, apart - _PIECE_BYTES)
    rest = flat.numel() - apart * _PIECES if turn // steps % 2 else 0  # the last bytes have their turn too
    rows = flat[rest : rest + apart * _PIECES].view(_PIECES, apart)
    return rows[:, first : first + _PIECE_BYTES].contiguous()


def _size_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return int(shape.numel()) * dtype.itemsize


def _seed(dtype: torch.dtype, shape: torch.Size) -> int:
    return xxhash.xxh32_intdigest(f"{dtype}{tuple(shape)}".encode())


def number_of(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass"))


def digest(value: Any) -> int:
    """Return a number that equal values share, on all ranks."""
    return xxhash.xxh3_64_intdigest(_canonical(value))


def _canonical(value: Any) -> bytes:
    """Write a value such that equal ones are written alike, whatever the order of their keys."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return f"{type(value).__name__}:{value!r}".encode(errors="surrogatepass")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"tensor:{RankDigests(1, is_whole=True)._tensor(value)}".encode()
    if isinstance(value, Mapping):
        members = sorted(_canonical(key) + b"=" + _canonical(item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        if all(type(item) is str for item in value):  # the parameters of a group, which can be very many
            return f"{kind}{[*value]!r}".encode(errors="surrogatepass")
        members = [*map(_canonical, value)]
    elif isinstance(value, set | frozenset):
        members = sorted(map(_canonical, value))
    else:
        written = io.BytesIO()
        try:
            _Pickler(written, protocol=4).dump(value)
        except Exception:  # the save says so
            return kind.encode()
        return f"{kind}:".encode() + written.getvalue()
    return kind.encode() + b"(" + b",".join(b"%d:%s" % (len(member), member) for member in members) + b")"


class _Pickler(pickle.Pickler):
    """Pickle an object such that equal ones are written alike: sets have another order in each process."""

    def persistent_id(self, value: Any) -> bytes | None:
        return _canonical(value) if isinstance(value, set | frozenset | Mapping | torch.Tensor) else None
