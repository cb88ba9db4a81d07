"""Record digests of delivered bytes: of each region of a tensor and of each object, as it is stored and was verified."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from ckpt.consistency.checksums import crc64nvme
from ckpt.stock.value_digests import value_digest
from ckpt.transfer.boxes import Box
from ckpt.transfer.region_digests import RegionDigest
from ckpt.transfer.tensor_memory import memory_of


@dataclass(frozen=True)
class StoredTensorKind:
    """Size and dtype of a tensor in the checkpoint."""

    size: tuple[int, ...]
    dtype: torch.dtype


StoredKind = StoredTensorKind | Literal["object"]


@dataclass(frozen=True, eq=False)
class DeliveredRegion:
    """A region of a tensor that was delivered.

    Attributes:
        begin, lengths: where in the tensor it is.
        order: its dimensions, in the order in which the digest goes through its elements: that of the file.
        dtype: in which it is stored.
        cast_dtype: of the target.
        digest: of its bytes.
    """

    begin: tuple[int, ...]
    lengths: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    cast_dtype: torch.dtype
    digest: RegionDigest

    @property
    def box(self) -> Box:
        return self.begin, tuple(b + n for b, n in zip(self.begin, self.lengths, strict=True))


@dataclass
class DeliveredObject:
    """An object that was delivered.

    Attributes:
        crc64nvme: of its pickle, as it is stored.
        value: the digest of the object itself; None if only the program may unpickle it, or it has none.
    """

    crc64nvme: int
    value: bytes | None = None

    def see(self, value: Any) -> None:
        """Record the digest of the unpickled object."""
        self.value = digest_or_none(value)


class DeliveredDigests:
    """The digests of all that loads of one checkpoint delivered on this rank, by the names of the targets.

    Attributes:
        url: of the checkpoint, without credentials.
        stored: the entries of the checkpoint, by name.
    """

    def __init__(self) -> None:
        self.url = ""
        self.stored: Mapping[str, StoredKind] = {}
        self._identity = ""
        self._regions: dict[str, dict[Box, DeliveredRegion]] = {}
        self._objects: dict[str, DeliveredObject] = {}
        self._sources: dict[str, str] = {}

    def begin(self, url: str, identity: str, metadata: Metadata) -> None:
        """Begin a load; digests of another checkpoint are dropped."""
        if identity == self._identity and url == self.url:
            return
        self.url, self._identity = url, identity
        self._regions, self._objects, self._sources = {}, {}, {}
        entries = metadata.state_dict_metadata.items()
        self.stored = {fqn: _kind(each) for fqn, each in entries}

    def region(
        self, item: ReadItem, dtype: torch.dtype, target_dtype: torch.dtype, order: Sequence[int]
    ) -> RegionDigest:
        """Add a region; return the collector for checksums of its bytes. It replaces an earlier read of the same region."""
        begin = item.dest_index.offset or (0,) * len(item.lengths)
        begin = tuple(b + o for b, o in zip(begin, item.dest_offsets, strict=True))
        elements = math.prod(item.lengths)
        cast_bytes = 0 if target_dtype == dtype else elements * target_dtype.itemsize
        digest = RegionDigest(elements * dtype.itemsize, cast_bytes)
        region = DeliveredRegion(begin, tuple(item.lengths), tuple(order), dtype, target_dtype, digest)
        self._regions.setdefault(item.dest_index.fqn, {})[region.box] = region
        self._sources[item.dest_index.fqn] = item.storage_index.fqn
        return digest

    def add_tensor(self, item: ReadItem, tensor: torch.Tensor, target_dtype: torch.dtype) -> None:
        """Note a region that was unpickled, and goes to a target of a dtype."""
        digest = self.region(item, tensor.dtype, target_dtype, range(tensor.dim()))
        tensor = tensor.resolve_conj().resolve_neg()
        data = memory_of(tensor.contiguous())
        digest.add(0, data.nbytes, crc64nvme(data))
        if target_dtype != tensor.dtype:
            data = memory_of(tensor.to(target_dtype).contiguous())
            digest.add_cast(0, data.nbytes, crc64nvme(data))

    def object(self, item: ReadItem, data: bytes | bytearray) -> DeliveredObject:
        """Add an object, by its pickle; its `see` takes the unpickled object."""
        delivered = self._objects[item.dest_index.fqn] = DeliveredObject(crc64nvme(data))
        self._sources[item.dest_index.fqn] = item.storage_index.fqn
        return delivered

    def kind_of(self, fqn: str) -> StoredKind | None:
        """Return the kind of the stored entry of a name; None if the checkpoint lacks it."""
        return self.stored.get(self._sources.get(fqn, fqn))

    def regions(self, fqn: str) -> list[DeliveredRegion]:
        """List the regions of a tensor that have come, all of each."""
        regions = self._regions.get(fqn, {}).values()
        return [region for region in regions if region.digest.crc64nvme() is not None]

    def object_at(self, fqn: str) -> DeliveredObject | None:
        """Return the digests of an object; None if it was not delivered."""
        return self._objects.get(fqn)

    def left_over(self, names: Iterable[str]) -> list[str]:
        """List the stored entries that none of `names` is, or was read from."""
        live = {self._sources.get(name, name) for name in names}
        return sorted(self.stored.keys() - live)


def digest_or_none(value: Any) -> bytes | None:
    """Return the digest of an object; None if it has none, as it cannot be pickled or holds tensors that are not dense."""
    with contextlib.suppress(Exception):
        return value_digest(value)
    return None


def _kind(stored: Any) -> StoredKind:
    if not isinstance(stored, TensorStorageMetadata):
        return "object"
    return StoredTensorKind(tuple(stored.size), stored.properties.dtype)
