"""Copy a checkpoint of stock PyTorch: file by file under the same names, `.metadata` last."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from ckpt.backends.base import PutMode, Store, exists, read_bytes
from ckpt.backends.bodies import CheckedBody
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.errors import AlreadyExists, CommitConflict, IntegrityError, NotFound
from ckpt.format.records import MAX_METADATA_BYTES, read_commit
from ckpt.reading.checkpoint import Checkpoint
from ckpt.tools.findings import Copied
from ckpt.tools.verify_stock import verify_stock
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.file_body import Due, FileBody, FileItem, StreamedPayload
from ckpt.transfer.relay_bodies import RUN_BYTES, RunReader, check_wanted
from ckpt.transfer.reports import ReportBytes, no_report
from ckpt.transfer.threads import in_order, workers

_BUDGET_BYTES = 256 << 20


def copy_stock(
    source: Store, destination: Store, parts: Sequence[Checkpoint], progress: ReportBytes
) -> Copied:
    """Copy a stock checkpoint, in one part or in one per rank. Raises as `ckpt.copy`, and CommitConflict."""
    with workers(source.threads, "ckpt-cp") as threads:
        checked = verify_stock(source, parts, threads, quick=True, progress=no_report)
    if checked.damages:
        first = checked.damages[0]
        text = f"the source is damaged: {first.message}"
        raise IntegrityError(text, url=source.url, key=first.key, start=first.start, stop=first.stop)
    return _StockCopy(source, destination, parts).run(progress)


class _StockCopy:
    def __init__(self, source: Store, destination: Store, parts: Sequence[Checkpoint]) -> None:
        self._from, self._to = source, destination
        # The name that readers look for first is written last.
        self._metadata = [(part.metadata_key, part.metadata_bytes) for part in reversed(parts)]
        paths = {info.relative_path for part in parts for info in part.metadata.storage_data.values()}
        self._sizes = {path: source.stat(path).size_bytes for path in sorted(paths)}
        self._pool = StagingPool(_BUDGET_BYTES)
        self._stop = threading.Event()

    def run(self, progress: ReportBytes) -> Copied:
        done = Copied(self._from.url, self._to.url, "stock")
        has_metadata = self._has_metadata()
        total = sum(self._sizes.values())
        at_once = min(4, self._to.threads)
        with workers(at_once, "ckpt-cp") as threads:
            for size, sent in in_order(threads, self._send, self._sizes, ahead=2 * at_once, stop=self._stop):
                done.count(size, sent=sent)
                progress(done.sent_bytes + done.kept_bytes, total)
        for key, data in self._metadata:
            if bytes(read_bytes(self._from, key, max_bytes=MAX_METADATA_BYTES)) != data:
                raise CommitConflict("the source was replaced while it was being copied", url=self._from.url)
        for key, data in self._metadata:
            if not exists(self._to, key):
                self._to.put(key, CheckedBody(data), mode=PutMode.CREATE)
        done.already_there = has_metadata and not done.sent_files
        return done

    def _has_metadata(self) -> bool:
        """Tell whether the destination has the metadata. Raises AlreadyExists if it has another one."""
        if (commit := read_commit(self._to)) is not None:
            writer = "this library" if commit.is_ours else "another program"
            raise self._taken(COMMIT_KEY, f"a checkpoint of {writer} is committed here")
        equal = 0
        for key, data in self._metadata:
            try:
                if bytes(read_bytes(self._to, key, max_bytes=MAX_METADATA_BYTES)) != data:
                    raise self._taken(key)
                equal += 1
            except NotFound:
                pass
        return equal == len(self._metadata)

    def _send(self, path: str) -> tuple[int, bool]:
        """Send a file unless it is there; return its size, and whether it was sent."""
        size = self._sizes[path]
        try:
            existing = self._to.stat(path).size_bytes
        except NotFound:
            item = FileItem(0, b"", StreamedPayload(size, partial(self._read, path)), b"")
            body = FileBody([item], self._pool, partial(check_wanted, self._stop))
            self._to.put(path, body, mode=PutMode.CREATE)
            return size, True
        if existing != size or not self._are_equal(path, size):
            raise self._taken(path)
        return size, False

    def _read(self, path: str, due: Sequence[Due]) -> None:
        for _, start, memory in due:
            self._from.read_into(path, start, [memory])

    def _are_equal(self, path: str, size: int) -> bool:
        source, destination = RunReader(self._from, self._pool), RunReader(self._to, self._pool)
        for start in range(0, size, RUN_BYTES):
            stop = min(start + RUN_BYTES, size)
            crcs = destination.crcs(path, start, stop, BLOCK_SIZE_BYTES)
            if not crcs or crcs != source.crcs(path, start, stop, BLOCK_SIZE_BYTES):
                return False
        return True

    def _taken(self, key: str, what: str = "another file has this name") -> AlreadyExists:
        return AlreadyExists(f"{what}; choose another destination", url=self._to.url, key=key)
