"""Which parts of which ranks make up a window of a model's file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckpt.models.layout import ModelFile, ModelTensor, Region, TensorPart


class Counted(tuple[int, ...]):
    """Offsets of a part that count how often anybody looks at them."""

    looks = 0

    def __iter__(self) -> Iterator[int]:
        Counted.looks += 1
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(index)


def file_of(shape: tuple[int, ...], parts: list[TensorPart]) -> ModelFile:
    return ModelFile("model", 0, (ModelTensor("w", torch.bfloat16, shape, tuple(parts)),))


@pytest.mark.parametrize("ranks", [16, 256, 1024])
def test_what_a_window_costs_does_not_grow_with_the_ranks(ranks: int) -> None:
    """Neither for the rank that asks nor for those that reply, whose parts are a hundred rows each."""
    rows = 100
    parts = [TensorPart(rank, Counted((rank * rows, 0)), (rows, 64)) for rank in range(ranks)]
    file = file_of((ranks * rows, 64), parts)
    begin, window = file.offsets[0], 2 * 64 * 250
    asked = [region.part.rank for region in file.regions(begin, begin + window)]  # the first sorts them
    assert asked == [0, 1, 2]
    for rank in asked:
        assert len(list(file.regions(begin, begin + window, rank))) == 1
    Counted.looks = 0
    for start in range(begin + window, begin + 5 * window, window):
        regions = list(file.regions(start, start + window))
        assert sum(region.nbytes for region in regions) == window
    assert Counted.looks < 100
    Counted.looks = 0
    assert len(list(file.regions(begin, begin + window, 1))) == 1
    assert Counted.looks < 10


def _cut(begin: list[int], end: list[int], chance: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a box into boxes that are no grid."""
    dimension = chance.randrange(len(begin))
    length = end[dimension] - begin[dimension]
    if length < 2 or chance.random() < 0.2:
        yield begin, end
        return
    middle = begin[dimension] + chance.randrange(1, length)
    yield from _cut(begin, [*end[:dimension], middle, *end[dimension + 1 :]], chance)
    yield from _cut([*begin[:dimension], middle, *begin[dimension + 1 :]], end, chance)


@pytest.mark.parametrize("seed", range(5))
def test_asker_and_replier_cut_a_window_alike(seed: int) -> None:
    chance = random.Random(seed)
    shape = (17, 9, 5)
    boxes = list(_cut([0] * 3, list(shape), chance))
    parts = [
        TensorPart(chance.randrange(4), tuple(a), tuple(e - b for b, e in zip(a, z, strict=True)))
        for a, z in boxes
    ]
    parts.append(TensorPart(1, (17, 0, 0), (0, 9, 5)))  # of a rank for which no row was left
    file = file_of(shape, chance.sample(parts, len(parts)))
    cuts = sorted({file.offsets[0], file.offsets[1], *(file.offsets[0] + 2 * n for n in (7, 90, 91, 400))})
    for start, stop in itertools.pairwise(cuts):
        regions = list(file.regions(start, stop))
        assert _elements(regions) == list(range((stop - start) // 2))
        for rank in range(4):
            own = [region for region in regions if region.part.rank == rank]
            assert list(file.regions(start, stop, rank)) == own


def _elements(regions: list[Region]) -> list[int]:
    """List the elements of a window that regions fill."""
    filled: list[int] = []
    for region in regions:
        size = torch.Size(region.box_shape).numel()
        box = torch.arange(region.box_begin // 2, region.box_begin // 2 + size).view(region.box_shape)
        filled += box[region.in_box].reshape(-1).tolist()
    return sorted(filled)
