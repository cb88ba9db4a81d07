"""Compute the chunks of a tensor from how it is sharded: for all ranks of a mesh at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from ckpt.format.columns import Integers

_REPLICATED = -1


class Rule(msgspec.Struct, frozen=True, array_like=True):
    """How a tensor lies on a mesh.

    Attributes:
        mesh: number of the mesh among those of the rank, which knows its coordinates there.
        sizes: of the mesh, dimension by dimension.
        placements: of each dimension of the mesh, the dimension of the tensor that it shards, or -1.
        strided: dimensions of the mesh that shard what later ones have sharded before.
    """

    mesh: int
    sizes: tuple[int, ...]
    placements: tuple[int, ...]
    strided: tuple[int, ...] = ()

    @property
    def sharding(self) -> tuple[int, ...]:
        """Dimensions of the mesh that shard; ranks that differ only in others are replicas."""
        return tuple(number for number, dimension in enumerate(self.placements) if dimension != _REPLICATED)


WHOLE = Rule(_REPLICATED, (), ())
"""The rule of a tensor that a rank holds whole."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The chunks of a tensor under a rule, one for each coordinate of the dimensions that shard it.

    Chunks without elements are all the same one, at the end of the tensor, as DCP has them.

    Attributes:
        offsets, sizes: of the different chunks, shape (chunks, dimensions).
        row: of each coordinate, in C order, its chunk; None if each has its own.
    """

    offsets: Integers
    sizes: Integers
    row: Integers | None

    @cached_property
    def elements(self) -> Integers:
        """Elements of each chunk."""
        count: Integers = self.sizes.prod(axis=1)
        return count

    def box(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offsets and sizes at a coordinate, which is numbered in C order."""
        row = number if self.row is None else int(self.row[number])
        return tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist())


def lay_out(shape: Sequence[int], rule: Rule) -> Layout:
    """Compute all chunks of a tensor of `shape`."""
    counts = [rule.sizes[number] for number in rule.sharding]
    total = math.prod(counts)
    offsets = np.zeros((total, len(shape)), dtype=np.int64)
    sizes = np.tile(np.array(shape, dtype=np.int64), (total, 1))
    coordinates = np.unravel_index(np.arange(total), counts) if counts else ()
    of_mesh = dict(zip(rule.sharding, coordinates, strict=True))
    for dimension, extent in enumerate(shape):
        along = [number for number in rule.sharding if rule.placements[number] == dimension]
        along.sort(key=lambda number: number in rule.strided)
        for number in along:
            chunk = -(-sizes[:, dimension] // rule.sizes[number])
            skipped = np.minimum(of_mesh[number] * chunk, sizes[:, dimension])
            offsets[:, dimension] += skipped
            sizes[:, dimension] = np.minimum(sizes[:, dimension] - skipped, chunk)
        if along:
            offsets[sizes[:, dimension] == 0, dimension] = extent
    if sizes.all():
        return Layout(offsets, sizes, None)
    _, first, row = np.unique(offsets, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # chunks keep the order of their first coordinates
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first = first[order]
    return Layout(offsets[first], sizes[first], rank[row.reshape(-1)])


def number_of(rule: Rule, coordinates: Sequence[int]) -> int:
    """Number the coordinates of a rank in the mesh of a rule as `Layout` does."""
    number = 0
    for dimension in rule.sharding:
        number = number * rule.sizes[dimension] + coordinates[dimension]
    return number


def box_at(
    shape: Sequence[int], rule: Rule, coordinates: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compute offsets and sizes of the chunk at some coordinates, as `lay_out` does for all."""
    offsets, sizes = [0] * len(shape), list(shape)
    for number in sorted(rule.sharding, key=lambda number: number in rule.strided):
        dimension = rule.placements[number]
        chunk = -(-sizes[dimension] // rule.sizes[number])
        skipped = min(coordinates[number] * chunk, sizes[dimension])
        offsets[dimension] += skipped
        sizes[dimension] = min(sizes[dimension] - skipped, chunk)
    for dimension in {rule.placements[number] for number in rule.sharding}:
        if sizes[dimension] == 0:
            offsets[dimension] = shape[dimension]
    return tuple(offsets), tuple(sizes)
