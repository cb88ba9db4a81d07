"""Keep bytes of stores on the local disk, checked when they are read, never more than a bound."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import re
import struct
import time
from collections.abc import Iterator

from ckpt.consistency.checksums import block_crcs, crc64nvme
from ckpt.whole_files import write_whole

BLOCK_BYTES = 1 << 16
"""The unit that is checked."""

_PAGE_BYTES = 4096
_KEPT_SHARE = 15 / 16
"""Of the bound, after files were removed to make room: that lists the whole folder."""
_LOCK_TIMEOUT_S = 5.0
_PAUSE_S = 30.0
"""After an error: a full disk, or a process that was stopped while it held the lock."""
_POLL_S = 0.005
_PREFIX = "ckpt-data-"
_COUNT = f"{_PREFIX}count"
_OWN = re.compile(rf"{_PREFIX}.+\.blocks")
_LEFT = re.compile(rf"\.{_PREFIX}.+\.tmp")
"""The names of files of blocks, and of those that a killed process has left. The folder may hold the user's own too."""

_COUNT_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_COUNT_FORMAT = struct.Struct("<QQ")

_logger = logging.getLogger(__name__)


class DiskCache:
    """Files in a folder that all processes of a host share, each of them some blocks and their checksums.

    The file `ckpt-data-count` holds an upper bound of their bytes. It is raised before a file is written and lowered after
    files were removed, under a lock that ends with its process. So the bound holds, also after a kill.

    Args:
        limit_bytes: of all these files, as the file system counts them. Others in the folder are left alone.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._paused_until_s = 0.0

    def read(self, name: str, number: int, nbytes: int) -> bytearray | None:
        """Read block `number` of a file that was written with `nbytes`; None if the cache has not, or not undamaged."""
        path = self._path(name)
        start = number * BLOCK_BYTES
        data = bytearray(min(BLOCK_BYTES, nbytes - start))
        checksum = bytearray(8)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            got = os.preadv(fd, [data], start) + os.preadv(fd, [checksum], nbytes + 8 * number)
            expected = _salt(name, number) ^ crc64nvme(data)
            is_whole = got == len(data) + 8 and int.from_bytes(checksum, "little") == expected
        except OSError:
            is_whole = False
        finally:
            os.close(fd)
        if is_whole:
            return data
        _logger.warning(
            "%s: block %d of the disk cache is damaged; it is read again from its store", path, number
        )
        _removed(path)
        return None

    @property
    def is_paused(self) -> bool:
        """Whether nothing is kept for now, after an error."""
        return time.monotonic() < self._paused_until_s

    def has(self, name: str) -> bool:
        return os.path.exists(self._path(name))

    def write(self, name: str, data: memoryview) -> bool:
        """Keep blocks under a name; return False if that is not possible now."""
        checksums = [_salt(name, at) ^ crc for at, crc in enumerate(block_crcs([data], BLOCK_BYTES))]
        size = _charge(data.nbytes + 8 * len(checksums))
        if size > self._limit_bytes - _PAGE_BYTES or self.is_paused:
            return False
        try:
            os.makedirs(self._folder, exist_ok=True)
            with self._locked() as count:
                if self.has(name):
                    return True
                used = _read_count(count)
                if used is None or used + size > self._limit_bytes:
                    used = self._make_room(size)
                    _write_count(count, used)
                if used + size > self._limit_bytes:
                    raise OSError("its files cannot be removed to make room")
                _write_count(count, used + size)
                table = struct.pack(f"<{len(checksums)}Q", *checksums)
                write_whole(self._path(name), b"".join((data, table)))
        except OSError as error:
            self._paused_until_s = time.monotonic() + _PAUSE_S
            _logger.warning(
                "the disk cache %s keeps nothing more for %.0f s: %s", self._folder, _PAUSE_S, error
            )
            return False
        return True

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, f"{_PREFIX}{name}.blocks")

    def _make_room(self, size: int) -> int:
        """Remove files, chosen at random, and what a killed process left; return the bytes that are used then.

        At random, as data are read in turn: of those read longest ago the next ones would be removed, epoch for epoch.
        """
        files: list[tuple[str, int]] = []
        used = _PAGE_BYTES
        for entry in os.scandir(self._folder):
            is_left = _LEFT.fullmatch(entry.name) is not None
            if is_left and _removed(entry.path):  # the lock is held, so no process is writing it
                continue
            if is_left or _OWN.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # damaged, and removed just now
                    files.append((entry.path, _charge(entry.stat(follow_symlinks=False).st_size)))
                    used += files[-1][1]
        random.shuffle(files)
        while files and used + size > self._limit_bytes * _KEPT_SHARE:
            path, freed = files.pop()
            if _removed(path):
                used -= freed
        return used

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the folder, yield the open file of its count. Raises OSError if it is held for too long."""
        fd = os.open(os.path.join(self._folder, _COUNT), _COUNT_FLAGS, 0o666)
        try:
            deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise TimeoutError(
                            f"another process has locked it for {_LOCK_TIMEOUT_S:.0f} s"
                        ) from None
                    time.sleep(_POLL_S)
            yield fd
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked process may have the file too
            os.close(fd)


def _removed(path: str) -> bool:
    """Remove a file, if that is possible; the count stays too high until room is made."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _salt(name: str, number: int) -> int:
    """Return what makes the checksum of a block that of this file and place."""
    return crc64nvme(f"{name}/{number}".encode())


def _charge(size: int) -> int:
    """Return what a file takes on disk: whole pages, and its share of the folder."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES + 256


def _read_count(fd: int) -> int | None:
    """Read the bytes that are used; None if that is unknown or damaged."""
    stored = os.pread(fd, _COUNT_FORMAT.size, 0)
    if len(stored) < _COUNT_FORMAT.size:
        return None
    used, checksum = _COUNT_FORMAT.unpack(stored)
    return used if checksum == crc64nvme(stored[:8]) else None


def _write_count(fd: int, used: int) -> None:
    number = used.to_bytes(8, "little")
    os.pwrite(fd, number + crc64nvme(number).to_bytes(8, "little"), 0)
