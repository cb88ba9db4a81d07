"""Files that a conversion writes: streamed, a few at a time, and taken away again if it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.backends.base import CheckedBody, PutMode, Store
from ckpt.body import FileBody, FileItem
from ckpt.errors import StorageError
from ckpt.parallel import in_order
from ckpt.staging import StagingPool

__all__ = ["OutputFile", "OutputFiles"]

_logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 4


@dataclass(frozen=True)
class OutputFile:
    """A file, and what it is made of."""

    key: str
    items: Sequence[FileItem]

    @property
    def nbytes(self) -> int:
        return self.items[-1].offset + self.items[-1].length if self.items else 0


class OutputFiles:
    """Puts files into a store and remembers them.

    Args:
        replace: take the place of files of the same name. Otherwise they are an error, and stay.
        pace: called with the number of bytes right before they are sent.
    """

    def __init__(
        self, store: Store, pool: StagingPool, *, replace: bool, pace: Callable[[int], None] | None = None
    ) -> None:
        self._store, self._pool, self._pace = store, pool, pace
        self._mode = PutMode.OVERWRITE if replace else PutMode.CREATE
        self._written: list[str] = []
        self._stop = threading.Event()

    def put_all(self, files: Sequence[OutputFile]) -> None:
        """Put these files; the first error, or an interrupt, stops them all."""
        parallel = self._store.capabilities.parallel_parts  # then one file keeps all threads busy
        at_once = 1 if parallel or len(files) == 1 else min(_FILES_AT_ONCE, self._store.threads)
        with ThreadPoolExecutor(at_once, thread_name_prefix="ckpt-file") as threads:
            for _ in in_order(threads, self._put, files, ahead=2 * at_once, stop=self._stop):
                pass

    def _put(self, file: OutputFile) -> None:
        self._store.put(file.key, FileBody(file.items, self._pool, self._check, self._pace), mode=self._mode)
        self._written.append(file.key)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Put a small file."""
        self._store.put(key, CheckedBody(data), mode=self._mode)
        self._written.append(key)

    def discard(self) -> None:
        """Delete what was written: nothing of it is of use to anyone."""
        written, self._written = self._written, []
        try:
            self._store.delete(written)
        except Exception as error:  # a failed conversion has an error of its own to report
            _logger.warning("what the conversion had written could not be deleted: %s", error)

    def _check(self) -> None:
        if self._stop.is_set():
            raise StorageError("stopped: another file failed, or the conversion was interrupted")
