"""Use a run's folder on a node only if this user has made it, and it holds no links."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat

from ckpt.errors import ConfigurationError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_own(path: str) -> None:
    """Make a folder that is for this user alone, or check one that exists.

    Raises ConfigurationError if another user has made it, or if it is a link or holds some; OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.path.islink(path):
        raise _refused(f"{path} is a link")
    folder = os.open(path, _FOLDER)
    try:
        facts = os.fstat(folder)
        if not _is_own(folder, facts.st_uid):
            raise _refused(f"{path} was made by another user (uid {facts.st_uid})")
        if facts.st_mode & 0o077:
            with contextlib.suppress(OSError):  # not every file system has modes
                os.fchmod(folder, 0o700)
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                _check(os.path.join(path, name), os.stat(name, dir_fd=folder, follow_symlinks=False), facts)
    finally:
        os.close(folder)


def open_own(folder: str, name: str, flags: int) -> int:
    """Open a file of a run's folder, and follow no link. Raises OSError."""
    directory = os.open(folder, _FOLDER)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    finally:
        os.close(directory)


def _is_own(folder: int, uid: int) -> bool:
    if uid == os.geteuid():
        return True
    # A file system may show what this user makes as another one's: NFS does, with root_squash.
    name = f".ckpt-user-{secrets.token_hex(8)}.tmp"
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return False
    try:
        return os.fstat(file).st_uid == uid
    finally:
        os.close(file)
        os.unlink(name, dir_fd=folder)


def _check(path: str, facts: os.stat_result, folder: os.stat_result) -> None:
    if stat.S_ISLNK(facts.st_mode):
        raise _refused(f"{path} is a link")
    if facts.st_uid not in (folder.st_uid, 0):
        raise _refused(f"{path} was made by another user (uid {facts.st_uid})")


def _refused(fault: str) -> ConfigurationError:
    text = f"{fault}: a run's folder on a node is used only by the user who made it, without links; remove it"
    return ConfigurationError(f"{text}, or give another folder")
