"""Keep one run's folder on a node's disk: named by the run's durable place, held by one job at a time."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import time
import weakref

from ckpt.backends.registry import normal_url
from ckpt.draining.marker import identity_of, mark
from ckpt.errors import ConfigurationError, StorageError
from ckpt.local_first.own_files import make_own, open_own

_logger = logging.getLogger(__name__)

_LOCK = ".ckpt-job.lock"
_PATIENCE_S = 10.0
_LEASE_S = 120.0
"""How long a file system over a network may keep the lock of a node that has died: NFS takes 90 s."""

_MAX_BYTES = 1 << 16
_NETWORK = re.compile(r"nfs\d?|lustre|gpfs|beegfs|ceph|cifs|smb\d?|9p|glusterfs|afs|fuse\..*|virtiofs")
_WORD = re.compile(r"[^A-Za-z0-9_.-]+")


class RunFolder:
    """The folder of one run below `local`, which other runs may share.

    Args:
        local: a folder of this node.
        durable: where the run's checkpoints become durable: its URL is the identity of the run.

    Attributes:
        path: the folder, which exists.
        is_leader: this process holds the folder for all ranks of its job on this node.
        holder: who does, once it is held: the same for all these ranks, and another one on each node.

    Raises:
        ConfigurationError: `local` is no path, or lies inside of `durable` or around it; another run's folder is there,
            or that of another user, or links are in it.
        StorageError: the folder cannot be made.
    """

    def __init__(self, local: str | os.PathLike[str], durable: str | os.PathLike[str]) -> None:
        text = normal_url(local)
        if "://" in text and not text.startswith("file://"):
            raise ConfigurationError(
                f"local= is a folder of this node, not a URL: {text.partition('://')[0]}://..."
            )
        self.durable = identity_of(durable)
        root = os.path.abspath(text.removeprefix("file://"))
        inside = os.path.abspath(self.durable.removeprefix("file://")) if "://" not in self.durable else None
        if inside is not None and os.path.commonpath([root, inside]) in (root, inside):
            raise ConfigurationError(f"local={root!r} and the run's root {inside!r} lie in each other")
        self.path = os.path.join(root, run_key(self.durable))
        self.is_leader, self.holder = False, ""
        self._lock: int | None = None
        _all.add(self)
        try:
            os.makedirs(root, exist_ok=True)
            make_own(self.path)
            mark(self.path, self.durable)
        except OSError as error:
            raise StorageError(
                f"the folder for local checkpoints cannot be made: {error}", url=root
            ) from error

    def mark(self, run: str) -> None:
        """Note the id of the run. Raises OSError."""
        mark(self.path, self.durable, run)

    def url(self, path: str) -> str:
        """Return the place of a checkpoint."""
        return os.path.join(self.path, path)

    def warn_if_shared(self) -> None:
        """Warn if the folder is not on a disk of this node: there it is neither faster nor safer."""
        kind, source = mount_of(self.path)
        if _NETWORK.fullmatch(kind):
            _logger.warning(
                "local=%s is on a network file system (%s, from %s): a local disk or /dev/shm does not wait for others",
                self.path,
                kind,
                source,
            )

    def hold_if_possible(self, job: str) -> None:
        """Hold a folder that other nodes see too, if its file system has locks.

        A node that has died may keep its lock for as long as its lease lasts. Raises as `hold`.
        """
        try:
            self.hold(job, patience_s=_LEASE_S)
        except OSError as error:
            _logger.warning(
                "%s has no locks (%s): nothing keeps a second job of this run from carrying from it",
                self.path,
                error,
            )

    def hold(self, job: str, *, patience_s: float | None = None) -> None:
        """Hold the folder for `job` until this process ends; several processes of one job may.

        Raises ConfigurationError if another job holds it, and does not let go of it within `patience_s`.
        """
        is_own = any(other.path == self.path and other._lock is not None for other in _all)
        patience_s = _PATIENCE_S if patience_s is None or is_own else patience_s
        lock = open_own(self.path, _LOCK, os.O_RDWR | os.O_CREAT)
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, _MAX_BYTES, 0).decode(errors="replace")
                if holder.partition(" ")[0] == job:
                    os.close(lock)
                    self.holder = holder
                    return
                if time.monotonic() > deadline_s:  # until then it may be one of ours that has not signed yet
                    os.close(lock)
                    text = f"another job ({holder or 'unknown'}) saves to {self.path}: give each run a root of its own"
                    if holder.split(" ")[1:3] == ["pid", str(os.getpid())]:
                        text = f"a manager of this process that was not closed saves to {self.path}: close it first"
                    raise ConfigurationError(text) from None
                time.sleep(0.05)
                continue
            except OSError:
                os.close(lock)
                raise
            self.holder = f"{job} pid {os.getpid()} {secrets.token_hex(4)}"  # pids of containers can be equal
            os.pwrite(
                lock, self.holder.encode(), 0
            )  # on a disk that is full, what is there can still be replaced
            os.ftruncate(lock, len(self.holder.encode()))
            self._lock, self.is_leader = lock, True
            return

    def release(self) -> None:
        """Let go of the folder."""
        lock, self._lock = self._lock, None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child of another fork may have it, too
            os.close(lock)

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self.release()


_all: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close the locks: a worker of the data loader that lives longer must not hold a folder for a job that is gone."""
    for folder in [*_all]:
        lock, folder._lock = folder._lock, None
        if lock is not None:
            os.close(lock)


os.register_at_fork(after_in_child=_let_go_in_child)


def run_key(durable: str) -> str:
    """Name the folder of a run by its durable place: readable, and another one for each run."""
    name = _WORD.sub("-", durable.rstrip("/").rpartition("/")[2])[:60] or "run"
    return f"{name}-{hashlib.sha256(durable.rstrip('/').encode()).hexdigest()[:12]}"


def mount_of(path: str) -> tuple[str, str]:
    """Return the type of the file system that holds `path`, and its source; empty if that is not known."""
    real, best = os.path.realpath(path), ("", "", "")
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                source, point, kind, *_ = line.split()
                point = point.encode("latin-1", "replace").decode("unicode_escape")
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best[0]):
                    best = point, kind, source
    except (OSError, ValueError):
        return "", ""
    return best[1], best[2]
