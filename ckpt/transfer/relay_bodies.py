"""Bytes from one store on their way into another: read part by part, checked, and handed on."""

from __future__ import annotations

import array
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from ckpt.backends.base import Store
from ckpt.backends.bodies import Part
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, block_crcs, combine_blocks
from ckpt.errors import IntegrityError, NotFound, StorageError, Truncated
from ckpt.format.records import FileRecord
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.tensor_memory import memory_of
from ckpt.transfer.threads import in_order

RUN_BYTES = 8 << 20
"""The bytes that are read at once to check a file."""

_ATTEMPTS = 2


class VerifiedBody:
    """A data file of another store, every block of which is checked before it is handed on."""

    has_checksums = True

    def __init__(
        self,
        store: Store,
        file: FileRecord,
        block_size_bytes: int,
        pool: StagingPool,
        stop: threading.Event,
        when_visible: Callable[[Callable[[], None]], None],
    ) -> None:
        """`stop`: once set, no part is opened any more."""
        self._store, self._file, self._block, self._pool = store, file, block_size_bytes, pool
        self._stop, self._when_visible = stop, when_visible
        self._crcs = file.block_crcs()

    @property
    def nbytes(self) -> int:
        return self._file.size_bytes

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        _check(self._stop)
        # Whole blocks, of which the part may be the middle.
        begin = start - start % self._block
        end = min(-(-stop // self._block) * self._block, self.nbytes)
        with self._pool.take(end - begin) as scratch:
            memory = memory_of(scratch)
            crcs = self._read(begin, end, memory)
            buffer = memory[start - begin : stop - begin]
            if (begin, end) == (start, stop):
                crc = combine_blocks(crcs, stop - start, self._block)
            else:
                crc = combine_blocks(block_crcs([buffer], BLOCK_SIZE_BYTES), buffer.nbytes, BLOCK_SIZE_BYTES)
            yield Part([buffer], crc)

    def crc64nvme(self) -> int:
        return combine_blocks(self._crcs, self.nbytes, self._block)

    def _read(self, begin: int, end: int, memory: memoryview) -> list[int]:
        first = begin // self._block
        for _ in range(_ATTEMPTS):  # perhaps they are only damaged on their way
            self._when_visible(lambda: self._store.read_into(self._file.path, begin, [memory]))
            crcs = block_crcs([memory], self._block)
            bad = [n for n, crc in enumerate(crcs, first) if crc != self._crcs[n]]
            if not bad:
                return crcs
        raise IntegrityError(
            "the stored bytes do not match their checksum; nothing of it was copied",
            url=self._store.url,
            key=self._file.path,
            start=bad[0] * self._block,
            stop=min((bad[0] + 1) * self._block, self.nbytes),
        )


class PlainBody:
    """An object of another store, whose checksum is not known before it has been read."""

    has_checksums = True

    def __init__(self, store: Store, key: str, nbytes: int, pool: StagingPool, stop: threading.Event) -> None:
        self._store, self._key, self._nbytes, self._pool, self._stop = store, key, nbytes, pool, stop
        self._crcs = array.array("Q", bytes(8 * -(-nbytes // BLOCK_SIZE_BYTES)))

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        _check(self._stop)
        with self._pool.take(stop - start) as scratch:
            buffer = memory_of(scratch)
            self._store.read_into(self._key, start, [buffer])
            crcs = block_crcs([buffer], BLOCK_SIZE_BYTES)
            first = start // BLOCK_SIZE_BYTES
            self._crcs[first : first + len(crcs)] = array.array("Q", crcs)
            yield Part([buffer], combine_blocks(crcs, stop - start, BLOCK_SIZE_BYTES))

    def crc64nvme(self) -> int:
        return combine_blocks(self._crcs, self._nbytes, BLOCK_SIZE_BYTES)


class RunReader:
    """Reads what is at the destination already."""

    def __init__(self, store: Store, pool: StagingPool) -> None:
        self._store, self._pool = store, pool

    def matches(
        self, key: str, file: FileRecord, block_size_bytes: int, threads: Executor | None = None
    ) -> bool:
        """Whether every block of an object has its checksum; without `threads`, read in this one."""
        step = max(RUN_BYTES // block_size_bytes, 1) * block_size_bytes
        crcs = file.block_crcs()

        def fits(start: int) -> bool:
            stop = min(start + step, file.size_bytes)
            found = self.crcs(key, start, stop, block_size_bytes)
            first = start // block_size_bytes
            return found == list(crcs[first : first + len(found)]) != []

        starts = range(0, file.size_bytes, step)
        if threads is None:
            return all(map(fits, starts))
        return all(in_order(threads, fits, starts, ahead=2 * self._store.threads))

    def crcs(self, key: str, start: int, stop: int, block_size_bytes: int) -> list[int]:
        """The checksums of the blocks in `[start, stop)`; none where the object does not reach that far."""
        with self._pool.take(stop - start) as scratch:
            memory = memory_of(scratch)
            try:
                self._store.read_into(key, start, [memory])
            except (NotFound, Truncated):
                return []
            return block_crcs([memory], block_size_bytes)


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise StorageError("stopped: the copy was interrupted, or another file of it failed")
