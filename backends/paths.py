"""Paths of the system: what is behind them once links are followed, below them, and which file system they are on."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from ckpt.errors import ConfigurationError

__all__ = [
    "LOCAL_TYPES",
    "O_PATH",
    "files_below",
    "filesystem_type",
    "is_within",
    "list_way_to",
    "path_of",
    "real_directory",
    "real_path",
]

# File systems of this one kernel: what one process wrote, every other sees. All else may lag.
LOCAL_TYPES = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "tmpfs",
        "ramfs",
        "overlay",
        "zfs",
        "f2fs",
        "bcachefs",
        "hugetlbfs",
        "devtmpfs",
    }
)

# Finds a file without opening it, so it needs no permission to read. Where it is unknown, O_NONBLOCK keeps a
# pipe from being waited for.
O_PATH: int = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK)


def path_of(url: str) -> str:
    """The path in `file:///path`, character by character as fsspec takes it: `%`, `#` and `?` are themselves."""
    scheme, separator, path = url.partition("://")
    if not separator or scheme != "file":
        return os.path.abspath(url)
    path = path.removeprefix("localhost") if path.startswith("localhost/") else path
    if not path.startswith("/"):
        raise ConfigurationError(f"{url!r}: write an absolute path as file:///absolute/path")
    return os.path.abspath(path)


def is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def real_path(fd: int, path: str) -> str:
    """The path, without links, of the open file `fd`, once found under `path`."""
    try:
        # One call instead of one for every directory on the way, and what was opened is what is judged.
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return os.path.realpath(path)


def real_directory(path: str) -> str:
    """`path` without links, also where it, or the end of it, is not there yet."""
    try:
        fd = os.open(path, O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return os.path.realpath(path)
    try:
        return real_path(fd, path)
    finally:
        os.close(fd)


def list_way_to(path: str) -> None:
    """List the directories that lead to `path`, from the deepest that is visible on."""
    unseen: list[str] = []
    directory = os.path.dirname(path)
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):
        unseen.append(directory)
        directory = os.path.dirname(directory)
    for each in (directory, *reversed(unseen)):
        try:
            with os.scandir(each) as entries:
                for _ in entries:
                    pass
        except OSError:
            return


def files_below(top: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every file below `top`, links not followed; what vanishes meanwhile is passed over."""
    try:
        entries = list(os.scandir(top))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(entry.path)
        else:
            yield entry.path, entry


def filesystem_type(path: str) -> str:
    """The type of the file system that `path` is (or would be) on, `unknown` where the system does not tell."""
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts,
    ):
        for line in mounts:
            before, _, after = line.partition(" - ")
            mount = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
            if len(mount) >= len(best) and (path + "/").startswith(mount.rstrip("/") + "/"):
                best, kind = mount, after.split(" ", 1)[0]
    return kind
