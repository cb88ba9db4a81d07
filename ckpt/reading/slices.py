"""Read parts of stored tensors through the loader: only their bytes, checked as in any load."""

from __future__ import annotations

import contextlib
import difflib
import functools
import heapq
import io
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.errors import ConfigurationError, FormatError, NotFound, UnsafeContent
from ckpt.format.columns import Columns, ObjectRow, TensorColumns
from ckpt.format.dtypes import is_quantized, item_bytes, torch_dtype
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.coverage import box_of
from ckpt.reading.loader import Loader
from ckpt.reading.opening import open_parts
from ckpt.stock.item_files import MemoryFile
from ckpt.stock.safe_load import safe_value
from ckpt.torch_private import StorageInfo
from ckpt.transfer.boxes import tiling_fault
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.threads import thread_pool

_MAX_NAMES, _MAX_COMPARED, _MAX_NAME, _MAX_PARTS = 1 << 17, 64, 256, 32
"""How many names are looked at for one like another, how many thoroughly; length and parts of them."""

_MAX_GROWTH = 16
"""How many times the bytes of its files a tensor may have: they can be compressed, or shared by tied tensors."""

GROWTH_SLACK_BYTES = 64 << 20


class OpenCheckpoint(contextlib.AbstractContextManager["OpenCheckpoint"]):
    """Read parts of a checkpoint by the names that `ckpt.inspect` shows. Raises as that does."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        guard: Callable[[Store], Store] = lambda store: store,
        wait_for_data: bool = True,
    ) -> None:
        """`wait_for_data`: wait also for data that is not visible yet, not for the records only."""
        self.store: Store = guard(open_store(url, storage_options))
        self.threads = thread_pool(self.store.threads, "ckpt-read")
        try:
            self.parts = open_parts(self.store, ReadSettings())
            if not wait_for_data:
                for part in self.parts:
                    part.settings = ReadSettings(visibility_timeout_s=0.0)
            self._columns = [part.columns for part in self.parts]
        except BaseException:
            self.close()
            raise
        self._pool = StagingPool(MIN_MEMORY_BUDGET_BYTES)

    @property
    def names(self) -> list[str]:
        return [self._prefix(n) + fqn for n, columns in enumerate(self._columns) for fqn in columns.entries]

    def find(self, name: str) -> tuple[Checkpoint, Columns, str, TensorColumns | ObjectRow]:
        """Find the part of a name, and its FQN and entry there. Raises NotFound if there is none."""
        for number, (part, columns) in enumerate(zip(self.parts, self._columns, strict=True)):
            prefix = self._prefix(number)
            fqn = name.removeprefix(prefix)
            if name.startswith(prefix) and fqn in columns.entries:
                return part, columns, fqn, columns.entries[fqn]
        near = _nearest(name, self.names)
        advice = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise NotFound(f"there is no {name[:200]!r} in this checkpoint{advice}", url=self.store.url)

    def tensor(self, name: str) -> TensorColumns:
        """Return the columns of a tensor. Raises NotFound if there is no tensor of that name."""
        entry = self.find(name)[3]
        if isinstance(entry, ObjectRow):
            raise NotFound(f"{name[:200]!r} is an object, not a tensor", url=self.store.url)
        return entry

    def prepare(self, names: Iterable[str]) -> None:
        """Fetch what reading these names needs, and check that what is stored can be so much.

        Raises FormatError if it cannot: a few bytes can list one item as any number of tensors.
        """
        files: dict[Checkpoint, set[str]] = defaultdict(set)
        nbytes = 0
        for name in names:
            part, columns, _, entry = self.find(name)
            if isinstance(entry, ObjectRow):
                files[part].add(columns.files[entry.file])
            else:
                files[part].update(columns.files[number] for number in np.unique(entry.file).tolist())
                nbytes += math.prod(entry.size) * item_bytes(entry.dtype)
        stored_bytes = 0
        for part, paths in files.items():
            part.prepare([StorageInfo(path, 0, 0) for path in paths], self.threads)
            stored_bytes += sum(self.threads.map(functools.partial(self._stored_bytes, part), sorted(paths)))
        if nbytes > _MAX_GROWTH * stored_bytes + GROWTH_SLACK_BYTES:
            message = f"lists tensors of {nbytes} bytes in files of {stored_bytes}, far more than is stored"
            raise FormatError(message, url=self.store.url)

    def _stored_bytes(self, part: Checkpoint, path: str) -> int:
        file = part.file(StorageInfo(path, 0, 0))
        if part.commit is None:
            return file.size_bytes
        return part.when_visible(lambda: self.store.stat(path).size_bytes)

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Read the region of a tensor at `offsets`, of size `lengths`, in its own dtype.

        Raises FormatError if the stored chunks do not cover it, each element once, IntegrityError
        if they are damaged, ConfigurationError if the tensor is quantized: it would need its scales.
        """
        part, items = self._plan(name, offsets, lengths, 0)
        target = torch.empty(tuple(lengths), dtype=torch_dtype(self.tensor(name).dtype), device="cpu")
        self._run(part, _Planner([target]), items)
        return target

    def read_into(self, wanted: Sequence[tuple[str, Sequence[int], torch.Tensor]]) -> None:
        """Fill each target from its tensor at the given offsets, cast to its dtype. Raises as `read`."""
        todo: dict[Checkpoint, list[ReadItem]] = defaultdict(list)
        for number, (name, offsets, target) in enumerate(wanted):
            part, items = self._plan(name, offsets, target.shape, number)
            todo[part] += items
        planner = _Planner([target for _, _, target in wanted])
        for part, items in todo.items():
            self._run(part, planner, items)

    def _plan(
        self, name: str, offsets: Sequence[int], lengths: Sequence[int], number: int
    ) -> tuple[Checkpoint, list[ReadItem]]:
        """Plan the reads for target `number`; all of them must be stored."""
        part, _, fqn, entry = self.find(name)
        assert isinstance(entry, TensorColumns)
        if is_quantized(entry.dtype):
            message = f"{name[:200]!r} is quantized; its values cannot be shown"
            raise ConfigurationError(message, url=self.store.url)
        items = list(_read_items(fqn, entry, offsets, lengths, str(number)))
        if (fault := tiling_fault([box_of(item) for item in items], lengths)) is not None:
            message = f"the requested region of {name[:200]!r} cannot be read from this checkpoint: {fault}"
            raise FormatError(message, url=self.store.url)
        return part, items

    def read_object(self, name: str) -> Any:
        """Load an object. Raises UnsafeContent if that needs more than torch's safe types."""
        return safe_value(MemoryFile(self.stored_object(name)), fqn=name, url=self.store.url, key=name)

    def stored_object(self, name: str) -> bytes:
        """Return the bytes of an object as it was saved, unchecked."""
        part, _, fqn, _ = self.find(name)
        return self._read_objects(part, [fqn])[fqn]

    def peek(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Load objects and small tensors, read together.

        Leaves out compressed objects, those that need more than safe types, and what has no value.
        Raises as `read`.
        """
        objects: dict[Checkpoint, dict[str, str]] = defaultdict(dict)
        tensors: list[tuple[str, Sequence[int], torch.Tensor]] = []
        for name in names:
            part, _, fqn, entry = self.find(name)
            if isinstance(entry, TensorColumns):
                if not is_quantized(entry.dtype):
                    target = torch.empty(entry.size, dtype=torch_dtype(entry.dtype), device="cpu")
                    tensors.append((name, [0] * len(entry.size), target))
            elif not part.metadata.storage_data[MetadataIndex(fqn)].transform_descriptors:
                objects[part][fqn] = name
        self.read_into(tensors)
        for name, _, target in tensors:
            yield name, target
        for part, named in objects.items():
            for fqn, data in self._read_objects(part, list(named)).items():
                with contextlib.suppress(UnsafeContent, FormatError):
                    yield named[fqn], safe_value(MemoryFile(data), fqn=fqn, url=self.store.url, key=fqn)

    def _read_objects(self, part: Checkpoint, fqns: Sequence[str]) -> dict[str, bytes]:
        """Read objects as they are stored, unchecked."""
        planner, nothing = _Planner([]), torch.Size([0])
        indices = [MetadataIndex(fqn) for fqn in fqns]
        items = [ReadItem(LoadItemType.BYTE_IO, i, nothing, i, nothing, nothing) for i in indices]
        self._run(part, planner, items, trusted=("*",))
        return planner.objects

    def _run(
        self, part: Checkpoint, planner: _Planner, items: Sequence[ReadItem], trusted: Collection[str] = ()
    ) -> None:
        Loader(part, planner, self._pool, self.threads, trusted).run(items)

    def _prefix(self, number: int) -> str:
        return f"rank {number}: " if len(self.parts) > 1 else ""

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def _read_items(
    fqn: str, entry: TensorColumns, offsets: Sequence[int], lengths: Sequence[int], target: str
) -> Iterator[ReadItem]:
    """List the part of each chunk that is in a region."""
    first = np.array(offsets, dtype=np.int64)
    last = first + np.array(lengths, dtype=np.int64)
    begin = np.maximum(entry.offsets, first)
    end = np.minimum(entry.offsets + entry.sizes, last)
    for row in np.flatnonzero((begin < end).all(axis=1)).tolist():
        yield ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(target),
            torch.Size((begin[row] - first).tolist()),
            MetadataIndex(fqn, torch.Size(entry.offsets[row].tolist()), row),
            torch.Size((begin[row] - entry.offsets[row]).tolist()),
            torch.Size((end[row] - begin[row]).tolist()),
        )


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Find names that a mistyped one may stand for, among as many as take no time."""
    parts = set(name.split(".")[:_MAX_PARTS])

    def likeness(other: str) -> tuple[int, int]:
        return len(parts & set(other.split(".")[:_MAX_PARTS])), -abs(len(other) - len(name))

    short = (other for other in itertools.islice(names, _MAX_NAMES) if len(other) <= _MAX_NAME)
    likely = heapq.nlargest(_MAX_COMPARED, short, key=likeness)
    return difflib.get_close_matches(name[:_MAX_NAME], likely, n=3, cutoff=0.7)


class _Planner(DefaultLoadPlanner):
    """Give the loader tensors by their number, and keep the bytes of objects."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.objects: dict[str, bytes] = {}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._targets[int(index.fqn)]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = value.getvalue()
