"""Fold many names into a short outline: what repeats is shown once, the rest level by level."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_MAX_LEVELS = 64
_MAX_COMPARED = 512
"""Characters of a name that decide its place in the order, and of a part that may repeat."""
_MAX_RUNS = 3
_MAX_NAMED = 4
"""Names that differ otherwise than in a number, in one label."""
_USEFUL_ROWS = 8
_DIGITS = re.compile(r"([0-9]+)")

T = TypeVar("T")


_Entry = tuple[str, Hashable, T]
"""Name, kind and value."""


@dataclass(eq=False)
class Row(Generic[T]):
    """A line of an outline: one name, a group of names, or names alike that are folded into one.

    Attributes:
        label: the part of the names that this line stands for.
        copies: how often this part repeats, with other numbers or names.
        is_leaf: the names end here.
        depth: number of the rows that it is below.
        rows: the rows below it that are shown; `hidden` counts those that are not.
    """

    label: str
    copies: int
    is_leaf: bool
    depth: int
    _level: int
    _entries: list[_Entry[T]] = field(repr=False)
    _starts: list[int] = field(repr=False)  # in each name, of the part of the next level
    rows: list[Row[T]] = field(default_factory=list, repr=False)
    hidden: int = 0
    _next: list[Row[T]] | None = field(default=None, repr=False)

    @property
    def values(self) -> list[T]:
        """The entries that it stands for, in the order of their names."""
        return [value for _, _, value in self._entries]

    def lines(self) -> Iterator[tuple[str, Row[T] | None]]:
        """Yield the text of each row that is shown below it, and the row; None: for those left out."""
        for row in self.rows:
            copies = f"  x {row.copies:,}" if row.copies > _MAX_NAMED else ""
            yield f"{'  ' * row.depth}{row.label or repr('')}{copies}", row
            yield from row.lines()
        if self.hidden:
            yield f"{'  ' * (self.depth + 1)}... and {self.hidden:,} more", None


def outline(entries: Iterable[_Entry[T]], *, max_rows: int | None, depth: int | None, fold: bool) -> Row[T]:
    """Arrange entries by the parts of their names between dots; return the row above all.

    Args:
        entries: name, kind and value of each; what has the same kinds under the same names repeats.
        max_rows: rows that are shown; groups with few rows in them are opened first.
        depth: levels that are opened, at most.
        fold: otherwise each name gets a row of its own.
    """
    listed = sorted(entries, key=lambda entry: natural(entry[0]))
    top = Row("", 1, False, -1, 0, listed, [0] * len(listed))
    count, level = 0, [top]
    while level and (depth is None or level[0].depth + 1 < depth):
        opened = [(row, _split(row, fold)) for row in level]
        for row, rows in sorted(opened, key=lambda pair: len(pair[1])):
            room = len(rows) if max_rows is None else max_rows - count
            if len(rows) > room and row is not top and room < _USEFUL_ROWS:
                continue
            row.rows, row.hidden = rows[:room], max(0, len(rows) - room)
            count += len(row.rows)
        level = [below for row in level for below in row.rows if not below.is_leaf]
    return top


def natural(name: str) -> str:
    """Make a key that sorts names by their letters, and numbers in them as numbers."""
    return _DIGITS.sub(_sortable, name[:_MAX_COMPARED])


def _sortable(digits: re.Match[str]) -> str:
    number = digits[0].lstrip("0")
    return f"{len(number):03}{number}"


def _split(row: Row[T], fold: bool) -> list[Row[T]]:
    """Make the rows of the next level, and join each with those below it as long as there is one only."""
    rows = []
    for below in row._next or _next_level(row, fold):
        while not below.is_leaf:
            below._next = _next_level(below, fold)
            if len(below._next) > 1:
                break
            (only,) = below._next
            only.label, only.copies = f"{below.label}.{only.label}", below.copies * only.copies
            only.depth, below = below.depth, only
        rows.append(below)
    return rows


def _next_level(row: Row[T], fold: bool) -> list[Row[T]]:
    parts: dict[tuple[str, bool], Row[T]] = {}
    for entry, start in zip(row._entries, row._starts, strict=True):
        name = entry[0]
        end = name.find(".", start) if row._level < _MAX_LEVELS else -1
        is_leaf = end < 0
        part = name[start:] if is_leaf else name[start:end]
        below = parts.get((part, is_leaf))
        if below is None:
            below = parts[part, is_leaf] = Row(part, 1, is_leaf, row.depth + 1, row._level + 1, [], [])
        below._entries.append(entry)
        below._starts.append(len(name) if is_leaf else end + 1)
    if not fold:
        return list(parts.values())
    groups: dict[Hashable, list[Row[T]]] = {}
    for below in parts.values():
        ends = zip(below._entries, below._starts, strict=True)
        alike = hash(tuple((name[start:], kind) for (name, kind, _), start in ends))
        # What is at the top has a meaning of its own, unless it is numbered.
        named = pattern(below.label) if row._level == 0 else None
        groups.setdefault((below.is_leaf, alike, named), []).append(below)
    return [_folded(rows) for rows in groups.values()]


def _folded(rows: Sequence[Row[T]]) -> Row[T]:
    first = rows[0]
    if len(rows) > 1:
        first.label, first.copies = _label([row.label for row in rows]), len(rows)
        for row in rows[1:]:
            first._entries += row._entries
            first._starts += row._starts
    return first


def pattern(part: str) -> str:
    """Put one number in the place of all numbers."""
    return _DIGITS.sub("0", part) if len(part) <= _MAX_COMPARED else part


def _label(parts: Sequence[str]) -> str:
    """Write `0..31`, `layer_0..31`, `{k_proj, q_proj}`."""
    numbered: dict[str, list[str]] = {}
    for part in parts:
        numbered.setdefault(pattern(part), []).append(part)
    labels = [_range(alike) for alike in numbered.values()]
    return labels[0] if len(labels) == 1 else _braces(labels, _MAX_NAMED)


def _range(parts: Sequence[str]) -> str:
    """Name parts that differ in their numbers only."""
    split = [_DIGITS.split(part) for part in parts]
    varying = [at for at in range(len(split[0])) if len({pieces[at] for pieces in split}) > 1]
    if len(varying) != 1:
        return parts[0] if len(parts) == 1 else f"{parts[0]}..{parts[-1]}"
    (at,) = varying
    runs: list[list[str]] = []
    for pieces in split:
        if runs and _follows(runs[-1][-1], pieces[at]):
            runs[-1][1:] = [pieces[at]]
        else:
            runs.append([pieces[at]])
    numbers = ["..".join(run) for run in runs]
    middle = numbers[0] if len(numbers) == 1 else _braces(numbers, _MAX_RUNS)
    return "".join([*split[0][:at], middle, *split[0][at + 1 :]])


def _follows(number: str, following: str) -> bool:
    return max(len(number), len(following)) < 19 and int(number) + 1 == int(following)


def _braces(labels: Sequence[str], limit: int) -> str:
    if len(labels) > limit:
        labels = [*labels[: limit - 1], "...", labels[-1]]
    return "{" + ", ".join(labels) + "}"
