"""Make the records of a checkpoint from the ranks' reports, with nothing missing."""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from ckpt.consistency import environment
from ckpt.errors import CommitError, ConfigurationError
from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns
from ckpt.format.dtypes import dtype_name
from ckpt.format.figures import BlockDigests, Timings
from ckpt.format.planner_data import check_planner_data
from ckpt.format.records import CommitRecord
from ckpt.format.run_record import NO_STAMP, RunStamp
from ckpt.format.runs import shortest
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.file_layouts import pack_placed
from ckpt.save_plans.placing import columns_of
from ckpt.save_plans.receipt_messages import RankReceipt


class PlacedItem(msgspec.Struct, array_like=True):
    """An item that a rank has written.

    Attributes:
        chunk_offsets: None for an object.
        hint: the chunk's number in DCP's metadata, if the plan says it.
        file: index into the rank's files.
        offset, length: its place in the file, in bytes.
    """

    fqn: str
    chunk_offsets: tuple[int, ...] | None
    hint: int | None
    file: int
    offset: int
    length: int


_ITEMS = msgspec.msgpack.Decoder(list[PlacedItem])  # made once, before there are threads


def pack_items(items: Sequence[PlacedItem]) -> bytes:
    return msgspec.msgpack.encode(items)


def pack_numbered(items: Sequence[PlacedItem]) -> bytes:
    """Pack items by the numbers that their plan gave them as hints."""
    return pack_placed([(-1 if i.hint is None else i.hint, i.file, i.offset, i.length) for i in items])


def records_of(
    planned: Metadata | CentralPlan,
    receipts: Sequence[RankReceipt],
    world_size: int,
    *,
    save_id: str,
    tags: Mapping[str, str],
    stamp: RunStamp = NO_STAMP,
    block_digests: str | None = None,
) -> tuple[Columns, CommitRecord]:
    """Make the columns and the commit record of a save that the receipts describe.

    `block_digests` is the algorithm of those in the manifests; the commit adds their root.

    Raises:
        CommitError: the ranks have not written what was planned.
        ConfigurationError: the planner describes, or wants to keep, what cannot be stored.
    """
    _check_ranks(receipts, world_size)
    try:
        check_planner_data(planned.planner_data)
    except ValueError as error:
        raise ConfigurationError(
            f"the planner's planner_data holds {error}; only dict, list, tuple, str, bytes, numbers, bool and "
            "None can be stored safely"
        ) from None
    receipts = sorted(receipts, key=lambda receipt: receipt.rank)
    if isinstance(planned, Metadata):
        columns = collect(planned, receipts)
    else:
        columns = columns_of(planned, [each.items for each in receipts], [each.files for each in receipts])
    columns.save_id, columns.version = save_id, CURRENT_DCP_VERSION
    manifests = [receipt.manifest for receipt in receipts if receipt.manifest is not None]
    created_at = datetime.datetime.fromtimestamp(stamp.now(), datetime.timezone.utc)
    return columns, CommitRecord(
        id=save_id,
        created_at=created_at.isoformat(timespec="seconds"),
        library=_library_version(),
        torch=str(torch.__version__),
        world_size=world_size,
        data_bytes=sum(manifest.data_bytes for manifest in manifests),
        manifests=sorted(manifests, key=lambda manifest: manifest.rank),
        tags=dict(tags),
        run=stamp.run or msgspec.UNSET,
        block_digests=BlockDigests(block_digests) if block_digests else msgspec.UNSET,
    )


def durations(began_at_s: Mapping[str, float]) -> dict[str, float]:
    """Compute how long phases took that follow one another, in seconds; the last ends now."""
    ended_at_s = [*began_at_s.values(), environment.monotonic()][1:]
    return {name: end - begin for (name, begin), end in zip(began_at_s.items(), ended_at_s, strict=True)}


def timings_of(began_at_s: Mapping[str, float], receipts: Sequence[RankReceipt]) -> Timings:
    """Make the timings of a save whose commit begins; that of the index is not known yet."""
    seconds = durations(began_at_s)
    ordered = sorted(receipts, key=lambda receipt: receipt.rank)
    sent_again = [(receipt.rank, receipt.retries) for receipt in ordered if receipt.retries]
    return Timings.of(
        plan_ms=round(1000 * seconds["plan_s"]),
        write_ms=round(1000 * seconds.get("write_s", 0.0)),  # else this rank has written nothing
        index_ms=0,
        ranks_ms=[receipt.write_ms for receipt in ordered],
        retries=sent_again,
    )


def _check_ranks(receipts: Sequence[RankReceipt], world_size: int) -> None:
    """Check that every rank has reported once, about the same save: DCP does not check."""
    ranks = sorted(receipt.rank for receipt in receipts)
    if ranks != list(range(world_size)):
        missing = _some([str(rank) for rank in sorted(set(range(world_size)) - set(ranks))])
        raise CommitError(
            f"nothing was committed: expected one report from each of {world_size:,} ranks; missing: {missing}"
        )
    places = sorted({receipt.place for receipt in receipts})
    if len(places) > 1:
        raise CommitError(
            f"nothing was committed: the ranks save to different places: {' and '.join(places[:3])}"
        )


@functools.cache
def _library_version() -> str:
    try:
        return f"ckpt-storage {version('ckpt-storage')}"
    except PackageNotFoundError:  # an uninstalled checkout
        return "ckpt-storage (not installed)"


def collect(metadata: Metadata, receipts: Iterable[RankReceipt]) -> Columns:
    """Make the columns of the items that DCP planned, placed as the ranks report.

    Raises CommitError if something was planned and not written, or the other way round, and
    ConfigurationError if the planner describes something that this format cannot hold.
    """
    table = _Table(metadata)
    files: list[str] = []
    unknown: list[str] = []
    for receipt in receipts:
        for item in _ITEMS.decode(receipt.items):
            if not table.place(item, len(files)):
                unknown.append(_name(item.fqn, item.chunk_offsets))
        files += receipt.files
    missing = list(table.missing())
    if missing or unknown:
        raise CommitError(
            f"nothing was committed: planned but not written: {_some(sorted(missing))}; "
            f"written but not planned: {_some(sorted(unknown))}"
        )
    return Columns(files=files, entries=table.entries(), planner_data=metadata.planner_data)


class _Table:
    """The rows that DCP planned, and where each was written."""

    def __init__(self, metadata: Metadata) -> None:
        self._described = metadata.state_dict_metadata
        self._first: dict[str, int] = {}
        self._numbers: dict[str, dict[tuple[int, ...], int]] = {}
        rows = 0
        for fqn, stored in self._described.items():
            self._first[fqn] = rows
            rows += len(stored.chunks) if isinstance(stored, TensorStorageMetadata) else 1
        self._file: list[int] = [-1] * rows
        self._offset: list[int] = [0] * rows
        self._length: list[int] = [0] * rows

    def place(self, item: PlacedItem, first_file: int) -> bool:
        row = self._row(item)
        if row is None:
            return False
        self._file[row] = first_file + item.file
        self._offset[row], self._length[row] = item.offset, item.length
        return True

    def _row(self, item: PlacedItem) -> int | None:
        first = self._first.get(item.fqn)
        if first is None:
            return None
        stored = self._described[item.fqn]
        if not isinstance(stored, TensorStorageMetadata):
            return first if item.chunk_offsets is None else None
        hint, chunks = item.hint, stored.chunks
        if hint is not None and 0 <= hint < len(chunks) and chunks[hint].offsets == item.chunk_offsets:
            return first + hint
        if item.fqn not in self._numbers:
            numbered = [(tuple(chunk.offsets), number) for number, chunk in enumerate(chunks)]
            self._numbers[item.fqn] = dict(reversed(numbered))
        number = None if item.chunk_offsets is None else self._numbers[item.fqn].get(item.chunk_offsets)
        return None if number is None else first + number

    def missing(self) -> Iterator[str]:
        """List the planned rows that no rank wrote. A chunk that was planned twice is written once."""
        for fqn, stored in self._described.items():
            first = self._first[fqn]
            if not isinstance(stored, TensorStorageMetadata):
                if self._file[first] < 0:
                    yield fqn
            elif -1 in self._file[first : first + len(stored.chunks)]:
                yield from self._missing_chunks(fqn, first, stored.chunks)

    def _missing_chunks(self, fqn: str, first: int, chunks: Sequence[ChunkStorageMetadata]) -> Iterator[str]:
        rows = list(enumerate((tuple(chunk.offsets) for chunk in chunks), first))
        written = {offsets: row for row, offsets in rows if self._file[row] >= 0}
        for row, offsets in rows:
            source = written.get(offsets)
            if source is None:
                yield _name(fqn, offsets)
            else:
                self._file[row], self._offset[row] = self._file[source], self._offset[source]
                self._length[row] = self._length[source]

    def entries(self) -> dict[str, TensorColumns | ObjectRow]:
        tensors = [stored for stored in self._described.values() if isinstance(stored, TensorStorageMetadata)]
        offsets = _flat(chunk.offsets for stored in tensors for chunk in stored.chunks)
        sizes = _flat(chunk.sizes for stored in tensors for chunk in stored.chunks)
        file, offset, length = (np.array(c, dtype=np.int64) for c in (self._file, self._offset, self._length))
        entries: dict[str, TensorColumns | ObjectRow] = {}
        cell = 0
        for fqn, stored in self._described.items():
            row = self._first[fqn]
            if isinstance(stored, TensorStorageMetadata):
                _check_described(fqn, stored)
                shape = (len(stored.chunks), len(stored.size))
                rows, cells = slice(row, row + shape[0]), slice(cell, cell + shape[0] * shape[1])
                cell = cells.stop
                entries[fqn] = shortest(TensorColumns(
                    dtype_name(stored.properties.dtype), tuple(stored.size), bool(stored.properties.requires_grad),
                    offsets[cells].reshape(shape), sizes[cells].reshape(shape),
                    file[rows], offset[rows], length[rows],
                ))  # fmt: skip
            elif isinstance(stored, BytesStorageMetadata):
                entries[fqn] = ObjectRow(self._file[row], self._offset[row], self._length[row])
            else:
                raise ConfigurationError(f"the planner describes {fqn!r} by a {type(stored).__name__}")
        return entries


def _check_described(fqn: str, stored: TensorStorageMetadata) -> None:
    layout, dimensions = stored.properties.layout, len(stored.size)
    if layout is not torch.strided:
        raise ConfigurationError(f"{fqn!r} has the layout {layout}; save it dense")
    if any(len(chunk.offsets) != dimensions or len(chunk.sizes) != dimensions for chunk in stored.chunks):
        raise ConfigurationError(f"{fqn!r} has chunks of another number of dimensions than its own")


def _flat(rows: Iterable[torch.Size]) -> Integers:
    return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64)


def _name(fqn: str, offsets: Sequence[int] | None) -> str:
    return fqn if offsets is None else f"{fqn}{list(offsets)}"


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
