"""Give parameters, buffers and modules one name, however a model is wrapped.

`DistributedDataParallel`, FSDP1, `torch.compile` and activation checkpointing put a module of their own around
another one, and its attribute into every name below. `fully_shard`, `parallelize_module` and PEFT leave names alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes of `torch.compile`, of activation checkpointing and of FSDP1 that hold the module they wrap."""


class ModuleNames:
    """The canonical names of what a model holds, by the keys of its `state_dict` and by tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[str, tuple[str, nn.Module | None]] = {"": ("", model)}
        self._model = model

    def canonical(self, key: str) -> str:
        """Return the canonical name of a key of `state_dict`, `named_parameters` or `named_modules`.

        Hooks of wrappers take some of their attributes out of the keys, and leave others in: both are followed.
        """
        prefix, _, last = key.rpartition(".")
        path, module = self._resolve(prefix)
        if module is not None and last == _wrapped_attribute(module):
            return path  # a key that ends at a wrapper is that of the module in it
        return f"{path}.{last}" if path else last

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """List parameters by canonical name, also those that have several."""
        for key, parameter in self._model.named_parameters(remove_duplicate=False):
            yield self.canonical(key), parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """List buffers by canonical name, also those that are not saved, or have several names."""
        for key, buffer in self._model.named_buffers(remove_duplicate=False):
            yield self.canonical(key), buffer

    def _resolve(self, prefix: str) -> tuple[str, nn.Module | None]:
        """Return the canonical name of a module, and the module; None below what is not a module."""
        known = self._known.get(prefix)
        if known is None:
            above, _, last = prefix.rpartition(".")
            path, module = self._resolve(above)
            while module is not None and (wrapped := _wrapped_attribute(module)) is not None:
                if last == wrapped:
                    break
                module = module._modules[wrapped]
            if module is not None and last == _wrapped_attribute(module):
                known = path, module._modules[last]
            else:
                child = None if module is None else module._modules.get(last)
                known = f"{path}.{last}" if path else last, child
            self._known[prefix] = known
        return known


def without_wrappers(name: str) -> str:
    """Return a stored name without the attributes of wrappers, which older checkpoints have."""
    kept = without_attributes(name)
    return kept.removeprefix("module.") or kept


def without_attributes(name: str) -> str:
    """Return a name without the attributes of wrappers that only wrappers have."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def first_names(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[int, str], dict[str, str]]:
    """Map each tensor, by `id`, to its first name; and each further name to that first one."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named:
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    return first, aliases


def _wrapped_attribute(module: nn.Module) -> str | None:
    for name in _WRAPPED:
        if name in module._modules:
            return name
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    return None
