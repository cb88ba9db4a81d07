"""Write one rank's part of a save: its data files and its manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from ckpt.backends.base import Store
from ckpt.backends.bodies import CheckedBody
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, crc_text
from ckpt.consistency.digests import FileDigests, PayloadDigest
from ckpt.errors import StorageError
from ckpt.format.names import data_key, manifest_key
from ckpt.format.records import (
    FileRecord,
    ItemRecord,
    ManifestRef,
    RankManifest,
    encode,
)
from ckpt.gc_pause import no_gc
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.file_body import FileBody, FileItem, TensorPayload
from ckpt.transfer.threads import run_all, workers
from ckpt.writing.layout import Entry, place
from ckpt.writing.receipts import PlacedItem, pack_items, pack_numbered
from ckpt.writing.save_objects import SaveObjects


class RankFiles:
    """Write the files of one rank in one save, and record what they hold.

    `objects` gets the name of every object before it exists; `pace` is called before bytes are sent. Items that are
    `numbered` by the hints of their indices are reported by those numbers.

    Attributes:
        digested: says of a tensor's name whether the manifest is to have its digest; None for one without.
    """

    def __init__(
        self,
        store: Store,
        objects: SaveObjects,
        pool: StagingPool,
        pace: Callable[[int], None] | None,
        *,
        numbered: bool = False,
    ) -> None:
        self.data_bytes = 0
        self.digested: Callable[[str], bool] | None = None
        self._store, self._objects, self._pool, self._pace = store, objects, pool, pace
        self._numbered = numbered
        self._records: list[FileRecord] = []
        self._items: list[ItemRecord] = []
        self._placed: list[PlacedItem] = []
        self._digests: list[PayloadDigest | None] = []

    def put(self, files: Sequence[Sequence[Entry]]) -> None:
        """Write these files at the same time; the first error stops them all."""
        stop = threading.Event()

        def check() -> None:
            if stop.is_set():
                raise StorageError("stopped: another file of this rank failed")

        first = len(self._records)
        numbers = range(first, first + len(files))
        keys = [data_key(self._objects.rank, self._objects.token, number) for number in numbers]
        with no_gc():
            placed = [place(entries) for entries in files]
            bodies = [self._body(*file, check) for file in zip(files, placed, strict=True)]
        self._objects.add(*keys)
        with workers(max(len(files), 1), "ckpt-file") as threads:
            run_all(threads, lambda file: self._store.put(*file), zip(keys, bodies, strict=True), stop=stop)
        with no_gc():
            for number, key, body, items, entries in zip(numbers, keys, bodies, placed, files, strict=True):
                self._records.append(FileRecord(path=key, size_bytes=body.nbytes, blocks=body.blocks()))
                self.data_bytes += body.nbytes
                for item, entry in zip(items, entries, strict=True):
                    self._note(entry, number, item.offset)

    def _note(self, entry: Entry, file: int, offset: int) -> None:
        index, length = entry.index, entry.length
        payload = (offset + len(entry.head), entry.payload.nbytes) if entry.is_plain else (-1, 0)
        chunk_offsets = None if index.offset is None else list(index.offset)
        self._items.append(ItemRecord(index.fqn, chunk_offsets, file, offset, length, *payload))
        self._placed.append(PlacedItem(index.fqn, index.offset, index.index, file, offset, length))

    def finish(self, place: str) -> RankReceipt:
        """Write the manifest, if it has items, and report what was written to this `place`."""
        manifest = self._put_manifest() if self._items else None
        names = [record.path for record in self._records]
        pack = pack_numbered if self._numbered else pack_items
        return RankReceipt(self._objects.rank, place, manifest, names, pack(self._placed))

    def _body(
        self, entries: Sequence[Entry], items: Sequence[FileItem], check: Callable[[], None]
    ) -> FileBody:
        """Make the body of a file, which digests on its way what later saves compare."""
        if self.digested is None:
            return FileBody(items, self._pool, check, self._pace)
        due: list[PayloadDigest | None] = [None] * len(items)
        for number, (entry, item) in enumerate(zip(entries, items, strict=True)):
            if isinstance(item.payload, TensorPayload) and self.digested(entry.index.fqn):
                due[number] = PayloadDigest(item.payload_offset, item.payload.nbytes)
        self._digests += due
        digests = FileDigests([digest for digest in due if digest is not None])
        return FileBody(items, self._pool, check, self._pace, digests)

    def _packed(self, of: Callable[[PayloadDigest], bytes]) -> bytes | msgspec.UnsetType:
        """Pack what the manifest has for each item, if it has digests; zeros where there is none."""
        if self.digested is None:
            return msgspec.UNSET
        none = of(PayloadDigest(0, 1))
        return b"".join(none if digest is None else of(digest) for digest in self._digests)

    def _put_manifest(self) -> ManifestRef:
        manifest = RankManifest(
            rank=self._objects.rank,
            token=self._objects.token,
            block_size_bytes=BLOCK_SIZE_BYTES,
            files=self._records,
            items=self._items,
            digests=self._packed(PayloadDigest.digest),
            probes=self._packed(lambda digest: digest.probe),
        )
        key = manifest_key(self._objects.rank, self._objects.token)
        body = CheckedBody(encode(manifest))
        self._objects.add(key)
        self._store.put(key, body)
        return ManifestRef(
            path=key,
            size_bytes=body.nbytes,
            crc64nvme=crc_text(body.crc64nvme()),
            rank=self._objects.rank,
            files=len(self._records),
            items=len(self._items),
            data_bytes=self.data_bytes,
        )
