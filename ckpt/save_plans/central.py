"""Make one plan of what all ranks hold: check it, and choose who writes each chunk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError
from ckpt.format.columns import Integers
from ckpt.format.dtypes import item_bytes
from ckpt.format.index import check_count
from ckpt.save_plans.chunks import Chunks, Entry, Fault, Group, PlacedSection
from ckpt.save_plans.holders import Holders, Loads
from ckpt.save_plans.local import Message
from ckpt.save_plans.sections import Section, digest_of, split_digests

_MAX_NAMED = 5


class CentralPlan:
    """What all ranks write together.

    Attributes:
        number: the same for the same plan, positive.
        messages: what the ranks have told.
        entries: by name, in the order of the first ranks.
        carried: names that nobody writes.
        rows: chunks and objects that are written.
    """

    def __init__(
        self, messages: Sequence[Message], sections: Mapping[bytes, Section], carried: Collection[str] = ()
    ) -> None:
        """Raises CheckpointError if the ranks do not fit together, ConfigurationError for too many chunks."""
        self.messages, self.carried = messages, frozenset(carried)
        self.size = len(messages)
        self.groups, self._placed = _place(messages, sections)
        self.number = _number(messages, self.carried)
        self.entries = self._make_entries()
        self.rows = 0
        for entry in self.entries.values():
            if entry.name not in self.carried:
                self.rows += entry.holders.count
        check_count(self.rows)
        self.loads = self._choose_writers()

    @property
    def sections(self) -> Iterator[PlacedSection]:
        return iter(self._placed.values())

    def contents(self) -> dict[bytes, Section]:
        """Return the sections by digest, for plans to come."""
        return {digest: placed.section for digest, placed in self._placed.items()}

    @cached_property
    def planner_data(self) -> dict[str, Any] | None:
        """Return what DCP's planner notes of all names; None if it does not flatten."""
        paths: dict[str, Any] = {}
        for placed in self._placed.values():
            if placed.section.paths is None:
                return None
            for name, path in zip(placed.section.names, placed.section.paths, strict=True):
                paths.setdefault(name, path)
        return paths

    # -- what a rank needs to know -------------------------------------------------------------------------

    @cached_property
    def answers(self) -> list[bytes]:
        """Say to each rank which of its items it writes: a bit for each, section by section; nothing if all."""
        bits = {id(placed): self._bits(placed) for placed in self._placed.values()}
        answers = [b""] * self.size
        for group in self.groups:
            if not group.sections:
                continue
            parts = []
            is_all = np.ones(len(group.ranks), dtype=bool)
            for placed in group.sections:
                packed, complete = bits[id(placed)]
                at = np.searchsorted(placed.ranks, group.ranks)
                parts.append(packed[at])
                is_all &= complete[at]
            joined = np.concatenate(parts, axis=1)
            for number in np.flatnonzero(~is_all).tolist():
                answers[group.ranks[number]] = joined[number].tobytes()
        return answers

    def writes(self, placed: PlacedSection, number: int) -> Any:
        """Tell which of the ranks of a section write its item of this number."""
        entry = self.entries[placed.section.names[number]]
        if entry.name in self.carried:
            return np.zeros(len(placed.ranks), dtype=bool)
        return entry.writers[placed.rows[number]] == placed.ranks

    def _bits(self, placed: PlacedSection) -> tuple[Any, Any]:
        """Return the bits of a section's items for each rank, packed, and whether all are set."""
        table = self._table(placed)
        return np.ascontiguousarray(np.packbits(table, axis=0).T), table.all(axis=0)

    def _table(self, placed: PlacedSection) -> Any:
        """Tell of each item of a section, and each of its ranks, whether it is written there."""
        known: dict[tuple[int, int], Any] = {}
        table = np.empty((len(placed.section.names), len(placed.ranks)), dtype=bool)
        for number, name in enumerate(placed.section.names):
            key = -1 if name in self.carried else id(self.entries[name].writers), id(placed.rows[number])
            if key not in known:
                known[key] = self.writes(placed, number)
            table[number] = known[key]
        return table

    # -- making it -----------------------------------------------------------------------------------------

    def _make_entries(self) -> dict[str, Entry]:
        where: dict[str, list[tuple[PlacedSection, int]]] = {}
        for placed in self._placed.values():
            placed.rows = [np.empty(0, dtype=np.int64)] * len(placed.section.names)
            for number, name in enumerate(placed.section.names):
                where.setdefault(name, []).append((placed, number))
        chunks = Chunks(self.messages, self.groups, self.size)
        entries: dict[str, Entry] = {}
        faults: list[str] = []
        for name, places in where.items():
            try:
                entries[name] = chunks.entry(name, places)
            except Fault as fault:
                faults.append(str(fault))
        if faults:
            more = f" (and {len(faults) - _MAX_NAMED} more)" if len(faults) > _MAX_NAMED else ""
            raise CheckpointError(f"the ranks do not fit together: {'; '.join(faults[:_MAX_NAMED])}{more}")
        return entries

    def _choose_writers(self) -> Integers:
        """Choose who writes; what only one rank holds first, then the largest chunks first."""
        loads = Loads(self.size)
        to_lowest = any(message.to_lowest for message in self.messages)
        fixed: dict[tuple[int, int], tuple[Holders, Integers, int]] = {}
        chosen: list[tuple[int, Entry, Integers]] = []
        for entry in self.entries.values():
            if entry.name in self.carried:
                continue
            entry.writers = entry.holders.lowest
            size = 1 if entry.held.dtype is None else item_bytes(entry.held.dtype)
            if to_lowest or not entry.holders.replicated:
                key = id(entry.holders), id(entry.layout)
                elements = np.ones(1, dtype=np.int64) if entry.layout is None else entry.layout.elements
                total = fixed[key][2] if key in fixed else 0
                fixed[key] = entry.holders, elements, total + size
            else:
                nbytes = entry.nbytes
                chosen.append((int(nbytes.max(initial=0)), entry, nbytes))
        for holders, elements, size in fixed.values():
            loads.add(holders.lowest, elements * size)
        for _, entry, nbytes in sorted(chosen, key=lambda each: -each[0]):
            entry.writers = loads.spread(entry.holders, nbytes)
        return loads.nbytes


def _place(
    messages: Sequence[Message], sections: Mapping[bytes, Section]
) -> tuple[list[Group], dict[bytes, PlacedSection]]:
    by_sections: dict[bytes, list[int]] = {}
    for rank, message in enumerate(messages):
        by_sections.setdefault(message.sections, []).append(rank)
    ranks: dict[bytes, list[list[int]]] = {}
    for digests, members in by_sections.items():
        for digest in split_digests(digests):
            ranks.setdefault(digest, []).append(members)
    placed = {
        digest: PlacedSection(sections[digest], np.sort(np.concatenate([np.array(m) for m in members])))
        for digest, members in ranks.items()
    }
    groups = [
        Group([placed[digest] for digest in split_digests(digests)], members)
        for digests, members in by_sections.items()
    ]
    return groups, placed


def _number(messages: Sequence[Message], carried: Collection[str]) -> int:
    told = (part for message in messages for part in (message.structure(), message.verdict))
    digest = digest_of([*told, *sorted(name.encode() for name in carried)])
    return int.from_bytes(digest[:8], "little") >> 2
