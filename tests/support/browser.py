"""A headless Chromium without a network, for pages that are opened from disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AXE = Path(__file__).parents[1] / "browser/node_modules/axe-core/axe.min.js"
SHOTS = Path(os.environ.get("CKPT_SHOTS", ""))
"""Where pictures of the pages are kept, if CKPT_SHOTS names a folder."""


def needs() -> Any:
    """Return what drives the browser. Skips the test where something is missing; with BROWSER=required it fails."""
    missing = None
    if shutil.which("chromium") is None:
        missing = "chromium is not installed"
    elif not AXE.exists():
        missing = "axe-core is not installed"
    try:
        from playwright import sync_api
    except ImportError:
        missing = missing or "playwright is not installed"
    if missing is None:
        return sync_api
    if os.environ.get("BROWSER") == "required":
        pytest.fail(missing)
    pytest.skip(f"{missing}: `make test-browser` installs it (root, apt, npm)")


@contextmanager
def chromium() -> Iterator[Any]:
    """Run the browser; each page gets a context of its own."""
    with needs().sync_playwright() as driver:
        # Root needs --no-sandbox; the pages are our own, and may not reach anything.
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Any,
    path: Path,
    *,
    width: int = 1280,
    scheme: str = "light",
    inspected: bool = False,
    faultless: bool = True,
) -> Iterator[Any]:
    """Open a page from disk with the network off. Any error of its scripts, or request elsewhere, is a failure.

    `inspected` lets a test put a script of its own into the page, which its policy forbids.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, bypass_csp=inspected
    )
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    page.on(
        "request", lambda sent: None if sent.url.startswith(("file:", "data:")) else problems.append(sent.url)
    )
    page.goto(path.as_uri())
    page.wait_for_selector("main section")
    yield page
    context.close()
    assert problems == [] or not faultless


def faults(page: Any) -> list[tuple[str, str, str]]:
    """Run axe-core; return the serious and critical violations."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [
        (each["impact"], each["id"], each["nodes"][0]["html"])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
