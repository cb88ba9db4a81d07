"""Whether a checkpoint's records agree: index with manifests, chunks with tensors, `.metadata` with the index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from ckpt.backends.base import Store, read_bytes
from ckpt.consistency.commit import STOCK_METADATA_KEY
from ckpt.consistency.seal import seal_pickle, unseal_pickle
from ckpt.errors import FormatError, IntegrityError, NotFound, UnsafeContent
from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns
from ckpt.format.records import CommitRecord, ItemRecord
from ckpt.reading.checkpoint import Checkpoint
from ckpt.stock.metadata_reader import MAX_METADATA_BYTES, decode_metadata
from ckpt.stock.metadata_writer import pickled_metadata
from ckpt.tools.findings import Damage, concerned
from ckpt.transfer.boxes import tiling_fault

__all__ = ["IndexedItems", "check_coverage_of", "check_stock_metadata"]

_MAX_NAMED = 100


class IndexedItems:
    """The items of an index, file by file, for comparison with what manifests say."""

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
        """Where the index and a manifest disagree on a file; `items` are the manifest's, by offset."""
        self._left.discard(path)
        rows = self._rows_of(path)
        damages: list[Damage] = []
        if len(rows) > len(items) + _MAX_NAMED:
            message = f"the index lists {len(rows):,} items in this file, the manifest {len(items):,}"
            return [Damage("disagreement", message, path, None, None, *concerned(self._fqns(rows)))]
        by_offset = {int(self._offset[row]): row for row in rows}
        for item in items:
            found = by_offset.pop(item.offset, None)
            reason = "the index does not list it" if found is None else self._differs(found, item)
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
        """Files that the index names and no manifest lists."""
        for path in sorted(self._left):
            fqns = self._fqns(self._rows_of(path))
            message = "the index names this file, but no manifest that can be read lists it"
            yield Damage("disagreement", message, path, None, None, *concerned(fqns))

    def fqns_beside(self, manifest: str) -> list[str]:
        """What is in the files that a manifest describes."""
        start = manifest.removesuffix(".json") + "-"
        return [
            fqn for path in self._files if path.startswith(start) for fqn in self._fqns(self._rows_of(path))
        ]

    def _differs(self, row: int, item: ItemRecord) -> str | None:
        entry, name = self._entries[self._entry[row]], self._names[self._entry[row]]
        if name != item.fqn or self._length[row] != item.length:
            return f"the index says {name!r}, {self._length[row]} bytes"
        if isinstance(entry, ObjectRow):
            return None if item.offsets is None else "the index says that it is no tensor"
        number = self._row[row]
        if item.offsets != entry.offsets[number].tolist():
            return f"the index says that it is at {tuple(entry.offsets[number].tolist())}"
        nbytes = int(np.prod(entry.sizes[number].astype(object))) * entry.dtype.itemsize
        if item.payload_offset >= 0 and item.payload_bytes != nbytes:
            return f"the index says that it has {nbytes} bytes of elements"
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
        """Number of items in the index."""
        return len(self._file)


def _rows(
    entries: Sequence[TensorColumns | ObjectRow],
) -> tuple[Integers, Integers, Integers, Integers, Integers]:
    """Columns of all items: file, offset, length, the number of the entry, the row in it."""
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
    """Tensors whose chunks do not fill them, each element once."""
    for fqn, entry in columns.entries.items():
        if isinstance(entry, ObjectRow):
            continue
        ends = (entry.offsets + entry.sizes).tolist()
        boxes = [(tuple(begin), tuple(end)) for begin, end in zip(entry.offsets.tolist(), ends, strict=True)]
        fault = tiling_fault(boxes, entry.size)
        if fault is not None:
            yield Damage("coverage", f"of {fqn!r} {fault}", fqns=(fqn,), fqn_count=1)


def check_stock_metadata(
    store: Store, commit: CommitRecord, checkpoint: Checkpoint, columns: Columns
) -> Iterator[Damage]:
    """Whether `.metadata`, which stock readers read, says what the commit says."""
    key, kind = STOCK_METADATA_KEY, "stock_metadata"
    try:
        data = bytes(read_bytes(store, key, max_bytes=MAX_METADATA_BYTES))
        pickled = unseal_pickle(data, url=store.url, key=key)
    except NotFound:
        yield Damage(kind, "there is no .metadata: stock PyTorch cannot read this checkpoint", key)
        return
    except IntegrityError as error:
        yield Damage.of(kind, error)
        return
    if commit.has_index and seal_pickle(pickled_metadata(columns)) == data:
        return
    try:
        found = decode_metadata(pickled, url=store.url, key=key)
    except (FormatError, UnsafeContent) as error:
        yield Damage.of(kind, error)
        return
    different = _different(found, checkpoint.metadata)
    if different:
        fqns, count = concerned(different)
        message = "stock PyTorch would read something else than what is committed here"
        yield Damage(kind, message, key, None, None, fqns, count)


def _different(found: Metadata, expected: Metadata) -> list[str]:
    """Names of which two metadata say different things."""
    names = [
        fqn
        for fqn in {**found.state_dict_metadata, **expected.state_dict_metadata}
        if found.state_dict_metadata.get(fqn) != expected.state_dict_metadata.get(fqn)
    ]
    places = {**found.storage_data, **expected.storage_data}
    names += [i.fqn for i in places if found.storage_data.get(i) != expected.storage_data.get(i)]
    if found.planner_data != expected.planner_data:
        names.append("planner_data")
    return names
