"""Show tensors as bytes: views of their memory, and copies of any part of one that has no such view; lock memory for a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Iterator

import torch

from ckpt.torch_private import device_in_use, is_zero_tensor
from ckpt.transfer.boxes import flat_boxes, span
from ckpt.transfer.threads import share

_PAGE_BYTES = 4096
_TOUCHED_BYTES = 16 << 20
_MOST_THREADS = 16
_GAP_PIECE_BYTES = 8 << 20

_logger = logging.getLogger(__name__)

_is_refused = False
_never_freed: list[torch.UntypedStorage] = []

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return `tensor` as an ordinary strided tensor over the same memory; None if it is more than that.

    Sparse, nested and quantized tensors and subclasses with a dispatch of their own (wrappers without
    memory) can only be pickled as they are. Raises ValueError if its storage was shrunk, as FSDP1
    does with parameters that it has freed: there is nothing to save.
    """
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return None
        tensor = tensor.as_subclass(torch.Tensor)
    if (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or is_zero_tensor(tensor)
    ):
        return None
    if tensor.device.type != "meta" and _end_byte(tensor) > tensor.untyped_storage().nbytes():
        raise ValueError("its storage holds fewer bytes than its shape needs: it was freed")
    return tensor


def _end_byte(tensor: torch.Tensor) -> int:
    """Tell where in its storage the last element ends."""
    if tensor.numel() == 0:
        return 0
    elements = tensor.numel() if tensor.is_contiguous() else span(tensor.shape, tensor.stride())
    return (int(tensor.storage_offset()) + elements) * tensor.element_size()


def has_memory_view(tensor: torch.Tensor) -> bool:
    """Tell whether the elements of `tensor`, in order, are one run of this process's memory."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor with `has_memory_view`, writable. It keeps the tensor alive.

    A read or write that was given up may still use it after all others have let go of the tensor.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def lock_pages(block: torch.Tensor) -> None:
    """Let the GPU in use copy to and from a block of fresh CPU memory by itself, which is three times as fast.

    That is so until `block`, the first that shows this memory, is gone. Where CUDA refuses, the block stays as it is, which
    works too. To be called by the thread that trains: another one could meet the capture of a graph, which it would end.
    Changes the bytes. A forked child does not have the memory.
    """
    global _is_refused
    device = device_in_use()
    if device is None or _is_refused or not block.numel() or block.is_pinned():
        return
    address, nbytes = block.data_ptr(), block.numel()
    try:
        pieces = range(0, nbytes, _TOUCHED_BYTES)
        share(
            lambda start: touch(block[start : start + _TOUCHED_BYTES]),
            pieces,
            "ckpt-memory",
            most=_MOST_THREADS,
        )
        with torch.cuda.device(device):
            failed = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
            if failed:
                _is_refused = True
                _logger.warning(
                    "copies from the GPU will be slower: CUDA does not lock %d bytes (error %d)",
                    nbytes,
                    failed,
                )
                with contextlib.suppress(Exception):  # else the next call of torch would raise it
                    torch.zeros(1, device="cuda")
                return
    except Exception as error:
        _logger.warning("copies from the GPU will be slower: memory cannot be locked: %r", error)
        return
    storage = block.untyped_storage()
    weakref.finalize(block, _unlock, storage, address, device, os.getpid()).atexit = False


def _unlock(storage: torch.UntypedStorage, address: int, device: int, pid: int) -> None:
    """Unlock memory that `storage` still keeps: CUDA is not to know pages that are no longer there."""
    if os.getpid() != pid:  # a forked child has no GPU
        return
    with torch.cuda.device(device):
        failed = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    if failed:
        _never_freed.append(storage)


def touch(block: torch.Tensor) -> None:
    """Take the pages of fresh memory from the system, which costs more than a copy into them."""
    block.numpy()[::_PAGE_BYTES] = 0


def tensor_over(memory: memoryview) -> torch.Tensor:
    """Show memory as a uint8 tensor, which keeps it alive."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8)


@functools.cache
def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch copies elements of one dtype into a tensor of the other: packed ones have no values."""
    if source == target:
        return True
    try:
        elements = torch.zeros(16, dtype=torch.uint8, device="cpu").view(source)
        torch.empty(elements.shape, dtype=target, device="cpu").copy_(elements)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def copy_elements(source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy a tensor into one of the same shape, cast to its dtype as stock PyTorch does."""
    dtype = _INTEGERS.get(source.element_size())
    lazy = source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()
    if dtype is None or lazy or source.dtype != target.dtype:
        # torch conjugates and negates on the CPU, without waiting for bytes that come from a GPU.
        target.copy_(source, non_blocking=non_blocking and not lazy)
    else:
        # As integers: some dtypes have no copy of their own.
        target.view(dtype).copy_(source.view(dtype), non_blocking=non_blocking)


def copy_flat(source: torch.Tensor, start: int, stop: int, target: memoryview) -> None:
    """Copy elements `[start, stop)` of `source`, in row-major order, into the bytes of `target`.

    `target` is of exactly their size, and aligned for the elements.
    """
    flat = tensor_over(target).view(source.dtype)
    if source.is_contiguous():
        copy_elements(source.reshape(-1)[start:stop], flat)
        return
    for part, of_flat in flat_pairs(source, start, flat):
        copy_elements(part, of_flat)


def flat_pairs(
    tensor: torch.Tensor, start: int, flat: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair views of `tensor`, from element `start` on in row-major order, with the same elements of `flat`.

    Of a tensor on a device that has gaps they are small: torch copies each through memory of the device.
    """
    has_gaps = tensor.device.type != "cpu" and not tensor.is_contiguous()
    step = _GAP_PIECE_BYTES // tensor.element_size() if has_gaps else max(1, flat.numel())
    for first in range(0, flat.numel(), step):
        position, stop = first, min(first + step, flat.numel())
        for box in flat_boxes(tensor.shape, start + position, start + stop):
            part = tensor[box]
            yield part, flat[position : position + part.numel()].view(part.shape)
            position += part.numel()
