"""Compare a checkpoint's records: index with manifests, chunks with tensors and `.metadata`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from ckpt.backends.base import Store, read_bytes
from ckpt.consistency.commit import STOCK_METADATA_KEY
from ckpt.consistency.seal import seal_pickle, unseal_pickle
from ckpt.errors import FormatError, IntegrityError, NotFound, UnsafeContent
from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns
from ckpt.format.records import CommitRecord, ItemRecord, RankManifest
from ckpt.reading.checkpoint import Checkpoint
from ckpt.stock.metadata_reader import MAX_METADATA_BYTES, decode_metadata
from ckpt.stock.metadata_writer import pickled_metadata
from ckpt.tools.findings import Damage, affected
from ckpt.transfer.boxes import tiling_fault

_MAX_NAMED = 100


def items_by_file(manifest: RankManifest) -> list[list[ItemRecord]]:
    """Group the items of a manifest by file."""
    items: list[list[ItemRecord]] = [[] for _ in manifest.files]
    for item in manifest.items:
        items[item.file].append(item)
    return items


class IndexedItems:
    """Hold the items of an index by file, to compare them with manifests."""

    def __init__(self, columns: Columns) -> None:
        self._names = list(columns.entries)
        self._entries = list(columns.entries.values())
        self._numbers = {path: number for number, path in enumerate(columns.files)}
        self._files = columns.files
        self._left = set(columns.files)
        file, offset, length, entry, row = _rows(self._entries)
        order = np.lexsort((offset, file))
        self._file, self._offset, self._length = file[order], offset[order], length[order]
        self._entry, self._row = entry[order], row[order]

    def compare(self, path: str, items: Sequence[ItemRecord]) -> list[Damage]:
        """Compare one file's items with those of its manifest (`items`, sorted by offset)."""
        self._left.discard(path)
        rows = self._rows_of(path)
        damages: list[Damage] = []
        if len(rows) > len(items) + _MAX_NAMED:
            message = f"the index lists {len(rows):,} items in this file, the manifest {len(items):,}"
            return [Damage("disagreement", message, path, None, None, *affected(self._fqns(rows)))]
        by_offset = {int(self._offset[row]): row for row in rows}
        for item in items:
            row_of_item = by_offset.pop(item.offset, None)
            reason = (
                "the index does not list it" if row_of_item is None else self._difference(row_of_item, item)
            )
            if reason and len(damages) < _MAX_NAMED:
                damages.append(_disagreement(path, item.offset, item.length, item.fqn, reason))
        for offset, row in by_offset.items():
            if len(damages) < _MAX_NAMED:
                fqn = self._names[self._entry[row]]
                damages.append(
                    _disagreement(path, offset, int(self._length[row]), fqn, "the manifest does not list it")
                )
        return damages

    def left_over(self) -> Iterator[Damage]:
        """Yield a damage for each file that the index names and no manifest lists."""
        for path in sorted(self._left):
            fqns = self._fqns(self._rows_of(path))
            message = "the index names this file, but no readable manifest lists it"
            yield Damage("disagreement", message, path, None, None, *affected(fqns))

    def fqns_beside(self, manifest: str) -> list[str]:
        """List the names in the files that a manifest describes."""
        start = manifest.removesuffix(".json") + "-"
        return [
            fqn for path in self._files if path.startswith(start) for fqn in self._fqns(self._rows_of(path))
        ]

    def _difference(self, row: int, item: ItemRecord) -> str | None:
        entry, name = self._entries[self._entry[row]], self._names[self._entry[row]]
        if name != item.fqn or self._length[row] != item.length:
            return f"the index says {name!r}, {self._length[row]} bytes"
        if isinstance(entry, ObjectRow):
            return None if item.offsets is None else "the index says that it is not a tensor"
        number = self._row[row]
        if item.offsets != entry.offsets[number].tolist():
            return f"the index says that its offsets are {tuple(entry.offsets[number].tolist())}"
        nbytes = int(np.prod(entry.sizes[number].astype(object))) * entry.dtype.itemsize
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


def _rows(
    entries: Sequence[TensorColumns | ObjectRow],
) -> tuple[Integers, Integers, Integers, Integers, Integers]:
    """Make columns of all items: file, offset, length, number of the entry, row in the entry."""
    columns: list[list[Integers]] = [[], [], [], [], []]
    for number, entry in enumerate(entries):
        parts = [
            np.atleast_1d(np.asarray(p, dtype=np.int64)) for p in (entry.file, entry.offset, entry.length)
        ]
        count = len(parts[0])
        parts += [np.full(count, number, dtype=np.int64), np.arange(count, dtype=np.int64)]
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    empty = np.empty(0, dtype=np.int64)
    file, offset, length, entry_of, row = (np.concatenate(column) if column else empty for column in columns)
    return file, offset, length, entry_of, row


def _disagreement(path: str, offset: int, length: int, fqn: str, reason: str) -> Damage:
    message = f"index and manifest disagree: {reason}"
    return Damage("disagreement", message, path, offset, offset + length, (fqn,), 1)


def check_coverage_of(columns: Columns) -> Iterator[Damage]:
    """Yield a damage for each tensor whose chunks leave out an element or hold one twice."""
    for fqn, entry in columns.entries.items():
        if isinstance(entry, ObjectRow):
            continue
        ends = (entry.offsets + entry.sizes).tolist()
        boxes = [(tuple(begin), tuple(end)) for begin, end in zip(entry.offsets.tolist(), ends, strict=True)]
        fault = tiling_fault(boxes, entry.size)
        if fault is not None:
            yield Damage("coverage", f"{fqn!r}: {fault}", fqns=(fqn,), fqn_count=1)


def check_stock_metadata(
    store: Store, commit: CommitRecord, checkpoint: Checkpoint, columns: Columns
) -> Iterator[Damage]:
    """Compare `.metadata`, which stock PyTorch reads, with the commit."""
    key, kind = STOCK_METADATA_KEY, "stock_metadata"
    try:
        data = bytes(read_bytes(store, key, max_bytes=MAX_METADATA_BYTES))
        pickled = unseal_pickle(data, url=store.url, key=key)
    except NotFound:
        yield Damage(kind, ".metadata is missing: stock PyTorch cannot read this checkpoint", key)
        return
    except IntegrityError as error:
        yield Damage.of(kind, error)
        return
    if commit.has_index and seal_pickle(pickled_metadata(columns)) == data:
        return
    try:
        metadata = decode_metadata(pickled, url=store.url, key=key)
    except (FormatError, UnsafeContent) as error:
        yield Damage.of(kind, error)
        return
    different = _different(metadata, checkpoint.metadata)
    if different:
        message = ".metadata disagrees with the commit: stock PyTorch would read something else"
        yield Damage(kind, message, key, None, None, *affected(different))


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
