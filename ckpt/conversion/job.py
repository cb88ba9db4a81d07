"""One conversion, as every writer of a format is given it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckpt.backends.base import exists
from ckpt.conversion.locations import Place
from ckpt.conversion.selection import Choice
from ckpt.conversion.source import Source
from ckpt.conversion.streams import Counter, Stream
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    CommitConflict,
    CommitUnknown,
    IntegrityError,
    StorageError,
)
from ckpt.ranks.group import Ranks, RanksFailed
from ckpt.transfer.buffer_pool import StagingPool

__all__ = ["Job", "is_settled"]


@dataclass
class Job:
    """What to convert, where to, and with whom.

    Attributes:
        files, sent_bytes: what this rank has written.
    """

    source: Source
    choice: Choice
    place: Place
    ranks: Ranks
    call: str
    overwrite: bool
    max_shard_bytes: int
    progress: Callable[[int, int], None]
    pool: StagingPool = field(default_factory=StagingPool)
    files: int = 0
    sent_bytes: int = 0

    @property
    def replaces_file(self) -> bool:
        """Whether what is written, one file, may replace another one. It is not taken away again: that one is gone."""
        return self.overwrite and self.place.key is not None

    @functools.cached_property
    def stream(self) -> Stream:
        return Stream(self.source)

    def counter(self, total_bytes: int) -> Counter:
        return Counter(total_bytes, self.progress)

    def agree(self) -> None:
        """Make sure that all ranks see the same source. Raises CommitConflict on all of them."""
        seen = self.ranks.gather((self.source.identity, self.choice.nbytes, len(self.choice.tensors)))
        if len(set(seen)) > 1:
            raise CommitConflict(
                "the ranks see different sources; is it being replaced, or is it not the same place for all?",
                url=self.source.url,
            )

    def refuse_existing_file(self) -> None:
        """Raise AlreadyExists where the one file that is written stands already, before it costs anything."""
        assert self.place.key is not None
        if not self.overwrite and exists(self.place.folder, self.place.key):
            raise AlreadyExists(
                "there is such a file already; choose another name, or pass --overwrite to replace it",
                url=self.place.folder.url,
                key=self.place.key,
            )

    @contextlib.contextmanager
    def discarding(self, discard: Callable[[], None]) -> Iterator[None]:
        """Take away what this rank has written if what is done here fails."""
        try:
            yield
        except BaseException:
            # Where the others have given this rank up, its stores do nothing else any more.
            with self.ranks.progress.cleaning_up():
                discard()
            raise

    def publish(
        self,
        step: Callable[[], None],
        discard: Callable[[], None],
        proves_failure: Callable[[BaseException], bool],
    ) -> None:
        """The last step, by which the output appears. The first rank takes it, the others wait.

        Args:
            discard: takes away what this rank has written. Not done where the step may have worked all the same.
            proves_failure: whether an error of the step means that nothing has appeared.
        """

        def work() -> None:
            try:
                if self.ranks.rank == 0:
                    step()
            except CheckpointError:
                raise
            except BaseException as error:
                raise CommitUnknown(
                    f"{type(error).__name__} in the last step: whether the output is complete is not known",
                    url=self.place.url,
                ) from error

        try:
            self.ranks.together(self.call, work)
        except RanksFailed as error:
            if 0 in error.failures and proves_failure(error.failures[0]):
                discard()
            raise

    def wrote(self, files: int, nbytes: int) -> None:
        self.files, self.sent_bytes = self.files + files, self.sent_bytes + nbytes


def is_settled(error: BaseException) -> bool:
    """Whether a put that failed so was surely not carried out."""
    if isinstance(error, StorageError):
        return error.settled
    return isinstance(error, CheckpointError) and not isinstance(error, CommitUnknown | IntegrityError)
