"""Draw the pictures of the documentation, light and dark: `python -m website.pictures`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs/pictures"
_SANS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_MONO = "ui-monospace, SFMono-Regular, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Colours:
    """The colours of a theme."""

    text: str
    faint: str
    line: str
    data: str
    record: str
    commit: str
    before: str
    on_fill: str


THEMES = {
    "light": Colours("#1f2328", "#59636e", "#d1d9e0", "#0969da", "#8250df", "#1a7f37", "#9a6700", "#ffffff"),
    "dark": Colours("#e6edf3", "#9198a1", "#3d444d", "#1f6feb", "#8957e5", "#2ea043", "#d29922", "#ffffff"),
}


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the SVG text of every picture."""
    for theme, colours in THEMES.items():
        yield f"commit-{theme}.svg", _commit(colours)
        yield f"tree-{theme}.svg", _tree(colours)


def _svg(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join([f'{head} role="img">', f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def _text(
    x: float, y: float, words: str, colour: str, *, size: int = 13, font: str = _SANS, **more: str
) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" font-family="{font}"{extra}>{escape(words)}</text>'


def _bar(x: float, y: float, width: float, words: str, fill: str, colours: Colours) -> list[str]:
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="24" rx="4" fill="{fill}"/>',
        _text(x + width / 2, y + 16.5, words, colours.on_fill, size=12, text_anchor="middle"),
    ]


def _commit(colours: Colours) -> str:
    """A save in time, from left to right."""
    c, parts = colours, []
    lanes = (("rank 0", 190, 250), ("rank 1", 230, 210), ("rank 2", 150, 290))
    for row, (name, data, _) in enumerate(lanes):
        y = 44 + 34 * row
        parts.append(_text(16, y + 16.5, name, c.text))
        parts += _bar(80, y, data, "data files", c.data, c)
        parts += _bar(84 + data, y, 70, "manifest", c.record, c)
    parts += _bar(420, 44, 56, "index", c.record, c)
    parts += _bar(486, 44, 104, "commit.json", c.commit, c)
    parts += _bar(600, 44, 84, ".metadata", c.record, c)
    commit_x = 590
    parts += [
        f'<line x1="{commit_x}" y1="26" x2="{commit_x}" y2="196" stroke="{c.commit}" stroke-width="2" stroke-dasharray="5 4"/>',
        _text(commit_x, 18, "one atomic put: the commit", c.commit, text_anchor="middle", font_weight="600"),
        f'<line x1="406" y1="40" x2="406" y2="142" stroke="{c.line}" stroke-width="1.5"/>',
        _text(406, 36, "all ranks reported", c.faint, size=11, text_anchor="end"),
        f'<rect x="80" y="156" width="{commit_x - 84}" height="40" rx="6" fill="none" stroke="{c.before}" stroke-width="1.5"/>',
        _text(96, 173, "killed here, at any moment:", c.before, font_weight="600"),
        _text(
            96,
            189,
            "the checkpoint before loads, bit for bit; ckpt gc removes what was written",
            c.text,
            size=12,
        ),
        f'<rect x="{commit_x + 4}" y="156" width="202" height="40" rx="6" fill="none" stroke="{c.commit}" stroke-width="1.5"/>',
        _text(commit_x + 18, 173, "killed here:", c.commit, font_weight="600"),
        _text(commit_x + 18, 189, "the new checkpoint loads", c.text, size=12),
        _text(16, 222, "time", c.faint, size=12),
        f'<path d="M 52 218 H 790 m -7 -4 l 7 4 l -7 4" fill="none" stroke="{c.faint}" stroke-width="1.5"/>',
    ]
    return _svg(812, 234, "How a save commits", parts)


_TREE = (
    ("step-1000/", "", "text"),
    ("├─ rank-00000/", "", "text"),
    ("│  ├─ 7f3a…-0.distcp", "tensors and objects of rank 0, as torch.save writes them", "data"),
    ("│  ├─ 7f3a…-1.distcp", "each rank writes several files at the same time", "data"),
    ("│  ├─ 7f3a….json", "manifest: a checksum for each 512 KiB", "record"),
    ("│  └─ 51be….index", "what is in the checkpoint, and where", "record"),
    ("├─ rank-00001/", "no rank writes where another does", "text"),
    ("│  └─ …", "", "text"),
    ("├─ commit.json", "lists and seals all of it; without it there is no checkpoint", "commit"),
    ("└─ .metadata", "the same for stock PyTorch, which reads these files too", "record"),
)


def _tree(colours: Colours) -> str:
    """What lies in a checkpoint."""
    parts = []
    for row, (name, about, kind) in enumerate(_TREE):
        y, colour = 26 + 25 * row, getattr(colours, kind)
        weight = "600" if kind == "commit" else "400"
        parts.append(
            _text(16, y, name, colours.text, size=14, font=_MONO, xml__space="preserve", font_weight=weight)
        )
        if about:
            parts.append(
                f'<rect x="236" y="{y - 11}" width="6" height="15" rx="2" fill="{colour if kind != "text" else colours.line}"/>'
            )
            parts.append(
                _text(254, y, about, colours.text if kind == "commit" else colours.faint, font_weight=weight)
            )
    return _svg(700, 26 + 25 * len(_TREE), "What lies in a checkpoint", parts).replace(
        "xml--space", "xml:space"
    )


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
