"""Save and load the state of one optimizer by the names of its parameters."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import ConfigurationError, LoadFailed
from ckpt.format.fqns import Path
from ckpt.state import flat_parameters
from ckpt.state.model_state import ModelState
from ckpt.state.optimizer_groups import (
    BY_PARAMETER,
    EXTRA,
    GROUPS,
    PARAMS,
    STATE,
    Name,
    equal,
    homes_of,
    matched,
    note_options,
    stored_names,
)
from ckpt.state.stored import StoredPart, StoredValue
from ckpt.state.structure import build, leaves, name_of
from ckpt.state.targets import Targets, empty_like
from ckpt.torch_private import ShardedTensor, has_load_hooks

_logger = logging.getLogger(__name__)

WHOLE = "whole"
"""In `extra`: the state dict of an optimizer that cannot be taken apart."""


class OneOptimizer:
    """One optimizer, whose parameters have the names of a model, and what was planned to be loaded of it.

    Args:
        model: whose canonical names the parameters have; None numbers them, as `Optimizer.state_dict` does.
    """

    def __init__(self, model: ModelState | None, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._model = model
        self._part = StoredPart("")
        self._names: list[Name] = []
        self._found: dict[Name, Name] = {}  # the stored name of each parameter that has a state
        self._extra_at: Path = ()  # where that is stored which its `state_dict` had beyond states and groups
        self._homes: list[list[int]] = []  # the stored groups in which the parameters of each group were

    # -- names ---------------------------------------------------------------------------------------------

    def names_by_group(self) -> list[list[Name]]:
        """Return the names of the parameters of each group."""
        fsdp = self._fsdp_model()
        if fsdp is not None:
            names = flat_parameters.names_by_group(fsdp, self.optimizer, self._parameter_names())
            return [[*own] for own in names]
        rest = iter(self._all_names(parameters_of(self.optimizer)))
        return [[*itertools.islice(rest, len(group[PARAMS]))] for group in self.optimizer.param_groups]

    def _all_names(self, parameters: Sequence[torch.Tensor]) -> list[Name]:
        if self._model is None:
            return [*range(len(parameters))]
        known = self._parameter_names()
        names: list[Name] = []
        for number, parameter in enumerate(parameters):
            name = known.get(id(parameter))
            if name is None:
                raise ConfigurationError(
                    f"parameter {number} of the optimizer, of shape {tuple(parameter.shape)}, is not in the model: give "
                    "a model that holds it, such as torch.nn.ModuleDict({'model': model, 'loss': loss})"
                )
            names.append(name)
        return names

    def _parameter_names(self) -> dict[int, str]:
        return {} if self._model is None else self._model.parameter_names()[0]

    def _fsdp_model(self) -> nn.Module | None:
        """Return the model that FSDP1 has wrapped, and whose parameters the optimizer has; None for other models."""
        models = [] if self._model is None else self._model.fsdp_models
        wanted = {id(parameter) for parameter in parameters_of(self.optimizer)} if models else set()
        for model in models:
            held = wanted & {id(parameter) for parameter in model.parameters()}
            if held == wanted:
                return model
            if held:
                raise ConfigurationError(
                    f"{type(self.optimizer).__name__} has parameters of a module that FSDP1 wraps, and of another one: "
                    "give each an optimizer of its own, or let FSDP1 wrap a module that holds both"
                )
        return None

    # -- saving --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return states, groups and extra by name."""
        packed = self.optimizer.state_dict()
        parameters = parameters_of(self.optimizer)
        if not self._can_be_taken_apart(packed):
            _logger.info(
                "the state of %s is saved whole, as its state_dict() has no state and param_groups by parameter: it "
                "loads on the same ranks and sharding only",
                type(self.optimizer).__name__,
            )
            name = str(self._all_names(parameters[:1])[0]) if parameters else ""
            return {STATE: {}, GROUPS: [], EXTRA: {name: {WHOLE: packed}}}
        fsdp = self._fsdp_model()
        if fsdp is not None:
            return flat_parameters.state_by_name(fsdp, self.optimizer, packed, self._parameter_names())
        names = self._all_names(parameters)
        extra = {key: value for key, value in packed.items() if key not in (STATE, GROUPS)}
        others = {key: value for key, value in packed[STATE].items() if type(key) is not int}
        if others:
            extra[STATE] = others
        state = {names[key]: value for key, value in packed[STATE].items() if type(key) is int}
        groups = [{**group, PARAMS: [names[number] for number in group[PARAMS]]} for group in packed[GROUPS]]
        return {STATE: state, GROUPS: groups, EXTRA: {str(names[0]): extra} if extra and names else {}}

    def _can_be_taken_apart(self, packed: Any) -> bool:
        """Tell whether a state dict is by number of the parameters in the groups."""
        if not isinstance(packed, Mapping) or not isinstance(packed.get(STATE), Mapping):
            return False
        groups = packed.get(GROUPS)
        if not isinstance(groups, list) or len(groups) != len(self.optimizer.param_groups):
            return False
        numbers = [
            number for group in groups if isinstance(group, Mapping) for number in group.get(PARAMS, (None,))
        ]
        return numbers == [*range(len(parameters_of(self.optimizer)))]

    # -- loading -------------------------------------------------------------------------------------------

    def plan(
        self, part: StoredPart, stored: Mapping[Name, Mapping[Path, StoredValue]], targets: Targets
    ) -> None:
        """Ask for what is stored of each parameter, and beyond these."""
        self._part = part
        self._homes = []
        self._extra_at = ()
        fsdp = self._fsdp_model()
        self._names = [*itertools.chain(*self.names_by_group())]
        live: dict[Name, Any] = {}
        likes: dict[Name, Any] = {}
        if fsdp is None:
            likes.update(zip(self._names, parameters_of(self.optimizer), strict=True))
            live = {name: self.optimizer.state.get(parameter, {}) for name, parameter in likes.items()}
        else:
            likes.update(flat_parameters.sharded_parameters(fsdp))
        self._found = stored_names(self._model, stored, self._names)
        for name, found in self._found.items():
            for path, value in stored[found].items():
                self._plan_value(value, path, likes.get(name), live.get(name), targets)
        extra: dict[Name, str | int] = {
            str(path[1]): path[1] for path in [*part.values, *part.nodes] if path[:1] == (EXTRA,) and path[1:]
        }
        known = stored_names(self._model, extra, [*map(str, self._names)]) if extra else {}
        for name in [*known.values()][:1]:
            self._extra_at = EXTRA, extra[name]
            for value in part.below(self._extra_at).values():
                _ask(value, targets)

    def _plan_value(self, value: StoredValue, path: Path, like: Any, live: Any, targets: Targets) -> None:
        if value.shape is None or targets.is_dry:
            _ask(value, targets)
            return
        # As torch does: counters of steps stay on the CPU but where the step runs on the device.
        on_device = path[-1:] != ("step",) or any(
            group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups
        )
        may_resize = targets.options.on_shape == "resize" and like is not None and value.shape
        if may_resize and len(value.shape) == like.dim() and tuple(like.size()) != value.shape:
            targets.in_place(value, empty_like(like, value.dtype).zero_())  # as its parameter
            return
        device = like.device if like is not None and on_device and not _is_meta(like) else None
        targets.as_stored(value, like=like, live=_member(live, path), device=device)

    def take(self, values: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the optimizer to what was loaded; `groups` are all that are stored."""
        state = {name: self._built((STATE, stored), values) for name, stored in self._found.items()}
        self.set(state, groups, self._built(self._extra_at, values) if self._extra_at else {})

    def _built(self, at: Path, values: Mapping[str, Any]) -> Any:
        part = self._part
        found = {path: values[value.name] for path, value in part.below(at).items()}
        return build(found, part.structure(at), None, name_of((part.name, *at)))

    def set(
        self, state: Mapping[Name, Any], groups: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
    ) -> None:
        """Set the optimizer to states by name, groups and what was beyond them. Raises LoadFailed if groups do not fit."""
        if WHOLE in extra:
            self.optimizer.load_state_dict(extra[WHOLE])
            return
        by_group = self.names_by_group()
        self._homes = homes_of(by_group, groups, self._model)
        fsdp = self._fsdp_model()
        if fsdp is None:
            numbers = {name: number for number, name in enumerate(itertools.chain(*by_group))}
            states: dict[Any, Any] = {numbers[name]: value for name, value in state.items()}
        else:
            states = flat_parameters.state_by_number(fsdp, self.optimizer, by_group, state)
        states |= extra.get(STATE, {})
        packed = []
        start = 0
        chosen = matched(by_group, groups, self._homes, self._model)
        for group, options in zip(self.optimizer.param_groups, chosen, strict=True):
            count = len(group[PARAMS])
            kept = {key: value for key, value in group.items() if key != PARAMS and key not in options}
            note_options(group, options)
            packed.append({**options, **kept, PARAMS: [*range(start, start + count)]})
            start += count
        more = {key: value for key, value in extra.items() if key != STATE}
        _apply(self.optimizer, {STATE: states, GROUPS: packed, **more})

    # -- certificates --------------------------------------------------------------------------------------

    def match(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Find the stored groups, to compare their options; other groups than those of the program have none."""
        with contextlib.suppress(LoadFailed):
            self._homes = homes_of(self.names_by_group(), groups, self._model)

    def live(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state by the stored names of the last load; what was not stored by those of a save."""
        found: dict[str, Any] = {}
        for name in self._names:
            found |= self._live_at((STATE, self._found.get(name, name)), own[STATE].get(name))
        for group, homes in zip(own[GROUPS], self._homes, strict=False):
            options = {key: value for key, value in group.items() if key not in BY_PARAMETER}
            for home in homes:
                for name, value in self._live_at((GROUPS, home), options).items():
                    # Two groups of the program that were one when saved: both have to be as it was.
                    is_other = name in found and not equal(found[name], value)
                    found[name] = (found[name], value) if is_other else value
        for extra in own.get(EXTRA, {}).values() if self._extra_at else ():
            found |= self._live_at(self._extra_at, extra)
        return found

    def _live_at(self, at: Path, value: Any) -> dict[str, Any]:
        is_empty = value is None or (isinstance(value, Mapping) and not value)
        own = {} if is_empty else dict(leaves(value))
        stored = self._part.below(at)
        known = {path: each for path, each in stored.items() if path[:1] not in _PATHS_BY_PARAMETER}
        found = {each.name: own.get(path) for path, each in known.items()}
        others = own.keys() - known.keys()
        return found | {name_of((self._part.name, *at, *path)): own[path] for path in others}


_PATHS_BY_PARAMETER = {(key,) for key in BY_PARAMETER}


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]


def _ask(value: StoredValue, targets: Targets) -> None:
    if value.shape is None:
        targets.object(value)
    else:
        targets.as_stored(value)


def _apply(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Set an optimizer to a state as its `state_dict` has it, as it is: torch would cast it."""
    parameters = parameters_of(optimizer)
    is_plain = type(optimizer).load_state_dict is Optimizer.load_state_dict and not has_load_hooks(optimizer)
    if is_plain:
        state: Any = defaultdict(dict)
        for key, value in packed[STATE].items():
            state[parameters[key] if type(key) is int else key] = value
        for group, options in zip(optimizer.param_groups, packed[GROUPS], strict=True):
            group.update({key: value for key, value in options.items() if key != PARAMS})
        optimizer.__setstate__({STATE: state, GROUPS: optimizer.param_groups})
        return
    optimizer.load_state_dict(packed)
    saved_again = optimizer.state_dict()
    again = saved_again.get(STATE, {}) if isinstance(saved_again, Mapping) else {}
    for key, given in packed[STATE].items():
        parameter = parameters[key] if type(key) is int else key
        loaded = optimizer.state.get(parameter)
        if all(isinstance(each, dict) for each in (loaded, given, again.get(key))):
            _undo_casts(loaded, given, again[key], parameter)


def _undo_casts(loaded: Any, given: Mapping[Any, Any], again: Mapping[Any, Any], parameter: Any) -> None:
    """Put back what torch's `load_state_dict` has changed, or one made after it: casts to the parameter's dtype, and texts.

    What the optimizer's own hooks and loader made of a value stands: it is saved as it was given.
    """
    for key in given.keys() & loaded.keys() & again.keys():
        value = given[key]
        own = loaded[key]
        saved = again[key]
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
            is_cast = own.dtype == parameter.dtype and own.shape == value.shape
            is_as_given = type(saved) is type(value) and saved.dtype == value.dtype
            if not is_as_given and (is_cast or type(own) is not type(value)):
                loaded[key] = value.to(own.device)
        elif isinstance(value, str) and isinstance(own, str) and saved != value:
            loaded[key] = value
        elif all(isinstance(each, dict) for each in (value, own, saved)):
            _undo_casts(own, value, saved, parameter)


def _member(value: Any, path: Path) -> Any:
    """Return what is at a path; a key may have been no text."""
    for part in path:
        if isinstance(value, Mapping):
            is_key = part in value
            value = (
                value[part]
                if is_key
                else next((item for key, item in value.items() if str(key) == part), None)
            )
        elif isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def _is_meta(tensor: Any) -> bool:
    """Tell whether a parameter has no memory; FSDP1's have, and a rank that holds none of one cannot be asked."""
    return isinstance(tensor, torch.Tensor) and not isinstance(tensor, ShardedTensor) and tensor.is_meta
