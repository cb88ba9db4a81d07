"""Write small tables as HTML for notebooks: light or dark as the page is, without scripts, all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ckpt.words import printable, size

_MAX_TEXT = 200
_CELL = "text-align:left;padding:2px 12px 2px 0;border:none;background:none;vertical-align:top"
_BAR = "display:inline-block;height:.7em;margin-right:.5em;background:currentColor;opacity:.55"


def titled(title: str, facts: Iterable[tuple[str, str]], *details: str) -> str:
    """Write a title, a table of facts (name and HTML), and what follows it."""
    rows = "".join(
        f'<tr><th style="{_CELL}">{text(name)}</th><td style="{_CELL}">{html}</td></tr>'
        for name, html in facts
    )
    table = f'<table style="border:none">{rows}</table>'
    return f'<div style="font-family:inherit"><strong>{text(title)}</strong>{table}{"".join(details)}</div>'


def text(value: object) -> str:
    """Write a value as a text of bounded length; the middle of a longer one is left out."""
    plain = printable(value)
    if len(plain) > _MAX_TEXT:
        plain = f"{plain[: _MAX_TEXT // 2]}…{plain[-_MAX_TEXT // 2 :]}"
    return escape(plain)


def folded(summary: str, heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table that is opened by a click, or by the keyboard."""
    head = "".join(f'<th style="{_CELL}">{text(cell)}</th>' for cell in heading)
    lines = (
        "<tr>" + "".join(f'<td style="{_CELL}">{text(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    table = (
        f'<table style="border:none"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    )
    return f"<details><summary>{text(summary)}</summary>{table}</details>"


def bars(sizes: Mapping[str, int]) -> str:
    """Draw a bar for each size in bytes."""
    largest = max([1, *sizes.values()])
    return "<br>".join(
        f'<span style="{_BAR};width:{12 * nbytes / largest:.2f}em"></span>{text(name)} {size(nbytes)}'
        for name, nbytes in sizes.items()
        if nbytes
    )
