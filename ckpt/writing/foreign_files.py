"""Save the files of another program as one checkpoint: streamed in chunks, and committed by our record.

A file is stored as a tensor of bytes. So it is checked, listed, copied and removed as any other.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.backends.base import Store
from ckpt.consistency.commit import proves_no_commit
from ckpt.errors import CommitError
from ckpt.format.names import last_segment, rank_directory
from ckpt.format.records import ManifestRef
from ckpt.stock.item_frame import frame
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.file_body import BytesPayload
from ckpt.transfer.threads import thread_pool
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.layout import Entry
from ckpt.writing.rank_files import RankFiles
from ckpt.writing.receipts import PlacedItem, RankReceipt, records_of
from ckpt.writing.save_objects import SaveObjects

CHUNK_BYTES = 16 << 20
_CHUNKS_AT_ONCE = 4
_free: list[memoryview] = []  # fresh memory costs more in page faults than the copy into it


class WrittenFile(msgspec.Struct, array_like=True):
    """A file that was closed, as the commit needs to know it; it can be sent to another rank.

    Attributes:
        manifest: its writer's manifest.
        data_files: the names of the objects that hold it.
        items: its chunks in them, packed as in a `RankReceipt`.
    """

    name: str
    size_bytes: int
    manifest: ManifestRef
    data_files: list[str]
    items: bytes


class FileStream(io.RawIOBase):
    """Write a file in chunks, of which a few are sent while the next ones are filled.

    It needs 128 MiB, which the next file uses again. `note` gets the file when it is whole and durable, before
    `close` returns; it is in a checkpoint when `commit_files` gets it. After an exception in `write`, or in
    its `with` block, nothing of it stays: `close` raises that of `write` again.

    Args:
        store: the checkpoint's place.
        name: of the file, relative to the place.
        writer: a number that no other file of this checkpoint has.
        note: called with the file.
    """

    def __init__(self, store: Store, name: str, writer: int, note: Callable[[WrittenFile], object]) -> None:
        self._objects = SaveObjects(writer)
        Coordinator(store, self._objects).look(overwrite=False)
        store.prepare(rank_directory(writer))
        self._store, self._name, self._size, self._note = store, name, 0, note
        self._failure: BaseException | None = None
        self._files = RankFiles(store, self._objects, StagingPool(MIN_MEMORY_BUDGET_BYTES), None)
        self._worker: ThreadPoolExecutor | None = thread_pool(1, "ckpt-stream")
        self._sending: Future[None] | None = None
        self._batch: list[list[Entry]] = []
        self._full: list[memoryview] = []  # chunks of the batch
        self._away: list[memoryview] = []  # chunks that are being sent
        self._chunk, self._filled, self._chunks = _new_chunk(), 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview | bytes | bytearray) -> int:  # type: ignore[override]
        if self._failure is not None:
            raise self._failure
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < view.nbytes:
                taken = min(CHUNK_BYTES - self._filled, view.nbytes - written)
                self._chunk[self._filled : self._filled + taken] = view[written : written + taken]
                self._filled, written = self._filled + taken, written + taken
                if self._filled == CHUNK_BYTES:
                    self._cut()
        except BaseException as error:
            self._failure = error
            raise
        return written

    def close(self) -> None:
        """Send what is left, and note the file in its manifest. Raises StorageError."""
        if self._worker is None:
            return
        try:
            if self._failure is not None:
                raise self._failure
            if self._filled or not self._chunks:
                self._cut()
            self._send()
            self._wait()
            receipt = self._files.finish(last_segment(self._store.url))
            assert receipt.manifest is not None  # it has a chunk
            self._note(WrittenFile(self._name, self._size, receipt.manifest, receipt.files, receipt.items))
        except BaseException:
            self.discard()
            raise
        self._end()

    def discard(self) -> None:
        """Delete what was sent: it is in no checkpoint."""
        if self._worker is not None:
            with contextlib.suppress(Exception):
                self._wait()
            self._end()
        self._objects.discard(self._store)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        """Do not count a file that was never closed."""
        if getattr(self, "_worker", None) is not None:
            self.discard()

    def _cut(self) -> None:
        """Make an item of the chunk, as `torch.save` would of a tensor of bytes."""
        framed = frame(torch.uint8, torch.Size([self._filled]))
        index = MetadataIndex(self._name, torch.Size([self._size]), self._chunks)
        payload = BytesPayload(self._chunk[: self._filled])
        self._batch.append([Entry(index, framed.head, payload, framed.tail, True)])
        self._size, self._chunks = self._size + self._filled, self._chunks + 1
        self._full.append(self._chunk)
        # The first chunks are sent at once, so that storage is busy while the next ones are filled.
        if len(self._batch) >= min(_CHUNKS_AT_ONCE, self._chunks // 2 + 1):
            self._send()
        self._chunk, self._filled = _new_chunk(), 0

    def _send(self) -> None:
        self._wait()
        assert self._worker is not None
        batch, self._batch = self._batch, []
        self._away, self._full = self._full, []
        if batch:
            self._sending = self._worker.submit(self._files.put, batch)

    def _wait(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()
        self._give_back(self._away)
        self._away = []

    @staticmethod
    def _give_back(chunks: list[memoryview]) -> None:
        _free.extend(chunks)
        del _free[2 * _CHUNKS_AT_ONCE :]

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()
            self._give_back([self._chunk])
        self._batch.clear()
        super().close()


def _new_chunk() -> memoryview:
    with contextlib.suppress(IndexError):
        chunk = _free.pop()
        if chunk.nbytes == CHUNK_BYTES:
            return chunk
    return np.empty(CHUNK_BYTES, dtype=np.uint8).data


def commit_files(store: Store, files: Sequence[WrittenFile], tags: Mapping[str, str]) -> None:
    """Make a checkpoint of exactly these files, whoever wrote them. Raises AlreadyExists, CommitError as any save."""
    described: dict[str, STORAGE_TYPES] = {}
    last = max(file.manifest.rank for file in files)
    receipts = {number: RankReceipt(number, "", None, [], b"\x90") for number in range(last + 1)}
    for file in files:
        if file.name in described:
            text = f"nothing was committed: two ranks wrote the same file: {file.name[:200]!r}"
            raise CommitError(text, url=store.url)
        items = msgspec.msgpack.decode(file.items, type=list[PlacedItem])
        starts = [start for item in items for start in item.chunk_offsets or ()]
        chunks = [
            ChunkStorageMetadata(torch.Size([start]), torch.Size([stop - start]))
            for start, stop in itertools.pairwise([*starts, file.size_bytes])
        ]
        properties = TensorProperties(dtype=torch.uint8)
        described[file.name] = TensorStorageMetadata(properties, torch.Size([file.size_bytes]), chunks)
        number = file.manifest.rank
        receipts[number] = RankReceipt(number, "", file.manifest, file.data_files, file.items)
    objects = SaveObjects()
    coordinator = Coordinator(store, objects)
    coordinator.look(overwrite=False)
    columns, record = records_of(
        Metadata(described),
        list(receipts.values()),
        save_id=objects.token,
        world_size=len(receipts),
        tags=tags,
    )
    try:
        coordinator.commit(columns, record)
    except Exception as error:
        if proves_no_commit(error):
            objects.discard(store)
        raise
