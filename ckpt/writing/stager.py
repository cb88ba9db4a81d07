"""Stage states for asynchronous saves: copy them into memory that is reused.

Memory fresh from the system costs five times the copy into it (page faults), pinned memory far more.
So a copy goes into a block that is kept, and free again when the last staged tensor in it is gone.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from ckpt.errors import CheckpointError
from ckpt.torch_private import (
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
        self._blocks = _SharedBlock() if shared_memory else _Blocks()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy `state_dict`: tensors to CPU memory, everything else by `copy.deepcopy`.

        Raises CheckpointError if both copies made before are still in use.
        """
        copies = _Copies()
        staged: dict[str, Any] = copies.of(state_dict)
        copies.fill(self._blocks.take(copies.nbytes))
        return staged

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


class _SharedBlock:
    """A block of shared memory: torch would move other memory there when it is sent."""

    def __init__(self) -> None:
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


class _Copies:
    """The copies of the tensors of a state, which get their memory all at once."""

    def __init__(self) -> None:
        self.nbytes = 0
        # Each tensor, its copy, and where in memory that belongs.
        self._copies: dict[Any, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def of(self, value: Any) -> Any:
        """Copy `value`, except for the elements of its tensors: these come with `fill`."""
        if isinstance(value, DTensor):
            return dtensor_like(value, self.of(local_tensor(value)))
        if isinstance(value, ShardedTensor):
            return self._of_sharded(value)
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, Mapping):
            return {key: self.of(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.of(item) for item in value]
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return copy.deepcopy(value)

    def _of_sharded(self, original: ShardedTensor) -> ShardedTensor:
        # Shallow copies: new ones would have to be on the device that their metadata names.
        copied = copy.copy(original)
        shards = [copy.copy(shard) for shard in original.local_shards()]
        for shard in shards:
            shard.tensor, shard.metadata = self.of(shard.tensor), _on_cpu(shard.metadata)
        set_local_shards(copied, shards)
        return copied

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        source = plain(tensor)
        if source is None or source.device.type == "meta":
            return tensor.detach().clone()
        shape, strides = tuple(source.shape), tuple(source.stride())
        if source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")
        lazy = (source.is_conj(), source.is_neg())
        key = (source.device, source.data_ptr(), source.dtype, shape, strides, *lazy)
        if key not in self._copies:
            self.nbytes += -self.nbytes % _ALIGNMENT_BYTES
            # Not made of its dtype: torch's deterministic mode cannot fill some, not even without elements.
            target = torch.empty(0, dtype=torch.uint8, device="cpu").view(source.dtype)
            self._copies[key] = source, target, self.nbytes
            self.nbytes += source.numel() * source.element_size()
        return self._copies[key][1]

    def fill(self, memory: torch.Tensor) -> None:
        """Give the copies their memory, and copy the elements.

        A copy by torch uses all cores for each tensor and waits for the last of them, so memory is
        moved by threads that do not wait for each other. Copies from a device belong into the
        caller's stream.
        """
        storage = memory.untyped_storage()
        runs: list[_Run] = []
        for source, target, offset in self._copies.values():
            target.set_(storage, offset // source.element_size(), source.shape)  # type: ignore[call-overload]
            if not has_memory_view(source):
                copy_elements(source, target, non_blocking=True)
                continue
            begin, end = source.data_ptr(), source.data_ptr() + source.numel() * source.element_size()
            runs += [
                (target.data_ptr() + start - begin, start, min(_RUN_BYTES, end - start))
                for start in range(begin, end, _RUN_BYTES)
            ]
        with thread_pool(max(1, min(8, os.cpu_count() or 1)), "ckpt-stage") as threads:
            run_all(threads, lambda run: ctypes.memmove(*run), runs)
        for device in {source.device for source, _, _ in self._copies.values()}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()


def _on_cpu(metadata: ShardMetadata) -> ShardMetadata:
    if metadata.placement is None:
        return metadata
    rank = metadata.placement.rank()
    placement = "cpu" if rank is None else f"rank:{rank}/cpu"
    return ShardMetadata(metadata.shard_offsets, metadata.shard_sizes, placement)
