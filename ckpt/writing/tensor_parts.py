"""Take tensors apart that hold others (sharded, or a subclass such as torchao's), and put them together again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckpt.torch_private import (
    ShardedTensor,
    ShardMetadata,
    dtensor_like,
    is_zero_tensor,
    local_tensor,
    set_local_shards,
)

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def parts_of(tensor: Any) -> list[torch.Tensor] | None:
    """Return the tensors of this rank that `tensor` is made of; None if it is one itself.

    A subclass on a device is taken as one: its class knows how to move it to the CPU.
    """
    if type(tensor) in _PLAIN:  # first of all, as nearly all are
        return None
    if isinstance(tensor, DTensor):
        return [local_tensor(tensor)]
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    if hasattr(tensor, "__tensor_flatten__") and tensor.device.type == "cpu":
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    return None


def with_parts(tensor: Any, parts: Sequence[torch.Tensor]) -> Any:
    """Make a tensor like `tensor` of other `parts`, which are on the CPU."""
    if isinstance(tensor, DTensor):
        return dtensor_like(tensor, parts[0])
    if isinstance(tensor, ShardedTensor):
        return _sharded_like(tensor, parts)
    names, context = tensor.__tensor_flatten__()
    inner = dict(zip(names, parts, strict=True))
    made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made.requires_grad_(tensor.requires_grad)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU whose storages hold no more than it: `torch.save` writes all of them.

    One that is so already is returned as it is: many kinds cannot be copied.
    """
    tensor = tensor.cpu()
    parts = parts_of(tensor)
    if parts is not None:
        compacted = [compact(part) for part in parts]
        kept = all(part is other for part, other in zip(parts, compacted, strict=True))
        return tensor if kept else with_parts(tensor, compacted)
    fits = not is_zero_tensor(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if fits else tensor.clone()


def whole_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor without parts that is more than its memory: a quantized one, or a subclass."""
    original = tensor.detach()
    if original.device.type not in ("cpu", "meta"):
        copied = original.cpu()
    elif original.is_quantized:
        copied = copy.deepcopy(compact(original))  # some cannot be cloned
    else:
        copied = original.clone()
    return copied.requires_grad_(tensor.requires_grad)


def _sharded_like(original: ShardedTensor, parts: Sequence[torch.Tensor]) -> ShardedTensor:
    # Shallow copies: new ones would have to be on the device that their metadata names.
    copied = copy.copy(original)
    shards = [copy.copy(shard) for shard in original.local_shards()]
    for shard, part in zip(shards, parts, strict=True):
        shard.tensor, shard.metadata = part, _on_cpu(shard.metadata)
    set_local_shards(copied, shards)
    return copied


def _on_cpu(metadata: ShardMetadata) -> ShardMetadata:
    if metadata.placement is None:
        return metadata
    rank = metadata.placement.rank()
    placement = "cpu" if rank is None else f"rank:{rank}/cpu"
    return ShardMetadata(metadata.shard_offsets, metadata.shard_sizes, placement)
