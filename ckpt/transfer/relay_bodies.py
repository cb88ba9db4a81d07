"""Copy bytes of one store into another: checked before they are handed on, or found to be there already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from ckpt.backends.base import Store
from ckpt.backends.bodies import Part
from ckpt.consistency.checksums import CheckedBuffers, block_crcs, combine_blocks
from ckpt.errors import NotFound, StorageError, Truncated
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import StoredFile, WhenVisible, read_verified
from ckpt.transfer.reports import no_report
from ckpt.transfer.threads import in_order

RUN_BYTES = 8 << 20
"""The bytes that are read at once to check a file."""

Range = tuple[int, int]
"""Bytes of a file, half open."""


def runs(size_bytes: int, block_size_bytes: int, start: int = 0) -> Iterator[Range]:
    """Cut a file, from the begin of a block on, into runs of whole blocks that are read at once."""
    step = max(RUN_BYTES // block_size_bytes, 1) * block_size_bytes
    for begin in range(start, size_bytes, step):
        yield begin, min(begin + step, size_bytes)


def check_wanted(stop: threading.Event) -> None:
    """Raise StorageError once a copy has been stopped."""
    if stop.is_set():
        raise StorageError("stopped: the copy was interrupted, or another file of it failed")


@dataclass(frozen=True)
class VerifiedBody:
    """A data file of another store, every block of which is checked before it is handed on.

    `check` is called before each part; it raises when the file is not wanted any more. `sent` is called after
    each part, with where it starts and stops.
    """

    store: Store
    file: StoredFile
    pool: StagingPool
    check: Callable[[], None]
    when_visible: WhenVisible
    sent: Callable[[int, int], None] = no_report

    has_checksums = True

    @property
    def nbytes(self) -> int:
        return self.file.size_bytes

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        self.check()
        block = self.file.block_size_bytes
        # Whole blocks, of which the part may be the middle.
        begin, end = start - start % block, min(-(-stop // block) * block, self.nbytes)
        with self.pool.take(end - begin) as memory:
            fault = "the stored bytes do not match their checksum; nothing of it was copied"
            crcs = read_verified(self.store, self.file, begin, [memory], self.when_visible, fault=fault)
            buffer = memory[start - begin : stop - begin]
            if (begin, end) != (start, stop):
                crcs = block_crcs([buffer], block)
            yield Part([buffer], combine_blocks(crcs, buffer.nbytes, block))
        self.sent(start, stop)

    def crc64nvme(self) -> int:
        assert self.file.block_crcs is not None
        return combine_blocks(self.file.block_crcs, self.nbytes, self.file.block_size_bytes)


@dataclass(frozen=True)
class RunReader:
    """Reads objects of a store to compare them."""

    store: Store
    pool: StagingPool

    def matches(self, file: StoredFile, threads: Executor | None = None) -> bool:
        """Tell whether every block of a file has its checksum, and its digest; without `threads`, read in this one."""
        expected, block = file.block_crcs, file.block_size_bytes
        assert expected is not None

        def fits(run: Range) -> bool:
            start, stop = run
            with self.pool.take(stop - start) as memory:
                crcs, first = self._crcs(file.key, start, memory, block), start // block
                fits = crcs == list(expected[first : first + len(crcs)]) and crcs != []
                return fits and not file.forged_blocks(start, [memory])

        todo = runs(file.size_bytes, block)
        if threads is None:
            return all(map(fits, todo))
        return all(in_order(threads, fits, todo, ahead=2 * self.store.threads))

    def crcs(self, key: str, start: int, stop: int, block_size_bytes: int) -> list[int]:
        """Compute the checksums of the blocks in `[start, stop)`; none if the object ends before."""
        with self.pool.take(stop - start) as memory:
            return self._crcs(key, start, memory, block_size_bytes)

    def _crcs(self, key: str, start: int, memory: memoryview, block_size_bytes: int) -> list[int]:
        checked = CheckedBuffers([memory], block_size_bytes)
        try:
            self.store.read_into(key, start, checked)
        except (NotFound, Truncated):
            return []
        return checked.crcs()
