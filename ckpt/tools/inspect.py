"""Describe the contents of a checkpoint, from its records alone: `ckpt.inspect`."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.backends.registry import open_store
from ckpt.format.columns import Integers, ObjectRow, TensorColumns
from ckpt.format.dtypes import item_bytes
from ckpt.format.fqns import has_model, part_of, paths_of
from ckpt.format.names import rank_of
from ckpt.format.records import CommitRecord
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.opening import open_parts

_SMALL_BYTES = 16 << 10
SMALL_ELEMENTS = 4
"""Of a tensor whose elements are shown in one line."""


@dataclass(frozen=True)
class SliceInfo:
    """A stored chunk of a tensor.

    Attributes:
        offsets, sizes: its place in the tensor, in elements.
        rank: the rank that wrote it; None if the file's name does not tell.
        file, offset, length: its item, in bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int | None
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor.

    Attributes:
        part: `weights`, `optimizer` or `other`, guessed from the name.
        nbytes: size of its elements, each counted once.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    part: str
    nbytes: int
    _columns: TensorColumns = field(repr=False)
    _files: list[str] = field(repr=False)

    @property
    def chunks(self) -> int:
        """Number of stored chunks."""
        return len(self._columns.file)

    @property
    def sharding(self) -> str:
        """Describe the sharding: `whole`, or the parts of each sharded dimension (`dim 0: 8`)."""
        cuts = [
            f"dim {dimension}: {parts}"
            for dimension in range(len(self.shape))
            if (parts := len(np.unique(self._columns.offsets[:, dimension]))) > 1
        ]
        return ", ".join(cuts) or "whole"

    @property
    def is_small(self) -> bool:
        """True if it takes one short read to show all of its elements."""
        columns = self._columns
        return (
            self.chunks == 1
            and 0 < math.prod(self.shape) <= SMALL_ELEMENTS
            and int(columns.length[0]) <= _SMALL_BYTES
        )

    def slices(self) -> Iterator[SliceInfo]:
        """Yield every stored chunk, in the order of the records."""
        columns = self._columns
        for row in range(self.chunks):
            file = self._files[int(columns.file[row])]
            yield SliceInfo(
                tuple(columns.offsets[row].tolist()),
                tuple(columns.sizes[row].tolist()),
                rank_of(file),
                file,
                int(columns.offset[row]),
                int(columns.length[row]),
            )


@dataclass(frozen=True)
class ObjectInfo:
    """A stored object that is not a tensor: its item, in bytes."""

    fqn: str
    part: str
    rank: int | None
    file: str
    offset: int
    length: int

    @property
    def is_small(self) -> bool:
        """True if it takes one short read to show it."""
        return self.length <= _SMALL_BYTES


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint.

    Attributes:
        format: `ckpt-storage`, `stock`, or `safetensors` for a model of another program.
        version: version of the format; None without a commit.
        commit: the commit record; only `ckpt-storage` has one.
        tensors, objects: by FQN, in the order of the records.
        files: by data file, the number of its items and their bytes.
    """

    url: str
    format: str
    version: int | None
    commit: CommitRecord | None
    tensors: Mapping[str, TensorInfo]
    objects: Mapping[str, ObjectInfo]
    files: Mapping[str, tuple[int, int]]

    @property
    def parameters(self) -> int:
        """Number of elements of the weights."""
        return sum(math.prod(info.shape) for info in self.tensors.values() if info.part == "weights")

    @property
    def stored_bytes(self) -> int:
        """Size of all items, as stored."""
        return sum(nbytes for _, nbytes in self.files.values())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Sum the tensors' bytes by dtype, the largest first."""
        return _sums((info.dtype, info.nbytes) for info in self.tensors.values())

    def bytes_by_part(self) -> dict[str, int]:
        """Sum the bytes of tensors and objects by part: `weights`, `optimizer` and `other`."""
        tensors = ((info.part, info.nbytes) for info in self.tensors.values())
        objects = ((info.part, info.length) for info in self.objects.values())
        return {"weights": 0, "optimizer": 0, "other": 0} | _sums([*tensors, *objects])


def inspect(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    visibility_timeout_s: float | None = None,
) -> Inspection:
    """Describe the contents of the checkpoint at `url`, or of anybody's safetensors model. Reads its records, no data.

    Args:
        storage_options: of the place, by name, as for a save there.
        visibility_timeout_s: how long to wait for what storage may show late, as for `ckpt.load`.

    Raises:
        NotFound, NotCommitted: there is no checkpoint.
        IntegrityError, FormatError, UnsafeContent: a record is damaged, unknown or unsafe.
        StorageError: the storage refused, or could not be reached.
    """
    settings = ReadSettings(visibility_timeout_s=visibility_timeout_s)
    with contextlib.closing(open_store(url, storage_options)) as store:
        return describe(store.url, open_parts(store, settings, models=True))


def describe(url: str, parts: Sequence[Checkpoint]) -> Inspection:
    """Describe the contents of an open checkpoint."""
    tensors: dict[str, TensorInfo] = {}
    objects: dict[str, ObjectInfo] = {}
    files: dict[str, tuple[int, int]] = {}
    for number, checkpoint in enumerate(parts):
        prefix = f"rank {number}: " if len(parts) > 1 else ""
        columns, paths = checkpoint.columns, checkpoint.columns.files
        with_model = has_model(paths_of(columns.planner_data).values())
        in_files: list[Integers] = []
        lengths: list[Integers] = []
        for name, entry in columns.entries.items():
            fqn = prefix + name
            part = part_of(name, is_tensor=isinstance(entry, TensorColumns), has_model=with_model)
            if isinstance(entry, ObjectRow):
                path = paths[entry.file]
                objects[fqn] = ObjectInfo(fqn, part, rank_of(path), path, entry.offset, entry.length)
                in_files.append(np.array([entry.file]))
                lengths.append(np.array([entry.length]))
            else:
                nbytes = math.prod(entry.size) * item_bytes(entry.dtype)
                tensors[fqn] = TensorInfo(fqn, entry.size, entry.dtype, part, nbytes, entry, paths)
                in_files.append(entry.file)
                lengths.append(entry.length)
        files |= _files(paths, in_files, lengths)
    commit = parts[0].commit
    form, version = "ckpt-storage", None if commit is None else commit.version
    if commit is None:
        form = "safetensors" if parts[0].is_model_folder else "stock"
    return Inspection(url, form, version, commit, tensors, objects, files)


def _files(
    paths: Sequence[str], in_files: Sequence[Integers], lengths: Sequence[Integers]
) -> dict[str, tuple[int, int]]:
    """Count the items in each file that has any, and their bytes."""
    counts, sums = np.zeros(len(paths), dtype=np.int64), np.zeros(len(paths), dtype=np.int64)
    if in_files:
        place = np.concatenate(in_files)
        np.add.at(counts, place, 1)
        np.add.at(sums, place, np.concatenate(lengths).astype(np.int64))
    found = zip(paths, counts.tolist(), sums.tolist(), strict=True)
    return {path: (count, nbytes) for path, count, nbytes in found if count}


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, nbytes in pairs:
        sums[name] += nbytes
    return dict(sums.most_common())
