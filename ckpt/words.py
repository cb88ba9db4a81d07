"""Write sizes, ages, counts, names and tags for people."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

OLD_VERSIONS = (
    "the bucket keeps old versions: what is deleted stays, and is paid for, until a lifecycle rule with "
    "NoncurrentVersionExpiration removes it, or its lock ends"
)
METRIC_TAG = "metric."
"""The names of tags that are metrics of a manager begin with it."""

_FRACTION = re.compile(r"-?[0-9]+\.[0-9]+(e[-+]?[0-9]+)?")


def printable(text: object, *, keep: str = "") -> str:
    """Write control characters as escapes, except those to `keep`."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "backslashreplace").decode()
        for c in plain
    )


def shown(text: object) -> str:
    """Make a text fit for a terminal: without control characters, and without rich's markup."""
    from rich.markup import escape

    return escape(printable(text))


def size(nbytes: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def count(number: int, noun: str) -> str:
    """Write `1 file`, `2 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def age(seconds: float | None) -> str:
    """Write a span of time in its largest unit."""
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def tags_text(tags: Mapping[str, str], limit: int = 8) -> str:
    """Write tags for people: numbers with few digits, the first `limit` tags."""
    texts = [f"{name}={_short_number(value)}" for name, value in itertools.islice(tags.items(), limit)]
    if len(tags) > limit:
        texts.append(f"and {len(tags) - limit:,} more")
    return ", ".join(texts)


def _short_number(text: str) -> str:
    if len(text) < 9 or not _FRACTION.fullmatch(text):  # such as a date or a hash, which are no numbers
        return text
    return f"{float(text):.4g}"
