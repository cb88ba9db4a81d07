"""Lay out a model in safetensors files: each tensor whole in one file, each file written by one rank."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan

from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.fqns import natural
from ckpt.format.names import model_key
from ckpt.stock.safetensors_format import MAX_HEADER_BYTES, DescribedTensor, encode_header
from ckpt.transfer.boxes import Slices, flat_boxes, tiling_fault
from ckpt.writing.layout import pack

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000

_MIN_FILE_BYTES = 256 << 20
"""Below it a file is not cut so that more ranks can write at the same time."""


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor that a rank holds."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model, and its parts on all ranks."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def parts_in(self, box: Slices, rank: int | None = None) -> Sequence[TensorPart]:
        """List the parts, or those of one rank, that may have elements in a box; in the same order always."""
        parts = self._sorted.get(rank)
        if parts is None:
            own = [part for part in self.parts if rank in (None, part.rank)]
            parts = self._sorted[rank] = _SortedParts(own, self._divided)
        return parts.near(box)

    @functools.cached_property
    def _sorted(self) -> dict[int | None, _SortedParts]:
        return {}

    @functools.cached_property
    def _divided(self) -> int | None:
        """The dimension in which parts begin at most places; None if there is no dimension."""
        begins = [{part.offsets[d] for part in self.parts} for d in range(len(self.shape))]
        return max(range(len(self.shape)), key=lambda d: len(begins[d]), default=None)


class _SortedParts:
    """Parts of a tensor, by where they begin in one dimension: a window finds its own without a look at all."""

    def __init__(self, parts: Sequence[TensorPart], dimension: int | None) -> None:
        self._parts, self._dimension = parts, dimension
        if dimension is not None:
            self._parts = sorted(parts, key=lambda part: (part.offsets[dimension], part.offsets))
            self._begins = [part.offsets[dimension] for part in self._parts]
            self._longest = max((part.sizes[dimension] for part in parts), default=0)

    def near(self, box: Slices) -> Sequence[TensorPart]:
        if self._dimension is None:
            return self._parts
        side = box[self._dimension]
        first = bisect.bisect_right(self._begins, side.start - self._longest)
        return self._parts[first : bisect.bisect_left(self._begins, side.stop)]


@dataclass(frozen=True)
class Region:
    """The elements that one part has of a box of a tensor.

    Attributes:
        in_part: where in the part they are.
        in_box: where in the box, whose bytes begin at `box_begin` of the window and have `box_shape`.
        shape: of these elements.
    """

    tensor: ModelTensor
    part: TensorPart
    in_part: Slices
    in_box: Slices
    box_begin: int
    box_shape: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.tensor.dtype.itemsize


@dataclass(frozen=True)
class ModelFile:
    """A file: its name, the rank that writes it, and its tensors in order."""

    key: str
    rank: int
    tensors: tuple[ModelTensor, ...]

    @functools.cached_property
    def header(self) -> bytes:
        return encode_header({t.name: DescribedTensor.of(t.dtype, t.shape) for t in self.tensors})

    @functools.cached_property
    def offsets(self) -> list[int]:
        """Where in the file each tensor begins, and where the last one ends."""
        return list(itertools.accumulate((t.nbytes for t in self.tensors), initial=len(self.header)))

    def regions(self, start: int, stop: int, rank: int | None = None) -> Iterator[Region]:
        """List what makes up the bytes `[start, stop)`, which is a window; not the header.

        With `rank`, only what that rank has of it: the same as among all, in the same order, without a
        look at the parts of others.
        """
        for number in range(max(bisect.bisect_right(self.offsets, start) - 1, 0), len(self.tensors)):
            tensor, begin, end = self.tensors[number], self.offsets[number], self.offsets[number + 1]
            if begin >= stop:
                return
            first, last = max(start, begin), min(stop, end)
            size = tensor.dtype.itemsize
            position = first - start
            for box in flat_boxes(tensor.shape, (first - begin) // size, (last - begin) // size):
                shape = tuple(part.stop - part.start for part in box)
                yield from _regions(tensor, box, shape, position, rank)
                position += math.prod(shape) * size


@dataclass(frozen=True)
class ModelLayout:
    """All files of a model, and the names that are not written, with those of the same memory."""

    files: tuple[ModelFile, ...]
    tied: Mapping[str, str]


def _regions(
    tensor: ModelTensor, box: Slices, shape: tuple[int, ...], position: int, rank: int | None
) -> Iterator[Region]:
    for part in tensor.parts_in(box, rank):
        begins = [max(s.start, o) for s, o in zip(box, part.offsets, strict=True)]
        ends = [min(s.stop, o + n) for s, o, n in zip(box, part.offsets, part.sizes, strict=True)]
        if all(begin < end for begin, end in zip(begins, ends, strict=True)):
            both = list(zip(begins, ends, strict=True))
            in_part = tuple(slice(a - o, b - o) for (a, b), o in zip(both, part.offsets, strict=True))
            in_box = tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(both, box, strict=True))
            yield Region(tensor, part, in_part, in_box, position, shape, tuple(b - a for a, b in both))


def lay_out(
    plans: Sequence[SavePlan], tied: Mapping[str, str], token: str, max_shard_bytes: int
) -> ModelLayout:
    """Lay out the tensors that the ranks planned.

    There are at least as many files as ranks, unless they would be small; every rank writes about
    the same number of bytes.

    Raises:
        CheckpointError: the parts of a tensor leave gaps, or overlap.
        ConfigurationError: a file would have a header that no reader accepts.
    """
    tensors = sorted(_tensors(plans, tied), key=lambda tensor: natural(tensor.name))
    groups = _groups(tensors, max_shard_bytes, len(plans))
    sizes = [sum(tensor.nbytes for tensor in group) for group in groups]
    owners = {number: rank for rank, own in enumerate(pack(sizes, len(plans))) for number in own}
    files = []
    for number, group in enumerate(groups):
        # Wide elements first, so that all are aligned.
        ordered = sorted(group, key=lambda tensor: -tensor.dtype.itemsize)
        files.append(ModelFile(model_key(token, number, len(groups)), owners[number], tuple(ordered)))
        if len(files[-1].header) > MAX_HEADER_BYTES:
            raise ConfigurationError(
                f"{len(group):,} tensors in one file are too many; pass a smaller max_shard_size"
            )
    return ModelLayout(tuple(files), tied)


def _tensors(plans: Sequence[SavePlan], tied: Collection[str]) -> Iterator[ModelTensor]:
    parts: dict[str, list[TensorPart]] = defaultdict(list)
    facts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, name = item.tensor_data, item.index.fqn
            if data is None or name in tied:
                continue
            here = (data.properties.dtype, tuple(data.size))
            if facts.setdefault(name, here) != here:
                raise CheckpointError(f"{name!r} has another dtype or shape on rank {rank} than on others")
            parts[name].append(TensorPart(rank, tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
    for name, (dtype, shape) in facts.items():
        boxes = [
            (part.offsets, tuple(o + n for o, n in zip(part.offsets, part.sizes, strict=True)))
            for part in parts[name]
        ]
        if (fault := tiling_fault(boxes, shape)) is not None:
            raise CheckpointError(f"{name!r} cannot be put together from what the ranks hold: {fault}")
        yield ModelTensor(name, dtype, shape, tuple(parts[name]))


def _groups(tensors: Sequence[ModelTensor], max_bytes: int, ranks: int) -> list[list[ModelTensor]]:
    """Cut the tensors, in order, into files of about the same size, none larger than allowed if possible."""
    total = sum(tensor.nbytes for tensor in tensors)
    count = max(-(-total // max_bytes), min(ranks, total // _MIN_FILE_BYTES), 1)
    groups: list[list[ModelTensor]] = [[]]
    size = 0
    for tensor in tensors:
        # An even share is full before most of the next tensor.
        is_full = 2 * size + tensor.nbytes > 2 * total / count or size + tensor.nbytes > max_bytes
        if groups[-1] and is_full:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def agreed_ties(by_rank: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the tied names on which all ranks agree."""
    first, *others = by_rank
    return {name: other for name, other in first.items() if all(ties.get(name) == other for ties in others)}
