"""Stage the pages, build them with Zensical, and check what came out; any warning is an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from website.checks import check_site
from website.staging import STAGED, stage

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build/website/site"
_WORKER = "https://unpkg.com/iframe-worker/shim"
"""What searches pages that are opened from disk; Zensical would fetch it from there."""
_NAMED_PAGE = re.compile(r"(<code>docs/([a-z-]+)\.md</code>)(?!</a>)")
"""How docstrings refer to a page."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def main() -> int:
    started_s = time.monotonic()
    problems = stage()
    if not problems:
        problems = _build() or check_site(SITE)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    pages = len(list(SITE.rglob("*.html")))
    print(f"{pages} pages in {time.monotonic() - started_s:.0f} s: open {SITE / 'index.html'}")
    return 0


def _build() -> list[str]:
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output = _COLOURS.sub("", done.stdout + done.stderr)
    # --strict ends with a traceback, and counts no warning of mkdocstrings.
    output = output.partition("Traceback")[0].replace(f"{STAGED}/", "")
    warnings = re.search(r"(?m)^(Warning|griffe|mkdocstrings|autorefs)\b", output)
    if done.returncode or warnings:
        return [output, "the build has warnings"]
    for page in SITE.rglob("*.html"):
        root = os.path.relpath(SITE, page.parent)
        text = page.read_text().replace(_WORKER, f"{root}/assets/iframe-worker.js")
        page.write_text(_NAMED_PAGE.sub(rf'<a href="{root}/\2.html">\1</a>', text))
    return []


if __name__ == "__main__":
    sys.exit(main())
