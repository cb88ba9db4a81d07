"""Draw what the `ckpt` command shows on a terminal of 80 columns, from its real output: `make screens`."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from support.commands import flip
from support.terminal import CKPT, Terminal

import ckpt
from website.pictures import FOLDER

COLUMNS = 80
_CHARACTER, _LINE, _EDGE = 8.4, 19, 18
_MONO = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', monospace"
_THEMES = {
    "light": {
        "ground": "#ffffff", "edge": "#d1d9e0", "default": "#1f2328", "green": "#116329", "brown": "#7d4e00",
        "red": "#cf222e", "cyan": "#1b7c83",
    },
    "dark": {
        "ground": "#0d1117", "edge": "#3d444d", "default": "#e6edf3", "green": "#3fb950", "brown": "#d29922",
        "red": "#ff7b72", "cyan": "#39c5cf",
    },
}  # fmt: skip

Run = tuple[str, str, bool]
"""Characters of one colour: the text, the colour as pyte names it, whether it is bold."""


def screens() -> Iterator[tuple[str, str, list[list[Run]]]]:
    """Run the commands; yield the name, a title and the lines of each screen."""
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        root = Path(folder)
        _fill(root)
        yield "screen-start", "ckpt without arguments", _shown(root, "")
        yield "screen-help", "ckpt --help", _shown(root, "--help")
        yield "screen-ls", "ckpt ls and ckpt verify", _shown(root, "ls runs", "verify runs/step-100")
        yield "screen-inspect", "ckpt inspect", _shown(root, "inspect runs/step-200")
        yield (
            "screen-progress",
            "ckpt drain",
            _shown(root, "drain large durable --max-bandwidth 8MB/s", until="MiB/s"),
        )


def _fill(root: Path) -> None:
    """Make a run of two checkpoints, the first of them damaged, and an interrupted save."""
    for step in (100, 200, 300):
        generator = torch.Generator().manual_seed(step)
        shapes = {"attn.qkv": (96, 32), "attn.out": (32, 32), "mlp.up": (128, 32), "mlp.down": (32, 128)}
        model = {
            f"layers.{layer}.{name}.weight": torch.randn(shape, generator=generator).bfloat16()
            for layer in range(12)
            for name, shape in shapes.items()
        }
        optimizer = {
            name: {"exp_avg": value.float(), "exp_avg_sq": value.float()} for name, value in model.items()
        }
        state: dict[str, Any] = {"model": model, "optim": {"state": optimizer, "lr": 3e-4}, "step": step}
        ckpt.save(
            state, root / f"runs/step-{step}", tags={"step": f"{step}", "metric.loss": f"{90 / step:.3f}"}
        )
    (data,) = (root / "runs/step-100").glob("rank-00000/*-0.distcp")
    flip(data, 40_000)
    for name in ("commit.json", ".metadata"):
        (root / "runs/step-300" / name).unlink()
    ckpt.save({f"w{number}": torch.zeros(1 << 20) for number in range(12)}, root / "large/step-1")


def _shown(root: Path, *commands: str, until: str | None = None) -> list[list[Run]]:
    """Run commands on a terminal one after the other; return its lines, at the moment when `until` is seen."""
    lines: list[list[Run]] = []
    for command in commands:
        words = command.split()
        lines += [[("$ ", "green", True), (f"ckpt {command}".rstrip(), "default", True)]]
        with Terminal(CKPT, *words, columns=COLUMNS, lines=70, cwd=root) as terminal:
            if until is not None:
                terminal.wait_until(lambda text: until in text)
            else:
                terminal.wait()
            count = len(terminal.text.splitlines())
            lines += [_runs(terminal.screen.buffer[row]) for row in range(count)]
    return lines


def _runs(row: Any) -> list[Run]:
    """Join the characters of a line that look alike."""
    cells = [row[column] for column in range(COLUMNS)]
    alike = itertools.groupby(cells, key=lambda cell: (cell.fg, cell.bold))
    return [("".join(cell.data for cell in group), *look) for look, group in alike]


def drawn(title: str, lines: Sequence[Sequence[Run]], theme: str) -> str:
    """Draw a screen as SVG."""
    colours = _THEMES[theme]
    width, height = round(COLUMNS * _CHARACTER + 2 * _EDGE), len(lines) * _LINE + 2 * _EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{colours["ground"]}" stroke="{colours["edge"]}"/>',
        f'<g font-family="{_MONO}" font-size="14">',
    ]
    for number, line in enumerate(lines):
        column, y = 0, _EDGE + 14 + number * _LINE
        for text, colour, bold in line:
            weight = ' font-weight="600"' if bold else ""
            fill = colours.get(colour, f"#{colour}")
            for words in re.finditer(r"\S+(?: \S+)*", text):  # renderers disagree about several spaces
                x, length = _EDGE + (column + words.start()) * _CHARACTER, len(words[0]) * _CHARACTER
                place = f'x="{x:.1f}" y="{y}" textLength="{length:.1f}"'
                parts.append(f'<text {place} fill="{fill}"{weight}>{escape(words[0])}</text>')
            column += len(text)
    return "\n".join([*parts, "</g>", "</svg>", ""])


def main() -> None:
    """Draw all screens, light and dark."""
    for name, title, lines in screens():
        for theme in _THEMES:
            (FOLDER / f"{name}-{theme}.svg").write_text(drawn(title, lines, theme))


if __name__ == "__main__":
    main()
