"""Show columns to DCP as its own `Metadata`, whose objects are made when they are looked at."""

from __future__ import annotations

import operator
import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp

from ckpt.errors import FormatError
from ckpt.format.columns import Columns, ObjectRow, TensorColumns, packed
from ckpt.format.dtypes import dtype_name, torch_dtype
from ckpt.format.names import split_path
from ckpt.format.runs import TensorRuns
from ckpt.torch_private import StorageInfo

_LEVEL = 1


def metadata_of(columns: Columns) -> dcp.Metadata:
    """Make DCP's view of columns. Raises FormatError for a dtype that this torch does not have."""
    return dcp.Metadata(
        state_dict_metadata={fqn: _description(columns, fqn) for fqn in columns.entries},
        planner_data=columns.planner_data,
        storage_data=StorageTable(columns),
        storage_meta=dcp.StorageMeta(save_id=columns.save_id),
        version=columns.version,
    )


def share_metadata(metadata: dcp.Metadata) -> bytes:
    """Pack what `metadata_of` has made, for other ranks."""
    columns = pickle.dumps(columns_of(metadata, url=""))
    return pickle.dumps((zlib.compress(columns, _LEVEL), metadata.storage_meta))


def shared_metadata(shared: bytes) -> dcp.Metadata:
    """Make the metadata that another rank has shared."""
    columns, storage_meta = pickle.loads(shared)
    metadata = metadata_of(pickle.loads(zlib.decompress(columns)))
    metadata.storage_meta = storage_meta
    return metadata


def _description(columns: Columns, fqn: str) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    entry = columns.entries[fqn]
    if isinstance(entry, ObjectRow):
        return dcp.BytesStorageMetadata()
    properties = dcp.TensorProperties(dtype=torch_dtype(entry.dtype), requires_grad=entry.requires_grad)
    chunks: Any = Chunks(columns, fqn)
    return dcp.TensorStorageMetadata(properties, torch.Size(entry.size), chunks)


class Chunks(Sequence[dcp.ChunkStorageMetadata]):
    """The chunks of a tensor, made one by one where DCP's planners expect a list."""

    def __init__(self, columns: Columns, fqn: str) -> None:
        self._columns, self._fqn = columns, fqn

    @property
    def tensor(self) -> TensorColumns:
        """The columns that they are rows of."""
        tensor = self._columns.entries[self._fqn]
        assert isinstance(tensor, TensorColumns)
        return tensor

    def size_at(self, index: dcp.MetadataIndex) -> torch.Size | None:
        """Return the size of the chunk at `index.offset`; None if there is none."""
        try:
            return torch.Size(self.tensor.sizes_at(self.tensor.row_of(index.offset, index.index)))
        except KeyError:
            return None

    def __len__(self) -> int:
        return self.tensor.count

    @overload
    def __getitem__(self, index: int) -> dcp.ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[dcp.ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> dcp.ChunkStorageMetadata | list[dcp.ChunkStorageMetadata]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(index)
        return dcp.ChunkStorageMetadata(*map(torch.Size, self.tensor.box(row)))

    def __iter__(self) -> Iterator[dcp.ChunkStorageMetadata]:
        sizes: dict[tuple[int, ...], torch.Size] = {}  # most chunks share theirs
        rows = zip(self.tensor.offsets.tolist(), self.tensor.sizes.tolist(), strict=True)
        for offset, size in rows:
            key = tuple(size)
            yield dcp.ChunkStorageMetadata(torch.Size(offset), sizes.setdefault(key, torch.Size(key)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"


class StorageTable(Mapping[dcp.MetadataIndex, StorageInfo]):
    """`Metadata.storage_data` over columns."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __getitem__(self, index: dcp.MetadataIndex) -> StorageInfo:
        entry, files = self.columns.entries[index.fqn], self.columns.files
        if isinstance(entry, ObjectRow):
            if index.offset is not None:
                raise KeyError(index)
            return StorageInfo(files[entry.file], entry.offset, entry.length)
        file, offset, length = entry.place(entry.row_of(index.offset, index.index))
        return StorageInfo(files[file], offset, length)

    def __iter__(self) -> Iterator[dcp.MetadataIndex]:
        for fqn, entry in self.columns.entries.items():
            if isinstance(entry, ObjectRow):
                yield dcp.MetadataIndex(fqn)
            else:
                for row, offset in enumerate(entry.offsets.tolist()):
                    yield dcp.MetadataIndex(fqn, torch.Size(offset), row)

    def __len__(self) -> int:
        return sum(1 if isinstance(e, ObjectRow) else e.count for e in self.columns.entries.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items in {len(self.columns.files)} files)"


def stored_bytes(metadata: dcp.Metadata) -> tuple[int, int]:
    """Count the bytes of the items of a checkpoint: its own, and those that it carries."""
    columns = columns_of(metadata, url="")
    is_carried = np.array([bool(split_path(path)[0]) for path in columns.files], dtype=bool)
    own = carried = 0
    for entry in columns.entries.values():
        if isinstance(entry, TensorRuns) and not is_carried.any():
            own += entry.columns[2].total
            continue
        file, length = np.atleast_1d(entry.file), np.atleast_1d(entry.length)
        total, part = int(length.sum()), int(length[is_carried[file]].sum())
        own, carried = own + total - part, carried + part
    return own, carried


def columns_of(metadata: dcp.Metadata, *, url: str) -> Columns:
    """Make the columns of any metadata. Raises FormatError if an item has no place, or a place no item."""
    if isinstance(metadata.storage_data, StorageTable):
        return metadata.storage_data.columns
    columns = Columns(planner_data=metadata.planner_data, version=metadata.version)
    files: dict[str, int] = {}
    places: dict[str, dict[bytes | None, StorageInfo]] = defaultdict(dict)
    for index, info in metadata.storage_data.items():
        places[index.fqn][None if index.offset is None else packed(index.offset)] = info
    for fqn, described in metadata.state_dict_metadata.items():
        infos = places.pop(fqn, {})
        if isinstance(described, dcp.TensorStorageMetadata):
            columns.entries[fqn] = _tensor(fqn, described, infos, files, url)
            continue
        if list(infos) != [None]:
            raise FormatError(f"the metadata does not say where {fqn!r} is", url=url)
        info = infos[None]
        file = files.setdefault(info.relative_path, len(files))
        columns.entries[fqn] = ObjectRow(file, info.offset, info.length)
    if places:
        raise FormatError(
            f"the metadata says where {next(iter(places))!r} is, but does not describe it", url=url
        )
    columns.files = list(files)
    return columns


def _tensor(
    fqn: str,
    described: dcp.TensorStorageMetadata,
    infos: dict[bytes | None, StorageInfo],
    files: dict[str, int],
    url: str,
) -> TensorColumns:
    rows = []
    for chunk in described.chunks:
        info = infos.pop(packed(chunk.offsets), None)
        if info is None:
            raise FormatError(
                f"the metadata does not say where {fqn!r} at {tuple(chunk.offsets)} is, or lists it twice",
                url=url,
            )
        rows.append((files.setdefault(info.relative_path, len(files)), info.offset, info.length))
    if infos:
        raise FormatError(f"the metadata says where a chunk of {fqn!r} is that it does not list", url=url)
    shape = (len(rows), len(described.size))
    offsets = np.array([tuple(chunk.offsets) for chunk in described.chunks], dtype=np.int64).reshape(shape)
    sizes = np.array([tuple(chunk.sizes) for chunk in described.chunks], dtype=np.int64).reshape(shape)
    places = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    properties = described.properties
    dtype = dtype_name(properties.dtype)
    return TensorColumns(dtype, tuple(described.size), properties.requires_grad, offsets, sizes, *places)
