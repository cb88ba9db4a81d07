"""Write one rank's part of a save: its data files and its manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from ckpt.backends.base import Store
from ckpt.backends.bodies import CheckedBody
from ckpt.consistency.block_digests import FileBlockDigests, digest_of
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, See, crc64nvme, crc_text
from ckpt.consistency.digests import FileDigests, PayloadDigest
from ckpt.content.counters import Seen
from ckpt.content.looks import FileLook, Payloads
from ckpt.content.rank_content import RankContent, encode_content, seen_in
from ckpt.errors import StorageError
from ckpt.format.dtypes import dtype_name
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
        parts_of: says of tensors' names which part of the state each is of; None not to look at what is written.
        looks_at_all: whether to look at all bytes, or at a sample.
        block_digests: the algorithm of the digests that the manifest is to have of all blocks; None for none.
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
        self.parts_of: Callable[[Sequence[str]], list[str]] | None = None
        self.looks_at_all = False
        self.counters: list[tuple[str, str, Seen]] = []
        self.block_digests: str | None = None
        self._store, self._objects, self._pool, self._pace = store, objects, pool, pace
        self._numbered = numbered
        self._records: list[FileRecord] = []
        self._items: list[ItemRecord] = []
        self._placed: list[PlacedItem] = []
        self._digests: list[PayloadDigest | None] = []
        self._looks: list[tuple[FileLook, Sequence[int]]] = []

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
            block_digests = [block_digests_of(self.block_digests, items) for items in placed]
            bodies = [self._body(*file, check) for file in zip(files, placed, block_digests, strict=True)]
        self._objects.add(*keys)
        with workers(max(len(files), 1), "ckpt-file") as threads:
            run_all(threads, lambda file: self._store.put(*file), zip(keys, bodies, strict=True), stop=stop)
        with no_gc():
            named = zip(keys, bodies, block_digests, strict=True)
            self._records += [file_record(key, body, digests) for key, body, digests in named]
            for number, body, items, entries in zip(numbers, bodies, placed, files, strict=True):
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
        with no_gc():
            items = (pack_numbered if self._numbered else pack_items)(self._placed)
            seen = seen_in(self._looks, self.counters)
        content = encode_content(RankContent(seen)) if self._looks or seen else b""
        return RankReceipt(self._objects.rank, place, manifest, names, items, content=content)

    def _body(
        self,
        entries: Sequence[Entry],
        items: Sequence[FileItem],
        block_digests: FileBlockDigests | None,
        check: Callable[[], None],
    ) -> FileBody:
        """Make the body of a file, whose bytes are looked at on their way, and digested for later saves."""
        see: See | None = None
        if self.digested is not None:
            see = self._digest(entries, items, self.digested).see
        if block_digests is not None:
            see = block_digests.see if see is None else both(see, block_digests.see)
        turn = None if self.looks_at_all else int(self._objects.token, 16)
        look = None if self.parts_of is None else _look(entries, items, self.parts_of, turn)
        body = FileBody(items, self._pool, check, self._pace, see, look)
        if look is not None:
            self._looks.append((look, body.block_crcs))
        return body

    def _digest(
        self, entries: Sequence[Entry], items: Sequence[FileItem], digested: Callable[[str], bool]
    ) -> FileDigests:
        due: list[PayloadDigest | None] = [None] * len(items)
        for number, (entry, item) in enumerate(zip(entries, items, strict=True)):
            if isinstance(item.payload, TensorPayload) and digested(entry.index.fqn):
                due[number] = PayloadDigest(item.payload_offset, item.payload.nbytes)
        self._digests += due
        return FileDigests([digest for digest in due if digest is not None])

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
        encoded = encode(manifest)
        self._objects.add(key)
        self._store.put(key, CheckedBody(encoded))
        return manifest_ref(key, encoded, manifest, self.block_digests)


def block_digests_of(algorithm: str | None, items: Sequence[FileItem]) -> FileBlockDigests | None:
    """Make what digests the blocks of a file of these items, if they are to be."""
    if algorithm is None:
        return None
    return FileBlockDigests(algorithm, items[-1].offset + items[-1].length if items else 0, BLOCK_SIZE_BYTES)


def file_record(key: str, body: FileBody, digests: FileBlockDigests | None) -> FileRecord:
    """Make the record of a file that was sent."""
    packed = msgspec.UNSET if digests is None else digests.packed()
    return FileRecord(path=key, size_bytes=body.nbytes, blocks=body.blocks(), digests=packed)


def manifest_ref(key: str, encoded: bytes, manifest: RankManifest, algorithm: str | None) -> ManifestRef:
    """Make what the commit says of a manifest."""
    return ManifestRef(
        path=key,
        size_bytes=len(encoded),
        crc64nvme=crc_text(crc64nvme(encoded)),
        digest=msgspec.UNSET if algorithm is None else digest_of(algorithm, encoded).hex(),
        rank=manifest.rank,
        files=len(manifest.files),
        items=len(manifest.items),
        data_bytes=sum(file.size_bytes for file in manifest.files),
    )


def both(first: See, second: See) -> See:
    """Show pieces to two that want to see them."""

    def see(position: int, piece: memoryview) -> None:
        first(position, piece)
        second(position, piece)

    return see


def _look(
    entries: Sequence[Entry],
    items: Sequence[FileItem],
    parts_of: Callable[[Sequence[str]], list[str]],
    turn: int | None,
) -> FileLook:
    numbers = [number for number, entry in enumerate(entries) if entry.dtype is not None]
    names = [entries[number].index.fqn for number in numbers]
    starts = [items[number].payload_offset for number in numbers]
    dtypes = [entry.dtype for entry in entries if entry.dtype is not None]
    facts = {dtype: (dtype_name(dtype), dtype.itemsize) for dtype in {*dtypes}}
    payloads = Payloads(
        names=names,
        parts=parts_of(names),
        dtypes=[facts[dtype][0] for dtype in dtypes],
        starts=starts,
        stops=[start + items[number].payload.nbytes for start, number in zip(starts, numbers, strict=True)],
        widths=[facts[dtype][1] for dtype in dtypes],
    )
    return FileLook(payloads, items[-1].offset + items[-1].length if items else 0, turn)
