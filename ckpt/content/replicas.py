"""Find out whether ranks that hold the same tensors hold the same values, before all but one copy are dropped.

Each rank digests a sample of every tensor that others may hold too. Replicas of DTensors it digests a section of its plan
at a time: who has one of them has all. Only where the digests of a section differ do ranks say more: that of each tensor.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Replicate

from ckpt.format.fqns import OWN_BUFFERS
from ckpt.save_plans.exchange import FEW_RANKS
from ckpt.save_plans.local import Structure
from ckpt.save_plans.sections import split_digests
from ckpt.transfer.tensor_memory import copy_flat, has_memory_view, memory_of

_SAMPLED_BYTES = 4096
_KEY_BYTES = 8

_MAX_COMPARED = 2048
"""Of states of more tensors so many are compared, chosen by their names: a replica that has drifted differs in most."""

_MAX_ALONE = 64
"""So many tensors that are no DTensors are compared one by one in a large job; more of them by sections."""


@dataclass(frozen=True)
class _Shared:
    """Tensors that others may hold too; `is_declared`: as replicas of a DTensor."""

    key: bytes
    items: list[WriteItem]
    is_declared: bool


@dataclass(frozen=True)
class Difference:
    """A tensor, or a chunk of one, of which ranks hold different values.

    Attributes:
        ranks, others: those that hold the values that fewer hold, and those that hold the others.
    """

    name: str
    offsets: tuple[int, ...]
    is_declared: bool
    ranks: list[int]
    others: list[int]


class Replicas:
    """What this rank holds, and others may hold too."""

    def __init__(
        self,
        structure: Structure,
        values: Mapping[str, object],
        resolve: Callable[[WriteItem], object],
        ranks: int,
    ) -> None:
        """`values` is the flat state; `resolve` returns the tensor of an item."""
        self._resolve = resolve
        self._shared = _shared(structure, values, ranks)

    def digests(self) -> list[tuple[bytes, bytes]]:
        """Return a pair for each section: which tensors these are, and what their values are."""
        return [
            (each.key, _short(b"".join(self._digest(item) for item in each.items))) for each in self._shared
        ]

    def details(self, keys: frozenset[bytes]) -> list[tuple[str, tuple[int, ...], bool, bytes]]:
        """Return name, offsets, whether it is declared to be a replica, and digest of each tensor of some sections."""
        return [
            (item.index.fqn, tuple(item.index.offset or ()), each.is_declared, self._digest(item))
            for each in self._shared
            if each.key in keys
            for item in each.items
        ]

    def _digest(self, item: WriteItem) -> bytes:
        tensor = self._resolve(item)
        return _sample_digest(tensor) if isinstance(tensor, torch.Tensor) else b""


def differing(replicas: Sequence[Sequence[tuple[bytes, bytes]]]) -> frozenset[bytes]:
    """Return the keys for which not all ranks that have them have one value."""
    first: dict[bytes, bytes] = {}
    return frozenset(
        key for pairs in replicas for key, value in pairs if first.setdefault(key, value) != value
    )


def differences(details: Sequence[Sequence[tuple[str, tuple[int, ...], bool, bytes]]]) -> list[Difference]:
    """Say of which tensors ranks hold different values; `details` are those of all ranks, in order."""
    held: dict[tuple[str, tuple[int, ...], bool], dict[int, bytes]] = {}
    for rank, tensors in enumerate(details):
        for name, offsets, is_declared, digest in tensors:
            held.setdefault((name, offsets, is_declared), {})[rank] = digest
    found: list[Difference] = []
    for (name, offsets, is_declared), digests in held.items():
        counts = Counter(digests.values())
        if len(counts) < 2:
            continue
        (usual, _), *_ = counts.most_common()  # of equal counts that of the lowest rank
        others = [rank for rank, digest in digests.items() if digest == usual]
        ranks = [rank for rank, digest in digests.items() if digest != usual]
        found.append(Difference(name, offsets, is_declared, ranks, others))
    return found


def _shared(structure: Structure, values: Mapping[str, object], ranks: int) -> list[_Shared]:
    begin, sections = 0, list[_Shared]()
    alone: list[WriteItem] = []
    every = 1 << ((len(structure.items) - 1) // _MAX_COMPARED).bit_length()
    for section, count in zip(split_digests(structure.message.sections), structure.counts, strict=True):
        kinds: dict[bool, list[WriteItem]] = {}
        for item in structure.items[begin : begin + count]:
            if every > 1 and zlib.crc32(item.index.fqn.encode(errors="surrogatepass")) % every:
                continue
            is_declared = _is_declared(item, values.get(item.index.fqn))
            if is_declared is not None:
                kinds.setdefault(is_declared, []).append(item)
        begin += count
        alone += kinds.get(False, [])
        for is_declared, items in kinds.items():
            places = repr((every, [item.index.offset for item in items])).encode()
            sections.append(_Shared(_short(section + bytes([is_declared]) + places), items, is_declared))
    if ranks > FEW_RANKS and len(alone) > _MAX_ALONE:
        return sections
    keys = [_short(repr((item.index.fqn, item.index.offset)).encode()) for item in alone]
    singles = [_Shared(key, [item], False) for key, item in zip(keys, alone, strict=True)]
    return [each for each in sections if each.is_declared] + singles


def _is_declared(item: WriteItem, value: object) -> bool | None:
    """Tell whether a chunk is a replica by its placements (True), or may be one (False); None if it cannot be one."""
    if item.tensor_data is None or item.index.fqn.rpartition(".")[2] in OWN_BUFFERS:
        return None
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        sizes = zip(value.placements, mesh.shape, strict=True)
        is_replica = any(isinstance(each, Replicate) and size > 1 for each, size in sizes)
        return True if is_replica else None
    return False if isinstance(value, torch.Tensor) else None


def _sample_digest(tensor: torch.Tensor) -> bytes:
    """Digest the first, the middle and the last bytes of a tensor, alike wherever and however it lies in memory."""
    size, count = tensor.element_size(), tensor.numel()
    sampled, middle = _SAMPLED_BYTES // size, count // 2
    ranges = [(0, count)]
    if count > 3 * sampled:
        ranges = [(0, sampled), (middle, middle + sampled), (count - sampled, count)]
    if has_memory_view(tensor):
        view = memory_of(tensor)
        return b"".join(xxhash.xxh3_64_digest(view[start * size : stop * size]) for start, stop in ranges)
    digests: list[bytes] = []
    for start, stop in ranges:
        sample = memoryview(bytearray((stop - start) * size))
        copy_flat(tensor, start, stop, sample)
        digests.append(xxhash.xxh3_64_digest(sample))
    return b"".join(digests)


def _short(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_KEY_BYTES).digest()
