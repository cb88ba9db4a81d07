"""Paths of the system: their links, the files below them, the type of their file system."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from ckpt.errors import ConfigurationError

# A directory may allow making files and forbid looking; and some file systems cannot fsync a
# directory. Names in it are durable or not, whatever we do.
_CANNOT_SYNC = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
_MOUNTS = "/proc/self/mountinfo"

LOCAL_TYPES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "zfs", "f2fs", "bcachefs",
     "hugetlbfs", "devtmpfs"}
)  # fmt: skip
"""File systems of this one kernel: no process lags behind another's writes."""

O_PATH: int = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK)
"""Finds a file without permission to read it. The substitute at least does not wait for pipes."""


def path_of(url: str) -> str:
    """Return the path in `file:///path`. As for fsspec, `%`, `#` and `?` stand for themselves."""
    scheme, separator, path = url.partition("://")
    if not separator or scheme != "file":
        return absolute(url)
    path = path.removeprefix("localhost") if path.startswith("localhost/") else path
    if not path.startswith("/"):
        raise ConfigurationError(f"{url!r}: write an absolute path as file:///absolute/path")
    return os.path.abspath(path)


def absolute(path: str) -> str:
    """Return a path from `/` on. Raises ConfigurationError if it is relative to a directory that is gone."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        text = f"{path!r} is relative to the working directory, which was removed: write an absolute path"
        raise ConfigurationError(text) from None


def expand_user(path: str) -> str:
    """Expand `~` and `~user` as a shell would. Raises ConfigurationError if there is no such user."""
    expanded = os.path.expanduser(path)
    if expanded == path and path.startswith("~"):
        user = path[1:].partition("/")[0]
        raise ConfigurationError(
            f"{path!r}: there is no user {user!r}; for a folder of that name write {'./' + path!r}"
        )
    return expanded


def is_within(path: str, root: str) -> bool:
    """Tell whether `path` is `root` or below it; both without links."""
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def is_hub_blob(path: str, root: str) -> bool:
    """Tell whether `path` is a file that a Hugging Face cache keeps for its folder `root`; both without links."""
    repository, folder = os.path.split(os.path.dirname(root))
    return folder == "snapshots" and os.path.dirname(path) == os.path.join(repository, "blobs")


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def real_path(fd: int, path: str) -> str:
    """Return the path, without links, of the open file `fd`, which was opened at `path`."""
    try:
        # One call, not one for every directory on the way; and it judges the file that was opened.
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return os.path.realpath(path)


def real_directory(path: str) -> str:
    """Return `path` without links, even if it, or the end of it, does not exist yet."""
    try:
        fd = os.open(path, O_PATH | os.O_DIRECTORY)
    except OSError:
        return os.path.realpath(path)
    with closing_fd(fd):
        return real_path(fd, path)


def list_way_to(path: str) -> None:
    """List the directories that lead to `path`, beginning with the deepest that is visible."""
    unseen = []
    directory = os.path.dirname(path)
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):
        unseen.append(directory)
        directory = os.path.dirname(directory)
    for each in (directory, *reversed(unseen)):
        try:
            os.listdir(each)
        except OSError:
            return


def link_refusal(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> OSError | None:
    """Give a file a second name; return the refusal, FileExistsError if the name is taken.

    Any other means that this file system makes no hard links, whatever number it gives: EPERM, EXDEV, 524 of NFS.
    """
    try:
        os.link(source, target)
    except OSError as error:
        return error
    return None


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable, if its file system can."""
    try:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def files_below(top: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """List every file below `top`, links not followed. Files may vanish meanwhile."""
    folders = [top]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                yield entry.path, entry


def parents_on_device(path: str) -> Iterator[str]:
    """List the directories above `path`, as far as its file system reaches."""
    path = os.path.realpath(path)
    device = os.stat(path).st_dev
    while (parent := os.path.dirname(path)) != path and os.stat(parent).st_dev == device:
        yield parent
        path = parent


def filesystem_type(path: str) -> str:
    """Return the type of the file system that `path` is (or would be) on, or `unknown`."""
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    with contextlib.suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            mount = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
            if len(mount) >= len(best) and (path + "/").startswith(mount.rstrip("/") + "/"):
                best, kind = mount, after.split(" ", 1)[0]
    return kind
