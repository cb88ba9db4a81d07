"""Name the tensor of a state that DCP's planner fails on: its own errors do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import DTensor

from ckpt.errors import CheckpointError
from ckpt.torch_private import ShardedTensor, plain_attributes


@contextlib.contextmanager
def tensors_named(state: Mapping[str, Any]) -> Iterator[None]:
    """Raise CheckpointError with the name of the tensor if planning a flat state fails because of it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        for name, value in state.items():
            fault = fault_of(value) if isinstance(value, torch.Tensor) and may_fail(value) else None
            if fault is not None:
                raise CheckpointError(f"{name!r} {fault}") from error
        raise


def layout_fault(layout: torch.layout) -> str:
    """Describe a tensor whose layout DCP plans but cannot load, and an alternative."""
    return f"has the layout {layout}, which could not be loaded again; save it dense, or its parts as tensors of their own"


def may_fail(tensor: torch.Tensor) -> bool:
    """Return whether `fault_of` has to be asked: few tensors are of such a kind, and it takes microseconds."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.layout is not torch.strided or tensor.is_nested
    return not isinstance(tensor, DTensor | ShardedTensor)


def fault_of(tensor: torch.Tensor) -> str | None:
    """Return why DCP's planner fails on a tensor, and what to do; None if it does not."""
    try:
        tensor.size()
        TensorProperties.create_from_tensor(tensor)
    except Exception as error:
        with plain_attributes():
            layout, is_nested = tensor.layout, tensor.is_nested
        if layout is not torch.strided:
            return layout_fault(layout)
        if is_nested:
            return "is a nested tensor, which has no shape to plan by; save its parts as tensors of their own"
        kind = type(tensor)
        return (
            f"is a {kind.__module__}.{kind.__qualname__} that does not support what a save needs of it "
            f"({type(error).__name__}: {error}); add that to its class, or save its parts as tensors of their own"
        )
    return None
