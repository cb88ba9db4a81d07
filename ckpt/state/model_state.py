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

from ckpt.errors import ConfigurationError, LoadFailed
from ckpt.format.fqns import Path
from ckpt.state.canonical_names import TensorNames, first_names, without_wrappers
from ckpt.state.flat_parameters import is_wrapped, sharded_states, shards
from ckpt.state.stored import StoredPart, StoredValue
from ckpt.state.structure import Structure, build, is_flattened, leaves, name_of, structure_of
from ckpt.state.targets import Targets, shortened

_logger = logging.getLogger(__name__)

_EXTRA_STATE = "_extra_state"

_Nested = tuple[str, dict[Path, StoredValue]]
"""The name of an extra state, and what is stored of it."""


class ModelState:
    """Save and load a model's parameters, buffers and extra states by canonical name.

    Args:
        model: plain, compiled, or wrapped by DDP, FSDP, `fully_shard` or `parallelize_module`; or several, whose
            names differ, such as the stages of a pipeline.
        frozen: without it, parameters that are not trained stay as they are, and are not saved: the base of adapters.

    Raises:
        ConfigurationError: `model` is no module.
    """

    kind = "model"

    def __init__(self, model: nn.Module | Sequence[nn.Module], *, frozen: bool = True) -> None:
        models = [model] if isinstance(model, nn.Module) else model
        if not isinstance(models, list | tuple) or not all(isinstance(each, nn.Module) for each in models):
            raise ConfigurationError(
                f"model= takes a torch.nn.Module, or a list of them, not {type(model).__name__}"
            )
        self._models: list[nn.Module] = [*models]
        self.names = TensorNames(self._models)
        self._frozen = frozen
        self._live: list[dict[str, Any]] = []
        self._loaded: dict[tuple[int, str], StoredValue | _Nested | None] = {}
        self._part = StoredPart("")
        self._grown: set[str] = set()

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
        """Return what flattening loses of extra states; tensors have none."""
        nested = {key: part for key, part in value.items() if is_flattened(part)}
        found = {(key,): structure_of(part, f"{name}.{key}") for key, part in nested.items()}
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
        self._plan_frozen(part, targets)
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
                    targets.lack(f"{part.name}.{name}", live)
                else:
                    self._plan_value(stored[found], name, live, (number, key), targets)
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
        elif name in self._grown and tuple(live.size()) != value.shape:
            targets.notes.append(
                f"buffer {value.name!r} is {value.shape} in the checkpoint, and was {tuple(live.size())}"
            )
            targets.as_stored(value, device=live.device)
        elif value.name in targets.values:  # one memory under two names
            self._loaded[key] = None
        else:
            targets.in_place(value, live)

    def _plan_frozen(self, part: StoredPart, targets: Targets) -> None:
        """Leave frozen parameters alone, also if the checkpoint has them."""
        self._grown = self.buffer_names()
        if not self._frozen:
            left_out = {name for name, p in self.parameters().items() if not p.requires_grad}
            targets.asked.update(
                value.name for path, value in part.values.items() if path and path[0] in left_out
            )

    def take(self, values: Mapping[str, Any]) -> None:
        """Give the loaded values to the model: extra states, hooks and loaders of its own get theirs."""
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
            self._give(model, state, self._live[number])
        self._live = []

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
            self._give(model, given, {})

    def _give(self, model: nn.Module, state: dict[str, Any], live: Mapping[str, Any]) -> None:
        grown = {
            key: value
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
            and (own := _buffer(model, key)) is not None
            and own.shape != value.shape
        }
        for key, value in grown.items():
            _set_buffer(model, key, value)
        rest = {key: value for key, value in state.items() if key not in grown}
        with sharded_states(model):
            result = model.load_state_dict(rest, strict=False)
        # Hooks may give and take values under other names: these are right if their memory was filled.
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        memory = {_memory(tensor) for tensor in tensors.values()}
        filled = {_memory(value) for value in state.values()}
        lost = [key for key in result.unexpected_keys if _memory(state[key]) not in memory]
        lost += [
            key
            for key in result.missing_keys
            if self._frozen
            and key not in live
            and key not in grown
            and _memory(tensors.get(key)) not in filled
        ]
        if lost:
            raise LoadFailed(
                f"the model does not take back what its state_dict() gives: {shortened(lost)}; a state dict hook that "
                "renames needs a hook that loads under the new names too"
            )

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
        if (buffer := _buffer(model, name)) is not None and buffer.is_meta
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


def _owner(model: nn.Module, key: str) -> tuple[nn.Module | None, str]:
    path, _, name = key.rpartition(".")
    try:
        return model.get_submodule(path), name
    except AttributeError:
        return None, name


def _buffer(model: nn.Module, key: str) -> torch.Tensor | None:
    owner, name = _owner(model, key)
    return None if owner is None else owner._buffers.get(name)


def _set_buffer(model: nn.Module, key: str, value: torch.Tensor) -> None:
    owner, name = _owner(model, key)
    assert owner is not None
    owner._buffers[name] = value


def _memory(value: Any) -> int | None:
    """Return where the elements of a tensor are; None if it is none."""
    if not isinstance(value, torch.Tensor):
        return None
    with torch.no_grad():
        local = value.to_local() if isinstance(value, DTensor) else value
    try:
        return local.data_ptr()
    except RuntimeError:
        return None
