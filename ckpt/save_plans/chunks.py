"""Find the chunks of each tensor, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ckpt.format.columns import Integers
from ckpt.format.dtypes import item_bytes
from ckpt.save_plans.holders import Holders
from ckpt.save_plans.local import Message
from ckpt.save_plans.rules import Layout, Rule, lay_out
from ckpt.save_plans.sections import Held, Section, is_row
from ckpt.save_plans.tiling import tiles
from ckpt.transfer.boxes import tiling_fault

_MAX_NAMED = 5
_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(eq=False)
class Group:
    """Ranks that hold the same sections."""

    sections: list[PlacedSection]
    ranks: list[int]


@dataclass(eq=False)
class PlacedSection:
    """A section, and the ranks that hold it.

    Attributes:
        ranks: sorted.
        rows: of each item, the chunk that each of the ranks holds.
    """

    section: Section
    ranks: Integers
    rows: list[Integers] = field(default_factory=list)


@dataclass(eq=False)
class Entry:
    """A tensor or object of the checkpoint.

    Attributes:
        held: as the first rank has it.
        layout: None for an object.
        writers: the rank that writes each chunk; empty where the entry is carried.
    """

    name: str
    held: Held
    layout: Layout | None
    holders: Holders
    writers: Integers

    @property
    def nbytes(self) -> Integers:
        """Bytes of each chunk; as DCP, one for an object."""
        if self.layout is None or self.held.dtype is None:
            return np.ones(1, dtype=np.int64)
        return self.layout.elements * item_bytes(self.held.dtype)


class Fault(Exception):
    """What is wrong with one tensor."""


class Chunks:
    """Find the chunks of each entry, and the ranks that hold them; what many have in common is made once."""

    def __init__(self, messages: Sequence[Message], groups: Sequence[Group], size: int) -> None:
        self._messages, self._groups, self._size = messages, groups, size
        self._layouts: dict[tuple[tuple[int, ...], Rule], Layout] = {}
        self._numbers: dict[tuple[int, Rule], Integers] = {}
        self._rows: dict[tuple[int, int], Integers] = {}
        self._holders: dict[tuple[int, ...], Holders] = {}
        self._zeros: dict[int, Integers] = {}
        self._own = _Rows(messages, groups)

    def entry(self, name: str, places: Sequence[tuple[PlacedSection, int]]) -> Entry:
        """Make an entry. Raises Fault."""
        helds = [placed.section.kinds[placed.section.kind[number]] for placed, number in places]
        first = helds[0]
        for (placed, _), held in zip(places, helds, strict=True):
            if (held.dtype, held.shape) != (first.dtype, first.shape):
                raise Fault(
                    f"{name!r} is {_kind(first)} on rank {_shown(places[0][0].ranks)}, and {_kind(held)} on rank "
                    f"{_shown(placed.ranks)}"
                )
        if first.dtype is None:
            for placed, number in places:
                placed.rows[number] = self._zeros_of(placed)
            return Entry(name, first, None, self._holders_of(places), _NOTHING)
        rules = {held.rule and (held.rule.sizes, held.rule.placements, held.rule.strided) for held in helds}
        if len(rules) == 1 and first.rule is not None:
            layout = self._layout(first.shape, first.rule)
            for (placed, number), held in zip(places, helds, strict=True):
                assert held.rule is not None
                placed.rows[number] = self._rows_of(placed, held.rule, layout)
            holders = self._holders_of(places)
            if holders.count == len(layout.offsets):
                return Entry(name, first, layout, holders, _NOTHING)
        return self._irregular(name, first, list(zip(places, helds, strict=True)))

    def _irregular(
        self, name: str, held: Held, places: Sequence[tuple[tuple[PlacedSection, int], Held]]
    ) -> Entry:
        """Make an entry of single chunks: its layout is what is there."""
        boxes = [self._boxes(placed, number, each) for (placed, number), each in places]
        offsets = np.concatenate([offsets for offsets, _ in boxes])
        sizes = np.concatenate([sizes for _, sizes in boxes])
        first, row = _distinct(offsets, held.shape)
        ranks = np.concatenate([placed.ranks for (placed, _), _ in places])
        differs = np.flatnonzero((sizes != sizes[first][row]).any(axis=1))
        if len(differs):
            at = differs[0]
            raise Fault(
                f"{name!r} has at {tuple(offsets[at].tolist())} a chunk of {tuple(sizes[first][row][at].tolist())} on "
                f"rank {ranks[first][row][at]}, and one of {tuple(sizes[at].tolist())} on rank {ranks[at]}"
            )
        layout = Layout(offsets[first], sizes[first], None)
        if self._size > 1 and not tiles(layout.offsets, layout.sizes, held.shape):
            raise Fault(_tiling_fault(name, held, layout, ranks[first]))
        begin = 0
        for (placed, number), _ in places:
            placed.rows[number] = row[begin : begin + len(placed.ranks)]
            begin += len(placed.ranks)
        return Entry(name, held, layout, Holders(ranks, row), _NOTHING)

    def _boxes(self, placed: PlacedSection, number: int, held: Held) -> tuple[Integers, Integers]:
        if held.rule is None:
            return self._own.boxes(placed, number)
        layout = self._layout(held.shape, held.rule)
        rows = self._rows_of(placed, held.rule, layout)
        return layout.offsets[rows], layout.sizes[rows]

    def _layout(self, shape: tuple[int, ...], rule: Rule) -> Layout:
        key = shape, Rule(0, rule.sizes, rule.placements, rule.strided)
        if key not in self._layouts:
            self._layouts[key] = lay_out(shape, rule)
        return self._layouts[key]

    def _rows_of(self, placed: PlacedSection, rule: Rule, layout: Layout) -> Integers:
        """Return the chunk that each rank of a section holds."""
        if not rule.sharding:
            return self._zeros_of(placed)
        key = id(placed), Rule(rule.mesh, rule.sizes, tuple(min(each, 0) for each in rule.placements))
        if key not in self._numbers:
            coordinates = [self._messages[rank].coordinates[rule.mesh] for rank in placed.ranks.tolist()]
            table = np.array(coordinates, dtype=np.int64).reshape(len(coordinates), -1)
            counts = [rule.sizes[number] for number in rule.sharding]
            self._numbers[key] = np.ravel_multi_index(tuple(table[:, list(rule.sharding)].T), counts)
        numbers = self._numbers[key]
        if layout.row is None:
            return numbers
        known = id(numbers), id(layout)
        if known not in self._rows:
            self._rows[known] = layout.row[numbers]
        return self._rows[known]

    def _holders_of(self, places: Sequence[tuple[PlacedSection, int]]) -> Holders:
        key = tuple(each for placed, number in places for each in (id(placed), id(placed.rows[number])))
        if key not in self._holders:
            ranks = np.concatenate([placed.ranks for placed, _ in places])
            rows = np.concatenate([placed.rows[number] for placed, number in places])
            self._holders[key] = Holders(ranks, rows)
        return self._holders[key]

    def _zeros_of(self, placed: PlacedSection) -> Integers:
        return self._zeros.setdefault(id(placed), np.zeros(len(placed.ranks), dtype=np.int64))


class _Rows:
    """The chunks that ranks told apart."""

    def __init__(self, messages: Sequence[Message], groups: Sequence[Group]) -> None:
        self._messages, self._groups = messages, groups
        self._tables: dict[int, Integers] = {}

    def boxes(self, placed: PlacedSection, number: int) -> tuple[Integers, Integers]:
        """Return the offsets and sizes of an item on each rank of a section."""
        if not self._tables:
            self._read()
        begin = 0
        for _, held in list(placed.section.items())[:number]:
            begin += 2 * len(held.shape) if is_row(held) else 0
        count = len(placed.section.kinds[placed.section.kind[number]].shape)
        table = self._tables[id(placed)]
        return table[:, begin : begin + count], table[:, begin + count : begin + 2 * count]

    def _read(self) -> None:
        for group in self._groups:
            for placed in group.sections:
                cells = placed.section.cells
                self._tables.setdefault(id(placed), np.empty((len(placed.ranks), cells), dtype=np.int64))
        for group in self._groups:
            told = np.stack([self._messages[rank].row_numbers() for rank in group.ranks])
            begin = 0
            for placed in group.sections:
                table = self._tables[id(placed)]
                table[np.searchsorted(placed.ranks, group.ranks)] = told[:, begin : begin + table.shape[1]]
                begin += table.shape[1]


def _distinct(offsets: Integers, shape: Sequence[int]) -> tuple[Integers, Integers]:
    """Find the different offsets: where each is first, in that order, and the number of each row's."""
    count = 1
    for extent in shape:
        count *= extent + 1
    if not len(shape):
        return np.zeros(1, dtype=np.int64), np.zeros(len(offsets), dtype=np.int64)
    if count < 1 << 62 and bool(((offsets >= 0) & (offsets <= np.array(shape))).all()):
        flat = np.ravel_multi_index(tuple(offsets.T), [extent + 1 for extent in shape])
        _, first, row = np.unique(flat, return_index=True, return_inverse=True)
    else:
        _, first, row = np.unique(offsets, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[row.reshape(-1)]


def _tiling_fault(name: str, held: Held, layout: Layout, ranks: Integers) -> str:
    """Say what is missing or there twice, and who holds the rest."""
    boxes = [
        (tuple(begin), tuple(start + size for start, size in zip(begin, count, strict=True)))
        for begin, count in zip(layout.offsets.tolist(), layout.sizes.tolist(), strict=True)
    ]
    fault = tiling_fault(boxes, held.shape) or "its chunks leave gaps, or overlap"
    return f"{name!r} of size {held.shape}, held by rank {_shown(np.sort(ranks))}: {fault}"


def _kind(held: Held) -> str:
    return "an object" if held.dtype is None else f"a tensor of {held.dtype} {held.shape}"


def _shown(ranks: Integers) -> str:
    return f"{', '.join(map(str, ranks[:_MAX_NAMED].tolist()))}{', ...' if len(ranks) > _MAX_NAMED else ''}"
