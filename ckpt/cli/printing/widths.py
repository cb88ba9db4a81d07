"""Fit texts into a terminal: lines break between words, long names are cut in the middle, columns left out."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_NARROW, _NARROWEST = 24, 8
"""Characters that a column of texts has, if it must be cut; and if there is no room even for that."""

_GAP = 2


def fitting(
    widths: Sequence[int], room: int, *, names: int, right: Collection[int], optional: int
) -> list[int]:
    """Choose the widths of columns, without those of the last `optional` many that are left out."""
    for kept in range(len(widths), len(widths) - optional - 1, -1):
        chosen = _cut(widths[:kept], room, names, right, _NARROW)
        if _total(chosen) <= room:
            return chosen
    return _cut(chosen, room, -1, right, _NARROWEST)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _cut(widths: Sequence[int], room: int, names: int, right: Collection[int], least: int) -> list[int]:
    """Cut the widest column of texts again and again, that of names last, none below `least`."""
    chosen = list(widths)
    texts = [at for at in range(len(widths)) if at not in right and at != names]
    for columns in (texts, [names] * (names >= 0)):
        while columns and (excess := _total(chosen) - room) > 0:
            widest = max(columns, key=chosen.__getitem__)
            others = [chosen[at] for at in columns if at != widest]
            cut = min(excess, max(1, chosen[widest] - max([least, *others])), chosen[widest] - least)
            if cut <= 0:
                break
            chosen[widest] -= cut
    return chosen


def cut_in_the_middle(text: str, width: int) -> str:
    """Leave out the middle of a text that is wider than `width` cells."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    left = set_cell_size(text, width // 2).rstrip()
    return f"{left}…{set_cell_size(text[::-1], width - 1 - cell_len(left))[::-1].lstrip()}"


def print_wrapped(console: Console, markup: str) -> None:
    """Print text in lines that break between words alone: a path stays whole, to be copied."""
    from rich.cells import cell_len
    from rich.text import Text

    text = Text.from_markup(markup, emoji=False)
    breaks, begin = [], 0
    for word in re.finditer(r"\S+", text.plain):
        fits_alone = cell_len(word[0]) <= console.width
        if fits_alone and cell_len(text.plain[begin : word.end()]) > console.width:
            breaks.append(begin := word.start())
    for line in text.divide(breaks):
        if breaks:
            line.rstrip()
        console.print(line, highlight=False, soft_wrap=True)
