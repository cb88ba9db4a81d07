"""Copy `docs/` and the pages beside it to where Zensical reads them, with links, pictures and diagrams that fit.

On GitHub a link may lead to any file of the repository. On the site it leads to the page made of that file,
or, if none is, to the file on GitHub. A link that leads nowhere is reported.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from website.diagrams import draw
from website.reference import PAGES, page_text

ROOT = Path(__file__).parents[1]
STAGED = ROOT / "build/website/docs"
_GITHUB = "https://github.com/ckpt-storage/ckpt-storage"
_SITE = "https://ckpt-storage.github.io/ckpt-storage/"

OUTSIDE = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "examples/recommender/README.md": "project/recommender.md",
}
"""Pages that stand outside of `docs/`, and where the site has them."""

_NOT_SEARCHED = ("README.md", "CHANGELOG.md")
"""What they say is explained on another page, which is the better answer."""

_MARKS = {"🟢": "good", "🟡": "rest", "🔴": "lost"}
"""Not every machine has a font for them: the site draws them by its style sheet."""

_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_PICTURE = re.compile(
    r"<picture>.*?srcset=\"([^\"]+)\".*?alt=\"([^\"]*)\" src=\"([^\"]+)\".*?</picture>", re.DOTALL
)
_MERMAID = re.compile(r"```mermaid\n(.*?)```\n", re.DOTALL)
_CODE = re.compile(r"(^[ ]*```.*?^[ ]*```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def stage() -> list[str]:
    """Write all pages below `STAGED`, and return what is wrong with their links."""
    shutil.rmtree(STAGED, ignore_errors=True)
    problems: list[str] = []
    for source, page in _pages():
        target = STAGED / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".md":
            target.write_text(_staged(source, page, problems))
        else:
            shutil.copyfile(ROOT / source, target)
    (STAGED / "reference").mkdir(exist_ok=True)
    for name in PAGES:
        (STAGED / "reference" / f"{name}.md").write_text(page_text(name))
    shutil.copytree(Path(__file__).parent / "assets", STAGED / "assets")
    return problems


def _staged(source: str, page: str, problems: list[str]) -> str:
    """Return the text of a page as the site has it."""
    text = _PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", (ROOT / source).read_text())
    for mark, meaning in _MARKS.items():
        text = text.replace(mark, f'<span class="mark-{meaning}" title="{meaning}">●</span>')
    if source in _NOT_SEARCHED:
        text = f"---\nsearch:\n  exclude: true\n---\n\n{text}"
    text = _outside_code(text, lambda prose: _with_links(prose, source, page, problems))
    return _MERMAID.sub(lambda block: _diagram(block[1], STAGED / page), text)


def _pages() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.is_file():
            source = path.relative_to(ROOT).as_posix()
            yield source, source.removeprefix("docs/")
    yield from OUTSIDE.items()


def _page_of(source: str) -> str | None:
    if source in OUTSIDE:
        return OUTSIDE[source]
    return source.removeprefix("docs/") if source.startswith("docs/") else None


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to a text, but to no link in code (links around code keep their code)."""
    hidden: list[str] = []

    def hide(code: re.Match[str]) -> str:
        hidden.append(code[0])
        return f"\x00{len(hidden) - 1}\x00"

    changed = change(_CODE.sub(hide, text))
    return re.sub("\x00([0-9]+)\x00", lambda mark: hidden[int(mark[1])], changed)


def _with_links(prose: str, source: str, page: str, problems: list[str]) -> str:
    def replace(link: re.Match[str]) -> str:
        target, mark, anchor = link[2].partition("#")
        path, wanted = "", None
        if target.startswith(_SITE):  # a page that GitHub does not have
            wanted = target.removeprefix(_SITE).replace(".html", ".md")
        elif not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        else:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
            if not (ROOT / path).exists():
                problems.append(f"{source}: the link to {link[2]} leads nowhere")
                return link[0]
            if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists():
                path = f"{path}/README.md"
            wanted = _page_of(path)
        if wanted is None:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"{link[1]}{_GITHUB}/{kind}/main/{path}{mark}{anchor}{link[3]}"
        return f"{link[1]}{os.path.relpath(wanted, posixpath.dirname(page) or '.')}{mark}{anchor}{link[3]}"

    return _LINK.sub(replace, prose)


def _diagram(text: str, page: Path) -> str:
    light, dark = (os.path.relpath(path, page.parent) for path in draw(text, STAGED / "diagrams"))
    return (
        "\n".join(
            f"[![A diagram; click for all of it]({path}#only-{theme})]({path})"
            for path, theme in ((light, "light"), (dark, "dark"))
        )
        + "\n"
    )
