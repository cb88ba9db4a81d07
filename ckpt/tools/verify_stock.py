"""Check a checkpoint that stock PyTorch wrote: sizes, coverage, and the CRCs in its items.

Stock items are zip archives with a CRC-32 of every record, unless they were saved without. No other
checksum covers their bytes.
"""

from __future__ import annotations

import itertools
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from ckpt.backends.base import Store, check_key
from ckpt.consistency.commit import STOCK_METADATA_KEY
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotFound,
    UnsafeContent,
)
from ckpt.format.columns import columns_of
from ckpt.reading.checkpoint import Checkpoint
from ckpt.stock.item_archive import check_archive
from ckpt.stock.item_files import PagedFile
from ckpt.stock.safe_load import first_line
from ckpt.tools.findings import Damage, Verification, find_strays
from ckpt.tools.record_checks import check_coverage_of
from ckpt.torch_private import StorageInfo
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.reports import ReportBytes
from ckpt.transfer.tensor_memory import memory_of
from ckpt.transfer.threads import in_order

_STEP_BYTES = 4 << 20
_LOCAL_HEADER = struct.Struct("<26xHH")
_ZIP = b"PK\x03\x04"


def verify_stock(
    store: Store,
    parts: Sequence[Checkpoint],
    threads: Executor,
    *,
    quick: bool,
    progress: ReportBytes,
) -> Verification:
    """Check a stock checkpoint, in one part or in one per rank."""
    result = Verification(store.url, "stock", quick)
    known = {STOCK_METADATA_KEY, *(f"__{rank}{STOCK_METADATA_KEY}" for rank in range(len(parts)))}
    for part in parts:
        _StockCheck(store, part, threads, result, known, progress).run()
    result.strays = find_strays(store, known)
    return result


@dataclass(frozen=True)
class _Item:
    fqn: str
    info: StorageInfo

    def damage(self, kind: str, message: str, start: int | None = None, stop: int | None = None) -> Damage:
        begin = self.info.offset if start is None else start
        end = self.info.offset + self.info.length if stop is None else stop
        return Damage(kind, message, self.info.relative_path, begin, end, (self.fqn,), 1)


class _StockCheck:
    """Check one metadata object and the files that it names."""

    def __init__(
        self,
        store: Store,
        checkpoint: Checkpoint,
        threads: Executor,
        result: Verification,
        known: set[str],
        progress: ReportBytes,
    ) -> None:
        self._store, self._checkpoint, self._threads = store, checkpoint, threads
        self._result, self._known, self._progress = result, known, progress
        self._pool = StagingPool(MIN_MEMORY_BUDGET_BYTES)
        self._sizes: dict[str, int | Damage] = {}

    def run(self) -> None:
        storage = self._checkpoint.metadata.storage_data
        items = [_Item(index.fqn, info) for index, info in storage.items()]
        items.sort(key=lambda item: (item.info.relative_path, item.info.offset))
        try:
            for damage in check_coverage_of(columns_of(self._checkpoint.metadata, url=self._store.url)):
                self._result.add(damage)
        except FormatError as error:
            self._result.add(Damage.of("record", error))
        paths = sorted({item.info.relative_path for item in items})
        self._known |= set(paths)
        self._sizes = dict(zip(paths, self._threads.map(self._size, paths), strict=True))
        self._result.checked_files += len(paths)
        for path, group in itertools.groupby(items, lambda item: item.info.relative_path):
            if isinstance(missing := self._sizes[path], Damage):
                fqns = [item.fqn for item in group]
                self._result.add(
                    Damage(missing.kind, missing.message, path, None, None, tuple(fqns[:20]), len(fqns))
                )
        total = sum(item.info.length for item in items)
        for damages, nbytes in in_order(self._threads, self._check, items, ahead=4 * self._store.threads):
            for damage in damages:
                self._result.add(damage)
            self._result.unchecked_items += nbytes is None
            self._result.checked_bytes += nbytes or 0
            self._progress(self._result.checked_bytes, total)

    def _size(self, path: str) -> int | Damage:
        try:
            return self._store.stat(check_key(path)).size_bytes
        except NotFound:
            return Damage("missing", "the metadata names this file, but it is not there", path)
        except ConfigurationError:
            return Damage("record", "the metadata names a file outside of the checkpoint", path)
        except UnsafeContent as error:
            return Damage.of("missing", error)

    def _check(self, item: _Item) -> tuple[list[Damage], int | None]:
        """Check an item; return its damages, and its checked bytes, None if it has no CRCs."""
        size = self._sizes[item.info.relative_path]
        stop = item.info.offset + item.info.length
        if isinstance(size, Damage):
            return [], 0
        if size < stop:
            message = f"the file ends at byte {size}, before the end of this item"
            return [item.damage("size", message)], 0
        if self._result.quick:
            return [], 0
        if item.info.transform_descriptors:
            return [], None
        try:
            return self._check_archive(item)
        except (IntegrityError, FormatError, UnsafeContent) as error:
            return [item.damage("archive", error.message)], 0

    def _check_archive(self, item: _Item) -> tuple[list[Damage], int | None]:
        window = PagedFile(lambda offset, buffer: self._read(item, offset, buffer), item.info.length)
        if item.info.relative_path.endswith(".safetensors"):
            return [], None
        try:
            check_archive(window)
            window.seek(0)
            with zipfile.ZipFile(window) as archive:
                records = archive.infolist()
        except CheckpointError:
            raise
        except Exception as error:
            if isinstance(window.failure, CheckpointError):
                raise window.failure from error
            return [item.damage("archive", f"is not an intact torch.save archive: {first_line(error)}")], 0
        if all(record.CRC == 0 for record in records if record.file_size):
            return [], None
        damages = [damage for record in records for damage in self._check_record(item, window, record)]
        return damages, item.info.length

    def _check_record(self, item: _Item, window: Any, record: zipfile.ZipInfo) -> Iterator[Damage]:
        window.seek(record.header_offset)
        header = window.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(_ZIP):
            yield item.damage(
                "archive", f"has no record {record.filename[:80]!r} at the place that its directory gives"
            )
            return
        start = record.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
        stop = start + record.file_size
        if stop > item.info.length or record.compress_type != zipfile.ZIP_STORED:
            yield item.damage("archive", f"has a record {record.filename[:80]!r} that reaches beyond its end")
            return
        if self._crc32(item, start, stop) != record.CRC and self._crc32(item, start, stop) != record.CRC:
            message = f"the record {record.filename[:80]!r} does not match its CRC"
            yield item.damage("checksum", message, item.info.offset + start, item.info.offset + stop)

    def _crc32(self, item: _Item, start: int, stop: int) -> int:
        crc = 0
        with self._pool.take(min(_STEP_BYTES, stop - start)) as scratch:
            memory = memory_of(scratch)
            while start < stop:
                piece = memory[: min(memory.nbytes, stop - start)]
                self._read(item, start, piece)
                crc = zlib.crc32(piece, crc)
                start += piece.nbytes
        return crc

    def _read(self, item: _Item, offset: int, buffer: memoryview) -> None:
        self._store.read_into(item.info.relative_path, item.info.offset + offset, [buffer])
