"""Describe the contents of a checkpoint, from its records alone: `ckpt.inspect`."""

from __future__ import annotations

import contextlib
import heapq
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt import notebook
from ckpt.backends.registry import open_store
from ckpt.consistency.expected import checked_expect, commit_digest
from ckpt.errors import short_traceback
from ckpt.format.columns import ObjectRow, TensorColumns
from ckpt.format.dtypes import item_bytes
from ckpt.format.fqns import has_model, part_of, paths_of
from ckpt.format.names import rank_of, split_path
from ckpt.format.records import CommitRecord
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.opening import open_parts
from ckpt.transfer.reports import Report, Tally
from ckpt.words import count, size, tags_text

_SMALL_BYTES = 16 << 10
_MAX_SHOWN = 20
"""Tensors in a notebook."""

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
    _foreign: npt.NDArray[np.bool_] | None = field(default=None, repr=False)

    @property
    def chunks(self) -> int:
        """Number of stored chunks."""
        return self._columns.count

    @property
    def sharding(self) -> str:
        """Describe the sharding: `whole`, or the parts of each sharded dimension (`dim 0: 8`)."""
        counts = [len(np.unique(column)) for column in self._columns.offsets.T]
        cuts = [f"dim {dimension}: {parts}" for dimension, parts in enumerate(counts) if parts > 1]
        return ", ".join(cuts) or "whole"

    @property
    def referred_bytes(self) -> int:
        """Stored bytes of its chunks that lie in other checkpoints, which this one names."""
        if self._foreign is None:
            return 0
        return int(self._columns.length[self._foreign[self._columns.file]].sum())

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
            number, offset, length = columns.place(row)
            offsets, sizes = map(tuple, columns.box(row))
            file = self._files[number]
            yield SliceInfo(offsets, sizes, rank_of(file), file, offset, length)


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
    def referred_bytes(self) -> int:
        """Its bytes, if they lie in another checkpoint, which this one names."""
        return self.length if split_path(self.file)[0] else 0

    @property
    def is_small(self) -> bool:
        """True if it takes one short read to show it."""
        return self.length <= _SMALL_BYTES


@dataclass(frozen=True)
class RankInfo:
    """A rank of a save.

    Attributes:
        data_bytes: of its data files; None in a model, whose files the records give to no rank.
        write_s: from its plan to the end of its last put; None if the save did not say.
        retries: requests that it sent again.
    """

    rank: int
    data_bytes: int | None
    write_s: float | None
    retries: int


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint. A notebook shows it as a table.

    Attributes:
        format: `ckpt-storage`, `stock`, or `safetensors` for a model of another program.
        version: version of the format; None without a commit.
        commit: the commit record; only `ckpt-storage` has one.
        digest: that of the commit record, which names the checkpoint: `sha256:...`; empty without one.
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
    digest: str = ""

    @property
    def parameters(self) -> int:
        """Number of elements of the weights."""
        return sum(math.prod(info.shape) for info in self.tensors.values() if info.part == "weights")

    @property
    def stored_bytes(self) -> int:
        """Size of all items, as stored."""
        return sum(nbytes for _, nbytes in self.files.values())

    @property
    def seconds(self) -> dict[str, float]:
        """How long the save took before its commit: `plan_s`, `write_s`, `index_s`; empty if it did not say."""
        timings = self.commit.timings if self.commit else None
        if not timings:
            return {}
        phases = zip(("plan_s", "write_s", "index_s"), timings.coordinator_ms, strict=True)
        return {name: ms / 1000 for name, ms in phases}

    @property
    def ranks(self) -> list[RankInfo]:
        """The ranks that saved it; of one that does not say how long they took, those that wrote something."""
        if self.commit is None:
            return []
        sizes = {ref.rank: ref.data_bytes for ref in self.commit.own_manifests}
        timings = self.commit.timings
        if not timings or len(timings.ranks_ms) != self.commit.world_size:
            return [RankInfo(rank, nbytes, None, 0) for rank, nbytes in sorted(sizes.items())]
        retries, by_rank = dict(timings.retries), not self.commit.is_model
        return [
            RankInfo(rank, sizes.get(rank, 0) if by_rank else None, ms / 1000, retries.get(rank, 0))
            for rank, ms in enumerate(timings.ranks_ms)
        ]

    def bytes_by_dtype(self) -> dict[str, int]:
        """Sum the tensors' bytes by dtype, the largest first."""
        return _sums((info.dtype, info.nbytes) for info in self.tensors.values())

    def bytes_by_part(self) -> dict[str, int]:
        """Sum the bytes of tensors and objects by part: `weights`, `optimizer` and `other`."""
        tensors = ((info.part, info.nbytes) for info in self.tensors.values())
        objects = ((info.part, info.length) for info in self.objects.values())
        return {"weights": 0, "optimizer": 0, "other": 0} | _sums([*tensors, *objects])

    def _repr_html_(self) -> str:
        facts = [("format", "stock PyTorch" if self.format == "stock" else notebook.text(self.format))]
        if self.commit is not None:
            facts += [
                ("committed", notebook.text(f"{self.commit.created_at}, id {self.commit.id}")),
                (
                    "written by",
                    notebook.text(f"{count(self.commit.world_size, 'rank')}, {self.commit.library}"),
                ),
                ("tags", notebook.text(tags_text(self.commit.tags))),
            ]
        names = f"{count(len(self.tensors), 'tensor')}, {count(len(self.objects), 'object')}"
        facts += [
            ("holds", f"{count(self.parameters, 'parameter')}, {names}"),
            ("stored", f"{size(self.stored_bytes)} in {count(len(self.files), 'file')}"),
            ("by part", notebook.bars(self.bytes_by_part())),
            ("by dtype", notebook.bars(self.bytes_by_dtype())),
        ]
        largest = heapq.nlargest(_MAX_SHOWN, self.tensors.values(), key=lambda info: info.nbytes)
        rows = [(info.fqn, info.dtype, info.shape, size(info.nbytes), info.sharding) for info in largest]
        heading = ("name", "dtype", "shape", "size", "sharding")
        summary = f"the largest {len(rows)} of {count(len(self.tensors), 'tensor')}"
        return notebook.titled(self.url, facts, notebook.folded(summary, heading, rows))


@short_traceback
def inspect(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    visibility_timeout_s: float | None = None,
    progress: Report | None = None,
    expect: str | None = None,
) -> Inspection:
    """Describe the contents of the checkpoint at `url`, or of anybody's safetensors model. Reads its records, no data.

    Args:
        storage_options: of the place, by name, as for a save there.
        visibility_timeout_s: how long to wait for what storage may show late, as for `ckpt.load`.
        progress: called with the bytes of the index that were read, and its size by the commit record.
        expect: the digest of the checkpoint, `sha256:...`.

    Raises:
        DigestMismatch: it is not the checkpoint that is expected.
        NotFound, NotCommitted: there is no checkpoint.
        IntegrityError, FormatError, UnsafeContent: a record is damaged, unknown or unsafe.
        StorageError: the storage refused, or could not be reached.
    """
    tally = None if progress is None else Tally(progress)
    settings = ReadSettings(
        visibility_timeout_s=visibility_timeout_s, tally=tally, expect=checked_expect(expect)
    )
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
        counts, sums = np.zeros((2, len(paths)), dtype=np.int64)
        foreign = (
            np.array([bool(split_path(path)[0]) for path in paths])
            if checkpoint.commit and checkpoint.commit.owners
            else None
        )
        for name, entry in columns.entries.items():
            fqn = prefix + name
            part = part_of(name, is_tensor=isinstance(entry, TensorColumns), has_model=with_model)
            if isinstance(entry, ObjectRow):
                path = paths[entry.file]
                objects[fqn] = ObjectInfo(fqn, part, rank_of(path), path, entry.offset, entry.length)
            else:
                nbytes = math.prod(entry.size) * item_bytes(entry.dtype)
                tensors[fqn] = TensorInfo(fqn, entry.size, entry.dtype, part, nbytes, entry, paths, foreign)
            np.add.at(counts, entry.file, 1)
            np.add.at(sums, entry.file, entry.length)
        found = zip(paths, counts.tolist(), sums.tolist(), strict=True)
        files |= {path: (count, nbytes) for path, count, nbytes in found if count}
    commit = parts[0].commit
    form, version = "ckpt-storage", None if commit is None else commit.version
    if commit is None:
        form = "safetensors" if parts[0].is_model_folder else "stock"
    stored = parts[0].stored_commit
    digest = "" if stored is None else commit_digest(stored.raw)
    return Inspection(url, form, version, commit, tensors, objects, files, digest)


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, nbytes in pairs:
        sums[name] += nbytes
    return dict(sums.most_common())
