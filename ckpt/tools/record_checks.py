"""Compare a checkpoint's records: index with manifests, chunks with tensors and `.metadata`; choose what is read of files."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from ckpt.backends.base import Store, exists, read_bytes
from ckpt.consistency.block_digests import checked_algorithm, digest_of
from ckpt.consistency.checksums import crc64nvme
from ckpt.consistency.commit import STOCK_METADATA_KEY
from ckpt.consistency.sampling import BlockSample
from ckpt.consistency.seal import is_sealed_json, unseal_json, unseal_pickle
from ckpt.errors import ConfigurationError, FormatError, IntegrityError, NotFound, UnsafeContent
from ckpt.format.columns import Columns, Integers, ObjectRow
from ckpt.format.dtypes import item_bytes
from ckpt.format.model_index import MAX_INDEX_BYTES, sealed_model_index
from ckpt.format.names import MODEL_INDEX_KEY, SINGLE_MODEL_KEY, owned_path, split_path
from ckpt.format.records import (
    MAX_METADATA_BYTES,
    CommitRecord,
    FileRecord,
    ItemRecord,
    ManifestRef,
    RankManifest,
    StoredCommit,
    decode_manifest,
)
from ckpt.reading.checkpoint import Checkpoint, ReadSettings, check_root, read_listed
from ckpt.tools.findings import Damage
from ckpt.transfer.boxes import tiling_fault
from ckpt.transfer.fetcher import StoredFile
from ckpt.transfer.relay_bodies import RUN_BYTES, Range, runs
from ckpt.transfer.reports import ReportBytes, no_report
from ckpt.transfer.threads import in_order, workers
from ckpt.writing.stock_metadata import encode_stock_metadata, names_only_ours, stock_columns

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

T = TypeVar("T")

MIN_SAMPLE_BYTES = 16 << 20
"""So much is read of any checkpoint, however small the share that is asked for."""

_MAX_NAMED = 100
_REMEDY = "unless a save is running, `ckpt gc` writes the right one"


def read_manifest(
    store: Store, settings: ReadSettings, commit: StoredCommit, ref: ManifestRef
) -> RankManifest:
    """Read a rank's manifest; of one of another checkpoint with the paths of files as `commit` names them.

    Raises as `read_listed`, and FormatError.
    """
    manifest = decode_manifest(read_listed(store, settings, ref, commit), url=store.url, key=ref.path)
    if not ref.owner:
        return manifest
    files = [msgspec.structs.replace(file, path=owned_path(ref.owner, file.path)) for file in manifest.files]
    return msgspec.structs.replace(manifest, files=files)


def checkable(commit: CommitRecord, *, must: bool) -> str | None:
    """Return the algorithm of a checkpoint's digests; None if it has none, or they cannot be computed here.

    Raises ConfigurationError if they `must` be and cannot.
    """
    if not commit.block_digests:
        return None
    try:
        return checked_algorithm(commit.block_digests.algorithm)
    except ConfigurationError:
        if must:
            raise
        return None


def check_digests(store: Store, commit: CommitRecord, checkpoint: Checkpoint | None) -> list[Damage]:
    """Check the root of a commit's digests, and that of its index, if it could be read."""
    damages: list[Damage] = []
    try:
        check_root(commit, store.url)
    except (FormatError, IntegrityError) as error:
        damages.append(Damage.of_error("record", error))
    ref = commit.described_by
    if commit.block_digests and checkpoint is not None:
        digest = digest_of(commit.block_digests.algorithm, checkpoint.metadata_bytes)
        if digest.hex() != ref.digest:
            message = "the stored bytes do not match their digest, though their checksum: they were forged"
            damages.append(Damage("record", message, ref.path))
    return damages


def each_manifest(
    store: Store, refs: Sequence[ManifestRef], read: Callable[[ManifestRef], T]
) -> Iterator[tuple[ManifestRef, T]]:
    """Yield what `read` makes of each manifest; only a few are in memory at a time."""
    ahead = min(4, store.threads)
    with workers(ahead, "ckpt-manifest") as threads:
        yield from zip(refs, in_order(threads, read, refs, ahead=ahead), strict=True)


def items_by_file(manifest: RankManifest) -> list[list[ItemRecord]]:
    """Group the items of a manifest by file."""
    items: list[list[ItemRecord]] = [[] for _ in manifest.files]
    for item in manifest.items:
        items[item.file].append(item)
    return items


def item_columns(columns: Columns) -> Integers:
    """Make five rows with a column for each item: file, offset, length, number of its entry, row in that."""
    items = [np.empty((5, 0), dtype=np.int64)]
    for number, entry in enumerate(columns.entries.values()):
        places = np.array([entry.file, entry.offset, entry.length], dtype=np.int64).reshape(3, -1)
        count = places.shape[1]
        items.append(np.vstack([places, np.full(count, number), np.arange(count)]))
    return np.concatenate(items, axis=1)


by_offset = attrgetter("offset")


@dataclass
class DataFile:
    """A data file under check: its record, its checksums, and its items, sorted by offset."""

    record: FileRecord
    block_size_bytes: int
    crcs: Sequence[int]
    items: list[ItemRecord]
    stored: StoredFile

    def fault(self, start: int, data: memoryview) -> str | None:
        """Say what is wrong with a block; None if nothing is."""
        if crc64nvme(data) != self.crcs[start // self.block_size_bytes]:
            return "the stored bytes do not match their checksum"
        if self.stored.forged_blocks(start, [data]):
            return "the stored bytes do not match their digest, though their checksum: they were forged"
        return None

    def fqns(self, start: int, stop: int) -> list[str]:
        """List the names whose bytes are in `[start, stop)`."""
        first = max(0, bisect_right(self.items, start, key=by_offset) - 1)
        touched = self.items[first : bisect_left(self.items, stop, key=by_offset)]
        return [item.fqn for item in touched if item.offset + item.length > start]

    def damage(self, kind: str, message: str, start: int, stop: int) -> Damage:
        return Damage.of(kind, message, self.record.path, start, stop, fqns=self.fqns(start, stop))


def whole_file(file: FileRecord, block_size_bytes: int) -> Iterable[Range]:
    """Choose all of a file."""
    return runs(file.size_bytes, block_size_bytes)


def no_data(file: FileRecord, block_size_bytes: int) -> Iterable[Range]:
    """Choose nothing of a file."""
    return ()


@dataclass(frozen=True)
class Choice:
    """What to read of a checkpoint's data, and whom to tell.

    Attributes:
        ranges: chooses ranges of whole blocks in a file, given the size of its blocks.
        sample: draws them instead.
        only_blocks: refuse what has no blocks with checksums: checkpoints of other programs.
        strays: look for objects that do not belong there.
        passed: called with the bytes of each range, in order, when it has been checked, and whether it is damaged;
            for other checks with 0 bytes.
        progress: called with the data bytes that were compared so far, and those in all.
    """

    ranges: Callable[[FileRecord, int], Iterable[Range]] = whole_file
    sample: BlockSample | None = None
    only_blocks: bool = False
    strays: bool = True
    passed: Callable[[int, bool], object] = no_report
    progress: ReportBytes = no_report

    def of(self, total_bytes: int) -> Choice:
        """Return what this means for a checkpoint of so many bytes: of a small one, a larger share is drawn."""
        if self.sample is None:
            return self
        sample = self.sample.at_least(MIN_SAMPLE_BYTES, total_bytes)

        def drawn(file: FileRecord, block_size_bytes: int) -> Iterable[Range]:
            return sample.ranges(file.size_bytes, block_size_bytes, RUN_BYTES)

        return replace(self, sample=sample, ranges=drawn)


class IndexedItems:
    """Hold the items of an index by file, to compare them with manifests."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._names = list(columns.entries)
        self._entries = list(columns.entries.values())
        self._numbers = {path: number for number, path in enumerate(columns.files)}
        self._left = set(columns.files)
        items = item_columns(columns)
        order = np.lexsort((items[1], items[0]))
        self._file, self._offset, self._length, self._entry, self._row = items[:, order]

    def offsets(self, path: str) -> set[int]:
        """List where the items are in a file that the index names."""
        return {int(self._offset[row]) for row in self._rows_of(path)}

    def compare(self, path: str, items: Sequence[ItemRecord]) -> list[Damage]:
        """Compare one file's items with those of its manifest, `items`; name 100 that disagree at most."""
        self._left.discard(path)
        rows = self._rows_of(path)
        if len(rows) > len(items) + _MAX_NAMED:
            message = f"the index lists {len(rows):,} items in this file, the manifest {len(items):,}"
            return [Damage.of("disagreement", message, path, fqns=self._fqns(rows))]
        return list(itertools.islice(self._disagreements(path, rows, items), _MAX_NAMED))

    def _disagreements(self, path: str, rows: range, items: Sequence[ItemRecord]) -> Iterator[Damage]:
        by_offset = {int(self._offset[row]): row for row in rows}
        for item in items:
            row = by_offset.pop(item.offset, None)
            if row is None and split_path(path)[0]:
                continue  # of another checkpoint not all is named
            reason = "the index does not list it" if row is None else self._difference(row, item)
            if reason:
                yield _disagreement(path, item.offset, item.length, item.fqn, reason)
        for offset, row in by_offset.items():
            fqn, reason = self._names[self._entry[row]], "the manifest does not list it"
            yield _disagreement(path, offset, int(self._length[row]), fqn, reason)

    def left_over(self) -> Iterator[Damage]:
        """Yield a damage for each file that the index names and no manifest lists."""
        for path in sorted(self._left):
            message = "the index names this file, but no readable manifest lists it"
            yield Damage.of("disagreement", message, path, fqns=self._fqns(self._rows_of(path)))

    def fqns_beside(self, manifest: str) -> list[str]:
        """List the names in the files that a manifest describes."""
        start = manifest.removesuffix(".json") + "-"
        files = [path for path in self.columns.files if path.startswith(start)]
        return [fqn for path in files for fqn in self._fqns(self._rows_of(path))]

    def _difference(self, row: int, item: ItemRecord) -> str | None:
        entry, name = self._entries[self._entry[row]], self._names[self._entry[row]]
        if name != item.fqn or self._length[row] != item.length:
            return f"the index says {name!r}, {self._length[row]} bytes"
        if isinstance(entry, ObjectRow):
            return None if item.offsets is None else "the index says that it is not a tensor"
        offsets, sizes = entry.box(int(self._row[row]))
        if item.offsets != offsets:
            return f"the index says that its offsets are {tuple(offsets)}"
        nbytes = math.prod(sizes) * item_bytes(entry.dtype)
        if item.payload_offset >= 0 and item.payload_bytes != nbytes:
            return f"the index says that its elements take {nbytes} bytes"
        return None

    def _rows_of(self, path: str) -> range:
        number = self._numbers.get(path)
        if number is None:
            return range(0)
        first, last = np.searchsorted(self._file, [number, number + 1])
        return range(int(first), int(last))

    def _fqns(self, rows: range) -> list[str]:
        return [self._names[entry] for entry in np.unique(self._entry[rows.start : rows.stop]).tolist()]

    @property
    def count(self) -> int:
        """Count the items of the index."""
        return len(self._file)


def _disagreement(path: str, offset: int, length: int, fqn: str, reason: str) -> Damage:
    message = f"index and manifest disagree: {reason}"
    return Damage.of("disagreement", message, path, offset, offset + length, fqns=[fqn])


def check_coverage_of(columns: Columns) -> Iterator[Damage]:
    """Yield a damage for each tensor whose chunks leave out an element or hold one twice."""
    for fqn, entry in columns.entries.items():
        if isinstance(entry, ObjectRow):
            continue
        offsets = entry.offsets
        ends = (offsets + entry.sizes).tolist()
        boxes = [(tuple(begin), tuple(end)) for begin, end in zip(offsets.tolist(), ends, strict=True)]
        fault = tiling_fault(boxes, entry.size)
        if fault is not None:
            yield Damage.of("coverage", f"{fqn!r}: {fault}", fqns=[fqn])


def check_stock_metadata(
    store: Store, commit: CommitRecord, columns: Columns
) -> tuple[list[Damage], list[Damage]]:
    """Compare `.metadata`, which stock PyTorch reads, with the columns of the commit.

    Returns damages, and warnings: it is written after the commit, so it may not be there yet.
    """
    if commit.is_model:
        damages, warnings = _check_model_index(store, columns)
        if exists(store, SINGLE_MODEL_KEY):
            message = "of another program, and transformers reads it in the place of this model; remove it"
            warnings.append(Damage("stock_metadata", message, SINGLE_MODEL_KEY))
        return damages, warnings
    key, kind = STOCK_METADATA_KEY, "stock_metadata"
    if not commit.is_for_stock:
        is_stale = exists(store, key)
        return [], [
            Damage(kind, f"of another save, this one left it out; {_REMEDY}", key)
        ] if is_stale else []
    try:
        data = bytes(read_bytes(store, key, max_bytes=MAX_METADATA_BYTES))
        pickled = unseal_pickle(data, url=store.url, key=key)
        if commit.has_index and encode_stock_metadata(commit, columns) == data:
            return [], []
        from ckpt.format.dcp_view import metadata_of
        from ckpt.stock.metadata_reader import decode_metadata

        different = _different(
            decode_metadata(pickled, url=store.url, key=key), metadata_of(stock_columns(columns))
        )
    except NotFound:
        message = f"missing, so stock PyTorch cannot read this checkpoint; {_REMEDY}"
        return [], [Damage(kind, message, key)]
    except (IntegrityError, FormatError, UnsafeContent) as error:
        return [Damage.of_error(kind, error)], []
    message = f"that of another save, which stock PyTorch would look for; {_REMEDY}"
    return [], [Damage.of(kind, message, key, fqns=different)] if different else []


def _check_model_index(store: Store, columns: Columns) -> tuple[list[Damage], list[Damage]]:
    """Compare the index that transformers reads with the columns; return damages and warnings."""
    key, kind = MODEL_INDEX_KEY, "stock_metadata"
    try:
        data = bytes(read_bytes(store, key, max_bytes=MAX_INDEX_BYTES))
        if data == sealed_model_index(columns):
            return [], []
        if not is_sealed_json(data) and names_only_ours(store, key):
            return [], [Damage(kind, f"another program wrote it anew; {_REMEDY}", key)]
        unseal_json(data, url=store.url, key=key)
    except NotFound:
        message = f"missing, so transformers cannot read this model; {_REMEDY}"
        return [], [Damage(kind, message, key)]
    except (IntegrityError, FormatError, UnsafeContent) as error:
        return [Damage.of_error(kind, error)], []
    return [], [Damage(kind, f"that of another save, which transformers would read; {_REMEDY}", key)]


def _different(metadata: Metadata, expected: Metadata) -> list[str]:
    """List the names on which two metadata disagree."""
    names = [
        fqn
        for fqn in {**metadata.state_dict_metadata, **expected.state_dict_metadata}
        if metadata.state_dict_metadata.get(fqn) != expected.state_dict_metadata.get(fqn)
    ]
    indices = {**metadata.storage_data, **expected.storage_data}
    names += [i.fqn for i in indices if metadata.storage_data.get(i) != expected.storage_data.get(i)]
    if metadata.planner_data != expected.planner_data:
        names.append("planner_data")
    return names
