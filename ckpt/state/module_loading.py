"""Give loaded values to modules, and tell what their loaders take."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ckpt.errors import LoadFailed
from ckpt.state.canonical_names import wrapped_attribute
from ckpt.state.flat_parameters import sharded_states
from ckpt.state.stored import StoredValue
from ckpt.state.targets import Targets, shortened

_logger = logging.getLogger(__name__)


def give(model: nn.Module, state: Mapping[str, Any], *, wanted: Collection[str] = ()) -> None:
    """Load a state dict into a model.

    Args:
        wanted: keys that the model must not miss.

    Raises LoadFailed for values that it does not take.
    """
    with sharded_states(model):
        missing, unexpected = _load(model, state)
    # Hooks may give and take values under other names: these are right if their memory was filled.
    own = memories(model)
    filled = {memory(value) for value in state.values()}
    unfilled = [key for key in missing if own.get(key) not in filled]
    untaken = [key for key in unexpected if key in state and memory(state[key]) not in own.values()]
    lost = [key for key in unfilled if key in wanted]
    if unfilled and any(isinstance(state[key], torch.Tensor) for key in untaken):
        lost += untaken
    if lost:
        raise LoadFailed(untaken_text(lost))
    if untaken:
        _logger.warning("%s", untaken_text(untaken))


def _load(model: nn.Module, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Load a state dict as the model's own method takes it; return the keys that are missing, and unexpected."""
    taken = inspect.signature(model.load_state_dict).parameters.values()
    is_lenient = any(each.name == "strict" or each.kind is each.VAR_KEYWORD for each in taken)
    result = model.load_state_dict(state, strict=False) if is_lenient else model.load_state_dict(state)
    return [*getattr(result, "missing_keys", ())], [*getattr(result, "unexpected_keys", ())]


def is_taken(model: nn.Module, key: str) -> bool:
    """Tell whether loading a state dict takes a key, or may do so: hooks and loaders of modules may take any."""
    if not _is_torchs(model, "load_state_dict"):
        return True
    module = model
    rest = key
    while True:
        if (
            not _is_torchs(module, "_load_from_state_dict")
            or module._load_state_dict_pre_hooks
            or module._load_state_dict_post_hooks
        ):
            return True
        head, dot, tail = rest.partition(".")
        child = module._modules.get(head) if dot else None
        if child is None:
            return rest in module._parameters or rest in module._buffers or rest == "_extra_state"
        module = child
        rest = tail


def _is_torchs(module: nn.Module, name: str) -> bool:
    return getattr(getattr(module, name), "__func__", None) is getattr(nn.Module, name)


def untaken_text(names: Collection[str]) -> str:
    """Say which keys a model gives, and does not take."""
    return (
        f"the model does not take back what its state_dict() gives: {shortened(names)}; a state dict hook that adds or "
        "renames needs a hook that loads under the same names"
    )


def buffers_that_follow(
    buffers: Collection[str], parameters: Mapping[str, torch.Tensor], stored: Mapping[str, StoredValue]
) -> Callable[[StoredValue, str, Any], bool]:
    """Return a function that tells of a value whether it is a buffer that gets the stored shape and dtype.

    Buffers of a model that was turned to another dtype as a whole, such as by `half()`, keep the program's.
    """
    is_as_stored = all(stored[name].dtype == p.dtype for name, p in parameters.items() if name in stored)

    def follows(value: StoredValue, name: str, live: Any) -> bool:
        if name not in buffers or value.dtype is None or is_lazy(live):
            return False
        if tuple(live.size()) != value.shape:
            return True
        return live.dtype != value.dtype and (is_as_stored or _kind(live.dtype) != _kind(value.dtype))

    return follows


def plan_buffer(value: StoredValue, live: torch.Tensor, targets: Targets) -> None:
    """Ask for a buffer that gets the stored shape and dtype."""
    assert value.shape is not None
    before = (tuple(live.size()), live.dtype)
    after = (value.shape, value.dtype)
    seen = [
        f"{new} in the checkpoint, and was {old}"
        for old, new in zip(before, after, strict=True)
        if old != new
    ]
    targets.notes.append(f"buffer {value.name!r} is {'; '.join(seen)}")
    own = None if live.is_meta else live
    targets.as_stored(value, like=own, device=None if own is None else own.device)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex or dtype.is_floating_point:
        return "complex" if dtype.is_complex else "float"
    return "bool" if dtype is torch.bool else "integer"


def _owner(model: nn.Module, key: str) -> tuple[nn.Module | None, str]:
    path, _, name = key.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return None, name
    while name not in owner._buffers and (wrapped := wrapped_attribute(owner)) is not None:
        owner = owner.get_submodule(wrapped)  # hooks of wrappers leave their attribute out of the key
    return owner, name


def buffer_of(model: nn.Module, key: str) -> torch.Tensor | None:
    """Return the buffer that a key of `state_dict` stands for, if one does."""
    owner, name = _owner(model, key)
    return None if owner is None else owner._buffers.get(name)


def set_buffer(model: nn.Module, key: str, value: torch.Tensor) -> None:
    """Put another tensor in the place of a buffer."""
    owner, name = _owner(model, key)
    assert owner is not None
    owner._buffers[name] = value


def memories(model: nn.Module) -> dict[str, int | None]:
    """Return where the elements of parameters and buffers are, by each of their names."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {name: memory(tensor) for name, tensor in tensors.items()}


def memory(value: Any) -> int | None:
    """Return where the elements of a tensor are; None if it is none."""
    if not isinstance(value, torch.Tensor):
        return None
    with torch.no_grad():
        local = value.to_local() if isinstance(value, DTensor) else value
    try:
        return local.data_ptr()
    except RuntimeError:
        return None
