"""A data file on its way to storage: `torch.save` items laid end to end, opened part by part.

Large payloads of CPU tensors are handed over where they are. Everything else (frames, small payloads,
tensors on a device or with gaps between their elements) is copied into one staging buffer per part.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ckpt.backends.bodies import Part
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, block_crcs, combine_blocks
from ckpt.gc_pause import no_gc
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.tensor_memory import copy_flat, has_memory_view, memory_of

ALIGNMENT_BYTES = 64
"""Where items start. Payloads then are aligned too, and no block boundary cuts an element in two."""

_COPY_BELOW_BYTES = 64 << 10
"""A run of bytes this short is cheaper to copy than to send as a buffer of its own."""


class Payload(Protocol):
    """The bytes of one item between its head and its tail."""

    @property
    def nbytes(self) -> int: ...

    def open(self) -> memoryview | torch.Tensor | StreamedPayload:
        """All of it as it lies in memory, the tensor it has to be copied from, or itself if it is streamed."""

    def served(self, nbytes: int) -> None:
        """That many bytes have left; what is no longer needed may be let go."""


class BytesPayload:
    """Bytes in memory."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def open(self) -> memoryview:
        return self._view

    def served(self, nbytes: int) -> None:
        pass


class TensorPayload:
    """A tensor, asked for when its first part is due and let go after its last."""

    def __init__(self, resolve: Callable[[], torch.Tensor], nbytes: int) -> None:
        self._resolve = resolve
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None
        self._left = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def open(self) -> torch.Tensor:
        with self._lock:
            if self._tensor is None:
                self._tensor = self._resolve()
            return self._tensor

    def served(self, nbytes: int) -> None:
        with self._lock:
            self._left -= nbytes
            if self._left <= 0:
                # Whoever still reads it holds it; a retry of an earlier part asks the planner again.
                self._tensor, self._left = None, self._nbytes


class StreamedPayload:
    """Bytes that are read when their part is due, and only those of the part.

    Args:
        read: fills the memory of all that is due of a part at once. Payloads of one file share it.
    """

    def __init__(self, nbytes: int, read: Callable[[Sequence[Due]], None]) -> None:
        self._nbytes = nbytes
        self.read = read

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def open(self) -> StreamedPayload:
        return self

    def served(self, nbytes: int) -> None:
        pass


Due = tuple[StreamedPayload, int, memoryview]
"""A payload, the place of the first byte wanted of it, and the memory to fill."""


@dataclass(frozen=True)
class FileItem:
    """An item and where it lies in its file."""

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
    """The body of a data file (`ckpt.backends.base.Body`), which notes its blocks' checksums as it goes."""

    has_checksums = True

    def __init__(
        self,
        items: Sequence[FileItem],
        pool: StagingPool,
        check: Callable[[], None] = lambda: None,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        """`check` is called before each part and raises when the file is not wanted any more.

        `pace` is called before bytes are sent (`ckpt.backends.base.Part`).
        """
        self._items = items
        self._pace = pace
        self._pool = pool
        self._check = check
        self._offsets = [item.offset for item in items]
        self._nbytes = items[-1].offset + items[-1].length if items else 0
        self._crcs = array.array("Q", bytes(8 * -(-self._nbytes // BLOCK_SIZE_BYTES)))

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        self._check()
        with no_gc():
            # The runs hold the tensors whose memory the buffers show.
            runs = list(self._runs(start, stop))
            scratch_bytes = _place(runs)
        with self._pool.take(scratch_bytes) as scratch:
            buffers = _fill(runs, scratch)
            crcs = block_crcs(buffers, BLOCK_SIZE_BYTES)
            first = start // BLOCK_SIZE_BYTES
            self._crcs[first : first + len(crcs)] = array.array("Q", crcs)
            yield Part(buffers, combine_blocks(crcs, stop - start, BLOCK_SIZE_BYTES), self._pace)
        for run in runs:
            if run.payload is not None:
                run.payload.served(run.nbytes)

    def crc64nvme(self) -> int:
        return combine_blocks(self._crcs, self._nbytes, BLOCK_SIZE_BYTES)

    def blocks(self) -> bytes:
        """The blocks' checksums as the manifest keeps them."""
        crcs = array.array("Q", self._crcs)
        if sys.byteorder == "big":
            crcs.byteswap()
        return crcs.tobytes()

    def _runs(self, start: int, stop: int) -> Iterator[_Run]:
        """The runs of bytes that make up `[start, stop)`, in order and without gaps."""
        position = start
        first = max(0, bisect.bisect_right(self._offsets, start) - 1)
        for item in itertools.islice(self._items, first, None):
            if item.offset >= stop:
                break
            end = item.offset + item.length
            if position <= item.offset and end <= stop and item.length < _COPY_BELOW_BYTES:
                yield _Run(position, end - position, item=item, payload=item.payload)
                position = end
                continue
            if position < item.offset:
                yield _view_run(position, memoryview(bytes(item.offset - position)))
                position = item.offset
            for run in _runs_of_item(item, position, stop):
                yield run
                position += run.nbytes
        if position < stop:
            yield _view_run(position, memoryview(bytes(stop - position)))


@dataclass(slots=True)
class _Run:
    """A run of a file's bytes from `position` on, and where they come from.

    One of: a `view` of memory; a `tensor` whose bytes from `begin` on are copied; a `streamed` payload that is read
    from `begin` on; a small `item` as a whole, with the gap before it, which is copied too.
    """

    position: int
    nbytes: int
    view: memoryview | None = None
    tensor: torch.Tensor | None = None
    begin: int = 0
    item: FileItem | None = None
    streamed: StreamedPayload | None = None
    payload: Payload | None = None
    scratch_at: int = -1


def _runs_of_item(item: FileItem, position: int, stop: int) -> Iterator[_Run]:
    """The runs of an item between `position`, which is inside of it, and `stop`."""
    for offset, piece in (
        (item.offset, item.head),
        (item.payload_offset, item.payload),
        (item.payload_offset + item.payload.nbytes, item.tail),
    ):
        nbytes = len(piece) if isinstance(piece, bytes) else piece.nbytes
        begin, end = max(position - offset, 0), min(stop - offset, nbytes)
        if begin >= end:
            continue
        if isinstance(piece, bytes):
            yield _view_run(position, memoryview(piece)[begin:end])
        else:
            yield _payload_run(position, piece, begin, end)
        position = offset + end


def _view_run(position: int, view: memoryview) -> _Run:
    return _Run(position, view.nbytes, view)


def _payload_run(position: int, payload: Payload, begin: int, end: int) -> _Run:
    source = payload.open()
    if isinstance(source, memoryview):
        return _Run(position, end - begin, source[begin:end], payload=payload)
    if isinstance(source, StreamedPayload):
        return _Run(position, end - begin, streamed=source, begin=begin)
    view = memory_of(source)[begin:end] if has_memory_view(source) else None
    return _Run(position, end - begin, view, source, begin, payload=payload)


def _place(runs: Sequence[_Run]) -> int:
    """Give a place in scratch to every run that is copied; returns the scratch bytes needed.

    Neighbours lie side by side, so that they leave as one buffer, and every place is aligned as the run is
    in its file, so that a tensor's elements are too.
    """
    end, after = 0, -1
    for run in runs:
        if run.view is not None and run.nbytes >= _COPY_BELOW_BYTES:
            continue
        if run.position != after:
            end += (run.position - end) % ALIGNMENT_BYTES
        run.scratch_at = end
        end += run.nbytes
        after = run.position + run.nbytes
    return end


def _fill(runs: Sequence[_Run], scratch: torch.Tensor) -> list[memoryview]:
    """Copy what has to be copied; returns the buffers of all runs in order."""
    memory = memory_of(scratch)
    buffers: list[memoryview] = []
    due: list[Due] = []
    open_from = open_to = -1
    for run in runs:
        if run.scratch_at < 0:
            if open_from >= 0:
                buffers.append(memory[open_from:open_to])
                open_from = -1
            assert run.view is not None
            buffers.append(run.view)
            continue
        at, to = run.scratch_at, run.scratch_at + run.nbytes
        if run.item is not None:
            _copy_item(run.item, memory, scratch, at, to, due)
        elif run.streamed is not None:
            due.append((run.streamed, run.begin, memory[at:to]))
        elif run.view is not None:
            memory[at:to] = run.view
        else:
            assert run.tensor is not None
            size = run.tensor.element_size()
            copy_flat(run.tensor, run.begin // size, (run.begin + run.nbytes) // size, scratch[at:to])
        if open_from < 0:
            open_from = at
        open_to = to
    if open_from >= 0:
        buffers.append(memory[open_from:open_to])
    if due:
        due[0][0].read(due)
    return buffers


def _copy_item(
    item: FileItem, memory: memoryview, scratch: torch.Tensor, at: int, to: int, due: list[Due]
) -> None:
    """Copy a whole item into scratch `[at, to)`, with zeros in the gap before it; what is streamed becomes `due`."""
    head_at = to - item.length
    memory[at:head_at] = bytes(head_at - at)
    payload_at, payload_to = head_at + len(item.head), to - len(item.tail)
    memory[head_at:payload_at] = item.head
    memory[payload_to:to] = item.tail
    source = item.payload.open()
    if isinstance(source, memoryview):
        memory[payload_at:payload_to] = source
    elif isinstance(source, StreamedPayload):
        due.append((source, 0, memory[payload_at:payload_to]))
    elif has_memory_view(source):
        memory[payload_at:payload_to] = memory_of(source)
    else:
        copy_flat(source, 0, source.numel(), scratch[payload_at:payload_to])
