"""Carry out one rank's load plan: from read items to filled tensors, in bounded memory."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from ckpt.errors import CheckpointError, FormatError
from ckpt.format.columns import packed
from ckpt.format.dcp_view import Chunks
from ckpt.format.dtypes import dtype_name
from ckpt.format.elements import StoredTensor
from ckpt.format.records import ItemRecord, ObjectRef
from ckpt.reading.checkpoint import Checkpoint
from ckpt.reading.coverage import check_coverage, filled_boxes
from ckpt.reading.delivered import DeliveredDigests
from ckpt.reading.parcels import Parcel, TensorParcel, WholeParcel
from ckpt.reading.read_once import Wanted
from ckpt.reading.windows import TargetMemory, Window
from ckpt.stock.extensions import untransformed
from ckpt.stock.item_files import MemoryFile
from ckpt.stock.payload_finder import locate_payload
from ckpt.stock.safe_load import load_tensor_item, safe_object
from ckpt.torch_private import StorageInfo
from ckpt.transfer.boxes import Box
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import Fetcher, StoredFile
from ckpt.transfer.pieces import Piece, frame_pieces
from ckpt.transfer.read_pieces import file_order, region_pieces
from ckpt.transfer.region_digests import RegionDigest
from ckpt.transfer.tensor_memory import can_cast, plain

_SMALL_ITEM_BYTES = 1 << 20
"""A stock item smaller than this is read whole: one request less than finding its payload."""

_MAX_EXPANDED_BYTES = 256 << 20
_MAX_EXPANSION = 16
_FRAME_BYTES = 1 << 20
"""More than `torch.save` puts around a tensor."""


@dataclass(frozen=True)
class _Target:
    """A tensor that an item is read into.

    Attributes:
        given: the tensor that the planner gave, and gets back.
        memory: the same as a plain tensor; None if `given` has no memory that can be read into.
        owner: targets of one owner share no element; None if that is not known.
    """

    given: torch.Tensor
    memory: torch.Tensor | None
    owner: Hashable


_Entry = tuple[ReadItem, StorageInfo, _Target | None]
"""An item, where it lies, and its target; None for bytes."""


class SharedReads(Protocol):
    """What ranks do together to read: `read_once.Replicas`, or another of its methods."""

    def records(
        self, refs: Sequence[ObjectRef], read: Callable[[ObjectRef], bytearray], threads: Executor
    ) -> list[bytearray]: ...

    def read(
        self,
        prepare: Callable[[], list[Wanted]],
        parcel_of: Callable[[Wanted], Parcel | None],
        fetcher: Fetcher,
        pool: StagingPool,
        threads: Executor,
    ) -> list[Wanted]: ...

    def leave(self) -> None: ...


class Loader:
    """Read a rank's items and give them to its planner; `trusted_objects` as they were stored.

    `delivered` takes the digests of all that is delivered.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        planner: LoadPlanner,
        pool: StagingPool,
        threads: Executor,
        trusted_objects: Collection[str],
        replicas: SharedReads | None = None,
        delivered: DeliveredDigests | None = None,
        request_bytes: int | None = None,
    ) -> None:
        self._checkpoint, self._store, self._planner = checkpoint, checkpoint.store, planner
        self._threads, self._trusted_objects = threads, trusted_objects
        self._pool, self._replicas, self._shared_memory = pool, replicas, TargetMemory()
        self._delivered = delivered
        self._fetcher = Fetcher(checkpoint.store, pool, checkpoint.when_visible, request_bytes)
        self._filled: Mapping[MetadataIndex, Box | None] = {}

    def run(self, items: Sequence[ReadItem]) -> None:
        if self._replicas is None:
            todo = self._prepare(items)
        else:
            prepare, resources = lambda: self._prepare(items), (self._fetcher, self._pool, self._threads)
            todo = self._replicas.read(prepare, self._parcel, *resources)
        takes_any_order, left = _takes_any_order(self._planner), list[_Entry]()
        entries = ((item, info, self._target(item) if _is_tensor(item) else None) for item, info in todo)
        while True:
            window, ahead = Window(), itertools.chain(left, entries)
            left = []
            pieces = self._fill(window, ahead, left)
            if not takes_any_order:  # it may change a target that it has given before
                pieces = iter([*pieces])
            self._fetcher.run(pieces, self._threads)
            for then in window.then:
                then()
            if not left:
                return

    def _prepare(self, items: Sequence[ReadItem]) -> list[Wanted]:
        """Check the plan, and find where its items lie; return them in the order of the files."""
        if self._checkpoint.is_model_folder:
            _refuse_unreadable(self._checkpoint, items)
        self._filled = filled_boxes(items)
        check_coverage(self._planner, self._checkpoint.metadata, self._filled, url=self._store.url)
        infos = [_info(self._checkpoint, item.storage_index) for item in items]
        read_all = None if self._replicas is None else self._replicas.records
        self._checkpoint.prepare({info.relative_path for info in infos}, self._threads, read_all)
        if self._checkpoint.commit is None and not self._checkpoint.is_model_folder:
            _locate(self._checkpoint, self._threads, items, infos)
        order = sorted(range(len(items)), key=lambda i: (infos[i].relative_path, infos[i].offset))
        return [(items[i], infos[i]) for i in order]

    def _parcel(self, wanted: Wanted) -> Parcel | None:
        """Make the parcel of an item that may be read together with others at any time.

        None if the planner wants to see each item in its turn, or two items have the same target.
        """
        item, info = wanted
        if not _takes_any_order(self._planner):
            return None
        start, stop = info.offset, info.offset + info.length
        file = self._checkpoint.file(info.relative_path, start, stop)
        index = item.storage_index
        record = self._checkpoint.item(index.fqn, index.offset, info.relative_path, info.offset, info.length)
        if item.type == LoadItemType.BYTE_IO:
            self._checkpoint.check_length(info.relative_path, start, stop)
            return WholeParcel(file, start, stop, lambda data: self._load_object(item, info, data))
        target, stored = self._target(item), self._stored_tensor(index, info, record)
        if stored is None or target.memory is None:
            return None
        _refuse_cast(item, stored.dtype, target)
        if not self._shared_memory.add(target.memory, target.owner):
            return None
        is_whole = item.lengths == chunk_of(self._checkpoint, index)[0]
        commit = lambda: self._planner.commit_tensor(item, target.given)
        digest = self._region_digest(item, stored, target.memory, range(len(item.lengths)))
        offsets = tuple(item.storage_offsets)
        return TensorParcel(file, start, stop, commit, stored, offsets, target.memory, is_whole, digest)

    def _region_digest(
        self, item: ReadItem, stored: StoredTensor, memory: torch.Tensor, order: Sequence[int]
    ) -> RegionDigest | None:
        """Return the collector for checksums of an item's bytes; None if digests are off."""
        if self._delivered is None:
            return None
        return self._delivered.region(item, stored.dtype, memory.dtype, order)

    def _fill(
        self, window: Window, entries: Iterable[_Entry], left: list[_Entry]
    ) -> Iterator[tuple[StoredFile, list[Piece]]]:
        """Add items to a window until it is full; put the first one that has no room into `left`.

        Yields the pieces of a file when all are known: it is read while those of the next are found.
        """
        for entry in entries:
            item, info, target = entry
            if window.is_full or not _has_room(window, target):
                left.append(entry)
                break
            file = self._checkpoint.file(info.relative_path, info.offset, info.offset + info.length)
            if file not in window.pieces:
                yield from window.take()
            self._add(window, file, item, info, target)
        yield from window.take()

    def _target(self, item: ReadItem) -> _Target:
        given = self._planner.resolve_tensor(item)
        if given.size() != item.lengths:
            raise FormatError(
                f"{item.dest_index.fqn!r} is to be loaded into a tensor of {tuple(given.size())}, but "
                f"{tuple(item.lengths)} is stored"
            )
        try:
            memory = plain(given)
        except ValueError as error:
            raise CheckpointError(f"{item.dest_index.fqn!r} cannot be loaded into: {error}") from error
        if memory is not None:
            given = given.detach()  # as stock does; others need not see what their alias gets
        if memory is None or self._filled[item.dest_index] is None:
            return _Target(given, memory, None)
        # Boxes of one array that do not overlap: all have its strides, and lead to its first element.
        steps = zip(item.dest_offsets, memory.stride(), strict=True)
        skipped = sum(offset * stride for offset, stride in steps) * memory.element_size()
        return _Target(given, memory, (item.dest_index, memory.data_ptr() - skipped, memory.stride()))

    def _add(
        self, window: Window, file: StoredFile, item: ReadItem, info: StorageInfo, target: _Target | None
    ) -> None:
        index = item.storage_index
        record = self._checkpoint.item(index.fqn, index.offset, info.relative_path, info.offset, info.length)
        if target is None:
            self._read_whole(window, file, info, lambda data: self._load_object(item, info, data))
            return
        stored = self._stored_tensor(item.storage_index, info, record)
        if stored is None:
            self._read_whole(window, file, info, lambda data: self._load_tensor(item, info, data, target))
            return
        _refuse_cast(item, stored.dtype, target)
        memory = target.memory if target.memory is not None else window.scratch(target.given, stored.dtype)
        digest = self._region_digest(item, stored, memory, file_order(stored, item.lengths))
        try:
            window.pieces[file] += region_pieces(stored, item.storage_offsets, item.lengths, memory, digest)
        except ValueError as error:
            raise self._fault(info, f"{item.storage_index.fqn!r}: {error}") from error
        if file.block_crcs is not None and item.lengths == chunk_of(self._checkpoint, item.storage_index)[0]:
            payload = slice(stored.first_byte, stored.first_byte + stored.payload_bytes)
            stop = info.offset + info.length
            window.pieces[file] += frame_pieces(info.offset, stop, payload, file.block_size_bytes)
        window.tensor_bytes += target.given.numel() * stored.dtype.itemsize
        window.then.append(lambda: self._planner.commit_tensor(item, target.given))

    def _read_whole(
        self, window: Window, file: StoredFile, info: StorageInfo, then: Callable[[bytearray], None]
    ) -> None:
        self._checkpoint.check_length(info.relative_path, info.offset, info.offset + info.length)
        window.read_whole(file, info, then)

    def _fault(self, info: StorageInfo, message: str) -> FormatError:
        return self._checkpoint.fault(message, info.relative_path)

    # -- items that are read whole ----------------------------------------------------------------------------

    def _load_object(self, item: ReadItem, info: StorageInfo, data: bytearray) -> None:
        fqn = item.dest_index.fqn
        max_bytes = max(_MAX_EXPANDED_BYTES, _MAX_EXPANSION * info.length)
        data = self._untransformed(item, info, data, max_bytes)
        delivered = None if self._delivered is None else self._delivered.object(item, data)
        if any(fnmatchcase(fqn, pattern) for pattern in self._trusted_objects):
            value = io.BytesIO(data)
        else:
            see = _ignore if delivered is None else delivered.see
            place = {"url": self._store.url, "key": info.relative_path}
            value = safe_object(MemoryFile(data), fqn=fqn, see=see, **place)
        self._planner.load_bytes(item, value)

    def _load_tensor(self, item: ReadItem, info: StorageInfo, data: bytearray, target: _Target) -> None:
        fqn, (shape, dtype) = item.storage_index.fqn, chunk_of(self._checkpoint, item.storage_index)
        max_bytes = max(math.prod(shape) * dtype.itemsize, info.length) + _FRAME_BYTES
        file = MemoryFile(self._untransformed(item, info, data, max_bytes))
        tensor = load_tensor_item(file, fqn=fqn, url=self._store.url, key=info.relative_path)
        if tensor.size() != shape:
            raise self._fault(
                info, f"{fqn!r} is {tuple(tensor.size())} where the metadata says {tuple(shape)}"
            )
        try:
            region = zip(item.storage_offsets, item.lengths, strict=True)
            for dimension, (offset, length) in enumerate(region):
                # Not all layouts can be narrowed, even to all they have.
                if (offset, length) != (0, tensor.size(dimension)):
                    tensor = tensor.narrow(dimension, offset, length)
        except (IndexError, RuntimeError, ValueError) as error:
            raise self._fault(info, f"{fqn!r}: {error}") from error
        if self._delivered is not None and (dense := plain(tensor)) is not None:
            self._delivered.add_tensor(item, dense, target.given.dtype)
        take = getattr(self._planner, "take_tensor", None)  # of a class that a dense target would lose
        if take is None or not take(item, tensor):
            _copy(tensor, target.given, fqn)
        self._planner.commit_tensor(item, target.given)

    def _untransformed(self, item: ReadItem, info: StorageInfo, data: bytearray, max_bytes: int) -> bytearray:
        if not info.transform_descriptors:
            return data
        try:
            return untransformed(data, info.transform_descriptors, max_bytes)
        except FormatError as error:
            raise self._fault(info, f"{item.storage_index.fqn!r} {error.message}") from error

    # -- the tensors in items -----------------------------------------------------------------------------

    def _stored_tensor(
        self, index: MetadataIndex, info: StorageInfo, record: ItemRecord | None
    ) -> StoredTensor | None:
        """Find the dense tensor in an item; None if the item has to be read as a whole."""
        shape, dtype = chunk_of(self._checkpoint, index)
        if self._checkpoint.is_model_folder:
            return StoredTensor.row_major(info.offset, dtype, shape)
        if record is None:
            located = self._checkpoint.located.get((info.relative_path, info.offset))
            if located is not None and located.shape != tuple(shape):
                raise self._fault(
                    info, f"{index.fqn!r} is {located.shape} where the metadata says {tuple(shape)}"
                )
            return located
        if record.payload_offset < 0:
            return None
        stored = StoredTensor.row_major(record.payload_offset, dtype, shape)
        if stored.payload_bytes != record.payload_bytes:
            raise self._fault(info, f"{index.fqn!r}: the metadata and the manifest disagree on its size")
        return stored


def _copy(tensor: torch.Tensor, target: torch.Tensor, fqn: str) -> None:
    """Copy a tensor that was unpickled. Raises CheckpointError if its class cannot be a part of a dense one."""
    try:
        with torch.no_grad():
            target.copy_(tensor)
    except Exception as error:
        if type(tensor) is torch.Tensor:
            raise
        raise CheckpointError(
            f"{fqn!r} was saved in shards of {type(tensor).__name__}, which cannot be cut otherwise ({type(error).__name__}: "
            f"{error}): load it on the mesh that saved it, or leave it out of the load"
        ) from error


def chunk_of(checkpoint: Checkpoint, index: MetadataIndex) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of a stored chunk. Raises FormatError if there is none."""
    tensor = checkpoint.metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(tensor, TensorStorageMetadata):
        raise checkpoint.fault(f"{index.fqn!r} is not a tensor in this checkpoint")
    shape: torch.Size | None
    if isinstance(tensor.chunks, Chunks):
        shape = tensor.chunks.size_at(index)
    else:
        known = checkpoint.chunk_sizes
        if index.fqn not in known:
            known[index.fqn] = {packed(chunk.offsets): chunk.sizes for chunk in tensor.chunks}
        shape = known[index.fqn].get(packed(index.offset or ()))
    if shape is None:
        raise checkpoint.fault(f"{index.fqn!r} has no chunk at {index.offset}")
    return shape, tensor.properties.dtype


def _info(checkpoint: Checkpoint, index: MetadataIndex) -> StorageInfo:
    info = checkpoint.metadata.storage_data.get(index)
    if info is None:
        raise checkpoint.fault(f"the metadata does not say where {index.fqn!r} is stored")
    return info  # type: ignore[no-any-return]


def _refuse_unreadable(checkpoint: Checkpoint, items: Sequence[ReadItem]) -> None:
    """Raise FormatError for a tensor of a dtype that torch lacks: a model's folder has no other objects."""
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            from ckpt.reading.model_folder import unreadable_error

            index = item.storage_index
            raise unreadable_error(checkpoint.store, index.fqn, _info(checkpoint, index).relative_path)


def _locate(
    checkpoint: Checkpoint, threads: Executor, items: Sequence[ReadItem], infos: Sequence[StorageInfo]
) -> None:
    """Find the payloads of large tensors in a stock checkpoint."""
    wanted = {
        (info.relative_path, info.offset): info
        for item, info in zip(items, infos, strict=True)
        if item.type != LoadItemType.BYTE_IO
        and info.length > _SMALL_ITEM_BYTES
        and not info.transform_descriptors
        and (info.relative_path, info.offset) not in checkpoint.located
    }

    def locate(info: StorageInfo) -> StoredTensor | None:
        checkpoint.file(info.relative_path, info.offset, info.offset + info.length)

        def read_at(offset: int, buffer: memoryview) -> None:
            checkpoint.store.read_into(info.relative_path, info.offset + offset, [buffer])

        return locate_payload(read_at, info.offset, info.length)

    checkpoint.located |= dict(zip(wanted, threads.map(locate, wanted.values()), strict=True))


def _ignore(value: object) -> None:
    pass


def _is_tensor(item: ReadItem) -> bool:
    return item.type != LoadItemType.BYTE_IO


def _takes_any_order(planner: LoadPlanner) -> bool:
    """Tell whether a planner takes items as DCP's own does: straight into the tensors of the state."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name)
        for name in ("resolve_tensor", "commit_tensor")
    )


def _refuse_cast(item: ReadItem, stored: torch.dtype, target: _Target) -> None:
    """Raise FormatError if torch cannot cast what is stored to the dtype of its target."""
    if not target.given.is_quantized and not can_cast(stored, target.given.dtype):
        name, wanted = item.dest_index.fqn, dtype_name(target.given.dtype)
        raise FormatError(
            f"{name!r} is stored as {dtype_name(stored)}, which torch cannot cast to {wanted}: load it into a tensor "
            f"of {dtype_name(stored)}"
        )


def _has_room(window: Window, target: _Target | None) -> bool:
    """Add the target's memory to the window; False if another item fills some of it already."""
    return target is None or target.memory is None or window.memory.add(target.memory, target.owner)
