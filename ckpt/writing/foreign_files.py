"""Save the files of another program as one checkpoint: streamed in chunks, and committed by our record.

A file is stored as a tensor of bytes. So it is checked, listed, copied and removed as any other.
"""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

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

from ckpt.backends.base import Store, read_bytes
from ckpt.consistency import environment
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.commit import proves_no_commit
from ckpt.errors import CommitError, NotVisible
from ckpt.format.names import ObjectName, last_segment, rank_directory
from ckpt.format.records import ManifestRef, RankManifest, decode_manifest
from ckpt.stock.item_frame import frame
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.file_body import BytesPayload
from ckpt.transfer.threads import in_order, thread_pool, workers
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.layout import Entry
from ckpt.writing.rank_files import RankFiles
from ckpt.writing.receipts import PlacedItem, RankReceipt, pack_items, records_of
from ckpt.writing.save_objects import SaveObjects

CHUNK_BYTES = 16 << 20
_CHUNKS_AT_ONCE = 4
_free: list[memoryview] = []  # fresh memory costs more in page faults than the copy into it
_PATIENCE_S = 60.0
"""How long a listing has to show a file of every rank."""


class FileStream(io.RawIOBase):
    """Write a file in chunks, of which a few are sent while the next ones are filled.

    It needs 128 MiB, which the next file uses again. The file counts when `close` returns, and is in the checkpoint when
    `commit_files` does; after an exception in its `with` block nothing of it stays.

    Args:
        store: the checkpoint's place.
        name: of the file, relative to the place.
        writer: a number that no other file of this checkpoint has.
        attempt: 8 hexadecimal digits that all files of one save share.
    """

    def __init__(self, store: Store, name: str, writer: int, attempt: str) -> None:
        self._objects = SaveObjects(writer, attempt + environment.token()[: 16 - len(attempt)])
        Coordinator(store, self._objects).look(overwrite=False)
        store.prepare(rank_directory(writer))
        self._store, self._name, self._size = store, name, 0
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
        """Send what is left, and note the file in its manifest. Raises StorageError."""
        if self._worker is None:
            return
        try:
            if self._filled or not self._chunks:
                self._cut()
            self._send()
            self._wait()
            self._files.finish(last_segment(self._store.url))
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


def commit_files(store: Store, attempt: str, world_size: int, tags: Mapping[str, str]) -> None:
    """Make a checkpoint of all files of an attempt, once all ranks have closed theirs.

    The number of a file's writer, modulo `world_size`, is its rank. Every rank must have written.

    Raises:
        NotVisible: the listing shows no file of some rank.
        AlreadyExists, CommitError: as for any save.
    """
    manifests = _await_manifests(store, attempt, world_size)
    described: dict[str, STORAGE_TYPES] = {}
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    receipts = {number: RankReceipt(number, "", None, [], b"\x90") for number in range(max(manifests) + 1)}
    for number, (ref, manifest) in manifests.items():
        if twice := chunks.keys() & {item.fqn for item in manifest.items}:
            text = f"nothing was committed: two ranks wrote the same file: {min(twice)[:200]!r}"
            raise CommitError(text, url=store.url)
        for item in manifest.items:
            offsets, sizes = torch.Size(item.offsets or ()), torch.Size([item.payload_bytes])
            chunks[item.fqn].append(ChunkStorageMetadata(offsets, sizes))
        items = [
            PlacedItem(item.fqn, tuple(item.offsets or ()), None, item.file, item.offset, item.length)
            for item in manifest.items
        ]
        names = [file.path for file in manifest.files]
        receipts[number] = RankReceipt(number, "", ref, names, pack_items(items))
    for name, of_file in chunks.items():
        size = torch.Size([sum(chunk.sizes[0] for chunk in of_file)])
        described[name] = TensorStorageMetadata(TensorProperties(dtype=torch.uint8), size, of_file)
    objects = SaveObjects(0, attempt + environment.token()[: 16 - len(attempt)])
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


def _await_manifests(
    store: Store, attempt: str, world_size: int
) -> dict[int, tuple[ManifestRef, RankManifest]]:
    """Read the manifests of an attempt, by writer, once every rank has one."""
    backoff = environment.Backoff(_PATIENCE_S, first_pause_s=0.25)
    while True:
        keys: dict[int, str] = {}
        for stat in store.list():
            name = ObjectName.parse(stat.key)
            if name is None or name.kind != "json" or not name.token.startswith(attempt):
                continue
            if keys.setdefault(name.rank, stat.key) != stat.key:
                text = "nothing was committed: files of an earlier save that failed are here; save to another place"
                raise CommitError(text, url=store.url)
        absent = sorted(set(range(world_size)) - {number % world_size for number in keys})
        if not absent:
            break
        if backoff.is_over:
            raise NotVisible(
                f"nothing was committed: no file of rank {absent[0]} is there ({len(absent)} of {world_size} "
                "ranks); every rank has to save at least one item",
                url=store.url,
            )
        backoff.pause()
    with workers(store.threads, "ckpt-commit") as threads:
        read = in_order(
            threads, lambda key: _read_manifest(store, key), keys.values(), ahead=4 * store.threads
        )
        return dict(zip(keys, read, strict=True))


def _read_manifest(store: Store, key: str) -> tuple[ManifestRef, RankManifest]:
    data = read_bytes(store, key)
    manifest = decode_manifest(data, url=store.url, key=key)
    ref = ManifestRef(
        path=key,
        size_bytes=len(data),
        crc64nvme=crc_text(crc64nvme(data)),
        rank=manifest.rank,
        files=len(manifest.files),
        items=len(manifest.items),
        data_bytes=sum(file.size_bytes for file in manifest.files),
    )
    return ref, manifest
