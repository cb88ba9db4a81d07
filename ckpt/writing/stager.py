"""Stage states for asynchronous saves: copy them into memory that is reused.

Memory fresh from the system costs five times the copy into it (page faults), and pinned memory far
more. So a copy goes into one block that is kept. A block is free again when the last staged tensor
in it is gone.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from ckpt.errors import CheckpointError
from ckpt.torch_private import (
    Shard,
    ShardedTensor,
    ShardMetadata,
    dtensor_like,
    local_tensor,
    set_local_shards,
    shared_storage,
)
from ckpt.transfer.tensor_memory import copy_elements, has_memory_view, plain
from ckpt.transfer.threads import run_all, thread_pool

_ALIGNMENT_BYTES = 64
_MAX_BLOCKS = 2
_RUN_BYTES = 16 << 20

_Run = tuple[int, int, int]
"""Target address, source address, bytes."""


class Stager(AsyncStager):
    """Copy states to CPU memory that is reused; also for `dcp.async_save(async_stager=...)`.

    Only the bytes of each tensor are copied, whatever the size of the storage it is a view of;
    tensors that are the same view of the same memory are copied once. Two staged states can exist
    at a time, so that one can be copied while another is still being written.

    Args:
        shared_memory: for saves by another process: copies are in one block of shared memory, which
            costs one open file however many tensors there are. Only one staged state can exist at a
            time then.
    """

    def __init__(self, *, shared_memory: bool = False) -> None:
        self._blocks: _Blocks = _SharedBlock() if shared_memory else _Blocks()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy `state_dict`: tensors to CPU memory, everything else by `copy.deepcopy`.

        Raises:
            CheckpointError: both copies made before are still in use.
        """
        copies = _Copies()
        staged = copies.placed(state_dict)
        memory = self._blocks.take(copies.nbytes)
        return copies.carried_out(staged, memory)  # type: ignore[no-any-return]

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is complete when `stage` returns."""

    def close(self) -> None:
        """Release the memory that no staged state uses; harmless to call twice."""
        self._blocks.clear()


class _Blocks:
    """Blocks of CPU memory, pinned where there is a GPU, each in use or free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self._in_use = 0
        self._returned: deque[torch.Tensor | None] = deque()
        os.register_at_fork(after_in_child=self._forget)

    def take(self, nbytes: int) -> torch.Tensor:
        """Lend a uint8 tensor, whose memory is free again when nothing refers to its storage."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        block = self._acquire(nbytes)
        # What torch holds is the lease, and its end is what gives the block back.
        lease = (ctypes.c_char * nbytes).from_address(block.data_ptr())
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def clear(self) -> None:
        with self._lock:
            self._take_back()
            self._free.clear()

    def _acquire(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            self._take_back()
            if self._in_use >= _MAX_BLOCKS:
                gc.collect()  # a state that is garbage may wait for it
                self._take_back()
            if self._in_use >= _MAX_BLOCKS:
                raise CheckpointError(
                    f"{_MAX_BLOCKS} staged states are still in use; wait for the saves that write them"
                )
            self._in_use += 1
            fitting = [block for block in self._free if nbytes <= block.numel() <= 2 * nbytes]
            self._free = [block for block in self._free if any(block is spare for spare in fitting[1:])]
            if fitting:
                return fitting[0]
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
        except BaseException:
            self._give_back(None)
            raise

    def _give_back(self, block: torch.Tensor | None) -> None:
        # Without the lock: the garbage collector may call this in the thread that holds it.
        self._returned.append(block)

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._in_use -= 1
            if block is not None:
                self._free.append(block)

    def _forget(self) -> None:
        """Replace the lock in a forked child, where another thread may have held it for ever."""
        self._lock = threading.Lock()


class _SharedBlock(_Blocks):
    """A block of shared memory: torch would move other memory there when it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self._block: torch.Tensor | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """Lend a uint8 tensor in the memory of the last state, if that fits."""
        if self._block is None or not nbytes <= self._block.numel() <= 2 * nbytes:
            self._block = None
            storage = shared_storage(max(1, nbytes))
            self._block = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return self._block[:nbytes]

    def clear(self) -> None:
        self._block = None


class _Place:
    """A tensor and where its copy goes."""

    def __init__(self, source: torch.Tensor, offset: int) -> None:
        self.source, self.offset = source, offset
        self.copy: torch.Tensor | None = None

    def copy_into(self, memory: torch.Tensor) -> Iterator[_Run]:
        """Make or begin the copy, and list the runs of memory that remain to be moved.

        A copy by torch uses all cores for each tensor and waits for the last of them, so memory is
        moved by threads that do not wait for each other. Copies from a device belong into the
        caller's stream.
        """
        nbytes = self.source.numel() * self.source.element_size()
        target = memory[self.offset : self.offset + nbytes]
        self.copy = target.view(self.source.dtype).view(self.source.shape)
        if not has_memory_view(self.source):
            copy_elements(self.source, self.copy, non_blocking=True)
            return
        for start in range(0, nbytes, _RUN_BYTES):
            size = min(_RUN_BYTES, nbytes - start)
            yield target.data_ptr() + start, self.source.data_ptr() + start, size


class _Copies:
    """The copies that a state needs: first placed, then made together."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._places: dict[Any, _Place] = {}

    def placed(self, value: Any) -> Any:
        """Replace every tensor in `value` by a place, and everything else by a copy."""
        if isinstance(value, ShardedTensor | DTensor):
            return _Rebuilt(value, [self.placed(local) for local in _locals(value)])
        if isinstance(value, torch.Tensor):
            return self._place(value)
        if isinstance(value, Mapping):
            return {key: self.placed(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return _like(value, [self.placed(item) for item in value])
        return copy.deepcopy(value)

    def carried_out(self, value: Any, memory: torch.Tensor) -> Any:
        """Make the copies in `memory`, and put them into the result of `placed`."""
        runs = [run for place in self._places.values() for run in place.copy_into(memory)]
        with thread_pool(_copy_threads(), "ckpt-stage") as threads:
            run_all(threads, lambda run: ctypes.memmove(*run), runs)
        for device in {place.source.device for place in self._places.values()}:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.current_stream(device).synchronize()
        return _finished(value)

    def _place(self, tensor: torch.Tensor) -> Any:
        source = plain(tensor)
        if source is None or source.device.type == "meta":
            return tensor.detach().clone()
        shape, strides = tuple(source.shape), tuple(source.stride())
        if source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")
        lazy = (source.is_conj(), source.is_neg())
        key = (source.device, source.data_ptr(), source.dtype, shape, strides, *lazy)
        if key not in self._places:
            self.nbytes += -self.nbytes % _ALIGNMENT_BYTES
            self._places[key] = _Place(source, self.nbytes)
            self.nbytes += source.numel() * source.element_size()
        return self._places[key]


class _Rebuilt:
    """A sharded tensor that gets copies of its local parts."""

    def __init__(self, original: ShardedTensor | DTensor, parts: list[Any]) -> None:
        self.original, self.parts = original, parts

    def around(self, parts: list[torch.Tensor]) -> ShardedTensor | DTensor:
        original = self.original
        if isinstance(original, DTensor):
            return dtensor_like(original, parts[0])
        # A shallow copy: a new one would have to be on the device that its metadata names.
        rebuilt = copy.copy(original)
        pairs = zip(parts, original.local_shards(), strict=True)
        set_local_shards(rebuilt, [Shard(part, _on_cpu(shard.metadata)) for part, shard in pairs])
        return rebuilt


def _on_cpu(metadata: ShardMetadata) -> ShardMetadata:
    if metadata.placement is None:
        return metadata
    rank = metadata.placement.rank()
    placement = "cpu" if rank is None else f"rank:{rank}/cpu"
    return ShardMetadata(metadata.shard_offsets, metadata.shard_sizes, placement)


def _copy_threads() -> int:
    return max(1, min(8, os.cpu_count() or 1))


def _locals(value: ShardedTensor | DTensor) -> list[torch.Tensor]:
    if isinstance(value, DTensor):
        return [local_tensor(value)]
    return [shard.tensor for shard in value.local_shards()]


def _finished(value: Any) -> Any:
    """Replace every place in the result of `placed` by its copy."""
    if isinstance(value, _Place):
        return value.copy
    if isinstance(value, _Rebuilt):
        return value.around([_finished(part) for part in value.parts])
    if isinstance(value, dict):
        return {key: _finished(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [_finished(item) for item in value])
    return value


def _like(original: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """Make a list, tuple or named tuple like `original` of `items`."""
    if isinstance(original, list):
        return items
    return type(original)(*items) if hasattr(original, "_fields") else tuple(items)
