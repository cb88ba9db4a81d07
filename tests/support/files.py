"""Look at files that a process is writing, each of which may be renamed or removed at any moment; damage files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def any_file(folder: Path, pattern: str, *, at_least_bytes: int = 0) -> bool:
    """Tell whether there is a file below `folder` that matches, and is so large."""
    with suppress(FileNotFoundError):
        return any(path.stat().st_size >= at_least_bytes for path in folder.rglob(pattern))
    return False


def damage(checkpoint: Path) -> None:
    """Flip a bit in the middle of the largest file of a checkpoint."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
