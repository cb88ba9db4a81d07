"""Copy bytes of one store into another: checked before they are handed on, or found to be there already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from ckpt.backends.base import Store
from ckpt.backends.bodies import Part
from ckpt.consistency.checksums import block_crcs, combine_blocks
from ckpt.errors import NotFound, StorageError, Truncated
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import StoredFile, WhenVisible, read_verified
from ckpt.transfer.threads import in_order

RUN_BYTES = 8 << 20
"""The bytes that are read at once to check a file."""


def check_wanted(stop: threading.Event) -> None:
    """Raise StorageError once a copy has been stopped."""
    if stop.is_set():
        raise StorageError("stopped: the copy was interrupted, or another file of it failed")


@dataclass(frozen=True)
class VerifiedBody:
    """A data file of another store, every block of which is checked before it is handed on.

    `check` is called before each part; it raises when the file is not wanted any more.
    """

    store: Store
    file: StoredFile
    pool: StagingPool
    check: Callable[[], None]
    when_visible: WhenVisible

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

    def crc64nvme(self) -> int:
        assert self.file.block_crcs is not None
        return combine_blocks(self.file.block_crcs, self.nbytes, self.file.block_size_bytes)


@dataclass(frozen=True)
class RunReader:
    """Reads objects of a store to compare them."""

    store: Store
    pool: StagingPool

    def matches(self, file: StoredFile, threads: Executor | None = None) -> bool:
        """Tell whether every block of a file has its checksum; without `threads`, read in this one."""
        expected, block = file.block_crcs, file.block_size_bytes
        assert expected is not None
        step = max(RUN_BYTES // block, 1) * block

        def fits(start: int) -> bool:
            crcs = self.crcs(file.key, start, min(start + step, file.size_bytes), block)
            first = start // block
            return crcs == list(expected[first : first + len(crcs)]) != []

        starts = range(0, file.size_bytes, step)
        if threads is None:
            return all(map(fits, starts))
        return all(in_order(threads, fits, starts, ahead=2 * self.store.threads))

    def crcs(self, key: str, start: int, stop: int, block_size_bytes: int) -> list[int]:
        """Compute the checksums of the blocks in `[start, stop)`; none if the object ends before."""
        with self.pool.take(stop - start) as memory:
            try:
                self.store.read_into(key, start, [memory])
            except (NotFound, Truncated):
                return []
            return block_crcs([memory], block_size_bytes)
