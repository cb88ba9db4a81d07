"""Give parameters, buffers and modules one name, however a model is wrapped.

`DistributedDataParallel`, FSDP1, `torch.compile`, activation checkpointing and Lightning Fabric put a module of their own around
another one, and its attribute into every name below. `fully_shard`, `parallelize_module` and PEFT leave names alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes of `torch.compile`, of activation checkpointing and of FSDP1 that hold the module they wrap."""

_FABRIC = ("lightning", "lightning_fabric")
"""Packages of Lightning Fabric."""

Named = tuple[str, torch.Tensor]
T = TypeVar("T")


class ModuleNames:
    """The canonical names of what a model holds, by the keys of its `state_dict` and by tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[str, tuple[str, nn.Module | None]] = {"": ("", model)}
        self._at: dict[str, tuple[str, str | None]] = {}
        self._model = model

    def canonical(self, key: str) -> str:
        """Return the canonical name of a key of `state_dict`, `named_parameters` or `named_modules`.

        Hooks of wrappers take some of their attributes out of the keys, and leave others in: both are followed.
        """
        prefix, _, last = key.rpartition(".")
        at = self._at.get(prefix)
        if at is None:
            path, module = self._resolve(prefix)
            at = self._at[prefix] = path, None if module is None else wrapped_attribute(module)
        path, wrapped = at
        if last == wrapped:
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
            while module is not None and (wrapped := wrapped_attribute(module)) is not None:
                if last == wrapped:
                    break
                module = module._modules[wrapped]
            if module is not None and last == wrapped_attribute(module):
                known = path, module._modules[last]
            else:
                child = None if module is None else module._modules.get(last)
                known = f"{path}.{last}" if path else last, child
            self._known[prefix] = known
        return known


class TensorNames:
    """The canonical names of all tensors of several models."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._kept: list[ModuleNames] | None = None
        self._pairs: tuple[list[Named], list[Named]] | None = None
        self._same: dict[str, list[str]] | None = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Ask the modules once: within it nothing is added to them, or taken away."""
        self._kept = [*map(ModuleNames, self._models)]
        self._pairs = self.pairs()
        self._same = self.same_tensors()
        try:
            yield
        finally:
            self._kept = self._pairs = self._same = None

    def of(self, model: nn.Module) -> ModuleNames:
        """Return the names of one of the models."""
        kept = dict(zip(map(id, self._models), self._kept, strict=True)) if self._kept is not None else {}
        return kept.get(id(model)) or ModuleNames(model)

    def pairs(self) -> tuple[list[Named], list[Named]]:
        """List parameters and buffers, under each of their names."""
        if self._pairs is not None:
            return self._pairs
        names = self._kept if self._kept is not None else [*map(ModuleNames, self._models)]
        parameters: list[Named] = [pair for each in names for pair in each.parameters()]
        return parameters, [pair for each in names for pair in each.buffers()]

    def same_tensors(self) -> dict[str, list[str]]:
        """Return the other names of each tensor that has several, the first one first."""
        if self._same is not None:
            return self._same
        parameters, buffers = self.pairs()
        _, aliases = first_names([*parameters, *buffers])
        groups: dict[str, list[str]] = {}
        for name, first in aliases.items():
            groups.setdefault(first, [first]).append(name)
        return {name: group for group in groups.values() for name in group}


def without_wrappers(name: str) -> str:
    """Return a stored name without the attributes of wrappers, which older checkpoints have."""
    kept = without_attributes(name)
    return kept.removeprefix("module.") or kept


def without_attributes(name: str) -> str:
    """Return a name without the attributes of wrappers that only wrappers have."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def without_fabric(value: T) -> T:
    """Return the module or optimizer that Lightning Fabric's wrapper holds; any other value as it is.

    Fabric's wrapper of a module has two names for each parameter, and gives a state dict without either.
    """
    attribute = "_forward_module" if isinstance(value, nn.Module) else "_optimizer"
    is_fabrics = type(value).__module__.partition(".")[0] in _FABRIC
    return without_fabric(getattr(value, attribute)) if is_fabrics and hasattr(value, attribute) else value


def first_names(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[int, str], dict[str, str]]:
    """Map each tensor, by `id`, to its first name; and each further name to that first one."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named:
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    return first, aliases


def wrapped_attribute(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper holds the module that it wraps; None of other modules."""
    for name in _WRAPPED:
        if name in module._modules:
            return name
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    return None
