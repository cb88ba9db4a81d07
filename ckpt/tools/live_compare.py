"""Compare a live state with delivered digests, name by name, region by region."""

from __future__ import annotations

import io
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from ckpt.consistency.checksums import crc64nvme
from ckpt.format.dtypes import dtype_name
from ckpt.reading.delivered import DeliveredDigests, DeliveredRegion, StoredTensorKind, digest_or_none
from ckpt.torch_private import ShardedTensor, create_chunk_list, local_tensor
from ckpt.transfer.boxes import Box, tiled_box
from ckpt.transfer.live_digests import LiveDigest, LiveElements, live_digests
from ckpt.transfer.tensor_memory import plain
from ckpt.transfer.tied_tensors import tied_names

Kind = Literal["different", "untouched", "missing", "resized", "unchecked"]


@dataclass(frozen=True, eq=False)
class _Check:
    """A region to compare.

    Attributes:
        expected: the digest that the live elements must have.
        otherwise: the finding if they have not.
    """

    name: str
    live: LiveElements
    expected: int
    otherwise: Kind = "different"


def local_chunks(name: str, tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """List the chunks of a tensor that this rank holds: where each begins, and its elements.

    Raises errors of torch for a tensor that cannot be saved either, such as one with partial sums.
    """
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor
        return
    for number, chunk in enumerate(create_chunk_list(tensor)):
        own = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if hasattr(own, "__get_tensor_shard__"):
            own = find_tensor_shard(own, MetadataIndex(name, chunk.offsets, number))
        yield tuple(chunk.offsets), own


class Comparing:
    """The comparison of one state, on this rank."""

    def __init__(self, live: Mapping[str, Any], delivered: DeliveredDigests) -> None:
        self._live, self._delivered = live, delivered
        self._checks: list[_Check] = []
        self._found: dict[Kind, set[str]] = defaultdict(set)
        self._cast: dict[str, tuple[str, str, str]] = {}
        self._tensors = self._objects = 0

    def run(self) -> dict[str, Any]:
        """Compare all, and return the fields of a certificate."""
        for name, value in self._live.items():
            self._look(name, value)
        self._look_for_tied()
        digests = live_digests([check.live for check in self._checks])
        for check, digest in zip(self._checks, digests, strict=True):
            self._judge(check, digest)
        found: dict[str, Any] = {kind: tuple(sorted(names)) for kind, names in self._found.items()}
        bad = set[str]().union(*self._found.values())
        found["cast"] = tuple(cast for name, cast in sorted(self._cast.items()) if name not in bad)
        found["left_over"] = tuple(self._delivered.left_over(self._live))
        tensors = (check.live.tensor for check in self._checks)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return {**found, "tensors": self._tensors, "objects": self._objects, "compared_bytes": nbytes}

    def _judge(self, check: _Check, digest: LiveDigest) -> None:
        if digest.crc64nvme != check.expected or not digest.returns:
            self._found[check.otherwise].add(check.name)

    def _look_for_tied(self) -> None:
        """Take back names that the checkpoint lacks, if their memory has another name in it: a model's files hold one."""
        missing = self._found["missing"]
        if missing:
            known = {name: each for name, each in self._live.items() if name not in missing}
            lacking = {name: self._live[name] for name in missing}
            missing -= {name for name, other in tied_names({**known, **lacking}).items() if other in known}

    def _look(self, name: str, value: Any) -> None:
        """Sort a name in."""
        stored = self._delivered.kind_of(name)
        if stored is None:
            self._found["missing"].add(name)
        elif isinstance(value, torch.Tensor) != isinstance(stored, StoredTensorKind):
            self._found["different"].add(name)
        elif isinstance(stored, StoredTensorKind):
            self._look_at_tensor(name, value, stored)
        else:
            self._look_at_object(name, value)

    def _look_at_object(self, name: str, value: Any) -> None:
        delivered = self._delivered.object_at(name)
        if delivered is None:
            self._found["untouched"].add(name)
            return
        self._objects += 1
        if delivered.value is not None:
            own = digest_or_none(value)
            if own != delivered.value:
                self._found["unchecked" if own is None else "different"].add(name)
        elif _pickled_crc(value) != delivered.crc64nvme:  # two pickles of one value can differ
            self._found["unchecked"].add(name)

    def _look_at_tensor(self, name: str, value: torch.Tensor, stored: StoredTensorKind) -> None:
        if tuple(value.size()) != stored.size:
            self._found["resized"].add(name)
            return
        self._tensors += 1
        try:
            chunks = [(begin, plain(local)) for begin, local in local_chunks(name, value)]
        except ValueError:  # its memory was freed
            self._found["untouched"].add(name)
            return
        except (RuntimeError, NotImplementedError):
            self._found["unchecked"].add(name)
            return
        regions = _Regions(self._delivered.regions(name))
        for begin, local in chunks:
            if local is None:
                self._found["unchecked"].add(name)
            elif local.numel():
                self._look_at_chunk(name, begin, local, regions)

    def _look_at_chunk(
        self, name: str, begin: tuple[int, ...], local: torch.Tensor, regions: _Regions
    ) -> None:
        """Find the regions that were delivered into a chunk of this rank, and add a check of each."""
        box = begin, tuple(b + n for b, n in zip(begin, local.shape, strict=True))
        touching = regions.touching(box)
        delivered = sum(map(_elements, touching.values()))
        if local.device.type == "meta" or delivered < local.numel():
            self._found["untouched"].add(name)
        elif any(region.box != part for region, part in touching.items()) or tiled_box(
            [*touching.values()]
        ) != (box):
            self._found["unchecked"].add(name)
        else:
            for region in touching:
                self._checks.append(self._check(name, begin, local, region))

    def _check(
        self, name: str, begin: tuple[int, ...], local: torch.Tensor, region: DeliveredRegion
    ) -> _Check:
        offsets = (r - b for r, b in zip(region.begin, begin, strict=True))
        box: tuple[Any, ...] = tuple(slice(o, o + n) for o, n in zip(offsets, region.lengths, strict=True))
        view = local[box].permute(region.order)
        digest = region.digest
        if view.dtype == region.dtype:
            return _Check(name, LiveElements(view), digest.crc64nvme() or 0)
        self._cast[name] = name, dtype_name(region.dtype), dtype_name(view.dtype)
        cast = digest.cast_crc64nvme()
        if view.dtype == region.cast_dtype and cast is not None:
            return _Check(name, LiveElements(view), cast)
        # The program has cast it: cast back, the elements are the stored ones, unless the cast has lost some bits.
        otherwise: Kind = "different" if _keeps_all(region.dtype, view.dtype) else "unchecked"
        return _Check(name, LiveElements(view, region.dtype), digest.crc64nvme() or 0, otherwise)


class _Regions:
    """The regions of a tensor that were delivered, by where they begin in the dimension in which most of them differ."""

    def __init__(self, regions: Sequence[DeliveredRegion]) -> None:
        self._by_box = {region.box: region for region in regions}
        dims = range(len(regions[0].begin) if regions else 0)
        self._dim = max(dims, key=lambda dim: len({region.begin[dim] for region in regions}), default=None)
        self._sorted = [*regions]
        self._begins = list[int]()
        self._longest = 0
        if self._dim is not None:
            dim = self._dim
            self._sorted.sort(key=lambda region: region.begin[dim])
            self._begins = [region.begin[dim] for region in self._sorted]
            self._longest = max(region.lengths[dim] for region in regions)

    def touching(self, box: Box) -> dict[DeliveredRegion, Box]:
        """Find the regions that have elements of a box, and the box that each has in common with it."""
        exact = self._by_box.get(box)
        if exact is not None:
            return {exact: box}
        near = self._sorted
        if self._dim is not None:
            first = bisect_right(self._begins, box[0][self._dim] - self._longest)
            near = near[first : bisect_left(self._begins, box[1][self._dim])]
        return {region: part for region in near if (part := _common(region.box, box)) is not None}


def _common(some: Box, other: Box) -> Box | None:
    """Return the box that two boxes have in common; None if there is none."""
    begin = tuple(map(max, some[0], other[0]))
    end = tuple(map(min, some[1], other[1]))
    return (begin, end) if all(b < e for b, e in zip(begin, end, strict=True)) else None


def _elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in zip(*box, strict=True))


def _keeps_all(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Tell whether a cast loses nothing: from floats to wider floats."""
    return (
        narrow.is_floating_point
        and wide.is_floating_point
        and torch.finfo(narrow).bits < torch.finfo(wide).bits
        and torch.finfo(narrow).eps >= torch.finfo(wide).eps
        and torch.finfo(narrow).max <= torch.finfo(wide).max
    )


def _pickled_crc(value: Any) -> int | None:
    """Pickle an object as a save does, and return the checksum; None if that fails."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception:
        return None
    return crc64nvme(file.getvalue())
