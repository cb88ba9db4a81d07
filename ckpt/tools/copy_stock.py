"""Copies of checkpoints that stock PyTorch wrote: file by file under the same names, `.metadata` last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from ckpt.backends.base import PutMode, Store, check_key, exists, read_bytes
from ckpt.backends.bodies import CheckedBody
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.errors import (
    AlreadyExists,
    CommitConflict,
    ConfigurationError,
    IntegrityError,
    NotFound,
    UnsafeContent,
)
from ckpt.reading.checkpoint import Checkpoint
from ckpt.stock.metadata_reader import MAX_METADATA_BYTES
from ckpt.tools.verify_stock import verify_foreign
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.relay_bodies import RUN_BYTES, PlainBody, RunReader
from ckpt.transfer.threads import in_order, thread_pool

__all__ = ["copy_foreign"]

_BUDGET_BYTES = 256 << 20


def copy_foreign(
    source: Store, destination: Store, parts: Sequence[Checkpoint], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Copy a stock checkpoint; `parts` are one, or one a rank. Returns what `Copied` says about it.

    Raises:
        AlreadyExists: another checkpoint, or another file under one of the names, is at the destination.
        IntegrityError: the source is not whole, as far as its sizes tell.
        CommitConflict: the source was replaced meanwhile.
    """
    with thread_pool(source.threads, "ckpt-cp") as threads:
        checked = verify_foreign(source, parts, threads, quick=True, progress=lambda done, total: None)
        if checked.damages:
            first = checked.damages[0]
            raise IntegrityError(
                f"the source is not whole: {first.message}",
                url=source.url, key=first.key, start=first.start, stop=first.stop,
            )  # fmt: skip
        return _Copy(source, destination, parts, threads, progress).run()


class _Copy:
    def __init__(
        self,
        source: Store,
        destination: Store,
        parts: Sequence[Checkpoint],
        threads: Executor,
        progress: Callable[[int, int], None],
    ) -> None:
        self._from, self._to, self._threads, self._progress = source, destination, threads, progress
        # The name that readers look for first comes last.
        self._metadata = [(part.metadata_key, part.metadata_bytes) for part in reversed(parts)]
        paths = {info.relative_path for part in parts for info in part.metadata.storage_data.values()}
        self._sizes = {path: self._size(path) for path in sorted(paths)}
        self._pool = StagingPool(_BUDGET_BYTES)
        self._stop = threading.Event()

    def run(self) -> dict[str, Any]:
        there = self._is_there()
        total = sum(self._sizes.values())
        sent_files = sent_bytes = kept_files = kept_bytes = 0
        at_once = min(4, self._to.threads)
        with thread_pool(at_once, "ckpt-cp") as files:
            for size, sent in in_order(files, self._file, self._sizes, ahead=2 * at_once, stop=self._stop):
                sent_files, sent_bytes = sent_files + sent, sent_bytes + sent * size
                kept_files, kept_bytes = kept_files + (not sent), kept_bytes + (not sent) * size
                self._progress(sent_bytes + kept_bytes, total)
        for key, data in self._metadata:
            if bytes(read_bytes(self._from, key, max_bytes=MAX_METADATA_BYTES)) != data:
                raise CommitConflict("the source was replaced while it was being copied", url=self._from.url)
        for key, data in self._metadata:
            if not exists(self._to, key):
                self._to.put(key, CheckedBody(data), mode=PutMode.CREATE)
        return {
            "already_there": there and not sent_files,
            "sent_files": sent_files,
            "sent_bytes": sent_bytes,
            "kept_files": kept_files,
            "kept_bytes": kept_bytes,
        }

    def _size(self, path: str) -> int:
        try:
            return self._from.stat(check_key(path)).size_bytes
        except ConfigurationError as error:
            raise UnsafeContent(
                f"the metadata name a file outside of the checkpoint: {path[:80]!r}", url=self._from.url
            ) from error

    def _is_there(self) -> bool:
        """Whether the metadata are at the destination already. Raises AlreadyExists where others are."""
        if exists(self._to, COMMIT_KEY):
            raise self._taken(COMMIT_KEY)
        found = 0
        for key, data in self._metadata:
            try:
                if bytes(read_bytes(self._to, key, max_bytes=MAX_METADATA_BYTES)) != data:
                    raise self._taken(key)
                found += 1
            except NotFound:
                pass
        return found == len(self._metadata)

    def _file(self, path: str) -> tuple[int, bool]:
        """Copy a file unless it is there; returns its size, and whether it was sent."""
        size = self._sizes[path]
        body = PlainBody(self._from, path, size, self._pool, self._stop)
        try:
            found = self._to.stat(path).size_bytes
        except NotFound:
            self._to.put(path, body, mode=PutMode.CREATE)
            return size, True
        if found != size or not self._are_equal(path, size):
            raise self._taken(path)
        return size, False

    def _are_equal(self, path: str, size: int) -> bool:
        here, there = RunReader(self._from, self._pool), RunReader(self._to, self._pool)
        for start in range(0, size, RUN_BYTES):
            stop = min(start + RUN_BYTES, size)
            found = there.crcs(path, start, stop, BLOCK_SIZE_BYTES)
            if not found or found != here.crcs(path, start, stop, BLOCK_SIZE_BYTES):
                return False
        return True

    def _taken(self, key: str) -> AlreadyExists:
        return AlreadyExists(
            "something else is there under this name; choose another destination", url=self._to.url, key=key
        )
