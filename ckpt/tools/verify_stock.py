"""Check what other programs wrote: checkpoints of stock PyTorch, and safetensors models.

Stock items are zip archives with a CRC-32 of every record, unless they were saved without. No other
checksum covers their bytes. Their heads say which tensors they hold. Safetensors files have no checksums.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt.backends.base import ObjectStat, Store, check_key, read_bytes
from ckpt.consistency.commit import STOCK_METADATA_KEY
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotFound,
    UnsafeContent,
)
from ckpt.format.dtypes import dtype_name, is_quantized
from ckpt.format.model_index import MAX_INDEX_BYTES, parse_model_index
from ckpt.format.names import INDEX_SUFFIX
from ckpt.reading.checkpoint import Checkpoint
from ckpt.reading.loader import chunk_of
from ckpt.reading.model_folder import check_models, describe_model
from ckpt.stock.item_archive import check_archive
from ckpt.stock.item_files import PagedFile
from ckpt.stock.payload_finder import load_meta
from ckpt.stock.safe_load import first_line
from ckpt.stock.safetensors_files import ModelFiles, read_header
from ckpt.stock.safetensors_format import Header
from ckpt.tools.findings import Damage, Verification, find_strays
from ckpt.tools.record_checks import check_coverage_of
from ckpt.torch_private import StorageInfo
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.reports import ReportBytes
from ckpt.transfer.threads import in_order

_STEP_BYTES = 4 << 20
_LOCAL_HEADER = struct.Struct("<26xHH")
_ZIP = b"PK\x03\x04"


def verify_stock(
    store: Store, parts: Sequence[Checkpoint], threads: Executor, *, quick: bool, progress: ReportBytes
) -> Verification:
    """Check a stock checkpoint, in one part or in one per rank."""
    result = Verification(store.url, "stock", quick)
    check = _StockCheck(store, threads, result, progress)
    check.run(parts)
    metadata_keys = {STOCK_METADATA_KEY, *(f"__{rank}{STOCK_METADATA_KEY}" for rank in range(len(parts)))}
    result.strays = find_strays(store, metadata_keys | check.sizes.keys())
    return result


def verify_model(store: Store, threads: Executor, keys: Sequence[str]) -> Verification | None:
    """Check the index, headers and sizes of the model that `find_models` found; None if no other program's.

    Files beside those of the model are its configuration, tokenizer and so on, not strays.
    """
    if not check_models(store, keys):
        return None
    result = Verification(store.url, "safetensors", quick=True, strays=[])
    index: dict[str, str] | None = None
    names: dict[str, list[str]] = {key: [] for key in keys}  # that the index gives to each file
    if keys[0].endswith(INDEX_SUFFIX):
        try:
            raw = read_bytes(store, keys[0], max_bytes=MAX_INDEX_BYTES)
            index = parse_model_index(raw, url=store.url, key=keys[0])
        except (IntegrityError, FormatError) as error:
            result.extend([Damage.of_error("record", error)])
            return result
        names = {}
        for name, file in index.items():
            names.setdefault(file, []).append(name)
    stats: dict[str, ObjectStat] = {}
    headers: dict[str, Header] = {}

    def look(file: str) -> Damage | None:
        try:
            stats[file] = store.stat(file)
            headers[file] = header = read_header(store, stats[file])
        except NotFound:
            return Damage.of(
                "missing", "the index names this file, but it is not there", file, fqns=names[file]
            )
        except (FormatError, UnsafeContent) as error:
            return Damage.of_error("record", error, names[file])
        lost = [name for name in names[file] if name not in header.tensors and name not in header.unreadable]
        text = "the index names tensors that this file does not hold"
        return Damage.of("disagreement", text, file, fqns=lost) if lost else None

    result.extend(filter(None, in_order(threads, look, names, ahead=4 * store.threads)))
    result.checked_files = len(names)
    if result.ok:
        ordered = {file: headers[file] for file in names}
        try:
            described = describe_model(ModelFiles(stats, index), ordered, url=store.url, key=keys[0])
            result.unchecked_items = len(described.entries)
        except FormatError as error:
            result.extend([Damage.of_error("disagreement", error)])
    return result


@dataclass(frozen=True, slots=True)
class _Item:
    """A stored item, and its names: several if tied tensors share it.

    Attributes:
        chunks: the shapes and dtypes that the metadata gives it; none for an object.
    """

    info: StorageInfo
    fqns: list[str] = field(default_factory=list)
    chunks: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.info.offset + self.info.length

    def damage(self, kind: str, message: str, start: int = 0, stop: int | None = None) -> Damage:
        """Describe a damage of all of the item, or of the bytes from `start` to `stop` in it."""
        begin = self.info.offset
        end = begin + (self.info.length if stop is None else stop)
        return Damage.of(kind, message, self.info.relative_path, begin + start, end, fqns=self.fqns)


def _items_of(parts: Sequence[Checkpoint]) -> list[_Item]:
    """List the stored items in the order of the files, each once."""
    items: dict[tuple[object, ...], _Item] = {}
    for part in parts:
        described = part.metadata.state_dict_metadata
        for index, info in part.metadata.storage_data.items():
            place = (info.relative_path, info.offset, info.length, *(info.transform_descriptors or ()))
            item = items.setdefault(place, _Item(info))
            item.fqns.append(index.fqn)
            if isinstance(described.get(index.fqn), TensorStorageMetadata):
                with contextlib.suppress(FormatError):  # no such chunk: a damage of the metadata
                    item.chunks.append(chunk_of(part, index))
    return sorted(items.values(), key=lambda item: (item.info.relative_path, item.info.offset))


@dataclass
class _StockCheck:
    """Check the files that metadata objects name; `sizes` holds the damages of those that are not there."""

    store: Store
    threads: Executor
    result: Verification
    progress: ReportBytes
    sizes: dict[str, int | Damage] = field(default_factory=dict)
    pool: StagingPool = field(default_factory=lambda: StagingPool(MIN_MEMORY_BUDGET_BYTES))

    def run(self, parts: Sequence[Checkpoint]) -> None:
        for part in parts:
            try:
                self.result.extend(check_coverage_of(part.columns))
            except FormatError as error:
                self.result.extend([Damage.of_error("record", error)])
        items = _items_of(parts)
        paths = sorted({item.info.relative_path for item in items})
        self.sizes |= zip(paths, self.threads.map(self._size, paths), strict=True)
        self.result.checked_files += len(paths)
        readable = list(itertools.chain.from_iterable(
            self._readable(path, list(group))
            for path, group in itertools.groupby(items, lambda item: item.info.relative_path)
        ))  # fmt: skip
        if self.result.quick:
            return
        total = sum(item.info.length for item in readable)
        for damages, nbytes in in_order(self.threads, self._check, readable, ahead=4 * self.store.threads):
            self.result.extend(damages)
            self.result.unchecked_items += nbytes is None
            self.result.checked_bytes += nbytes or 0
            self.progress(self.result.checked_bytes, total)

    def _readable(self, path: str, items: Sequence[_Item]) -> Iterator[_Item]:
        """Yield the items of a file that lie in it one after the other; report the others."""
        size = self.sizes[path]
        if isinstance(size, Damage):
            fqns = [fqn for item in items for fqn in item.fqns]
            self.result.extend([Damage.of(size.kind, size.message, path, fqns=fqns)])
            return
        end = 0
        for item in items:
            if item.stop > size:
                message = f"the file ends at byte {size}, before the end of this item"
                self.result.extend([item.damage("size", message)])
            elif item.info.offset < end:
                message = "the metadata says that another item is in the same bytes"
                self.result.extend([item.damage("disagreement", message)])
            else:
                end = item.stop
                if self.result.quick:
                    self.result.extend(_impossible(item))
                yield item

    def _size(self, path: str) -> int | Damage:
        try:
            return self.store.stat(check_key(path)).size_bytes
        except NotFound:
            return Damage("missing", "the metadata names this file, but it is not there", path)
        except ConfigurationError:
            return Damage("record", "the metadata names a file outside of the checkpoint", path)
        except UnsafeContent as error:
            return Damage.of_error("missing", error)

    def _check(self, item: _Item) -> tuple[list[Damage], int | None]:
        """Check an item; return its damages, and its checked bytes, None if it has no CRCs."""
        if item.info.transform_descriptors or item.info.relative_path.endswith(".safetensors"):
            return [], None
        try:
            return self._check_archive(item)
        except (IntegrityError, FormatError, UnsafeContent) as error:
            return [item.damage("archive", error.message)], 0

    def _check_archive(self, item: _Item) -> tuple[list[Damage], int | None]:
        window = PagedFile(lambda offset, buffer: self._read(item, offset, buffer), item.info.length)
        try:
            reader = check_archive(window)
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
            return list(_contradictions(item, reader, window)), None
        damages = [damage for record in records for damage in self._check_record(item, window, record)]
        # Of a damaged item the head may say anything.
        return damages or list(_contradictions(item, reader, window)), item.info.length

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
            yield item.damage("checksum", message, start, stop)

    def _crc32(self, item: _Item, start: int, stop: int) -> int:
        crc = 0
        with self.pool.take(min(_STEP_BYTES, stop - start)) as memory:
            while start < stop:
                piece = memory[: min(memory.nbytes, stop - start)]
                self._read(item, start, piece)
                crc = zlib.crc32(piece, crc)
                start += piece.nbytes
        return crc

    def _read(self, item: _Item, offset: int, buffer: memoryview) -> None:
        self.store.read_into(item.info.relative_path, item.info.offset + offset, [buffer])


def _impossible(item: _Item) -> Iterator[Damage]:
    """Yield a damage for each chunk that has more elements than its stored item has bits."""
    for shape, dtype in dict.fromkeys(item.chunks):
        if not item.info.transform_descriptors and math.prod(shape) > 8 * item.info.length:
            message = f"the metadata says that {_words(shape, dtype)} is in these {item.info.length} bytes"
            yield item.damage("disagreement", message)


def _contradictions(item: _Item, reader: Any, file: PagedFile) -> Iterator[Damage]:
    """Yield a damage for each chunk of another shape or dtype than the tensor that the item holds."""
    if not item.chunks:
        return
    if any(is_quantized(dtype_name(dtype)) for _, dtype in item.chunks):  # torch makes none without memory
        yield from _impossible(item)
        return
    try:
        value = load_meta(reader, file)
    except Exception:
        if isinstance(file.failure, CheckpointError):
            raise file.failure from None
        yield from _impossible(item)  # of a class that only the program knows that saved it
        return
    for shape, dtype in dict.fromkeys(item.chunks):
        if not isinstance(value, torch.Tensor):
            stored = f"a {type(value).__name__}"
        elif (value.shape, value.dtype) != (shape, dtype):
            stored = _words(value.shape, value.dtype)
        else:
            continue
        message = f"holds {stored} where the metadata says {_words(shape, dtype)}"
        yield item.damage("disagreement", message)


def _words(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor of {dtype_name(dtype)} and shape {tuple(shape)}"
