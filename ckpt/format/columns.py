"""Hold a checkpoint's metadata as integer columns, at a tenth of the size and cost of DCP's `Metadata`.

DCP keeps an object per chunk and two per stored item: millions at a thousand ranks, and making them
takes longer than moving the tensors of a rank. Here the objects that DCP's planners look at are
made when they are looked at.
"""

from __future__ import annotations

import array
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import metadata as dcp

from ckpt.errors import FormatError
from ckpt.format.stored_tensor import dtype_name
from ckpt.torch_private import StorageInfo

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TensorColumns:
    """A tensor and its stored chunks.

    Attributes:
        dtype, size, requires_grad: of the whole tensor.
        offsets, sizes: of each chunk, shape (chunks, dimensions).
        file: index of the file of each chunk.
        offset, length: of each chunk's item in its file, in bytes.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    requires_grad: bool
    offsets: Integers
    sizes: Integers
    file: Integers
    offset: Integers
    length: Integers

    def row_of(self, offset: Sequence[int] | None, hint: int | None) -> int:
        """Find the row of the chunk at `offset`. Raises KeyError."""
        if offset is None or len(offset) != len(self.size):
            raise KeyError(offset)
        if hint is not None and 0 <= hint < len(self.file) and self.offsets[hint].tolist() == list(offset):
            return hint
        rows = np.flatnonzero((self.offsets == np.array(offset, dtype=np.int64)).all(axis=1))
        if not len(rows):
            raise KeyError(offset)
        return int(rows[0])


@dataclass(frozen=True)
class ObjectRow:
    """A stored item that is not a tensor: index of its file, and its offset and length there in bytes."""

    file: int
    offset: int
    length: int


@dataclass(eq=False)
class Columns:
    """All tensors and objects of a checkpoint, by FQN in DCP's order, and the files they are in."""

    files: list[str] = field(default_factory=list)
    entries: dict[str, TensorColumns | ObjectRow] = field(default_factory=dict)
    planner_data: Any = None
    save_id: str | None = None
    version: str | None = None

    def metadata(self) -> dcp.Metadata:
        """Make DCP's view of it."""
        return dcp.Metadata(
            state_dict_metadata={fqn: self._description(fqn) for fqn in self.entries},
            planner_data=self.planner_data,
            storage_data=StorageTable(self),
            storage_meta=dcp.StorageMeta(save_id=self.save_id),
            version=self.version,
        )

    def _description(self, fqn: str) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
        entry = self.entries[fqn]
        if isinstance(entry, ObjectRow):
            return dcp.BytesStorageMetadata()
        properties = dcp.TensorProperties(dtype=entry.dtype, requires_grad=entry.requires_grad)
        chunks: Any = Chunks(self, fqn)
        return dcp.TensorStorageMetadata(properties, torch.Size(entry.size), chunks)

    def info(self, index: dcp.MetadataIndex) -> StorageInfo:
        """Tell where an item is. Raises KeyError."""
        entry = self.entries[index.fqn]
        if isinstance(entry, ObjectRow):
            if index.offset is not None:
                raise KeyError(index)
            return StorageInfo(self.files[entry.file], entry.offset, entry.length)
        row = entry.row_of(index.offset, index.index)
        return StorageInfo(self.files[entry.file[row]], int(entry.offset[row]), int(entry.length[row]))


class Chunks(Sequence[dcp.ChunkStorageMetadata]):
    """The chunks of a tensor, made one by one where DCP's planners expect a list."""

    def __init__(self, columns: Columns, fqn: str) -> None:
        self._columns, self._fqn = columns, fqn

    @property
    def _tensor(self) -> TensorColumns:
        tensor = self._columns.entries[self._fqn]
        assert isinstance(tensor, TensorColumns)
        return tensor

    def size_at(self, index: dcp.MetadataIndex) -> torch.Size | None:
        """Return the size of the chunk at `index.offset`; None if there is none."""
        try:
            return torch.Size(self._tensor.sizes[self._tensor.row_of(index.offset, index.index)].tolist())
        except KeyError:
            return None

    def __len__(self) -> int:
        return len(self._tensor.file)

    @overload
    def __getitem__(self, index: int) -> dcp.ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[dcp.ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> dcp.ChunkStorageMetadata | list[dcp.ChunkStorageMetadata]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        tensor = self._tensor
        return dcp.ChunkStorageMetadata(
            torch.Size(tensor.offsets[index].tolist()), torch.Size(tensor.sizes[index].tolist())
        )

    def __iter__(self) -> Iterator[dcp.ChunkStorageMetadata]:
        sizes: dict[tuple[int, ...], torch.Size] = {}  # most chunks share theirs
        rows = zip(self._tensor.offsets.tolist(), self._tensor.sizes.tolist(), strict=True)
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
        return self.columns.info(index)

    def __iter__(self) -> Iterator[dcp.MetadataIndex]:
        for fqn, entry in self.columns.entries.items():
            if isinstance(entry, ObjectRow):
                yield dcp.MetadataIndex(fqn)
            else:
                for row, offset in enumerate(entry.offsets.tolist()):
                    yield dcp.MetadataIndex(fqn, torch.Size(offset), row)

    def __len__(self) -> int:
        return sum(1 if isinstance(e, ObjectRow) else len(e.file) for e in self.columns.entries.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items in {len(self.columns.files)} files)"


def packed(offsets: Sequence[int]) -> bytes:
    """Make a dict key of offsets: an attacker who knows the hashes of numbers can make a dict slow."""
    return array.array("q", offsets).tobytes()


def columns_of(metadata: dcp.Metadata, *, url: str) -> Columns:
    """Make the columns of any metadata.

    Raises:
        FormatError: an item is listed without its place, or the other way round.
    """
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
    return TensorColumns(
        properties.dtype, tuple(described.size), properties.requires_grad, offsets, sizes, *places
    )


def is_quantized(dtype: torch.dtype) -> bool:
    """Tell whether tensors of a dtype have no values without their scales."""
    return dtype_name(dtype).startswith(("qint", "quint"))
