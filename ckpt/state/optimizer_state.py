"""Save and load the state of optimizers by the names of their parameters, without a step, and without a cast."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import ConfigurationError, LoadFailed
from ckpt.format.fqns import Path
from ckpt.state import flat_parameters
from ckpt.state.canonical_names import without_wrappers
from ckpt.state.model_state import ModelState
from ckpt.state.stored import StoredPart, StoredValue
from ckpt.state.structure import Structure, build, leaves, name_of, structure_of
from ckpt.state.targets import Targets, empty_like, shortened
from ckpt.torch_private import ShardedTensor, has_load_hooks

_logger = logging.getLogger(__name__)

_ADAM_MOMENTS = 2
_STATE, _GROUPS, _PARAMS, _EXTRA = "state", "param_groups", "params", "extra"
_LABELS = "param_names"
_BY_PARAMETER = {_PARAMS, _LABELS}
"""What a group has of each parameter, in their order."""
_PATHS_BY_PARAMETER = {(key,) for key in _BY_PARAMETER}
_WHOLE = "whole"
"""In `extra`: the state dict of an optimizer that cannot be taken apart."""

Name = str | int


class OptimizerState:
    """Save and load optimizers by parameter: names and structure are those of torch's `get_optimizer_state_dict`.

    For each parameter its state, whatever keys, types and shapes that has; for each group its options and the names
    of its parameters; and under `extra`, by the first parameter, what an optimizer's `state_dict` has beyond both.

    Args:
        model: whose canonical names the parameters have; None numbers them, as `Optimizer.state_dict` does.
        optimizer: one or several.

    Raises:
        ConfigurationError: not an optimizer.
    """

    kind = "optimizer"

    def __init__(
        self,
        model: ModelState | nn.Module | Sequence[nn.Module] | None,
        optimizer: Optimizer | Iterable[Optimizer],
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        if isinstance(optimizers, Mapping) or not isinstance(optimizers, Iterable):
            raise ConfigurationError(_not_optimizers(optimizer))
        self._optimizers = [*optimizers]
        if not all(isinstance(each, Optimizer) for each in self._optimizers):
            raise ConfigurationError(_not_optimizers(optimizer))
        self._model = model if isinstance(model, ModelState | None) else ModelState(model)
        self._part = StoredPart("")
        self._plans: list[_OptimizerPlan] = []
        self._renamed: Callable[[str], str] = str

    # -- saving --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, and change nothing. Raises ConfigurationError for a parameter without a name, or with two optimizers."""
        state: dict[str, Any] = {_STATE: {}, _GROUPS: []}
        seen: set[Name] = set()
        for own in self._own_states():
            _add_names(seen, own[_GROUPS])
            state[_STATE] |= own[_STATE]
            state[_GROUPS] += own[_GROUPS]
            if own.get(_EXTRA):
                state.setdefault(_EXTRA, {}).update(own[_EXTRA])
        return state

    def structures(self, value: Mapping[str, Any], name: str) -> dict[Path, Structure]:
        """Return what flattening loses, for each parameter, each group, and the rest."""
        found: dict[Path, Structure] = {}
        if any(isinstance(key, int) for key in value[_STATE]):  # by number, which flattening turns into text
            found[()] = structure_of(value, name)
        else:
            for key, state in value[_STATE].items():
                found[_STATE, key] = structure_of(state, f"{name}.{_STATE}.{key}")
            for number, group in enumerate(value[_GROUPS]):
                found[_GROUPS, number] = structure_of(group, f"{name}.{_GROUPS}.{number}")
            for key, extra in value.get(_EXTRA, {}).items():
                found[_EXTRA, key] = structure_of(extra, f"{name}.{_EXTRA}.{key}")
        return {unit: structure for unit, structure in found.items() if structure}

    def size_bytes(self) -> int:
        """Estimate the size; an optimizer that has no state yet counts as Adam."""
        total = 0
        for optimizer in self._optimizers:
            trained = [p for p in _parameters(optimizer) if p.requires_grad]
            total += _tensor_bytes(optimizer.state) or _ADAM_MOMENTS * _tensor_bytes(trained)
        models = [] if self._model is None else self._model.fsdp_models
        return flat_parameters.shards(models[0]) * total if models else total

    def _own_states(self) -> list[dict[str, Any]]:
        with self._names_kept():
            return [*map(self._own_state, self._optimizers)]

    def _names_kept(self) -> contextlib.AbstractContextManager[None]:
        """Ask the model for its names once: there may be an optimizer for each parameter."""
        return contextlib.nullcontext() if self._model is None else self._model.names.unchanged()

    def _own_state(self, optimizer: Optimizer) -> dict[str, Any]:
        packed = optimizer.state_dict()
        parameters = _parameters(optimizer)
        if not _can_be_taken_apart(packed, optimizer):
            _logger.info(
                "the state of %s is saved whole, as its state_dict() has no state and param_groups by parameter: it "
                "loads on the same ranks and sharding only",
                type(optimizer).__name__,
            )
            name = str(_names(self._model, parameters[:1])[0]) if parameters else ""
            return {_STATE: {}, _GROUPS: [], _EXTRA: {name: {_WHOLE: packed}}}
        fsdp = self._fsdp_of(optimizer)
        if fsdp is not None:
            return flat_parameters.state_by_name(fsdp, optimizer, packed, self._parameter_names())
        names = _names(self._model, parameters)
        extra = {key: value for key, value in packed.items() if key not in (_STATE, _GROUPS)}
        others = {key: value for key, value in packed[_STATE].items() if type(key) is not int}
        if others:
            extra[_STATE] = others
        state = {names[key]: value for key, value in packed[_STATE].items() if type(key) is int}
        groups = [
            {**group, _PARAMS: [names[number] for number in group[_PARAMS]]} for group in packed[_GROUPS]
        ]
        return {_STATE: state, _GROUPS: groups, _EXTRA: {str(names[0]): extra} if extra and names else {}}

    def _parameter_names(self) -> dict[int, str]:
        return {} if self._model is None else self._model.parameter_names()[0]

    def _fsdp_of(self, optimizer: Optimizer) -> nn.Module | None:
        """Return the model that FSDP1 has wrapped, and whose parameters an optimizer has; None for other models."""
        if self._model is None:
            return None
        wanted = {id(parameter) for parameter in _parameters(optimizer)}
        for model in self._model.fsdp_models:
            held = wanted & {id(parameter) for parameter in model.parameters()}
            if held == wanted:
                return model
            if held:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has parameters of a module that FSDP1 wraps, and of another one: give each "
                    "an optimizer of its own, or let FSDP1 wrap a module that holds both"
                )
        return None

    def _flat_names(self, model: nn.Module, optimizer: Optimizer) -> list[list[Name]]:
        return [
            [*names] for names in flat_parameters.names_by_group(model, optimizer, self._parameter_names())
        ]

    def _names_by_group(self, optimizer: Optimizer) -> list[list[Name]]:
        """Return the names of the parameters of each group."""
        fsdp = self._fsdp_of(optimizer)
        if fsdp is not None:
            return self._flat_names(fsdp, optimizer)
        return _split(optimizer, _names(self._model, _parameters(optimizer)))

    # -- loading -------------------------------------------------------------------------------------------

    def plan(self, part: StoredPart, targets: Targets) -> None:
        """Ask for all that is stored of the parameters of this rank."""
        self._part, self._renamed = part, targets.stored.renamed
        self._plans = []
        for path, value in part.values.items():
            # Options of groups are few, and each rank finds its own among them.
            if path[:1] == (_GROUPS,):
                if value.shape is None:
                    targets.object(value)
                else:
                    targets.as_stored(value)
        stored: dict[Name, dict[Path, StoredValue]] = defaultdict(dict)
        for path, value in part.values.items():
            if path[:1] == (_STATE,) and len(path) > 1:
                stored[path[1]][path[2:]] = value
        for path in part.nodes:  # a state that holds nothing
            if path[:1] == (_STATE,) and len(path) == 2:
                stored[path[1]]
        known = {path[0] for path in [*part.values, *part.nodes] if path}
        if not known and self._optimizers:
            targets.missing.append(part.name)
        elif not known & {_GROUPS, _EXTRA}:
            targets.faults.append(
                f"{part.name!r} has no param_groups in the checkpoint: it is no state of an optimizer"
            )
        with self._names_kept():
            for optimizer in self._optimizers:
                _replace(optimizer, targets.replaced)
            self._plans = [self._plan_one(each, stored, part, targets) for each in self._optimizers]

    def _plan_one(
        self,
        optimizer: Optimizer,
        stored: Mapping[Name, Mapping[Path, StoredValue]],
        part: StoredPart,
        targets: Targets,
    ) -> _OptimizerPlan:
        fsdp = self._fsdp_of(optimizer)
        entries: list[tuple[Name, Any]]
        likes: dict[Name, Any] = {}
        if fsdp is None:
            parameters = _parameters(optimizer)
            names = _names(self._model, parameters)
            entries = [*zip(names, parameters, strict=True)]
            likes.update(entries)
        else:
            names = [*itertools.chain(*self._flat_names(fsdp, optimizer))]
            entries = [(name, None) for name in names]
            likes.update(flat_parameters.sharded_parameters(fsdp))
        plan = _OptimizerPlan(optimizer, names)
        lookup = _lookup(self._model, stored, names)
        for name, parameter in entries:
            found = lookup.get(name)
            if found is None:
                continue
            plan.found[name] = found
            live = {} if parameter is None else optimizer.state.get(parameter, {})
            like = likes.get(name)
            for path, value in stored[found].items():
                _plan_value(value, path, like, live, optimizer, targets)
        self._plan_extra(plan, part, targets)
        return plan

    def _plan_extra(self, plan: _OptimizerPlan, part: StoredPart, targets: Targets) -> None:
        """Ask for what `state_dict` had beyond states and groups: it is stored by one of the parameters."""
        extra: dict[Name, str | int] = {
            str(path[1]): path[1]
            for path in [*part.values, *part.nodes]
            if path[:1] == (_EXTRA,) and path[1:]
        }
        found = _lookup(self._model, extra, [*map(str, plan.names)]) if extra else {}
        for name in list(found.values())[:1]:
            plan.extra_at = (_EXTRA, extra[str(name)])
            plan.extra = part.below(plan.extra_at)
            for value in plan.extra.values():
                if value.shape is None:
                    targets.object(value)
                else:
                    targets.as_stored(value)

    def take(self, values: Mapping[str, Any]) -> None:
        """Set the optimizers to what was loaded."""
        loaded = _stored_groups(self._part, values, self._renamed)
        with self._names_kept():
            for plan in self._plans:
                self._take_one(plan, values, loaded)

    def _take_one(
        self, plan: _OptimizerPlan, values: Mapping[str, Any], loaded: Sequence[Mapping[str, Any]]
    ) -> None:
        part = self._part
        state: dict[Name, Any] = {}
        for name, stored in plan.found.items():
            found = {path: values[value.name] for path, value in part.below((_STATE, stored)).items()}
            state[name] = build(found, part.structure((_STATE, stored)), None, f"{part.name}.{_STATE}.{name}")
        extra: Any = {}
        if plan.extra_at:
            found = {path: values[value.name] for path, value in plan.extra.items()}
            extra = build(found, part.structure(plan.extra_at), None, f"{part.name}.{_EXTRA}")
        plan.homes = self._set(plan.optimizer, plan.names, state, loaded, extra)

    def live(self) -> dict[str, Any]:
        """Return the optimizers' values by the stored names of the last load; what was not stored by that of a save."""
        found: dict[str, Any] = {}
        for plan, own in zip(self._plans, self._own_states(), strict=True):
            for name in plan.names:
                found |= self._live_at((_STATE, plan.found.get(name, name)), own[_STATE].get(name))
            for group, homes in zip(own[_GROUPS], plan.homes, strict=False):
                options = {key: value for key, value in group.items() if key not in _BY_PARAMETER}
                for home in homes:
                    for name, value in self._live_at((_GROUPS, home), options).items():
                        # Two groups of the program that were one when saved: both have to be as it was.
                        is_other = name in found and not _equal(found[name], value)
                        found[name] = (found[name], value) if is_other else value
            for extra in own.get(_EXTRA, {}).values():
                found |= self._live_at(plan.extra_at, extra) if plan.extra_at else {}
        return found

    def _live_at(self, at: Path, value: Any) -> dict[str, Any]:
        """Return what a value of the program holds, by the names of what is stored at a path, or would be."""
        is_empty = value is None or (isinstance(value, Mapping) and not value)
        own = {} if is_empty else dict(leaves(value))
        known = {
            path: each for path, each in self._part.below(at).items() if path[:1] not in _PATHS_BY_PARAMETER
        }
        found = {each.name: own.get(path) for path, each in known.items()}
        others = own.keys() - known.keys()
        return found | {name_of((self._part.name, *at, *path)): own[path] for path in others}

    def check_groups(self, state: Mapping[str, Any]) -> None:
        """Check that the groups of a state are found by their parameters. Raises LoadFailed."""
        whole = {name for name, extra in state.get(_EXTRA, {}).items() if _WHOLE in extra}
        for optimizer in self._optimizers if state[_GROUPS] else ():
            by_group = self._names_by_group(optimizer)
            if not whole & {str(name) for name in itertools.chain(*by_group)}:
                _homes(by_group, state[_GROUPS], self._model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the optimizers to a state as `state_dict` gives it."""
        for optimizer in self._optimizers:
            names = [*itertools.chain(*self._names_by_group(optimizer))]
            lookup = _lookup(self._model, state[_STATE], names)
            own = {name: state[_STATE][found] for name, found in lookup.items()}
            extra = state.get(_EXTRA, {}).get(str(names[0]), {}) if names else {}
            self._set(optimizer, names, own, state[_GROUPS], extra)

    def _set(
        self,
        optimizer: Optimizer,
        names: Sequence[Name],
        state: Mapping[Name, Any],
        groups: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
    ) -> list[list[int]]:
        """Set one optimizer; return the numbers of the stored groups in which the parameters of each group were."""
        if _WHOLE in extra:
            optimizer.load_state_dict(extra[_WHOLE])
            return []
        fsdp = self._fsdp_of(optimizer)
        by_group = self._names_by_group(optimizer)
        homes = _homes(by_group, groups, self._model)
        chosen = _matched(by_group, groups, homes, self._model)
        if fsdp is None:
            numbers = {name: number for number, name in enumerate(names)}
            states: dict[Any, Any] = {numbers[name]: value for name, value in state.items()}
        else:
            states = flat_parameters.state_by_number(fsdp, optimizer, by_group, state)
        states |= extra.get(_STATE, {})
        packed_groups = []
        start = 0
        for group, options in zip(optimizer.param_groups, chosen, strict=True):
            count = len(group[_PARAMS])
            kept = {key: value for key, value in group.items() if key != _PARAMS and key not in options}
            _note_options(group, options)
            packed_groups.append({**options, **kept, _PARAMS: [*range(start, start + count)]})
            start += count
        more = {key: value for key, value in extra.items() if key != _STATE}
        _apply(optimizer, {_STATE: states, _GROUPS: packed_groups, **more})
        return homes


@dataclass
class _OptimizerPlan:
    """What is loaded of one optimizer.

    Attributes:
        found: the stored name of each parameter that has a state.
        extra, extra_at: what its `state_dict` had beyond states and groups, and where that is stored.
        homes: the numbers of the stored groups in which the parameters of each group were.
    """

    optimizer: Optimizer
    names: list[Name]
    found: dict[Name, Name] = field(default_factory=dict)
    extra: dict[Path, StoredValue] = field(default_factory=dict)
    extra_at: Path = ()
    homes: list[list[int]] = field(default_factory=list)


def _plan_value(
    value: StoredValue, path: Path, like: Any, live: Any, optimizer: Optimizer, targets: Targets
) -> None:
    if value.shape is None:
        targets.object(value)
        return
    if targets.is_dry:
        targets.as_stored(value)
        return
    # As torch does: counters of steps stay on the CPU but where the step runs on the device.
    on_device = path[-1:] != ("step",) or any(
        group.get("capturable") or group.get("fused") for group in optimizer.param_groups
    )
    is_resized = targets.options.on_shape == "resize" and like is not None and value.shape
    if (
        is_resized and len(value.shape) == like.dim() and tuple(like.size()) != value.shape
    ):  # as its parameter
        targets.in_place(value, empty_like(like, value.dtype).zero_())
        return
    device = like.device if like is not None and on_device and not _is_meta(like) else None
    targets.as_stored(value, like=like, live=_member(live, path), device=device)


def _homes(
    by_group: Sequence[Sequence[Name]], groups: Sequence[Mapping[str, Any]], model: ModelState | None
) -> list[list[int]]:
    """Find the stored groups of each group by its parameters. Raises LoadFailed, which names them, if it has none."""
    homes: dict[Name, int] = {}
    for number, group in enumerate(groups):
        for name in group.get(_PARAMS, ()):
            homes.setdefault(name, number)
    known = _lookup(model, homes, [*itertools.chain(*by_group)])
    empty = iter([number for number, group in enumerate(groups) if not group.get(_PARAMS)])
    found = []
    for own in by_group:
        lost = [str(name) for name in own if name not in known]
        if lost and groups:
            raise LoadFailed(
                f"the checkpoint has no group of the optimizer for {shortened(lost)}: make the optimizer of the "
                "parameters that it had when it was saved, or leave it out of the restore"
            )
        found.append(sorted({homes[known[name]] for name in own if name in known}) if own else [*empty][:1])
    return found


def _matched(
    by_group: Sequence[Sequence[Name]],
    groups: Sequence[Mapping[str, Any]],
    homes: Sequence[Sequence[int]],
    model: ModelState | None,
) -> list[dict[str, Any]]:
    """Return the stored options of each group. Raises LoadFailed if its parameters had several."""
    labels: dict[Name, str] = {}
    for group in groups:
        if len(group.get(_LABELS, ())) == len(group.get(_PARAMS, ())):
            labels |= zip(group.get(_PARAMS, ()), group.get(_LABELS, ()), strict=True)
    chosen = []
    for own, numbers in zip(by_group, homes, strict=True):
        # Groups that were one get tensors of their own, which the program may change one by one.
        options = copy.deepcopy(_common_options([groups[number] for number in numbers], own))
        known = _lookup(model, labels, own) if labels else {}
        if own and known.keys() >= {*own}:
            options[_LABELS] = [labels[known[name]] for name in own]
        chosen.append(options)
    return chosen


def _lookup(model: ModelState | None, stored: Mapping[Name, Any], names: Sequence[Name]) -> dict[Name, Name]:
    """Find the stored name of each parameter: its own, another one of its, or one of an older checkpoint."""
    found: dict[Name, Name] = {}
    same = {} if model is None else model.same_tensors()
    older: dict[str, Name] | None = None
    numbers = {str(name): name for name in stored} if all(str(name).isdecimal() for name in stored) else {}
    taken = {*names}  # each of these is a parameter of its own
    for number, name in enumerate(names):
        known: Name | None = name
        if name not in stored:
            if older is None:  # only now: nearly always all are found
                older = {without_wrappers(each): each for each in stored if isinstance(each, str)}
            tries: list[Name] = [*same.get(str(name), ()), older.get(str(name), name)]
            tries.append(numbers.get(str(number), name))  # numbered, as Optimizer.state_dict has it
            known = next((each for each in tries if each in stored and each not in taken), None)
        if known is not None:
            found[name] = known
    return found


def _names(model: ModelState | None, parameters: Sequence[torch.Tensor]) -> list[Name]:
    """Return the name of each parameter, in the order of the groups."""
    if model is None:
        return [*range(len(parameters))]
    known, _ = model.parameter_names()
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


def _stored_groups(
    part: StoredPart, values: Mapping[str, Any], renamed: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Return the stored groups, with the names that their parameters have in the program."""
    found = {path: values[value.name] for path, value in part.below((_GROUPS,)).items()}
    groups = build(found, part.structure((_GROUPS,)), None, f"{part.name}.{_GROUPS}")
    if not isinstance(groups, list):
        return []
    above = f"{part.name}.{_STATE}."
    for group in groups:
        names = group.get(_PARAMS, ())
        group[_PARAMS] = [
            renamed(above + name).removeprefix(above) if isinstance(name, str) else name for name in names
        ]
    return groups


def _common_options(groups: Sequence[Mapping[str, Any]], names: Sequence[Name]) -> dict[str, Any]:
    """Return the options that several stored groups agree on. Raises LoadFailed if they do not."""
    if not groups:
        return {}
    first = _options(groups[0])
    for other in groups[1:]:
        options = _options(other)
        differing = sorted(
            key for key in first.keys() | options.keys() if not _equal(first.get(key), options.get(key))
        )
        if differing:
            raise LoadFailed(
                f"a group of the optimizer holds parameters that were in groups with other {', '.join(differing)}: "
                f"{shortened([*map(str, names)])}; divide the parameters into groups as they were when they were saved"
            )
    return first


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _BY_PARAMETER}


def _equal(some: Any, other: Any) -> bool:
    if isinstance(some, torch.Tensor) and isinstance(other, torch.Tensor):
        return some.shape == other.shape and bool((some == other).all())
    return type(some) is type(other) and bool(some == other)


def _note_options(group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Say which options only the checkpoint or only the program has."""
    new = sorted(map(str, options.keys() - group.keys()))
    gone = sorted(map(str, group.keys() - options.keys() - _BY_PARAMETER))
    if new:
        _logger.info(
            "a group of the optimizer gets options that the program does not set: %s", ", ".join(new)
        )
    if gone and options:
        _logger.warning(
            "the checkpoint has no options %s of the optimizer: the program's stay", ", ".join(gone)
        )


def _apply(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Set an optimizer to a state as its `state_dict` has it, as it is: torch would cast it."""
    parameters = _parameters(optimizer)
    is_plain = type(optimizer).load_state_dict is Optimizer.load_state_dict and not has_load_hooks(optimizer)
    if is_plain:
        state: Any = defaultdict(dict)
        for key, value in packed[_STATE].items():
            state[parameters[key] if type(key) is int else key] = value
        for group, options in zip(optimizer.param_groups, packed[_GROUPS], strict=True):
            group.update({key: value for key, value in options.items() if key != _PARAMS})
        optimizer.__setstate__({_STATE: state, _GROUPS: optimizer.param_groups})
        return
    optimizer.load_state_dict(packed)
    saved_again = optimizer.state_dict()
    again = saved_again.get(_STATE, {}) if isinstance(saved_again, Mapping) else {}
    for key, given in packed[_STATE].items():
        parameter = parameters[key] if type(key) is int else key
        loaded = optimizer.state.get(parameter)
        if all(isinstance(each, dict) for each in (loaded, given, again.get(key))):
            _undo_casts(loaded, given, again[key], parameter)


def _undo_casts(loaded: Any, given: Mapping[Any, Any], again: Mapping[Any, Any], parameter: Any) -> None:
    """Put back what torch's `load_state_dict` has changed, or one made after it: casts to the parameter's dtype, and texts.

    What the optimizer's own hooks and loader made of a value stands: it is saved as it was given.
    """
    for key in given.keys() & loaded.keys() & again.keys():
        value, own, saved = given[key], loaded[key], again[key]
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
            is_cast = own.dtype == parameter.dtype and own.shape == value.shape
            is_as_given = type(saved) is type(value) and saved.dtype == value.dtype
            if not is_as_given and (is_cast or type(own) is not type(value)):
                loaded[key] = value.to(own.device)
        elif isinstance(value, str) and isinstance(own, str) and saved != value:
            loaded[key] = value
        elif all(isinstance(each, dict) for each in (value, own, saved)):
            _undo_casts(own, value, saved, parameter)


def _replace(optimizer: Optimizer, replaced: Mapping[int, nn.Parameter]) -> None:
    """Let an optimizer that was made of parameters on the meta device hold those in their place."""
    if replaced:
        for group in optimizer.param_groups:
            # In the same list: LBFGS has another name for it.
            group[_PARAMS][:] = [replaced.get(id(parameter), parameter) for parameter in group[_PARAMS]]


def _can_be_taken_apart(packed: Any, optimizer: Optimizer) -> bool:
    """Tell whether a state dict is by number of the parameters in the groups."""
    if not isinstance(packed, Mapping) or not isinstance(packed.get(_STATE), Mapping):
        return False
    groups = packed.get(_GROUPS)
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        return False
    numbers = [
        number for group in groups if isinstance(group, Mapping) for number in group.get(_PARAMS, (None,))
    ]
    return numbers == [*range(len(_parameters(optimizer)))]


def _split(optimizer: Optimizer, names: Sequence[Name]) -> list[list[Name]]:
    rest = iter(names)
    return [[*itertools.islice(rest, len(group[_PARAMS]))] for group in optimizer.param_groups]


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group[_PARAMS]]


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


def _tensor_bytes(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    if isinstance(values, Mapping):
        return sum(map(_tensor_bytes, values.values()))
    return sum(map(_tensor_bytes, values)) if isinstance(values, list | tuple) else 0


def _is_meta(tensor: Any) -> bool:
    """Tell whether a parameter has no memory; FSDP1's have, and a rank that holds none of one cannot be asked."""
    return isinstance(tensor, torch.Tensor) and not isinstance(tensor, ShardedTensor) and tensor.is_meta


def _add_names(seen: set[Name], groups: Iterable[Mapping[str, Any]]) -> None:
    """Note the parameters of an optimizer. Raises ConfigurationError if another one has them too."""
    names = {name for group in groups for name in group[_PARAMS]}
    if twice := seen & names:
        raise ConfigurationError(
            f"several optimizers have {shortened(sorted(map(str, twice)))}, and the state of one would stand for all: "
            "save each as a part of its own, as in training_state(model=model, first=..., second=...)"
        )
    seen |= names


def _not_optimizers(value: object) -> str:
    advice = "give a list of its values" if isinstance(value, Mapping) else "give the Optimizer that it wraps"
    return (
        f"optimizer= takes a torch.optim.Optimizer, or a list of them, not {type(value).__name__}: {advice}"
    )
