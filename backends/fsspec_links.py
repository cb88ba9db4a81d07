"""Symbolic links as file systems of fsspec show them: those of this machine, and of sftp, which has its own words."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any

from ckpt.backends.fsspec_connection import LOCAL, FsspecConnection
from ckpt.backends.paths import is_within

_SFTP = frozenset({"sftp", "ssh"})


def is_link(files: FsspecConnection, path: str) -> bool:
    """Return True if a symbolic link is at `path`."""
    if files.protocol in LOCAL:
        return os.path.islink(path)
    return files.protocol in _SFTP and files.run(lambda fs: stat.S_ISLNK(fs.ftp.lstat(path).st_mode or 0))


def unlink(files: FsspecConnection, path: str) -> None:
    """Remove the symbolic link at `path`: sftp's own removal takes a link to a folder for a folder."""
    if files.protocol in LOCAL:
        os.unlink(path)
    else:
        files.run(lambda fs: fs.ftp.remove(path))


def leads_out(files: FsspecConnection, path: str) -> bool:
    """Return True if a link to a folder outside of the root is at `path`; those of this machine are refused anyway."""
    if files.protocol not in _SFTP:
        return False
    root = files.root

    def leads_out(fs: Any) -> bool:
        if not stat.S_ISLNK(fs.ftp.lstat(path).st_mode or 0):
            return False
        target = fs.ftp.normalize(path)
        return fs.isdir(target) and not is_within(target, fs.ftp.normalize(root))

    try:
        return files.run(leads_out)
    except FileNotFoundError:  # it leads nowhere, or there is nothing
        return False


def links_out(files: FsspecConnection, folder: str) -> Iterator[str]:
    """List the paths of the links directly below a folder that lead out of the root."""
    if files.protocol in _SFTP:
        for path, facts in files.entries(folder):
            if facts.get("type") == "link" and leads_out(files, path):
                yield path
