"""Look at files that a process is writing: each may be renamed or removed at any moment."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def any_file(folder: Path, pattern: str, *, at_least_bytes: int = 0) -> bool:
    """Tell whether there is a file below `folder` that matches, and is so large."""
    with suppress(FileNotFoundError):
        return any(path.stat().st_size >= at_least_bytes for path in folder.rglob(pattern))
    return False
