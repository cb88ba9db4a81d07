"""The pictures of screens in the documentation show what the command prints today, but for ids and numbers."""

from __future__ import annotations

import re
from html import unescape

import pytest

from website.pictures import FOLDER
from website.screens import drawn, screens


def _words(svg: str) -> list[str]:
    text = " ".join(unescape(each) for each in re.findall(r"<text [^>]*>([^<]*)</text>", svg))
    plain = re.sub(
        r"sha256:[0-9a-f]{64}|ckpt-[a-z0-9_]{8}\b|\b[0-9a-f]{16}\b|[0-9][0-9.,:T+-]*|[━╸╺]+", "#", text
    )
    return re.sub(r"(# )+", "# ", f"{plain} ").split()


@pytest.mark.long
def test_the_screens_are_those_of_the_command() -> None:
    names = set()
    for name, title, lines in screens():
        for theme in ("light", "dark"):
            shown = (FOLDER / f"{name}-{theme}.svg").read_text()
            assert _words(shown) == _words(drawn(title, lines, theme)), f"{name}: run `make screens`"
            names.add(f"{name}-{theme}.svg")
    assert names == {path.name for path in FOLDER.glob("screen-*")}
