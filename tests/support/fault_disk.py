"""A file system whose operations fail when they are told to: a directory, seen through FUSE.

    PYTHONPATH=tests python -m support.fault_disk SOURCE MOUNT ORDERS

What the processes that use it meet comes from the kernel: EIO from write, fsync, close, rename or read; a write or
read that carries less than it was given; a call that does not come back.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from support.servers import spawn

__all__ = ["FaultDisk", "Orders", "fault_disk"]

T = TypeVar("T")


@dataclass(frozen=True)
class Orders:
    """What fails, once given: the `position`-th operation from then on, and, if it `lasts`, all that follow.

    Attributes:
        action: "EIO", "short" or "hang".
        reads: operations are those that read; otherwise those that change the file system.
        note: a file that gets the time at which it begins (`time.monotonic`).
    """

    action: str
    reads: bool
    position: int
    lasts: bool
    note: str


@dataclass(frozen=True)
class FaultDisk:
    """Mounted at `mount`; `source` shows the same files without faults."""

    source: Path
    mount: Path
    orders: Path

    def give(self, orders: Orders) -> None:
        written = self.orders.with_suffix(".new")
        written.write_text(json.dumps(asdict(orders)))
        written.rename(self.orders)

    def release(self) -> None:
        """No more faults; calls that hang come back."""
        self.orders.with_suffix(".over").touch()


@contextlib.contextmanager
def fault_disk(folder: Path, mount: Path) -> Iterator[FaultDisk]:
    """A disk that is mounted at `mount`, an empty directory, and keeps what it needs in `folder`.

    Raises:
        OSError: this machine has no FUSE, or this process may not use it.
    """
    disk = FaultDisk(folder / "source", mount, folder / "orders")
    disk.source.mkdir()
    _refuse_without_fuse()
    with (folder / "disk.log").open("wb") as log:
        command = [sys.executable, "-m", "support.fault_disk", disk.source, mount, disk.orders]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        process = spawn(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(mount):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the disk did not start: {(folder / 'disk.log').read_text()[-500:]}")
            time.sleep(0.02)
        yield disk
    finally:
        disk.release()
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
        process.terminate()
        process.wait()


def _refuse_without_fuse() -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid() != 0:
        raise OSError(errno.EPERM, "FUSE cannot be used here")
    if not (ctypes.util.find_library("fuse3") or ctypes.util.find_library("fuse")):
        raise OSError(errno.ENODEV, "libfuse is not installed")


# -- the process that serves it ----------------------------------------------------------------------------


class _Faults:
    """Counts operations, and lets those fail that are due."""

    def __init__(self, orders: Path) -> None:
        self._path, self._over = orders, orders.with_suffix(".over")
        self._orders: Orders | None = None
        self._count = 0
        self._lock = threading.Lock()

    def due(self, name: str) -> str | None:
        """The action that befalls this operation, if any does."""
        with self._lock:
            if self._orders is None:
                with contextlib.suppress(FileNotFoundError):
                    self._orders = Orders(**json.loads(self._path.read_text()))
            orders = self._orders
            if orders is None or self._over.exists() or name not in _counted(orders):
                return None
            self._count += 1
            if self._count != orders.position and not (orders.lasts and self._count > orders.position):
                return None
            with contextlib.suppress(FileExistsError), open(orders.note, "x") as note:
                note.write(str(time.monotonic()))
            return orders.action

    def hang(self) -> None:
        while not self._over.exists():
            time.sleep(0.05)


_READS = frozenset({"open", "read", "flush"})
_CHANGES = frozenset(
    {"mkdir", "create", "write", "flush", "fsync", "fsyncdir", "rename", "link", "unlink", "rmdir"}
)


def _counted(orders: Orders) -> frozenset[str]:
    if orders.action == "short":
        return frozenset({"read" if orders.reads else "write"})
    return _READS if orders.reads else _CHANGES


def _serve(source: str, mount: str, orders: str) -> None:
    import mfusepy

    faults = _Faults(Path(orders))

    def attempt(name: str, call: Callable[[], T]) -> T:
        action = faults.due(name)
        if action == "hang":
            faults.hang()
        if action != "EIO":
            return call()
        if name == "flush":  # the file is closed all the same
            call()
        raise mfusepy.FuseOSError(errno.EIO)

    def transferred(name: str, nbytes: int) -> int:
        """How much of a read or write is carried out."""
        action = faults.due(name)
        if action == "hang":
            faults.hang()
        if action == "EIO":
            raise mfusepy.FuseOSError(errno.EIO)
        return max(1, nbytes // 2) if action == "short" else nbytes

    class Disk(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = os.lstat(source + path)
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks")
            times = {name: getattr(found, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
            return {**{name: getattr(found, name) for name in names}, **times}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(source + path)]

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(source)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

        def mkdir(self, path: str, mode: int) -> int:
            return attempt("mkdir", lambda: os.mkdir(source + path, mode)) or 0

        def rmdir(self, path: str) -> int:
            return attempt("rmdir", lambda: os.rmdir(source + path)) or 0

        def unlink(self, path: str) -> int:
            return attempt("unlink", lambda: os.unlink(source + path)) or 0

        def rename(self, old: str, new: str) -> int:
            return attempt("rename", lambda: os.rename(source + old, source + new)) or 0

        def link(self, target: str, source_path: str) -> int:
            return attempt("link", lambda: os.link(source + source_path, source + target)) or 0

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            return attempt("create", lambda: os.open(source + path, flags, mode))

        def open(self, path: str, flags: int) -> int:
            return attempt("open", lambda: os.open(source + path, flags))

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, transferred("read", size), offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data[: transferred("write", len(data))], offset)

        def flush(self, path: str, fh: int) -> int:
            return attempt("flush", lambda: 0)

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            return attempt("fsync", lambda: os.fsync(fh)) or 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            return attempt("fsyncdir", lambda: 0)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(source + path, length)
            return 0

    # Without the kernel's cache, every call of a process is one here, and less done is less returned.
    mfusepy.FUSE(Disk(), mount, foreground=True, direct_io=True, attr_timeout=0, entry_timeout=0)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
