"""Send a data file: `torch.save` items laid end to end, opened part by part.

Large payloads of CPU tensors are handed over where they are. Everything else (frames, small
payloads, tensors on a device or with gaps between their elements) is copied into one staging buffer
per part.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ckpt.backends.bodies import Part
from ckpt.consistency.checksums import (
    BLOCK_SIZE_BYTES,
    Piece,
    See,
    block_crcs,
    combine_blocks,
    cut_crcs,
    joined_blocks,
)
from ckpt.errors import CheckpointError
from ckpt.gc_pause import no_gc
from ckpt.torch_private import changes_of
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.tensor_memory import copy_flat, has_memory_view, memory_of

ALIGNMENT_BYTES = 64
"""Where items start. Payloads then are aligned too, and no block boundary cuts an element in two."""

_COPY_BELOW_BYTES = 64 << 10
"""A run of bytes this short is cheaper to copy than to send as a buffer of its own."""

_SPOT_BYTES = 64


class Look(Protocol):
    """Looks at a sample of the bytes of a file."""

    @property
    def cuts(self) -> Sequence[int]: ...

    def note(self, start: int, pieces: Iterable[Piece]) -> None: ...

    def look(self, position: int, buffers: Sequence[memoryview]) -> None: ...


class Payload(ABC):
    """The `nbytes` bytes of an item between its head and its tail."""

    nbytes: int

    @abstractmethod
    def open(self) -> memoryview | torch.Tensor | StreamedPayload:
        """Return all of it as it lies in memory, the tensor to copy it from, or itself if it is streamed."""

    def mark(self, view: memoryview) -> Mark | None:
        """Note how this memory of the payload looks before it is sent; None if only we can change it."""
        return None

    def served(self, nbytes: int) -> None:  # noqa: B027 (most keep nothing)
        """Let go of what is no longer needed, now that `nbytes` more have left."""


class BytesPayload(Payload):
    """Bytes in memory."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")
        self.nbytes = self._view.nbytes

    def open(self) -> memoryview:
        return self._view


class TensorPayload(Payload):
    """A tensor, `name` in errors, asked for when its first part is due and let go after its last."""

    def __init__(self, resolve: Callable[[], torch.Tensor], nbytes: int, name: str) -> None:
        self.nbytes = nbytes
        self.resolve, self._name = resolve, name
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None
        self._is_memory = False
        self._version: int | None = None
        self._left = nbytes

    def open(self) -> memoryview | torch.Tensor:
        with self._lock:
            if self._tensor is None:
                tensor = self.resolve()
                # An inference tensor does not count its changes: it is copied.
                self._is_memory = has_memory_view(tensor) and not tensor.is_inference()
                self._tensor, self._version = tensor, None
            # Each time anew: memory may move between two parts, to where other processes see it for one.
            return memory_of(self._tensor) if self._is_memory else self._tensor

    def mark(self, view: memoryview) -> Mark | None:
        with self._lock:
            tensor = self._tensor
            if tensor is None:  # only while a part is sent again after all were
                return None
            if self._version is None:
                self._version = changes_of(tensor)
            return Mark(self._name, tensor, self._version, view, _spots(view))

    def served(self, nbytes: int) -> None:
        with self._lock:
            self._left -= nbytes
            if self._left <= 0:
                # Its memory outlives it where it is still read; a retry of an earlier part asks the planner again.
                self._tensor, self._left = None, self.nbytes


class StreamedPayload(Payload):
    """Bytes that are read when their part is due, and only those of the part.

    `read` fills the memory of all that is due of a part at once. Payloads of one file share it.
    """

    def __init__(self, nbytes: int, read: Callable[[Sequence[Due]], None]) -> None:
        self.nbytes = nbytes
        self.read = read

    def open(self) -> StreamedPayload:
        return self


Due = tuple[StreamedPayload, int, memoryview]
"""A payload, the offset in it of the first byte wanted, and the memory to fill."""


@dataclass(frozen=True)
class Mark:
    """Tell whether memory that is sent where it is stays as it was: it is read twice, for its checksum too.

    torch counts what it changes, but not what is changed through `.data`, NumPy, other processes or
    C++ code, nor by fused optimizers. Those mostly sweep over all of a tensor, and so do not leave
    all of a few bytes in each part alone.
    """

    name: str
    tensor: torch.Tensor
    version: int
    view: memoryview
    spots: bytes

    def check(self) -> None:
        """Raise CheckpointError if it changed."""
        if changes_of(self.tensor) != self.version or _spots(self.view) != self.spots:
            raise changed_while_saved(self.name)


def changed_while_saved(name: str) -> CheckpointError:
    """Make the error for a tensor that did not stay as it was."""
    return CheckpointError(
        f"{name!r} was changed while it was saved, by another thread or process; "
        "wait for the save before you change the state, or save a copy with ckpt.async_save"
    )


def _spots(view: memoryview) -> bytes:
    """Copy a few bytes from the begin, the middle and the end."""
    middle = view.nbytes // 2
    return b"".join((view[:_SPOT_BYTES], view[middle : middle + _SPOT_BYTES], view[-_SPOT_BYTES:]))


@dataclass(frozen=True)
class FileItem:
    """An item, and its offset in its file."""

    offset: int
    head: bytes
    payload: Payload
    tail: bytes

    @property
    def payload_offset(self) -> int:
        return self.offset + len(self.head)

    @property
    def length(self) -> int:
        return len(self.head) + self.payload.nbytes + len(self.tail)


class FileBody:
    """The body of a data file (`ckpt.backends.base.Body`), which notes its blocks' checksums as it goes.

    `check` is called before each part, and raises when the file is not wanted any more; `pace` before bytes are sent
    (`ckpt.backends.base.Part`); `see` with each piece of a block, right after it was read: where it begins, and its
    bytes. `look` sees all bytes once for a sample, and has notes of the checksums between its `cuts`.
    """

    has_checksums = True

    def __init__(
        self,
        items: Sequence[FileItem],
        pool: StagingPool,
        check: Callable[[], None] = lambda: None,
        pace: Callable[[int], None] | None = None,
        see: See | None = None,
        look: Look | None = None,
    ) -> None:
        self.nbytes = items[-1].offset + items[-1].length if items else 0
        self._items, self._pool, self._check, self._pace = items, pool, check, pace
        self._see_piece, self._look = see, look
        self._offsets = [item.offset for item in items]
        self._crcs = array.array("Q", bytes(8 * -(-self.nbytes // BLOCK_SIZE_BYTES)))

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        self._check()
        with no_gc():
            runs = list(self._runs(start, stop))
            scratch_bytes = _place(runs)
        with self._pool.take(scratch_bytes) as scratch:
            buffers, marks = _fill(runs, scratch)
            crcs = self._checksums(start, stop, buffers)
            block = start // BLOCK_SIZE_BYTES
            self._crcs[block : block + len(crcs)] = array.array("Q", crcs)
            try:
                yield Part(buffers, combine_blocks(crcs, stop - start, BLOCK_SIZE_BYTES), self._pace)
            except Exception:  # the storage may have seen that the bytes do not match their checksum
                _check(marks)
                raise
            _check(marks)
        for run in runs:
            if run.payload is not None:
                run.payload.served(run.nbytes)

    def _checksums(self, start: int, stop: int, buffers: Sequence[memoryview]) -> list[int]:
        """Compute those of the blocks of a part, and show its bytes to who wants to see them."""
        see, look = self._see_piece, self._look
        seeing = None if see is None else lambda position, piece: see(start + position, piece)
        if look is None:
            return block_crcs(buffers, BLOCK_SIZE_BYTES, seeing)
        first, last = bisect.bisect_right(look.cuts, start), bisect.bisect_left(look.cuts, stop)
        cuts = [cut - start for cut in look.cuts[first:last]]
        pieces = cut_crcs(buffers, BLOCK_SIZE_BYTES, cuts, seeing)
        look.note(start, pieces)
        look.look(start, buffers)
        return joined_blocks(pieces, BLOCK_SIZE_BYTES)

    def crc64nvme(self) -> int:
        return combine_blocks(self._crcs, self.nbytes, BLOCK_SIZE_BYTES)

    @property
    def block_crcs(self) -> Sequence[int]:
        return self._crcs

    def blocks(self) -> bytes:
        """Return the blocks' checksums as the manifest keeps them."""
        return np.asarray(self._crcs, dtype="<u8").tobytes()

    def _runs(self, start: int, stop: int) -> Iterator[_Run]:
        """List the runs of bytes that make up `[start, stop)`, in order and without gaps."""
        position = start
        first = max(0, bisect.bisect_right(self._offsets, start) - 1)
        for item in itertools.islice(self._items, first, None):
            if item.offset >= stop:
                break
            end = item.offset + item.length
            if position <= item.offset and end <= stop and item.length < _COPY_BELOW_BYTES:
                yield _Run(position, end - position, item, payload=item.payload)
                position = end
                continue
            if position < item.offset:
                yield _zeros(position, item.offset)
                position = item.offset
            for run in _runs_of_item(item, position, stop):
                yield run
                position += run.nbytes
        if position < stop:
            yield _zeros(position, stop)


@dataclass(slots=True)
class _Run:
    """A run of a file's bytes from `position` on.

    Attributes:
        source: memory; a tensor or streamed payload, of which the bytes from `begin` on are copied;
            or a small item, which is copied as a whole with the gap before it.
        scratch_at: where it is copied to; -1 for memory that is handed over where it is.
    """

    position: int
    nbytes: int
    source: memoryview | torch.Tensor | StreamedPayload | FileItem
    begin: int = 0
    payload: Payload | None = None
    scratch_at: int = -1


def _zeros(position: int, stop: int) -> _Run:
    return _Run(position, stop - position, memoryview(bytes(stop - position)))


def _runs_of_item(item: FileItem, position: int, stop: int) -> Iterator[_Run]:
    """List the runs of an item between `position`, which is inside of it, and `stop`."""
    offset = item.offset
    for part in (memoryview(item.head), item.payload, memoryview(item.tail)):
        begin, end = max(position - offset, 0), min(stop - offset, part.nbytes)
        if begin < end:
            payload = part if isinstance(part, Payload) else None
            source = part.open() if isinstance(part, Payload) else part
            if isinstance(source, memoryview):
                source = source[begin:end]
            yield _Run(position, end - begin, source, begin, payload)
            position = offset + end
        offset += part.nbytes


def _place(runs: Sequence[_Run]) -> int:
    """Give a place in scratch to every run that is copied; return the scratch bytes needed.

    Neighbours lie side by side, so that they leave as one buffer, and every place is aligned as the
    run is in its file, so that a tensor's elements are too.
    """
    end, after = 0, -1
    for run in runs:
        if isinstance(run.source, memoryview) and run.nbytes >= _COPY_BELOW_BYTES:
            continue
        if run.position != after:
            end += (run.position - end) % ALIGNMENT_BYTES
        run.scratch_at = end
        end += run.nbytes
        after = run.position + run.nbytes
    return end


def _fill(runs: Sequence[_Run], scratch: memoryview) -> tuple[list[memoryview], list[Mark]]:
    """Copy what has to be copied; return the buffers of all runs in order, and marks of what was not."""
    buffers: list[memoryview] = []
    marks: list[Mark] = []
    due: list[Due] = []
    for is_copied, neighbours in itertools.groupby(runs, lambda run: run.scratch_at >= 0):
        group = list(neighbours)
        if is_copied:
            for run in group:
                _copy(run, scratch, due)
            buffers.append(scratch[group[0].scratch_at : group[-1].scratch_at + group[-1].nbytes])
            continue
        for run in group:
            assert isinstance(run.source, memoryview)
            buffers.append(run.source)
            mark = run.payload.mark(run.source) if run.payload is not None else None
            if mark is not None:
                marks.append(mark)
    if due:
        due[0][0].read(due)
    return buffers, marks


def _check(marks: Iterable[Mark]) -> None:
    for mark in marks:
        mark.check()


def _copy(run: _Run, memory: memoryview, due: list[Due]) -> None:
    """Copy a run to its place in memory; what is streamed becomes `due`."""
    source, begin, end = run.source, run.scratch_at, run.scratch_at + run.nbytes
    if isinstance(source, FileItem):
        item, item_begin = source, end - source.length
        memory[begin:item_begin] = bytes(item_begin - begin)  # the gap before it
        begin = item_begin + len(item.head)
        memory[item_begin:begin] = item.head
        memory[end - len(item.tail) : end] = item.tail
        end -= len(item.tail)
        if begin == end:  # a tensor without elements
            return
        source = item.payload.open()
    if isinstance(source, memoryview):
        memory[begin:end] = source
    elif isinstance(source, StreamedPayload):
        due.append((source, run.begin, memory[begin:end]))
    else:
        size = source.element_size()
        copy_flat(source, run.begin // size, (run.begin + end - begin) // size, memory[begin:end])
