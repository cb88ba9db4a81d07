"""Draw useful time over the interval between saves, a line for each number of ranks, as SVG.

Written out here: the drawing is a page of lines and texts, and so the command needs no matplotlib, which
would take longer to import than everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 790, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 260, 56, 48
_MARKS_S = (10, 30, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400)
_MARKS = (0.99999, 0.9999, 0.999, 0.998, 0.995, 0.99, 0.98, 0.95, 0.9, 0.8, 0.5, 0.0)
_MIN_GAP = 17.0
_LIGHT = ("#8ec8e8", "#4ea3d4", "#2b7fb8", "#185a8c", "#0b3558")
_DARK = ("#27567a", "#3a7cab", "#59a2d3", "#8cc4ea", "#c8e4f8")
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 14px; } .quiet { fill: #59636e; }
.back { fill: #ffffff; } .grid { stroke: #d8dee4; } .line { fill: none; stroke-width: 2; }
"""
_STYLE_DARK = (
    "text { fill: #e6edf3; } .quiet { fill: #9198a1; } .back { fill: #0d1117; } .grid { stroke: #30363d; }"
)


@dataclass(frozen=True)
class Line:
    """Useful time with one number of ranks.

    Attributes:
        points: interval in seconds, and the useful share of the time.
        best: the interval that the plan takes, and its share.
    """

    name: str
    points: Sequence[tuple[float, float]]
    best: tuple[float, float]


def draw(title: str, lines: Sequence[Line]) -> str:
    """Return an SVG picture for light and dark pages; at most five lines, in order."""
    return "\n".join(_parts(title, lines)) + "\n"


def duration(seconds: float) -> str:
    """Write `45 s`, `12 min`, `3.5 h`, `2 d`."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length or (seconds >= length and seconds % length == 0):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def _parts(title: str, lines: Sequence[Line]) -> Iterator[str]:
    begin_s = min(line.points[0][0] for line in lines)
    end_s = max(line.points[-1][0] for line in lines)
    marks = _marks([share for line in lines for _, share in (*line.points, line.best)])
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(seconds: float) -> float:
        return _LEFT + wide * math.log(seconds / begin_s) / math.log(end_s / begin_s)

    def y(share: float) -> float:
        # The time that is not useful, on a logarithmic scale: else all lines lie at the top.
        top, bottom = (math.log(1 - mark) for mark in (marks[0], marks[-1]))
        return _TOP + high * (math.log(1 - share) - top) / (bottom - top)

    chosen = [round(at * (len(_LIGHT) - 1) / max(1, len(lines) - 1)) for at in range(len(lines))]
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">'
    )
    yield f"<style>{_STYLE}{_colors(_LIGHT, chosen)}"
    yield f"@media (prefers-color-scheme: dark) {{ {_STYLE_DARK} {_colors(_DARK, chosen)} }}</style>"
    yield f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}"/>'
    yield f'<text class="title" x="16" y="24">{escape(title)}</text>'
    yield '<text class="quiet" x="16" y="42">useful share of the time; dots: the chosen interval; lines begin where uploads keep up</text>'
    for share in marks:
        yield f'<path class="grid" d="M{_LEFT} {y(share):.1f}h{wide}"/>'
        yield (
            f'<text class="quiet" x="{_LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{100 * share:.4g} %</text>'
        )
    for mark_s in _MARKS_S:
        if begin_s <= mark_s <= end_s:
            yield f'<path class="grid" d="M{x(mark_s):.1f} {_TOP}v{high}"/>'
            yield (
                f'<text class="quiet" x="{x(mark_s):.1f}" y="{_TOP + high + 18}" text-anchor="middle">'
                f"{duration(mark_s)}</text>"
            )
    yield (
        f'<text class="quiet" x="{_LEFT + wide / 2:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">'
        "work between two saves</text>"
    )
    labels = _spread([y(line.points[-1][1]) for line in lines])
    for number, (line, label_y) in enumerate(zip(lines, labels, strict=True)):
        path = "L".join(f"{x(seconds):.1f} {y(share):.1f}" for seconds, share in line.points)
        yield f'<path class="line c{number}" d="M{path}"/>'
        yield f'<circle class="dot c{number}" cx="{x(line.best[0]):.1f}" cy="{y(line.best[1]):.1f}" r="4"/>'
        end_y = y(line.points[-1][1])
        yield f'<path class="line c{number}" d="M{_LEFT + wide} {end_y:.1f}L{_LEFT + wide + 14} {label_y:.1f}"/>'
        text = f"{line.name}: {100 * line.best[1]:.2f} % at {duration(line.best[0])}"
        yield f'<text x="{_LEFT + wide + 18}" y="{label_y + 4:.1f}">{escape(text)}</text>'
    yield "</svg>"


def _colors(colors: Sequence[str], chosen: Sequence[int]) -> str:
    return " ".join(
        f".c{number}.line {{ stroke: {colors[at]}; }} .c{number}.dot {{ fill: {colors[at]}; }}"
        for number, at in enumerate(chosen)
    )


def _marks(shares: Sequence[float]) -> list[float]:
    """Choose the marks of the axis from the share above all to that below all."""
    above = max((mark for mark in _MARKS if mark > max(shares)), key=lambda mark: -mark, default=_MARKS[0])
    below = next((mark for mark in _MARKS if mark <= min(shares)), 0.0)
    return [mark for mark in _MARKS if below <= mark <= above]


def _spread(heights: Sequence[float]) -> list[float]:
    """Move labels apart that would lie over one another, and keep them in the picture."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    placed = dict[int, float]()
    last = -math.inf
    for number in order:
        last = placed[number] = max(heights[number], last + _MIN_GAP)
    too_low = max(0.0, last - (_HEIGHT - _BOTTOM))
    return [placed[number] - too_low for number in range(len(heights))]
