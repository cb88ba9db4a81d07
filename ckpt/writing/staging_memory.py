"""Lend CPU memory for staged states, and use it again: fresh memory costs more than the copy into it.

Fresh from the system it costs page faults, and more where a GPU is to copy to it. So memory is kept in blocks, and a block is free
again when the last tensor in it is gone. Each staged tensor has a storage of its own in the block: whatever is
pickled with one would take all of its storage along.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import logging
import math
import mmap
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from ckpt.errors import CheckpointError
from ckpt.geometry import Geometry, attached
from ckpt.torch_private import shared_storage
from ckpt.transfer.tensor_memory import has_memory_view, lock_pages, plain, touch

Lease = ctypes.Array[ctypes.c_char]
"""Memory that is lent until nothing refers to it; the tensors in it do."""

_Place = tuple[int, torch.dtype, tuple[int, ...], bool, Geometry | None]
"""The offset of a tensor in a lease, its dtype, shape and `requires_grad`, and the geometry that it carries."""

_PATIENCE_S = 120.0
"""Of who wants memory that is being made ready."""
_TOUCHED_BYTES = 16 << 20

_logger = logging.getLogger(__name__)

_lock = threading.Lock()


def _forget_lock() -> None:
    """Replace the lock in a forked child, where another thread may have held it for ever."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)  # once: the system keeps what is registered


class Ahead:
    """A block that a thread makes ready: its pages are taken from the system, which costs more than the copy into them."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._making: _Making | None = None

    def begin(self, nbytes: int, *, for_device: bool) -> None:
        """Make a block of `nbytes` ready, unless one is being made, or was."""
        making = _Making(nbytes, os.getpid(), for_device)
        with _lock:  # and no more: the garbage collector may call what needs it
            if self._making is not None:
                return
            self._making = making
        work = threading.Thread(target=self._run, args=[making], name="ckpt-memory")
        try:
            work.start()
        except RuntimeError as error:  # the system has no more threads
            making.block.set_exception(error)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return the block as soon as it is ready; None if there is none of about that size, or it takes too long."""
        pid = os.getpid()
        with _lock:
            making = self._making
            if making is None or making.pid != pid:
                return None
            is_small = nbytes > making.nbytes  # it will never be of use
            if is_small or fits(making.nbytes, nbytes):
                self._making = None
            if not fits(making.nbytes, nbytes):
                making.is_wanted = not is_small
                return None
        try:
            return making.block.result(_PATIENCE_S)
        except (
            Exception
        ) as error:  # who wants the memory gets it from the system, or tells that there is none
            _logger.info("no memory was made ready for the first save: %r", error)
            making.is_wanted = False
            return None

    def lock(self) -> None:
        """Lock the pages of the block, if it is ready and for the copies of a GPU."""
        with _lock:
            making = self._making
        if making is None or not making.for_device or making.pid != os.getpid() or not making.block.done():
            return
        making.for_device = False
        if making.block.exception() is None:
            _lock_block(making.block.result())

    def drop(self) -> None:
        """Let go of the block, ready or not."""
        with _lock:
            making, self._making = self._making, None
        if making is not None:
            making.is_wanted = False

    def _run(self, making: _Making) -> None:
        try:
            block = self._make(making.nbytes)
            for start in range(0, making.nbytes, _TOUCHED_BYTES):  # other threads run meanwhile
                if not (making.is_wanted and threading.main_thread().is_alive()):
                    break
                touch(block[start : start + _TOUCHED_BYTES])
        except Exception as error:
            making.block.set_exception(error)
        else:
            making.block.set_result(block)


@dataclass(eq=False)
class _Making:
    """A block that is being made, in the process `pid`: a fork has no thread that ends it."""

    nbytes: int
    pid: int
    for_device: bool
    block: Future[torch.Tensor] = field(default_factory=Future)
    is_wanted: bool = True


def fits(block_bytes: int, nbytes: int) -> bool:
    """Tell whether a block is large enough, and not so large that it wastes memory."""
    return nbytes <= block_bytes <= 2 * nbytes


class Blocks:
    """Blocks of CPU memory, each in use or free.

    Args:
        most: the number of blocks that may be in use at a time; None is no limit.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._free: list[torch.Tensor] = []
        self._in_use, self._pid = 0, os.getpid()
        self._returned: deque[torch.Tensor | None] = deque()
        self.ahead = Ahead(_fresh)

    def provide(self, nbytes: int, *, for_device: bool) -> None:
        """Make a block ready in the background, for the first state of this size."""
        with _lock:
            is_first = not (self._free or self._returned or self._in_use)
        if is_first and nbytes:
            self.ahead.begin(nbytes, for_device=for_device)

    def take(self, nbytes: int, *, for_device: bool) -> Lease:
        """Lend memory, to which a GPU copies by itself if it is `for_device`. Raises CheckpointError if all is in use."""
        if nbytes == 0:
            return (ctypes.c_char * 0)()
        block = self._acquire(nbytes)
        lease = _lease(block, nbytes)
        weakref.finalize(lease, self._give_back, block, os.getpid()).atexit = False
        if for_device:
            _lock_block(block)
        return lease

    def clear(self) -> None:
        """Release the free blocks."""
        self.ahead.drop()
        with _lock:
            self._take_back()
            self._free.clear()

    def _acquire(self, nbytes: int) -> torch.Tensor:
        if self._pid != os.getpid():  # a forked child does not have what is locked
            self._pid, self._free, self._in_use = os.getpid(), [], 0
            self._returned.clear()
        ready = self.ahead.take(nbytes)
        with _lock:
            is_full = self._is_full()
            if ready is not None:
                self._free.append(ready)
        if is_full:
            gc.collect()  # a state that is garbage may wait for it; what it calls may need the lock
        with _lock:
            if self._is_full():
                raise CheckpointError(
                    f"{self._most} staged states are still in use; wait for the saves that write them"
                )
            self._in_use += 1
            fitting = [block for block in self._free if fits(block.numel(), nbytes)]
            self._free = [block for block in self._free if any(block is spare for spare in fitting[1:])]
            if fitting:
                return fitting[0]
        try:
            return _fresh(nbytes)
        except BaseException:
            self._give_back(None, self._pid)
            raise

    def _is_full(self) -> bool:
        self._take_back()
        return self._most is not None and self._in_use >= self._most

    def _give_back(self, block: torch.Tensor | None, pid: int) -> None:
        # Without the lock: the garbage collector may call this in the thread that holds it.
        if pid == self._pid:
            self._returned.append(block)

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._in_use -= 1
            if block is not None:
                self._free.append(block)


def _fresh(nbytes: int) -> torch.Tensor:
    """Make a block of whole pages, huge ones where the system has them: a copy into such takes half as long."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    block: Any = torch.frombuffer(memory, dtype=torch.uint8)
    block.memory = memory
    return block  # type: ignore[no-any-return]


def _lock_block(block: Any) -> None:
    lock_pages(block)
    if hasattr(block, "memory") and block.is_pinned():
        # The system would copy all pages that are locked at each fork. A child lends none of them.
        block.memory.madvise(mmap.MADV_DONTFORK)


class SharedBlock:
    """A block of shared memory: torch would copy other memory there when it is sent."""

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self.ahead = Ahead(_shared_block)

    def provide(self, nbytes: int, *, for_device: bool) -> None:
        """Make the block ready in the background, for the first state of this size."""
        if self._block is None and nbytes:
            self.ahead.begin(nbytes, for_device=for_device)

    def take(self, nbytes: int, *, for_device: bool) -> Lease:
        """Lend the memory of the last state, if that fits; a GPU copies to it by itself if it is `for_device`."""
        if self._block is None or not fits(self._block.numel(), nbytes):
            self._block = None
            ready = self.ahead.take(nbytes)
            self._block = _shared_block(nbytes) if ready is None else ready
        if for_device and nbytes:
            _lock_block(self._block)
        return _lease(self._block, nbytes)

    def clear(self) -> None:
        """Release the block."""
        self.ahead.drop()
        self._block = None


def tensor_in(lease: Lease, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make a dense tensor, with a storage of its own, over memory of `lease` from `offset` on."""
    nbytes = math.prod(shape) * dtype.itemsize
    # Not made of its dtype: torch's deterministic mode cannot fill some, not even without elements.
    if nbytes == 0:
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    else:
        flat = torch.frombuffer(lease, dtype=torch.uint8, count=nbytes, offset=offset)
    return flat.view(dtype).view(tuple(shape))


class StagedState(dict[str, Any]):
    """A staged state; another process gets all its memory at once.

    torch would send each storage by itself, with an open file for each, and copy it if it is not in
    shared memory. To anything but `multiprocessing` it is a dict like any other.
    """

    def __init__(self, values: Mapping[str, Any], lease: Lease) -> None:
        super().__init__(values)
        self._lease = weakref.ref(lease)  # whoever keeps the dict, when it is cleared the memory is free

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({**self},)


def _send(state: StagedState) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
    lease = state._lease() or (ctypes.c_char * 0)()  # nothing keeps one that has no bytes
    buffer = io.BytesIO()
    _Pickler(buffer, lease).dump({**state})
    block: torch.Tensor | None = None
    if len(lease):
        block = lease.owner  # type: ignore[attr-defined]
        if not block.is_shared():
            block = _shared_block(len(lease))
            ctypes.memmove(block.data_ptr(), lease, len(lease))
    return _receive, (block, len(lease), buffer.getvalue())


def _receive(block: torch.Tensor | None, nbytes: int, pickled: bytes) -> dict[str, Any]:
    lease = (ctypes.c_char * 0)() if block is None else _lease(block, nbytes)
    state: dict[str, Any] = _Unpickler(io.BytesIO(pickled), lease).load()
    return state


ForkingPickler.register(StagedState, _send)


class _Pickler(ForkingPickler):
    """Pickle the place of each tensor in `lease` instead of its memory."""

    def __init__(self, buffer: io.BytesIO, lease: Lease) -> None:
        super().__init__(buffer)
        self._begin = ctypes.addressof(lease)
        self._end = self._begin + len(lease)

    def persistent_id(self, value: Any) -> _Place | None:
        if type(value) is not torch.Tensor:
            return None
        tensor = plain(value)
        if tensor is None or not has_memory_view(tensor):
            return None
        # One without elements has no memory, but may have hooks, which torch does not send.
        begin = tensor.data_ptr() if tensor.nbytes else self._begin
        if not self._begin <= begin <= begin + tensor.nbytes <= self._end:
            return None
        offset, shape = begin - self._begin, tuple(tensor.shape)
        return offset, tensor.dtype, shape, value.requires_grad, attached(value)

    def reducer_override(self, value: Any) -> Any:
        # To another process, torch sends a quantized tensor without its scales.
        if type(value) is torch.Tensor and value.is_quantized:
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, lease: Lease) -> None:
        super().__init__(buffer)
        self._lease = lease

    def persistent_load(self, place: _Place) -> torch.Tensor:
        offset, dtype, shape, requires_grad, geometry = place
        tensor = tensor_in(self._lease, offset, dtype, shape).requires_grad_(requires_grad)
        if geometry is not None:
            geometry.attach(tensor)
        return tensor


def _lease(block: torch.Tensor, nbytes: int) -> Lease:
    lease = (ctypes.c_char * nbytes).from_address(block.data_ptr())
    lease.owner = block  # type: ignore[attr-defined]
    return lease


def _shared_block(nbytes: int) -> torch.Tensor:
    storage = shared_storage(max(1, nbytes))
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
