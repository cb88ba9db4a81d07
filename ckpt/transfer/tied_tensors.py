"""Find tied tensors: several names for one memory, as a model's embedding and head."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckpt.geometry import chunks_key


def tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Map the name of every tensor that is one with an earlier one, of all its elements, to that one's name.

    A rank that holds no element of two DTensors may take them for one: ranks must agree.
    """
    first: dict[Hashable, str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        memory = memory_key(value) if isinstance(value, torch.Tensor) else None
        if memory is not None and (other := first.setdefault(memory, name)) != name:
            tied[name] = other
    return tied


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Describe the memory of a tensor, alike for all views of the same elements; None if it has none.

    The same memory can hold chunks of different tensors, if these say so.
    """
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.layout is not torch.strided or local.device.type == "meta" or tensor.numel() == 0:
        return None
    try:
        begin = local.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a wrapper around other tensors
        return None
    memory = (begin, local.storage_offset(), tuple(local.shape), local.stride())
    return (tensor.dtype, tuple(tensor.shape), *memory, chunks_key(tensor))
