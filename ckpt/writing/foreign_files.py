"""Save the files of another program as one checkpoint: streamed in chunks, and committed by our record.

A file is stored as a tensor of bytes. So it is checked, listed, copied and removed as any other.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

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
from ckpt.errors import CheckpointError, CommitError
from ckpt.format.names import rank_directory
from ckpt.format.records import ManifestRef
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.stock.item_frame import frame
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.file_body import BytesPayload
from ckpt.transfer.threads import thread_pool
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.layout import Entry
from ckpt.writing.rank_files import RankFiles
from ckpt.writing.receipts import PlacedItem, records_of
from ckpt.writing.save_objects import SaveObjects

CHUNK_BYTES = 16 << 20
_CHUNKS_AT_ONCE = 4
_free: list[memoryview] = []  # fresh memory costs more in page faults than the copy into it


class WrittenFiles(msgspec.Struct, array_like=True):
    """All files of one rank, durable, as the commit needs to know them; it can be sent to another rank.

    Attributes:
        size_bytes: by name.
        manifest: None without a file.
        data_files: the names of the objects that hold them.
        items: the chunks in them, packed as in a `RankReceipt`.
    """

    size_bytes: dict[str, int]
    manifest: ManifestRef | None
    data_files: list[str]
    items: bytes


class FilesSave:
    """Write the files of one rank in one save, a few chunks at a time while the next ones are filled.

    It needs 128 MiB, and 16 MiB for each file that is written at the same time; the next save uses them
    again. After an error nothing of this rank stays, and every later call raises it again.

    Args:
        store: the checkpoint's place.
        rank: of this save.

    Raises:
        AlreadyExists: a checkpoint is committed there.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._objects = store, SaveObjects(rank)
        Coordinator(store, self._objects).look(overwrite=False)
        store.prepare(rank_directory(rank))
        self._files = RankFiles(store, self._objects, StagingPool(MIN_MEMORY_BUDGET_BYTES), None)
        self._worker = thread_pool(1, "ckpt-files")
        self._lock = threading.RLock()
        self._size_bytes: dict[str, int | None] = {}  # None: it is being written
        self._batch: list[tuple[Entry, memoryview]] = []
        self._sending: Future[None] | None = None
        self._chunks = 0
        self._failure: BaseException | None = None

    def open(self, name: str) -> FileStream:
        """Begin a file; the name is relative to the place. Raises CheckpointError for one that was begun before."""
        with self._lock:
            self._check()
            if name in self._size_bytes:
                raise CheckpointError(
                    f"the file was written before in this save: {name[:200]!r}", url=self._store.url
                )
            self._size_bytes[name] = None
        return FileStream(self, name)

    def put(self, entry: Entry, chunk: memoryview) -> None:
        """Send a chunk soon; `chunk` is its memory, which is given back then."""
        with self._lock:
            self._batch.append((entry, chunk))
            self._chunks += 1
            # The first chunks are sent at once, so that storage is busy while the next ones are filled.
            if len(self._batch) >= min(_CHUNKS_AT_ONCE, self._chunks // 2 + 1):
                self._send()

    def closed(self, name: str, size_bytes: int) -> None:
        """Note that a file is whole."""
        with self._lock:
            self._check()
            self._size_bytes[name] = size_bytes

    def finish(self) -> WrittenFiles:
        """Wait until all files are durable, and write their manifest. Raises StorageError, CheckpointError."""
        with self._lock:
            try:
                self._send()
                self._wait()
                sizes = {name: size for name, size in self._size_bytes.items() if size is not None}
                if still_open := sorted(self._size_bytes.keys() - sizes.keys()):
                    raise CheckpointError(
                        f"the file was not closed: {still_open[0][:200]!r}", url=self._store.url
                    )
                receipt = self._files.finish("")
            except BaseException as error:
                self.fail(error)
                raise
            self._objects.release()  # a commit may list them from now on
            self._worker.shutdown()
            self._failure = CheckpointError("the save has ended: it takes no more files", url=self._store.url)
            return WrittenFiles(sizes, receipt.manifest, receipt.files, receipt.items)

    def fail(self, error: BaseException) -> None:
        """End the save, and delete what was sent."""
        with self._lock:
            if self._failure is None:
                self._failure = error
                self._worker.shutdown()
                self._batch.clear()
                self._objects.discard(self._store)

    def _send(self) -> None:
        self._wait()
        batch, self._batch = self._batch, []
        if batch:
            self._sending = self._worker.submit(self._put, batch)

    def _wait(self) -> None:
        self._check()
        sending, self._sending = self._sending, None
        if sending is not None:
            try:
                sending.result()
            except BaseException as error:
                self.fail(error)
                raise

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _put(self, batch: Sequence[tuple[Entry, memoryview]]) -> None:
        files: list[list[Entry]] = []
        for entry, _ in batch:  # a full chunk has an object of its own, short ones share one
            together_bytes = (
                entry.payload.nbytes + sum(each.payload.nbytes for each in files[-1]) if files else 0
            )
            if files and together_bytes <= CHUNK_BYTES:
                files[-1].append(entry)
            else:
                files.append([entry])
        self._files.put(files)
        _free.extend(chunk for _, chunk in batch)
        del _free[2 * _CHUNKS_AT_ONCE :]


class FileStream(io.RawIOBase):
    """Write a file of a `FilesSave`. An exception in its `with` block ends that save."""

    def __init__(self, save: FilesSave, name: str) -> None:
        self._save, self._name = save, name
        self._size_bytes, self._chunks = 0, 0
        self._chunk, self._filled = _new_chunk(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview | bytes | bytearray) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        written = 0
        while written < view.nbytes:
            taken = min(CHUNK_BYTES - self._filled, view.nbytes - written)
            self._chunk[self._filled : self._filled + taken] = view[written : written + taken]
            self._filled, written = self._filled + taken, written + taken
            if self._filled == CHUNK_BYTES:
                self._cut()
        return written

    def close(self) -> None:
        """Send what is left; it is durable when the save has finished. Raises StorageError of any file."""
        if self.closed:
            return
        try:
            if self._filled or not self._chunks:
                self._cut()
            self._save.closed(self._name, self._size_bytes)
        finally:
            super().close()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._save.fail(error)
            super().close()

    def __del__(self) -> None:
        """Leave a file that was never closed unfinished: the save finds it when it ends."""
        super().close()

    def _cut(self) -> None:
        """Make an item of the chunk, as `torch.save` would of a tensor of bytes."""
        framed = frame(torch.uint8, torch.Size([self._filled]))
        index = MetadataIndex(self._name, torch.Size([self._size_bytes]), self._chunks)
        payload = BytesPayload(self._chunk[: self._filled])
        self._save.put(Entry(index, framed.head, payload, framed.tail, True), self._chunk)
        self._size_bytes, self._chunks = self._size_bytes + self._filled, self._chunks + 1
        self._chunk, self._filled = _new_chunk(), 0


def _new_chunk() -> memoryview:
    with contextlib.suppress(IndexError):
        chunk = _free.pop()
        if chunk.nbytes == CHUNK_BYTES:
            return chunk
    return np.empty(CHUNK_BYTES, dtype=np.uint8).data


def commit_files(store: Store, ranks: Sequence[WrittenFiles], tags: Mapping[str, str]) -> None:
    """Make a checkpoint of exactly the files of these ranks, in order. Raises AlreadyExists, CommitError as any save."""
    described: dict[str, STORAGE_TYPES] = {}
    for written in ranks:
        starts: dict[str, list[int]] = {name: [] for name in written.size_bytes}
        for item in msgspec.msgpack.decode(written.items, type=list[PlacedItem]):
            starts[item.fqn] += item.chunk_offsets or ()
        for name, size_bytes in written.size_bytes.items():
            if name in described:
                text = f"nothing was committed: two ranks wrote the same file: {name[:200]!r}"
                raise CommitError(text, url=store.url)
            chunks = [
                ChunkStorageMetadata(torch.Size([start]), torch.Size([stop - start]))
                for start, stop in itertools.pairwise([*sorted(starts[name]), size_bytes])
            ]
            properties = TensorProperties(dtype=torch.uint8)
            described[name] = TensorStorageMetadata(properties, torch.Size([size_bytes]), chunks)
    receipts = [
        RankReceipt(rank, "", written.manifest, written.data_files, written.items)
        for rank, written in enumerate(ranks)
    ]
    objects = SaveObjects()
    coordinator = Coordinator(store, objects)
    coordinator.look(overwrite=False)
    columns, record = records_of(
        Metadata(described), receipts, save_id=objects.token, world_size=len(receipts), tags=tags
    )
    try:
        coordinator.commit(columns, record)
    except Exception as error:
        if proves_no_commit(error):
            objects.discard(store)
        raise
