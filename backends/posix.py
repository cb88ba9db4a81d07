"""A store in a directory: on a local disk, NFS, Lustre or a FUSE mount.

A put writes a temporary file beside its final name, never seeking back (FUSE mounts of object
stores allow nothing else), makes it durable, and only then gives it its name: no short file ever
stands under a final name. Nothing here depends on files of another client.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ckpt.backends import paths
from ckpt.backends.base import (
    WRITE_SIZE_BYTES,
    Capabilities,
    ObjectStat,
    PutMode,
    check_kept,
    check_key,
    delete_in_batches,
    is_key,
    part_size_bytes,
)
from ckpt.backends.bodies import Body, body_errors_unchanged, open_part, remaining, showing
from ckpt.backends.cancellable_reads import IOV_MAX, Reads, read_file
from ckpt.backends.options import take_options
from ckpt.backends.posix_links import PosixLinks
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    NotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
    Truncated,
    UnsafeContent,
)

__all__ = ["PosixStore"]

_FEW_KEYS = 256
_TEMPORARY = re.compile(r"^\.(.+)\.[0-9a-f]{16}\.ckpt-tmp$")

_ERRORS: Mapping[type[StorageError], tuple[int, ...]] = {
    NotFound: (errno.ENOENT, errno.ENOTDIR),
    AlreadyExists: (errno.EEXIST,),
    AccessDenied: (errno.EACCES, errno.EPERM, errno.EROFS),
    StorageFull: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    StorageUnavailable: (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
}


class PosixStore(PosixLinks):
    """A directory.

    Options:
        fsync: make files and directories durable against power loss before a put returns (default
            True). Without it a checkpoint survives the death of processes, not that of the machine.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 4) -> None:
        self._fsync = bool(take_options("file", options or {}, {"fsync": True})["fsync"])
        self._root = paths.path_of(url)
        self.url = self.directory = self._root
        self.threads = threads
        self._durable: set[str] = set()  # directories whose own names are durable

    @cached_property
    def _real_root(self) -> str:
        return os.path.realpath(self._root)  # not when the store is made: a mount can hang

    @cached_property
    def _filesystem(self) -> str:
        return paths.filesystem_type(self._root)

    @cached_property
    def capabilities(self) -> Capabilities:
        local = self._filesystem in paths.LOCAL_TYPES
        return Capabilities(
            conditional_create=local,
            atomic_replace=local,
            list_after_write=local,
            cross_client_visibility=local,
        )

    @cached_property
    def reads(self) -> Reads | None:
        return None if self._filesystem in paths.LOCAL_TYPES else Reads()  # others can hang

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        path = self._path(key)
        directory, name = os.path.split(path)
        self._refuse_outside(paths.real_directory(directory), key)
        temporary = os.path.join(directory, f".{name}.{secrets.token_hex(8)}.ckpt-tmp")
        try:
            with body_errors_unchanged(), self._translated(key, "write", settled=True):
                self._write(temporary, body, key)
            with self._translated(key, "give the file its name"):
                _publish(temporary, path, mode)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if self._fsync:
            with self._translated(key, "make the file's name durable", settled=False):
                self._make_names_durable(directory)

    def _write(self, temporary: str, body: Body, key: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(temporary, flags, 0o666)
        except FileNotFoundError:
            self._make_directory(os.path.dirname(temporary))
            fd = os.open(temporary, flags, 0o666)
        with paths.closing_fd(fd):
            size = part_size_bytes(body.nbytes, self.part_size_bytes or WRITE_SIZE_BYTES, self.capabilities)
            if self._fsync and self._filesystem == "fuse.rclone":
                _refuse_write_back(fd, self.url, key)
            for start in range(0, body.nbytes, size):
                with open_part(body, start, min(start + size, body.nbytes)) as part:
                    if part.pace is not None:
                        part.pace(part.nbytes)
                    _write_all(fd, part.buffers)
                if self._fsync:
                    _begin_writeback(fd, start, size)
            if self._fsync:
                os.fsync(fd)
            written = os.fstat(fd).st_size
        check_kept(written, body.nbytes, url=self.url, key=key)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        # Without O_NONBLOCK, a pipe that stands under a file's name would be waited for.
        flags = os.O_RDONLY | os.O_NONBLOCK
        begun = contextlib.nullcontext() if self.reads is None else self.reads.begin()
        with showing(buffers) as came, self._opened(key, "read", flags) as fd, begun as read:
            got = read_file(fd, offset, buffers, read, came)
            wanted = sum(buffer.nbytes for buffer in buffers)
            if got < wanted:
                text = f"ends at byte {os.fstat(fd).st_size}"
                raise Truncated(text, url=self.url, key=key, start=offset, stop=offset + wanted)

    def stat(self, key: str) -> ObjectStat:
        with self._opened(key, "stat", paths.O_PATH) as fd:
            return _stat(key, os.fstat(fd))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        # Start at the deepest directory that the prefix names whole, not at the root.
        top = self._folder(prefix.rpartition("/")[0])
        with self._translated(prefix, "list"):
            for path, entry in paths.files_below(top):
                key = self._key(path)
                if key.startswith(prefix) and is_key(key) and not _TEMPORARY.match(entry.name):
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield _stat(key, facts)

    def delete(self, keys: Iterable[str]) -> None:
        # In threads: a shared file system takes its time for each.
        delete_in_batches([*keys], self._delete, batch=_FEW_KEYS, threads=self.threads)

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            # Not the name itself: a link is removed, never its target.
            self._refuse_outside(paths.real_directory(os.path.dirname(path)), key)
            with self._translated(key, "delete"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)

    def prepare(self, prefix: str) -> None:
        path = self._folder(prefix)
        self._refuse_outside(paths.real_directory(path), prefix)
        with self._translated(prefix, "make the directory"):
            self._make_directory(path)

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        count = 0
        with self._translated(prefix, "abandon"):
            for path, entry in paths.files_below(self._root):
                name = _TEMPORARY.match(entry.name)
                if name is None:
                    continue
                key = self._key(path).removesuffix(entry.name) + name[1]
                with contextlib.suppress(FileNotFoundError):
                    unfinished = _stat(key, entry.stat(follow_symlinks=False))
                    if key.startswith(prefix) and (choose is None or choose(unfinished)):
                        os.unlink(path)
                        count += 1
        return count

    def folders(self, prefix: str = "") -> Iterator[str]:
        top = self._folder(prefix[:-1])
        with self._translated(prefix, "list"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in list(os.scandir(top)):
                if entry.is_dir(follow_symlinks=False) and is_key(entry.name):
                    yield entry.name

    def remove_empty(self, prefix: str = "") -> None:
        path = self._folder(prefix)
        self._refuse_outside(paths.real_directory(path), prefix)
        with contextlib.suppress(OSError):  # it is not empty, or a mount, or not ours to remove
            os.rmdir(path)

    def free_bytes(self) -> int | None:
        path = self._root
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        with self._translated("", "ask for free space"):
            usage = shutil.disk_usage(path)
        return usage.free if usage.total else None  # some network file systems do not know their size

    def _make_directory(self, path: str) -> None:
        """Create `path` and its parents; another client may do so meanwhile."""
        parent = os.path.dirname(path)
        try:
            os.mkdir(path)
        except FileExistsError:
            return  # also when this view does not show it yet: the write that follows is the judge
        except FileNotFoundError:
            self._make_directory(parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
        if self._fsync:
            paths.fsync_directory(parent)

    def _make_names_durable(self, directory: str) -> None:
        """Make the names in a directory durable, and the first time its own.

        Who made it may have died before it did that, or never do it. Above the root, that is done
        with the first file directly in it: a commit record, and not the files of every rank.
        """
        paths.fsync_directory(directory)
        if directory in self._durable:
            return
        parents = paths.parents_on_device(directory)
        if directory != self._root:
            parents = (parent for parent in parents if paths.is_within(parent, self._real_root))
        for parent in parents:
            paths.fsync_directory(parent)
        self._durable.add(directory)

    def _at(self, path: str) -> PosixStore:
        return PosixStore(path, {"fsync": self._fsync}, threads=self.threads)

    def _path(self, key: str) -> str:
        return os.path.join(self._root, *check_key(key).split("/"))

    def _folder(self, prefix: str) -> str:
        return self._path(prefix) if prefix else self._root

    def _key(self, path: str) -> str:
        return path[len(self._root) :].lstrip(os.sep)  # it was made by joining the root and a key

    @contextlib.contextmanager
    def _opened(self, key: str, action: str, flags: int) -> Iterator[int]:
        """Open the regular file behind `key`; refuse a link out of the root, unless into a Hugging Face cache."""
        path = self._path(key)
        with self._translated(key, action), paths.closing_fd(self._open(path, flags)) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a file")
            real = paths.real_path(fd, path)
            if not paths.is_hub_blob(real, self._real_root):
                self._refuse_outside(real, key)
            yield fd

    def _open(self, path: str, flags: int) -> int:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            if self.capabilities.cross_client_visibility:
                raise
        # This client may only remember that the name was missing when it looked before (s3fs for 15
        # minutes). A name that it lists, it knows again.
        paths.list_way_to(path)
        return os.open(path, flags)

    def _refuse_outside(self, real: str, key: str) -> None:
        """Raise UnsafeContent unless `real`, a path without links, is inside of the root."""
        if not paths.is_within(real, self._real_root):
            self._real_root = os.path.realpath(self._root)  # may be a link that was turned meanwhile
        if not paths.is_within(real, self._real_root):
            raise UnsafeContent("is a link that leads out of the checkpoint; refused", url=self.url, key=key)

    @contextlib.contextmanager
    def _translated(self, key: str, action: str, *, settled: bool | None = None) -> Iterator[None]:
        """Turn OSErrors into ours. `settled`: of those, unless it depends on their kind."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            kind = next((kind for kind, numbers in _ERRORS.items() if error.errno in numbers), StorageError)
            if settled is None:
                # Over NFS, a rename can work, its reply get lost, and its repetition find nothing
                # left to rename.
                settled = kind not in (StorageUnavailable, NotFound)
            text = f"cannot {action}: {error.strerror or error}"
            raise kind(text, url=self.url, key=key, settled=settled) from None


def _stat(key: str, facts: os.stat_result) -> ObjectStat:
    # `cp -a`, `rsync -a`, `tar` and `mv` give a new file the modification time of the old one.
    changed_at_s = max(facts.st_mtime, facts.st_ctime)
    return ObjectStat(key, facts.st_size, f"{facts.st_ino}-{facts.st_mtime_ns}", changed_at_s)


def _refuse_write_back(fd: int, url: str, key: str) -> None:
    """Raise ConfigurationError if this rclone mount acknowledges files before it stores them.

    Its fsync does nothing. With a cache of writes, storing comes after closing and may fail unseen.
    No mount table tells of the cache, but only with one can an empty file be made longer.
    """
    try:
        os.ftruncate(fd, 1)
    except PermissionError:
        return
    raise ConfigurationError(
        "this rclone mount caches writes (--vfs-cache-mode): its fsync returns before anything is stored, so it "
        "cannot promise that a save is durable, or visible elsewhere; save to the bucket itself (s3://...), "
        "mount it with --vfs-cache-mode off, or give up durability with the storage option fsync=False",
        url=url,
        key=key,
    )


def _publish(temporary: str, path: str, mode: PutMode) -> None:
    """Give the finished file its name."""
    if mode is PutMode.OVERWRITE:
        os.replace(temporary, path)
        return
    refusal = paths.link_refusal(temporary, path)
    # Over NFS, a link can work, its reply get lost, and its repetition find the name taken.
    if refusal is not None and not _is_linked(temporary, path):
        if isinstance(refusal, FileExistsError):
            raise refusal
        # No hard links here: rename. Two creators can both win, and the capabilities of such a file system say so.
        os.replace(temporary, path)
        return
    with contextlib.suppress(OSError):  # the file has its name; a second one does no harm
        os.unlink(temporary)


def _is_linked(temporary: str, path: str) -> bool:
    """Return True if both names are of one file, False if `path` is free. Raises FileExistsError for another file."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return False
    if os.stat(temporary).st_nlink == 2 and os.path.samestat(os.lstat(temporary), facts):
        return True
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def _begin_writeback(fd: int, start: int, nbytes: int) -> None:
    """Have the disk begin with the bytes just written, so that the fsync at the end is short.

    The advice drops only clean pages, and these are dirty: a load that follows still finds them.
    """
    with contextlib.suppress(OSError, AttributeError):  # not on every system, and never needed
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        written = os.writev(fd, pending[:IOV_MAX])
        if written == 0:
            raise OSError(errno.EIO, "the file system accepted no byte")
        pending = remaining(pending, written)
