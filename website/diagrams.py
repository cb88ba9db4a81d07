"""Draw Mermaid diagrams while the site is built, so that its pages need neither a network nor a script for them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

_KEPT = Path(__file__).parents[1] / "build/website/diagrams"
"""Drawing takes seconds: what was drawn for the same text is used again."""


def draw(text: str, folder: Path) -> tuple[Path, Path]:
    """Draw a diagram for light pages and for dark ones as SVG files in a folder."""
    import mermaidx  # it is in the environment of `make docs` alone

    folder.mkdir(parents=True, exist_ok=True)
    _KEPT.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{mermaidx.__name__}\n{text}".encode()).hexdigest()[:16]
    drawn = []
    for shade, theme in (("light", "neutral"), ("dark", "dark")):
        kept = _KEPT / f"{name}-{shade}.svg"
        if not kept.exists():
            kept.write_text(mermaidx.render(text, theme=theme).svg())
        drawn.append(Path(shutil.copy(kept, folder)))
    return drawn[0], drawn[1]
