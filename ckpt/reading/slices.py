"""Read parts of stored tensors through the loader: only their bytes, checked as in any load."""

from __future__ import annotations

import contextlib
import io
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.errors import ConfigurationError, FormatError, NotFound
from ckpt.format.columns import Columns, ObjectRow, TensorColumns, columns_of, is_quantized
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.coverage import box_of
from ckpt.reading.loader import Loader
from ckpt.reading.opening import open_parts
from ckpt.transfer.boxes import tiling_fault
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.threads import thread_pool


class OpenCheckpoint(contextlib.AbstractContextManager["OpenCheckpoint"]):
    """Read parts of a checkpoint by the names that `ckpt.inspect` shows. Raises as that does."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        guard: Callable[[Store], Store] = lambda store: store,
    ) -> None:
        self.store: Store = guard(open_store(url, storage_options))
        self.threads = thread_pool(self.store.threads, "ckpt-read")
        try:
            self.parts = open_parts(self.store, ReadSettings())
            self._columns = [columns_of(part.metadata, url=self.store.url) for part in self.parts]
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
        raise NotFound(f"there is no {name[:200]!r} in this checkpoint", url=self.store.url)

    def tensor(self, name: str) -> TensorColumns:
        """Return the columns of a tensor. Raises NotFound if there is no tensor of that name."""
        entry = self.find(name)[3]
        if isinstance(entry, ObjectRow):
            raise NotFound(f"{name[:200]!r} is an object, not a tensor", url=self.store.url)
        return entry

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Read the region of a tensor at `offsets`, of size `lengths`, in its own dtype.

        Raises FormatError if the stored chunks do not cover it, each element once, IntegrityError
        if they are damaged, ConfigurationError if the tensor is quantized: it would need its scales.
        """
        part, items = self._plan(name, offsets, lengths, 0)
        target = torch.empty(tuple(lengths), dtype=self.tensor(name).dtype, device="cpu")
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
        data = self._read_object(name, trusted=False)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

    def stored_object(self, name: str) -> bytes:
        """Return the bytes of an object as it was saved, unchecked."""
        return self._read_object(name, trusted=True)

    def _read_object(self, name: str, *, trusted: bool) -> bytes:
        part, _, fqn, _ = self.find(name)
        index, nothing = MetadataIndex(fqn), torch.Size([0])
        planner = _Planner([])
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        self._run(part, planner, [item], trusted=("*",) if trusted else ())
        return planner.data

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


class _Planner(DefaultLoadPlanner):
    """Give the loader tensors by their number, and keep the bytes of an object."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.data = b""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._targets[int(index.fqn)]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.data = value.getvalue()
