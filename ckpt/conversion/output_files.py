"""Write the files of a conversion: streamed, a few at a time, and deleted again if it fails."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckpt.backends.base import PutMode, Store
from ckpt.backends.bodies import Body, CheckedBody, Part
from ckpt.errors import CheckpointError, CommitUnknown, IntegrityError, StorageError
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.file_body import FileBody, FileItem
from ckpt.transfer.threads import in_order, thread_pool

_logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 4


@dataclass(frozen=True)
class OutputFile:
    """A file, and the items that it is made of."""

    key: str
    items: Sequence[FileItem]

    @property
    def nbytes(self) -> int:
        return self.items[-1].offset + self.items[-1].length if self.items else 0


class OutputFiles:
    """Put files into a store, and note their names.

    Args:
        replace: replace files of the same name. Otherwise they are an error, and stay.
        pace: called with the number of bytes right before they are sent.
    """

    def __init__(
        self, store: Store, pool: StagingPool, *, replace: bool, pace: Callable[[int], None] | None = None
    ) -> None:
        self._store, self._pool, self._pace = store, pool, pace
        self._mode = PutMode.OVERWRITE if replace else PutMode.CREATE
        self._written: list[str] = []
        self._unsettled: list[str] = []
        self._stop = threading.Event()

    def put_all(self, files: Sequence[OutputFile], *, check_source: Callable[[], None] | None = None) -> None:
        """Put these files; the first error, or an interrupt, stops them all.

        Args:
            check_source: called for each file when all its bytes have been read, before it appears;
                raises if the source has changed.
        """
        parallel = self._store.capabilities.parallel_parts  # then one file keeps all threads busy
        at_once = 1 if parallel or len(files) == 1 else min(_FILES_AT_ONCE, self._store.threads)
        with thread_pool(at_once, "ckpt-file") as threads:
            work = functools.partial(self._put_file, check_source=check_source)
            for _ in in_order(threads, work, files, ahead=2 * at_once, stop=self._stop):
                pass

    def put_bytes(self, key: str, data: bytes | bytearray) -> None:
        """Put a small file."""
        self._put(key, CheckedBody(data))

    def discard(self) -> None:
        """Delete the files that were written."""
        written, self._written = self._written, []
        try:
            self._store.delete(written)
        except Exception as error:  # a failed conversion has an error of its own to report
            _logger.warning(
                "the files of a failed conversion could not be deleted from %s: %s", self._store.url, error
            )
        if self._unsettled:  # such a file may be somebody else's: then a delete would be wrong
            _logger.warning(
                "it is not known whether these files were written to %s; delete them if they are there: %s",
                self._store.url, ", ".join(self._unsettled),
            )  # fmt: skip

    def _put_file(self, file: OutputFile, check_source: Callable[[], None] | None) -> None:
        body = FileBody(file.items, self._pool, self._check, self._pace)
        self._put(file.key, body if check_source is None else _SourceCheckedBody(body, check_source))

    def _put(self, key: str, body: Body) -> None:
        try:
            self._store.put(key, body, mode=self._mode)
        except CheckpointError as error:
            # Errors of reading the source come through here too.
            if error.url == self._store.url and not is_settled(error):
                self._unsettled.append(key)
            raise
        self._written.append(key)

    def _check(self) -> None:
        if self._stop.is_set():
            raise StorageError("stopped: another file failed, or the conversion was interrupted")


def is_settled(error: BaseException) -> bool:
    """Tell whether a put that failed with `error` was surely not carried out."""
    if isinstance(error, StorageError):
        return error.settled
    return isinstance(error, CheckpointError) and not isinstance(error, CommitUnknown | IntegrityError)


class _SourceCheckedBody:
    """A body that calls `check_source` before it releases its last bytes."""

    def __init__(self, body: FileBody, check_source: Callable[[], None]) -> None:
        self._body, self._check_source = body, check_source
        self.nbytes, self.has_checksums = body.nbytes, body.has_checksums
        self._read: dict[int, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        with self._body.part(start, stop) as part:
            with self._lock:
                self._read[start] = stop
                is_last = sum(end - begin for begin, end in self._read.items()) >= self.nbytes
            if is_last:
                self._check_source()
            yield part

    def crc64nvme(self) -> int:
        return self._body.crc64nvme()
