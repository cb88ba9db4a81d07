"""Run one conversion on all ranks: agree, write, publish, clean up after a failure."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckpt.backends.base import exists
from ckpt.conversion.locations import Location
from ckpt.conversion.selection import Rules, Selection
from ckpt.conversion.source import TensorSource, TensorStream
from ckpt.errors import AlreadyExists, CheckpointError, CommitConflict, CommitUnknown
from ckpt.ranks.group import Ranks, RanksFailed
from ckpt.transfer.buffer_pool import StagingPool


@dataclass
class ConversionJob:
    """One conversion: from a source to a destination, with these ranks.

    Attributes:
        call: names the conversion for the other ranks.
        progress: called with the bytes that this rank has sent, and will send in all.
        files, sent_bytes: written by this rank.
    """

    source: TensorSource
    selection: Selection
    rules: Rules
    destination: Location
    ranks: Ranks
    call: str
    overwrite: bool
    max_shard_bytes: int
    progress: Callable[[int, int], None] | None
    pool: StagingPool = field(default_factory=StagingPool)
    files: int = 0
    sent_bytes: int = 0

    @property
    def replaces_file(self) -> bool:
        """True if the single output file may overwrite an existing one.

        It is then kept on failure, because the old file is already lost.
        """
        return self.overwrite and self.destination.key is not None

    @functools.cached_property
    def stream(self) -> TensorStream:
        return TensorStream(self.source)

    def counter(self, total_bytes: int) -> SentBytes:
        return SentBytes(total_bytes, self.progress)

    def agree(self) -> None:
        """Check that all ranks see the same source. Raises CommitConflict on all of them."""
        seen = self.ranks.gather((self.source.identity, self.selection.nbytes, len(self.selection.tensors)))
        if len(set(seen)) > 1:
            raise CommitConflict(
                "the ranks see different sources; is it being replaced, or is it not the same place for all?",
                url=self.source.url,
            )

    def refuse_existing_file(self) -> None:
        """Raise AlreadyExists if the single output file exists, before anything is written."""
        assert self.destination.key is not None
        if not self.overwrite and exists(self.destination.folder, self.destination.key):
            raise AlreadyExists(
                "this file exists already; choose another name, or pass --overwrite to replace it",
                url=self.destination.folder.url,
                key=self.destination.key,
            )

    @contextlib.contextmanager
    def discarding(self, discard: Callable[[], None]) -> Iterator[None]:
        """Call `discard`, which deletes this rank's files, if the block fails."""
        try:
            yield
        except BaseException:
            with self.ranks.progress.cleaning_up():  # also where others have given up this rank
                discard()
            raise

    def publish(
        self,
        step: Callable[[], None],
        discard: Callable[[], None],
        proves_failure: Callable[[BaseException], bool],
    ) -> None:
        """Run the last step, by which the output appears, on the first rank; the others wait.

        Args:
            discard: deletes this rank's files; not called if the step may have worked all the same.
            proves_failure: tells whether an error of the step proves that no output has appeared.
        """

        def work() -> None:
            try:
                if self.ranks.rank == 0:
                    step()
            except CheckpointError:
                raise
            except BaseException as error:
                raise CommitUnknown(
                    f"{type(error).__name__} in the last step: the output may or may not be complete",
                    url=self.destination.url,
                ) from error

        try:
            self.ranks.together(self.call, work)
        except RanksFailed as error:
            if 0 in error.failures and proves_failure(error.failures[0]):
                discard()
            raise

    def wrote(self, files: int, nbytes: int) -> None:
        """Count files and bytes of this rank."""
        self.files, self.sent_bytes = self.files + files, self.sent_bytes + nbytes


class SentBytes:
    """Count the bytes sent, for a display of progress. Bytes sent again never exceed the total."""

    def __init__(self, total_bytes: int, progress: Callable[[int, int], None] | None) -> None:
        self._total_bytes, self._progress = total_bytes, progress
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done_bytes = min(self._done_bytes + nbytes, self._total_bytes)
                self._progress(self._done_bytes, self._total_bytes)
