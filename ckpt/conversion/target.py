"""Write the output of a conversion on all ranks; publish it, or clean up after a failure."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt.backends.base import PutMode, exists
from ckpt.backends.bodies import Body, CheckedBody, Part
from ckpt.conversion.selection import ChosenTensor, Selection
from ckpt.conversion.source import Location, TensorSource
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    CommitConflict,
    CommitUnknown,
    IntegrityError,
    StorageError,
)
from ckpt.ranks.group import Ranks, RanksFailed
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.file_body import FileBody, FileItem, Payload
from ckpt.transfer.reports import ReportBytes
from ckpt.transfer.threads import in_order, thread_pool

_logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 4


@dataclass(frozen=True)
class Written:
    """One rank's report: its data files, their size, and what a commit needs to know of them."""

    files: int
    nbytes: int
    receipt: RankReceipt | None = None


@dataclass
class Target(ABC):
    """The output of one conversion: all ranks write, then the first one lets it appear.

    Attributes:
        call: names the conversion for the other ranks.
        progress: called with the bytes that this rank has sent, and will send in all.
        total_bytes: that this rank will send.
    """

    format: str
    source: TensorSource
    selection: Selection
    destination: Location
    ranks: Ranks
    call: str
    overwrite: bool
    max_shard_bytes: int
    progress: ReportBytes
    pool: StagingPool = field(default_factory=StagingPool)
    total_bytes: int = 0
    _sent_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:  # noqa: B027 (one has nothing to do yet)
        """Lay out the output, alike on all ranks."""

    @property
    def lacks_config(self) -> bool:
        """Tell whether the output is a model's folder without its configuration."""
        return False

    @abstractmethod
    def begin(self) -> None:
        """Check and prepare the destination, before anything is written."""

    @abstractmethod
    def write(self) -> Written:
        """Write this rank's files."""

    def publish(self, written: Sequence[Written]) -> None:  # noqa: B027 (one file needs no such step)
        """Take the last step, by which the output appears, on the first rank."""

    @abstractmethod
    def proves_failure(self, error: BaseException) -> bool:
        """Tell whether an error of `publish` proves that no output has appeared."""

    @abstractmethod
    def discard(self) -> None:
        """Delete this rank's files."""

    def run(self) -> list[Written]:
        """Write the output; return the reports of all ranks. Raises RanksFailed on all of them."""
        self._agree()
        try:
            self.ranks.together(self.call, self.begin)
            written = self.ranks.gather(self.ranks.together(self.call, self.write))
        except BaseException:
            # A file that may have replaced another one stays: the old one is lost already.
            if not self.overwrite or self.destination.key is None:
                with self.ranks.progress.cleaning_up():  # also where others have given up this rank
                    self.discard()
            raise
        try:
            self.ranks.together(self.call, functools.partial(self._publish, written))
        except RanksFailed as error:
            if 0 in error.failures and self.proves_failure(error.failures[0]):
                self.discard()
            raise
        return written

    def _agree(self) -> None:
        """Check that all ranks see the same source. Raises CommitConflict on all of them."""
        seen = self.ranks.gather((self.source.identity, self.selection.nbytes, len(self.selection.tensors)))
        if len(set(seen)) > 1:
            raise CommitConflict(
                "the ranks see different sources; is it being replaced, or is it not the same place for all?",
                url=self.source.url,
            )

    def _publish(self, written: Sequence[Written]) -> None:
        try:
            if self.ranks.rank == 0:
                self.publish(written)
        except CheckpointError:
            raise
        except BaseException as error:
            text = f"{type(error).__name__} in the last step: the output may or may not be complete"
            raise CommitUnknown(text, url=self.destination.url) from error

    def count_sent(self, nbytes: int) -> None:
        """Count bytes for `progress`. Bytes sent again never exceed the total."""
        with self._lock:
            self._sent_bytes = min(self._sent_bytes + nbytes, self.total_bytes)
            self.progress(self._sent_bytes, self.total_bytes)

    def refuse_existing(self, keys: Iterable[str], advice: str) -> None:
        """Raise AlreadyExists, with this advice, if one of these files exists."""
        store = self.destination.folder
        for key in keys:
            if exists(store, key):
                raise AlreadyExists(advice, url=store.url, key=key)


@dataclass
class FileTarget(Target):
    """A target of files that are streamed, a few at a time, and deleted again after a failure."""

    _written: list[str] = field(default_factory=list)
    _unsettled: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def whole(self, tensor: ChosenTensor) -> Payload:
        """Make the payload of a whole tensor."""
        return self.source.payload(tensor.source, tensor.facts.dtype, tensor.facts.shape)

    def body(self, items: Sequence[FileItem], *, check_source: bool) -> Body:
        """Make the body of a file; `check_source` before the last bytes are released."""
        body = FileBody(items, self.pool, self._check_not_stopped, self.count_sent)
        return _SourceCheckedBody(body, self.source) if check_source else body

    def refuse_existing_file(self) -> None:
        """Raise AlreadyExists if the output is a single file that exists and must stay."""
        if self.destination.key is not None and not self.overwrite:
            advice = "this file exists already; choose another name, or pass --overwrite to replace it"
            self.refuse_existing([self.destination.key], advice)

    def put_all(self, files: Mapping[str, Body]) -> None:
        """Put these files; the first error, or an interrupt, stops them all."""
        store = self.destination.folder
        parallel = store.capabilities.parallel_parts  # then one file keeps all threads busy
        at_once = 1 if parallel or len(files) == 1 else min(_FILES_AT_ONCE, store.threads)
        with thread_pool(at_once, "ckpt-file") as threads:
            for _ in in_order(threads, self._put, files.items(), ahead=2 * at_once, stop=self._stop):
                pass

    def put_bytes(self, key: str, data: bytes | bytearray) -> None:
        """Put a small file."""
        self._put((key, CheckedBody(data)))

    def proves_failure(self, error: BaseException) -> bool:
        """Tell whether a put that failed with `error` was surely not carried out."""
        if isinstance(error, StorageError):
            return error.settled
        return isinstance(error, CheckpointError) and not isinstance(error, CommitUnknown | IntegrityError)

    def discard(self) -> None:
        written, self._written = self._written, []
        store = self.destination.folder
        try:
            store.delete(written)
        except Exception as error:  # a failed conversion has an error of its own to report
            _logger.warning(
                "the files of a failed conversion could not be deleted from %s: %s", store.url, error
            )
        if self._unsettled:  # such a file may be somebody else's: then a delete would be wrong
            _logger.warning(
                "it is not known whether these files were written to %s; delete them if they are there: %s",
                store.url, ", ".join(self._unsettled),
            )  # fmt: skip

    def _put(self, file: tuple[str, Body]) -> None:
        store, (key, body) = self.destination.folder, file
        try:
            store.put(key, body, mode=PutMode.OVERWRITE if self.overwrite else PutMode.CREATE)
        except CheckpointError as error:
            # Errors of reading the source come through here too.
            if error.url == store.url and not self.proves_failure(error):
                self._unsettled.append(key)
            raise
        self._written.append(key)

    def _check_not_stopped(self) -> None:
        if self._stop.is_set():
            raise StorageError("stopped: another file failed, or the conversion was interrupted")


def end_to_end(payloads: Iterable[Payload]) -> list[FileItem]:
    """Lay out payloads without frames and gaps."""
    items: list[FileItem] = []
    end = 0
    for payload in payloads:
        items.append(FileItem(end, b"", payload, b""))
        end += payload.nbytes
    return items


class _SourceCheckedBody:
    """A body that checks that the source has not changed before it releases its last bytes."""

    def __init__(self, body: FileBody, source: TensorSource) -> None:
        self._body, self._source = body, source
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
                self._source.check_unchanged()
            yield part

    def crc64nvme(self) -> int:
        return self._body.crc64nvme()
