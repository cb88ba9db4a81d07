"""Check a built site: every link and anchor leads somewhere, nothing is fetched from elsewhere, no list got lost."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from website.reference import names_on

_FETCHED = {"script": "src", "img": "src", "source": "srcset", "iframe": "src"}
_STYLES = {"stylesheet", "preload", "icon", "shortcut icon"}


class _Page(HTMLParser):
    """Collect the links, anchors and fetched files of a page, and lines that should have been a list."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.fetched: list[str] = []
        self.lost_lists: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if values.get(_FETCHED.get(tag, "-")):
            self.fetched.append(values[_FETCHED[tag]])
        if tag == "link" and values.get("rel") in _STYLES:
            self.fetched.append(values["href"])
        if tag in ("p", "pre", "code"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, text: str) -> None:
        if self._open == ["p"]:
            self.lost_lists += re.findall(r"(?m)^(?:- |[0-9]+\. |\|.*\||```).*$", text)


def check_site(site: Path) -> list[str]:
    """Return what is wrong with the pages of a folder; none may refer to a file that is not in it."""
    pages = {path.resolve(): _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        problems += [f"{where}: {each} is fetched from elsewhere" for each in page.fetched if _is_far(each)]
        problems += [f"{where}: no list, but text: {each}" for each in page.lost_lists]
        near = [each for each in (*page.links, *page.fetched) if not _is_far(each)]
        # The page for what is not there refers to the root of a server.
        problems += (
            [] if path.name == "404.html" else [f"{where}: {each}" for each in _broken(near, path, pages)]
        )
    for name, expected in names_on().items():
        missing = expected - pages[(site / f"reference/{name}.html").resolve()].anchors
        problems += [f"reference/{name}.html: {each} is not described" for each in sorted(missing)]
    return problems


def _is_far(link: str) -> bool:
    return bool(urllib.parse.urlsplit(link).scheme) or link.startswith("//")


def _broken(links: list[str], path: Path, pages: dict[Path, _Page]) -> Iterator[str]:
    for link in sorted(set(links)):
        parts = urllib.parse.urlsplit(link)
        target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
        target = target / "index.html" if target.is_dir() else target
        if not target.exists():
            yield f"{link} leads nowhere"
        elif target in pages and parts.fragment and not parts.fragment.startswith(("__", ":~:")):
            known = urllib.parse.unquote(parts.fragment) in pages[target].anchors
            yield from () if known else (f"{link} has no such anchor",)
