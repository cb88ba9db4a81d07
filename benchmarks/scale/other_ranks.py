"""Stand in for the other ranks of a job: what they hold, write, tell and want, without processes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from benchmarks.scale.network import CountingStore
from ckpt.format.columns import Integers
from ckpt.format.dtypes import torch_dtype
from ckpt.format.names import data_key, manifest_key
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.local import Structure
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.save_plans.rules import WHOLE, box_at
from ckpt.save_plans.sections import Held, decode_section, split_digests
from ckpt.stock.item_frame import Frame, frame
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.file_body import Payload
from ckpt.writing.layout import Entry
from ckpt.writing.rank_files import RankFiles
from ckpt.writing.save_objects import SaveObjects

FEW_RANKS = 64
"""Up to so many the files of each rank are made; of more, one of those that write boxes of the same sizes."""

Sizes = tuple[int, ...]


def token_of(rank: int) -> str:
    """Name what a rank writes, the same in a simulation and in a job."""
    return hashlib.blake2b(str(rank).encode(), digest_size=8).hexdigest()


class _Zeros(Payload):
    """So many bytes, which are made when they are asked for."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def open(self) -> memoryview:
        return memoryview(bytes(self.nbytes))


@dataclass
class OtherRanks:
    """All ranks of a job but the first.

    Attributes:
        structures: of each pipeline stage.
        mesh: of the ranks of a stage.
        answers: what the first rank told each of them to write.
        wanted: which sections it asked them for.
        exact: ranks whose files have to be their own in large jobs too, as the first rank reads them.
    """

    structures: Sequence[Structure]
    mesh: tuple[int, ...]
    answers: list[bytes] = field(default_factory=list)
    wanted: list[bytes] = field(default_factory=list)
    exact: Collection[int] = ()

    def __post_init__(self) -> None:
        self.stage_size = int(np.prod(self.mesh))
        self.size = self.stage_size * len(self.structures)
        self.coordinates = np.stack(np.unravel_index(np.arange(self.stage_size), self.mesh), axis=1).tolist()
        self._items = [_items_of(structure) for structure in self.structures]
        self._written: dict[Any, RankReceipt] = {}
        self._placed: list[bytes] = []

    # -- plans ---------------------------------------------------------------------------------------------

    def messages(self, *, with_contents: bool) -> Iterator[bytes]:
        """Make what each rank tells of what it holds."""
        for rank in range(1, self.size):
            structure = self.structures[rank // self.stage_size]
            place = tuple(self.coordinates[rank % self.stage_size])
            contents = list(structure.contents.values()) if with_contents else []
            message = msgspec.structs.replace(
                structure.message,
                coordinates=[place for _ in structure.message.coordinates],
                contents=contents,
            )
            yield msgspec.msgpack.encode(message)

    def contents(self) -> Iterator[bytes]:
        """Send the sections that the first rank asked for."""
        known = {digest: content for each in self.structures for digest, content in each.contents.items()}
        for wanted in self.wanted[1:]:
            yield msgspec.msgpack.encode([known[each] for each in split_digests(wanted)]) if wanted else b""

    # -- data ----------------------------------------------------------------------------------------------

    def write(self, store: CountingStore, place: str) -> Iterator[RankReceipt]:
        """Write the files of each rank; yield what it reports."""
        self._written, self._placed = {}, []
        for receipt in self._files(store, place):
            self._placed.append(receipt.items)
            yield receipt

    def layouts(self) -> Iterator[bytes]:
        """Send where the items are of those ranks that the first one asked."""
        for wanted, placed in zip(self.wanted[1:], self._placed, strict=True):
            yield placed if wanted else b""

    def _files(self, store: CountingStore, place: str) -> Iterator[RankReceipt]:
        pool = StagingPool(128 << 20, for_device=False)
        for rank in range(1, self.size):
            stage = rank // self.stage_size
            boxes = self._boxes(rank)
            exact = rank if self.size <= FEW_RANKS or rank in self.exact else 0
            key = exact, stage, self.answers[rank][8:], tuple(sizes for _, sizes in boxes)
            objects = SaveObjects(rank, token_of(rank))
            if key in self._written:
                receipt = self._written[key]
                manifest = receipt.manifest
                names = [data_key(rank, objects.token, number) for number in range(len(receipt.files))]
                if manifest is not None:
                    path = manifest_key(rank, objects.token)
                    store.count_put(names[0], manifest.data_bytes)
                    store.count_put(path, manifest.size_bytes)
                    manifest = msgspec.structs.replace(manifest, rank=rank, path=path)
                yield RankReceipt(rank, place, manifest, names, receipt.items)
                continue
            entries = self._entries(stage, boxes, self.answers[rank][8:])
            files = RankFiles(store, objects, pool, None, numbered=True)
            if entries:
                files.put([entries])
            self._written[key] = files.finish(place)
            yield self._written[key]

    def _boxes(self, rank: int) -> list[tuple[Sizes, Sizes]]:
        """Compute offsets and sizes of each kind of item on a rank."""
        place = self.coordinates[rank % self.stage_size]
        kinds = self._items[rank // self.stage_size].kinds
        return [box_at(held.shape, held.rule or WHOLE, place) for held in kinds]

    def _entries(self, stage: int, boxes: Sequence[tuple[Sizes, Sizes]], bits: bytes) -> list[Entry]:
        items = self._items[stage]
        numbers = range(len(items.names)) if not bits else _numbers(self.structures[stage], bits)
        entries = []
        for number in numbers:
            kind = items.kind[number]
            offsets, sizes = boxes[kind]
            framed = _framed(items.kinds[kind].dtype, sizes)
            index = MetadataIndex(items.names[number], offsets, number)
            entries.append(Entry(index, framed.head, _Zeros(framed.payload_bytes), framed.tail, True))
        return entries

    # -- loads ---------------------------------------------------------------------------------------------

    def manifests(self, plan: CentralPlan) -> list[list[str]]:
        """Name the manifests that each rank wants, when all load what they saved."""
        pairs = [np.empty(0, dtype=np.int64)]
        for placed in plan.sections:
            seen: set[tuple[int, int]] = set()
            for number, name in enumerate(placed.section.names):
                entry = plan.entries[name]
                key = id(entry.writers), id(placed.rows[number])
                if key in seen or entry.layout is None:
                    continue
                seen.add(key)
                has_bytes = entry.layout.elements[placed.rows[number]] > 0
                pairs.append((placed.ranks * self.size + entry.writers[placed.rows[number]])[has_bytes])
                if len(pairs) > _MANY:
                    pairs = [np.unique(np.concatenate(pairs))]
        wanted: list[list[str]] = [[] for _ in range(self.size)]
        keys = [manifest_key(rank, token_of(rank)) for rank in range(self.size)]
        for pair in np.unique(np.concatenate(pairs)).tolist():
            wanted[pair // self.size].append(keys[pair % self.size])
        return wanted

    def classes(self, plan: CentralPlan) -> dict[str, Integers]:
        """Number the ranks by the boxes that they want: of each class of names, replicas have the same number."""
        hashes: dict[str, Any] = {}
        for placed in plan.sections:
            for number, name in enumerate(placed.section.names):
                known = hashes.setdefault(name.partition(".")[0], np.zeros(self.size, dtype=np.uint64))
                rows = placed.rows[number].astype(np.uint64) + np.uint64(1)
                known[placed.ranks] = known[placed.ranks] * _PRIME + rows * np.uint64(number + 1)
        return hashes


_MANY = 64
_PRIME = np.uint64(0x100000001B3)


@dataclass(frozen=True)
class _Items:
    """The items of a stage; `kind` is the number of each item's."""

    names: list[str]
    kinds: list[Held]
    kind: list[int]


def _items_of(structure: Structure) -> _Items:
    names: list[str] = []
    numbers: dict[Held, int] = {}
    kind: list[int] = []
    for digest in split_digests(structure.message.sections):
        for name, held in decode_section(structure.contents[digest]).items():
            names.append(name)
            kind.append(numbers.setdefault(held, len(numbers)))
    return _Items(names, list(numbers), kind)


def _numbers(structure: Structure, bits: bytes) -> list[int]:
    """Return the numbers of the items whose bits are set."""
    flags: list[int] = []
    for count in structure.counts:
        part, bits = bits[: -(-count // 8)], bits[-(-count // 8) :]
        flags += np.unpackbits(np.frombuffer(part, dtype=np.uint8), count=count).tolist()
    numbers: list[int] = np.flatnonzero(flags).tolist()
    return numbers


@functools.cache
def _framed(dtype: str, sizes: Sizes) -> Frame:
    return frame(torch_dtype(dtype), torch.Size(sizes))
