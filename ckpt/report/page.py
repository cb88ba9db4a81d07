"""Make the page: one file, whose scripts and styles are inside and may do nothing but draw."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

_STYLE = "page.css"
_SCRIPTS = ("elements.js", "treemap.js", "charts.js", "page.js")


def page_of(facts: Mapping[str, Any], title: str) -> str:
    """Return the page that draws `facts`; names and texts in it are data, never markup."""
    style, script = _text(_STYLE), "".join(map(_text, _SCRIPTS))
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Template(_text("page.html")).substitute(
        policy=policy, title=html.escape(title), style=style, script=script, data=embedded(facts)
    )


def embedded(facts: Mapping[str, Any]) -> str:
    """Encode data for a `<script>` of the page: in ASCII, without any character that could end it."""
    text = json.dumps(facts, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return files("ckpt.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
