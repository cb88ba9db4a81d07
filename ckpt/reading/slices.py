"""Read parts of stored tensors: only their bytes, checked as in any load; without torch where that is possible."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import heapq
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.consistency.expected import checked_expect
from ckpt.errors import ConfigurationError, FormatError, NotFound, UnsafeContent
from ckpt.format.columns import Columns, ObjectRow, TensorColumns
from ckpt.format.dtypes import is_quantized, item_bytes
from ckpt.format.elements import Elements, stored_dtype, values_of
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.opening import open_parts
from ckpt.reading.plain_reads import PlainReader, RegionPlan, chunk_parts
from ckpt.stock.item_files import MemoryFile
from ckpt.stock.plain_objects import plain_value
from ckpt.transfer.boxes import tiling_fault
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.reports import Report, Tally
from ckpt.transfer.threads import thread_pool

if TYPE_CHECKING:
    import torch

Region = tuple[str, Sequence[int], Sequence[int]]
"""Name of a tensor, offsets and lengths."""

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
        models: bool = False,
        report: Report | None = None,
        expect: str | None = None,
    ) -> None:
        """`wait_for_data`: wait also for data that is not visible yet, not for the records only.

        `models`: open a folder of safetensors files of any program too. `report`: called with the bytes of index and
        manifests that were read, and those known to be read. `expect`: the digest that it must have.
        """
        self.store: Store = guard(open_store(url, storage_options))
        self.threads = thread_pool(self.store.threads, "ckpt-read")
        self.parts: list[Checkpoint] = []
        try:
            settings = ReadSettings(
                tally=None if report is None else Tally(report), expect=checked_expect(expect)
            )
            self.parts = open_parts(self.store, settings, models=models)
            if not wait_for_data:
                for part in self.parts:
                    part.settings = dataclasses.replace(settings, visibility_timeout_s=0.0)
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
        raise no_such_name(name, self.names, self.store.url)

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
            numbers = [entry.file] if isinstance(entry, ObjectRow) else np.unique(entry.file).tolist()
            files[part].update(columns.files[number] for number in numbers)
            if isinstance(entry, TensorColumns):
                nbytes += math.prod(entry.size) * item_bytes(entry.dtype)
        self._prepare(files, nbytes)

    def prepare_region(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Do the same for a region of a tensor."""
        part, columns, _, _ = self.find(name)
        entry = self.tensor(name)
        numbers = {entry.file[each.row] for each in chunk_parts(entry, offsets, lengths)}
        files = {columns.files[number] for number in numbers}
        self._prepare({part: files}, math.prod(lengths) * item_bytes(entry.dtype))

    def _prepare(self, files: Mapping[Checkpoint, set[str]], nbytes: int) -> None:
        stored_bytes = 0
        for part, paths in files.items():
            part.prepare(paths, self.threads)
            stored_bytes += sum(self.threads.map(functools.partial(self._stored_bytes, part), sorted(paths)))
        if nbytes > _MAX_GROWTH * stored_bytes + GROWTH_SLACK_BYTES:
            message = f"lists tensors of {nbytes} bytes in files of {stored_bytes}, far more than is stored"
            raise FormatError(message, url=self.store.url)

    def _stored_bytes(self, part: Checkpoint, path: str) -> int:
        file = part.file(path)
        if part.commit is None:
            return file.size_bytes
        return part.when_visible(lambda: part.store.stat(path).size_bytes)

    def read(self, regions: Iterable[Region]) -> list[Elements]:
        """Read regions of tensors, all together; each as its elements are stored.

        Raises FormatError if the stored chunks do not cover one, each element once, IntegrityError
        if they are damaged, ConfigurationError if the tensor is quantized: it would need its scales.
        """
        todo: dict[Checkpoint, list[tuple[RegionPlan, Elements]]] = defaultdict(list)
        arrays = []
        for name, offsets, lengths in regions:
            part, plan = self._plan(name, offsets, lengths)
            try:
                arrays.append(np.empty(tuple(lengths), dtype=stored_dtype(plan.entry.dtype)))
            except ValueError as error:  # an empty one too: the product of the others overflows
                message = f"{name[:200]!r} has a shape that no array can have: {tuple(lengths)} ({error})"
                raise FormatError(message, url=self.store.url) from None
            todo[part].append((plan, arrays[-1]))
        for part, wanted in todo.items():
            if part.commit is not None:
                wanted = PlainReader(part, self._pool, self.threads).read(wanted)
            if wanted:
                from ckpt.reading.torch_reads import read_tensors, tensor_of

                tensors = [(plan, tensor_of(array, plan.entry.dtype)) for plan, array in wanted]
                read_tensors(part, self._pool, self.threads, tensors)
        return arrays

    def read_into(self, wanted: Sequence[tuple[str, Sequence[int], torch.Tensor]]) -> None:
        """Fill each target from its tensor at the given offsets, cast to its dtype. Raises as `read`."""
        from ckpt.reading.torch_reads import read_tensors

        todo: dict[Checkpoint, list[tuple[RegionPlan, torch.Tensor]]] = defaultdict(list)
        for name, offsets, target in wanted:
            part, plan = self._plan(name, offsets, target.shape)
            todo[part].append((plan, target))
        for part, tensors in todo.items():
            read_tensors(part, self._pool, self.threads, tensors)

    def _plan(
        self, name: str, offsets: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Checkpoint, RegionPlan]:
        """Plan the reads of a region; all of it must be stored."""
        part, _, fqn, _ = self.find(name)
        entry = self.tensor(name)
        if is_quantized(entry.dtype):
            message = f"{name[:200]!r} is quantized; its values cannot be shown"
            raise ConfigurationError(message, url=self.store.url)
        parts = list(chunk_parts(entry, offsets, lengths))
        if (fault := tiling_fault([each.box for each in parts], lengths)) is not None:
            message = f"the requested region of {name[:200]!r} cannot be read from this checkpoint: {fault}"
            raise FormatError(message, url=self.store.url)
        return part, RegionPlan(fqn, entry, parts)

    def read_object(self, name: str) -> Any:
        """Load an object. Raises UnsafeContent if that needs more than torch's safe types."""
        return self._loaded(name, self.stored_object(name))

    def stored_object(self, name: str) -> bytes:
        """Return the bytes of an object as it was saved, unchecked."""
        part, _, fqn, _ = self.find(name)
        return bytes(self._read_objects(part, [fqn])[fqn])

    def peek(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Load objects and small tensors, read together.

        Leaves out compressed objects, those that need more than safe types, and what has no value.
        Raises as `read`.
        """
        objects: dict[Checkpoint, dict[str, str]] = defaultdict(dict)
        tensors: dict[str, TensorColumns] = {}
        for name in names:
            part, _, fqn, entry = self.find(name)
            if isinstance(entry, ObjectRow):
                objects[part][fqn] = name
            elif not is_quantized(entry.dtype):
                tensors[name] = entry
        arrays = self.read((name, [0] * len(entry.size), entry.size) for name, entry in tensors.items())
        for (name, entry), elements in zip(tensors.items(), arrays, strict=True):
            with contextlib.suppress(ConfigurationError):
                yield name, values_of(elements, entry.dtype)
        for part, named in objects.items():
            if part.commit is None:
                from ckpt.reading.torch_reads import is_transformed

                named = {fqn: name for fqn, name in named.items() if not is_transformed(part, fqn)}
            for fqn, data in self._read_objects(part, list(named)).items():
                with contextlib.suppress(UnsafeContent, FormatError):
                    yield named[fqn], self._loaded(named[fqn], data)

    def _read_objects(self, part: Checkpoint, fqns: Sequence[str]) -> Mapping[str, bytes | bytearray]:
        """Read objects as they are stored, unchecked."""
        if part.commit is not None:
            return PlainReader(part, self._pool, self.threads).objects(fqns)
        from ckpt.reading.torch_reads import read_objects

        return read_objects(part, self._pool, self.threads, fqns)

    def _loaded(self, name: str, data: bytes | bytearray) -> Any:
        with contextlib.suppress(Exception):
            return plain_value(data)
        from ckpt.stock.safe_load import safe_value

        return safe_value(MemoryFile(data), fqn=name, url=self.store.url, key=name)

    def _prefix(self, number: int) -> str:
        return f"rank {number}: " if len(self.parts) > 1 else ""

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        for part in self.parts:
            part.close()
        self.store.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def no_such_name(name: str, names: Iterable[str], url: str, noun: str = "") -> NotFound:
    """Make the error for a name, or a pattern, that none of `names` is; it suggests some of them."""
    near = _nearest(name.strip("*"), [*names])
    advice = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return NotFound(f"there is no {noun}{name[:200]!r} in this checkpoint{advice}", url=url)


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Find names that a mistyped one, or the first part of one, may stand for, among as many as take no time."""
    if name and (below := [*itertools.islice((other for other in names if other.startswith(name)), 3)]):
        return below
    parts = set(name.split(".")[:_MAX_PARTS])

    def likeness(other: str) -> tuple[int, int]:
        return len(parts & set(other.split(".")[:_MAX_PARTS])), -abs(len(other) - len(name))

    short = (other for other in itertools.islice(names, _MAX_NAMES) if len(other) <= _MAX_NAME)
    likely = heapq.nlargest(_MAX_COMPARED, short, key=likeness)
    return difflib.get_close_matches(name[:_MAX_NAME], likely, n=3, cutoff=0.7)
