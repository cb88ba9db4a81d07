"""Know of modules what no tensor tells: versions, names that hold None, and what their loaders take."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt.state.canonical_names import ModuleNames
from ckpt.state.flat_parameters import is_wrapped
from ckpt.state.stored import StoredValue
from ckpt.state.structure import MODULES, Node
from ckpt.state.targets import Targets

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slot:
    """A name of a module for a parameter or a buffer."""

    module: nn.Module
    name: str
    is_parameter: bool

    @property
    def is_empty(self) -> bool:
        own: Mapping[str, Any] = self.module._parameters if self.is_parameter else self.module._buffers
        return own.get(self.name) is None

    def fill(self, value: torch.Tensor | None) -> None:
        """Put a tensor, or None, there."""
        if self.is_parameter and value is not None:
            is_trained = value.is_floating_point() or value.is_complex()
            self.module._parameters[self.name] = nn.Parameter(value, requires_grad=is_trained)
        else:
            self.module._buffers[self.name] = value


def note_of(models: Iterable[tuple[nn.Module, ModuleNames]]) -> dict[str, Node]:
    """Return a note, by its name, of the versions of modules that are not 1, and of buffers that are None.

    Its name is made of what it says: ranks that hold stages of a pipeline note what their own modules are.
    """
    found: dict[str, Any] = {}
    for model, names in models:
        for path, module in model.named_modules(remove_duplicate=False):
            if (version := getattr(module, "_version", 1)) != 1 and isinstance(version, int | float | str):
                found[_prefix(names.canonical(path))] = version
            for name in _empty_buffers(module):
                found[names.canonical(f"{path}.{name}" if path else name)] = None
    if not found:
        return {}
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return {f"{MODULES}-{digest[:12]}": Node(MODULES, modules=found)}


def slots(model: nn.Module, names: ModuleNames) -> Iterator[tuple[str, Slot]]:
    """List the buffers that are saved, and the parameters that are None, by canonical name."""
    for path, module in model.named_modules(remove_duplicate=False):
        own = [Slot(module, name, True) for name, value in module._parameters.items() if value is None]
        own += [Slot(module, name, False) for name in module._buffers if _is_saved(module, name)]
        for slot in own:
            yield names.canonical(f"{path}.{slot.name}" if path else slot.name), slot


def plan_empty(
    models: Iterable[tuple[nn.Module, ModuleNames]],
    stored: Mapping[str, StoredValue],
    older: Mapping[str, str],
    targets: Targets,
) -> dict[str, tuple[Slot, StoredValue]]:
    """Ask for parameters and buffers that are None in the program, and for whose values nothing else has asked.

    Args:
        stored: values of the model, by name.
        older: names with attributes of wrappers, by those without.
    """
    left = {
        name: value
        for name, value in stored.items()
        if value.name not in targets.asked and value.shape is not None
    }
    found: dict[str, tuple[Slot, StoredValue]] = {}
    for model, names in models if left else ():
        is_sharded = is_wrapped(model) or any(isinstance(p, DTensor) for p in model.parameters())
        device = next((t.device for t in [*model.parameters(), *model.buffers()] if not t.is_meta), None)
        for name, slot in slots(model, names):
            value = left.get(name) or left.get(older.get(name, ""))
            if value is None or not slot.is_empty or (slot.is_parameter and is_sharded):
                continue
            targets.as_stored(value, device=device)
            found[name] = slot, value
            if slot.is_parameter and not targets.is_dry:
                _logger.warning(
                    "the parameter %r is None in the program, and gets the stored value: an optimizer that was made "
                    "before does not have it",
                    value.name,
                )
    return found


def emptied(
    models: Iterable[tuple[nn.Module, ModuleNames]], noted: Mapping[str, Any] | None
) -> dict[str, tuple[Slot, None]]:
    """Return the buffers that were None in the program that saved, by name."""
    if noted is None or None not in noted.values():
        return {}
    return {
        name: (slot, None)
        for model, names in models
        for name, slot in slots(model, names)
        if name in noted and not slot.is_parameter
    }


def with_versions(
    state: Mapping[str, Any], model: nn.Module, names: ModuleNames, live: Any, noted: Mapping[str, Any] | None
) -> OrderedDict[str, Any]:
    """Return a state dict that tells `load_state_dict` the versions of the modules that were saved.

    Args:
        live: what the model's own `state_dict` returns.
        noted: versions by prefix, of which those that are 1 are left out; None if the checkpoint says nothing of
            versions: these are the program's then.
    """
    own = getattr(live, "_metadata", {})
    metadata: OrderedDict[str, Any] = OrderedDict()
    for path, module in model.named_modules(remove_duplicate=False):
        version = getattr(module, "_version", 1)
        metadata[path] = {"version": version, **own.get(path, {})}
        if noted is not None:
            metadata[path]["version"] = noted.get(_prefix(names.canonical(path)), 1)
    result: Any = OrderedDict(state)
    result._metadata = metadata
    return result  # type: ignore[no-any-return]


def warn_of_versions(models: Iterable[nn.Module]) -> None:
    """Name the classes of the program's own that have a version, for checkpoints that say nothing of versions."""
    modules = {type(module): module for model in models for module in model.modules()}
    own = {kind for kind, module in modules.items() if getattr(module, "_version", 1) != 1}
    names = sorted(kind.__qualname__ for kind in own if kind.__module__.partition(".")[0] != "torch")
    if names:
        _logger.warning(
            "the checkpoint does not say which versions of %s it has: those of the program are assumed",
            ", ".join(names),
        )


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _is_saved(module: nn.Module, name: str) -> bool:
    return name not in module._non_persistent_buffers_set


def _empty_buffers(module: nn.Module) -> list[str]:
    return [name for name, value in module._buffers.items() if value is None and _is_saved(module, name)]
