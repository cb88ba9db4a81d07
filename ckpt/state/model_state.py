"""Save and load a model's parameters and buffers under their canonical names."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ckpt.errors import ConfigurationError, LoadFailed
from ckpt.format.fqns import Path
from ckpt.state.canonical_names import ModuleNames, TensorNames, first_names, without_fabric, without_wrappers
from ckpt.state.flat_parameters import is_wrapped, sharded_states, shards
from ckpt.state.module_loading import (
    buffer_of,
    buffers_that_follow,
    give,
    is_taken,
    memories,
    memory,
    plan_buffer,
    set_buffer,
    untaken_text,
)
from ckpt.state.module_notes import Slot, emptied, note_of, plan_empty, warn_of_versions, with_versions
from ckpt.state.parts import text_of_wrong_object
from ckpt.state.stored import StoredPart, StoredValue
from ckpt.state.structure import Structure, build, is_flattened, leaves, name_of, structure_of
from ckpt.state.targets import Targets, shortened

_logger = logging.getLogger(__name__)

_EXTRA_STATE = "_extra_state"

_Nested = tuple[str, dict[Path, StoredValue]]
"""The name of an extra state, and what is stored of it."""


class ModelState:
    """Save and load a model's parameters, buffers and extra states by canonical name.

    Parameters keep the program's shape and dtype, buffers get the checkpoint's. The loaders of modules get the
    versions of the modules that were saved. Where a checkpoint says nothing of versions, as stock ones do, these are
    the program's: nearly always it is the same program, and code for older states would change good values.

    Args:
        model: plain, compiled, or wrapped by DDP, FSDP, `fully_shard`, `parallelize_module` or Lightning Fabric; or
            several, whose names differ, such as the stages of a pipeline.
        frozen: without it, parameters that are not trained stay as they are, and are not saved: the base of adapters.

    Raises:
        ConfigurationError: `model` is no module.
    """

    kind = "model"

    def __init__(self, model: nn.Module | Sequence[nn.Module], *, frozen: bool = True) -> None:
        models = [model] if isinstance(model, nn.Module) else model
        if not isinstance(models, list | tuple) or not all(isinstance(each, nn.Module) for each in models):
            raise ConfigurationError(text_of_wrong_object("model", "torch.nn.Module", model))
        self._models: list[nn.Module] = [without_fabric(each) for each in models]
        self.names = TensorNames(self._models)
        self._frozen = frozen
        self._live: list[dict[str, Any]] = []
        self._loaded: dict[tuple[int, str], StoredValue | _Nested | None] = {}
        self._part = StoredPart("")
        self._noted: dict[str, Any] | None = None
        self._replaced: set[tuple[int, str]] = set()
        self._slots: dict[str, tuple[Slot, StoredValue | None]] = {}

    # -- names ---------------------------------------------------------------------------------------------

    def parameter_names(self) -> tuple[dict[int, str], dict[str, str]]:
        """Return the name of each parameter, by `id`, and the names that stand for the same one."""
        return first_names(self.names.pairs()[0])

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by canonical name, under each of their names."""
        named: Any = self.names.pairs()[0]
        return dict(named)

    def buffer_names(self) -> set[str]:
        return {name for name, _ in self.names.pairs()[1]}

    @property
    def fsdp_models(self) -> list[nn.Module]:
        """The models that FSDP1 has wrapped."""
        return [model for model in self._models if is_wrapped(model)]

    @property
    def is_meta(self) -> bool:
        """Tell whether some of the model is on the meta device."""
        return any(_is_meta(model) for model in self._models)

    # -- saving --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for model, raw in zip(self._models, self._raw_states(), strict=True):
            for name, value in self._named(model, raw):
                if name in state:
                    raise ConfigurationError(
                        f"two values of the model are named {name!r}: give each module names of its own"
                    )
                state[name] = value
        return state

    def structures(self, value: Mapping[str, Any], name: str) -> dict[Path, Structure]:
        """Return what flattening loses of extra states, and what no tensor tells of modules."""
        nested = {key: part for key, part in value.items() if is_flattened(part)}
        found = {(key,): structure_of(part, f"{name}.{key}") for key, part in nested.items()}
        note = note_of(self._each())
        found |= {(unit,): {(): node} for unit, node in note.items()}
        return {unit: structure for unit, structure in found.items() if structure}

    def size_bytes(self) -> int:
        """Estimate the size of the whole state."""
        saved = [p for model in self._models for p in model.parameters() if self._frozen or p.requires_grad]
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        return shards(self._models[0]) * sum(
            part.numel() * part.element_size() for part in [*saved, *buffers]
        )

    # -- loading -------------------------------------------------------------------------------------------

    def plan(self, part: StoredPart, targets: Targets) -> None:
        """Ask for all that is stored of the model, into the memory that it has."""
        if not targets.is_dry:
            for model in filter(_is_meta, self._models):
                _materialise(model, targets)
        self._live, self._loaded = self._raw_states(), {}
        stored = {str(path[0]): value for path, value in part.values.items() if len(path) == 1}
        nested: dict[str, dict[Path, StoredValue]] = {}
        for path, value in part.values.items():
            if len(path) > 1:
                nested.setdefault(str(path[0]), {})[path[1:]] = value
        older = {without_wrappers(name): name for name in stored if without_wrappers(name) not in stored}
        same = self.same_tensors()
        if not self._frozen:
            _leave_frozen(self.parameters(), part, targets)
        self._noted = targets.stored.modules(part.name)
        self._slots = {**emptied(self._each(), self._noted)}
        self._replaced = set()
        if self._noted is None and stored and not targets.is_dry:
            warn_of_versions(self._models)
        follows = buffers_that_follow(self.buffer_names(), self.parameters(), stored)
        for number, (model, raw) in enumerate(zip(self._models, self._live, strict=True)):
            for key, name, live in self._keyed(model, raw):
                others = same.get(name, ())
                found = next((each for each in (name, older.get(name), *others) if each in stored), None)
                if name in nested or (
                    found is None and name.endswith(_EXTRA_STATE) and (name,) in part.nodes
                ):
                    self._loaded[number, key] = name, nested.get(name, {})
                    _plan_nested(nested.get(name, {}), targets)
                elif found is None:
                    if name not in self._slots:  # a buffer that was None
                        targets.lack(f"{part.name}.{name}", live)
                    continue
                elif follows(stored[found], name, live) and buffer_of(model, key) is not None:
                    self._loaded[number, key] = stored[found]
                    self._replaced.add((number, key))
                    plan_buffer(stored[found], live, targets)
                else:
                    self._plan_value(stored[found], name, live, (number, key), targets)
                if not is_taken(model, key) and memory(live) not in memories(model).values():
                    targets.faults.append(untaken_text([key]))
        self._slots |= plan_empty(self._each(), stored, older, targets)
        self._part = part

    def _plan_value(
        self, value: StoredValue, name: str, live: Any, key: tuple[int, str], targets: Targets
    ) -> None:
        self._loaded[key] = value
        if value.shape is None:
            if isinstance(live, torch.Tensor) and not name.endswith(_EXTRA_STATE):
                targets.faults.append(
                    f"{value.name!r} is an object in the checkpoint, and a tensor in the model"
                )
            targets.object(value)
        elif name.endswith(_EXTRA_STATE) or not hasattr(live, "size"):
            targets.as_stored(value, live=live, device=_device_of(live))
        elif is_lazy(live):  # gets the stored shape when it takes the value
            targets.as_stored(value, device=live.device)
        elif value.name in targets.values:  # one memory under two names
            self._loaded[key] = None
        else:
            targets.in_place(value, live)

    def _each(self) -> list[tuple[nn.Module, ModuleNames]]:
        return [(model, self.names.of(model)) for model in self._models]

    def take(self, values: Mapping[str, Any]) -> None:
        """Give the loaded values to the model: extra states, hooks and loaders of its own get theirs."""
        self._fill_slots(values)
        for number, model in enumerate(self._models):
            state: dict[str, Any] = {}
            for key, live in self._live[number].items():
                loaded = self._loaded.get((number, key))
                if isinstance(loaded, StoredValue):
                    state[key] = values[loaded.name]
                elif loaded is not None:
                    name, parts = loaded
                    leaves = {path: values[value.name] for path, value in parts.items()}
                    state[key] = build(leaves, self._part.structure((name,)), None, name)
                elif (number, key) in self._loaded:
                    state[key] = live
                if (number, key) in self._replaced:
                    set_buffer(model, key, state[key])
            give(model, with_versions(state, model, self.names.of(model), self._live[number], self._noted))
        self._live = []

    def _fill_slots(self, values: Mapping[str, Any]) -> None:
        """Let parameters and buffers begin, or end, as they did in the program that saved."""
        for slot, value in self._slots.values():
            slot.fill(None if value is None else values[value.name])
        if self._slots:
            self._live = self._raw_states()
            for number, (model, raw) in enumerate(zip(self._models, self._live, strict=True)):
                for key, name, _ in self._keyed(model, raw):
                    if name in self._slots:
                        self._loaded[number, key] = self._slots[name][1]

    def live(self) -> dict[str, Any]:
        """Return the model's values by the stored names of the last plan, and what that lacked by those of a save."""
        found: dict[str, Any] = {}
        for number, (model, raw) in enumerate(zip(self._models, self._raw_states(), strict=True)):
            for key, name, value in self._keyed(model, raw):
                loaded = self._loaded.get((number, key))
                if isinstance(loaded, StoredValue):
                    found[loaded.name] = value
                elif (number, key) not in self._loaded or loaded is not None:
                    stored = loaded[1] if loaded is not None else {}
                    own = dict(leaves(value, (name,)))
                    found |= {each.name: own.pop((name, *path), None) for path, each in stored.items()}
                    found |= {name_of((self._part.name, *path)): each for path, each in own.items()}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load values by canonical name, as DCP and stock programs have them."""
        for model, raw in zip(self._models, self._raw_states(), strict=True):
            same = self.same_tensors()
            given: dict[str, Any] = {}
            for key, name, _ in self._keyed(model, raw):
                found = next((each for each in (name, *same.get(name, ())) if each in state), None)
                if found is not None:
                    given[key] = state[found]
            for key, value in given.items():
                own = buffer_of(model, key)
                if own is not None and not is_lazy(own) and own.shape != value.shape:
                    set_buffer(model, key, value)
            wanted = {key for key, _, _ in self._keyed(model, raw)}
            give(model, with_versions(given, model, self.names.of(model), raw, None), wanted=wanted)

    # -- raw states ----------------------------------------------------------------------------------------

    def _raw_states(self) -> list[dict[str, Any]]:
        """Return `state_dict()` of each model."""
        states = []
        for model in self._models:
            with sharded_states(model), torch.no_grad():
                states.append(model.state_dict())
        return states

    def _keyed(self, model: nn.Module, raw: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        names = self.names.of(model)
        frozen: set[str] = set()
        if not self._frozen:
            frozen = {name for name, value in names.parameters() if not value.requires_grad}
        for key, value in raw.items():
            name = names.canonical(key)
            if name not in frozen:
                yield key, name, value

    def _named(self, model: nn.Module, raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """List values by canonical name, once each: wrappers inside of shared modules give a name twice."""
        seen: set[str] = set()
        for _, name, value in self._keyed(model, raw):
            if name not in seen:
                seen.add(name)
                yield name, value

    def same_tensors(self) -> dict[str, list[str]]:
        """Return the other names of each tensor that has several, the first one first."""
        return self.names.same_tensors()


def _leave_frozen(parameters: Mapping[str, nn.Parameter], part: StoredPart, targets: Targets) -> None:
    """Leave frozen parameters alone, also if the checkpoint has them."""
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    targets.asked.update(value.name for path, value in part.values.items() if path and path[0] in frozen)


def _plan_nested(values: Mapping[Path, StoredValue], targets: Targets) -> None:
    """Ask for an extra state that is a dict or a list."""
    for value in values.values():
        if value.shape is None:
            targets.object(value)
        else:
            targets.as_stored(value)


def _is_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers()))


def _materialise(model: nn.Module, targets: Targets) -> None:
    """Give memory to what is on the meta device. Tied parameters stay tied."""
    unsaved = [
        name
        for prefix, module in model.named_modules()
        for name in (f"{prefix}.{each}".lstrip(".") for each in module._non_persistent_buffers_set)
        if (buffer := buffer_of(model, name)) is not None and buffer.is_meta
    ]
    if unsaved:
        raise LoadFailed(
            f"the model is on the meta device, and no checkpoint holds its buffers that are not saved: "
            f"{shortened(unsaved)}; call to_empty() and initialise them before the restore"
        )
    devices = {t.device for t in model.parameters() if not t.is_meta}
    device = next(iter(devices), None) or _device_for(model)
    before = [(module, name, p) for module in model.modules() for name, p in module._parameters.items()]
    whole: Any = model
    whole._apply(functools.cache(partial(_with_memory, device)))
    made: dict[int, nn.Parameter] = {}
    for module, name, old in before:
        if old is not None:
            own: Any = module._parameters[name]
            new = made.setdefault(id(old), own)
            module._parameters[name] = new  # torch makes one for each of its names
            new.requires_grad_(old.requires_grad)
    targets.replaced.update((number, new) for number, new in made.items() if id(new) != number)


def _device_for(model: nn.Module) -> torch.device:
    """Return where the parameters of a model belong that has none yet."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            return (
                torch.device(kind)
                if kind == "cpu"
                else torch.device(kind, torch.accelerator.current_device_index())
            )
    return torch.get_default_device()


def _with_memory(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def _device_of(value: Any) -> torch.device | None:
    return value.device if isinstance(value, torch.Tensor) and not value.is_meta else None
