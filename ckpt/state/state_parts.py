"""Take a state dict apart into parts, each of which knows how it is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.errors import ConfigurationError
from ckpt.format.fqns import STRUCTURE, Path
from ckpt.state.model_state import ModelState
from ckpt.state.optimizer_state import OptimizerState
from ckpt.state.parts import PartState, PlainValue
from ckpt.state.per_rank import PerRank, by_units, marked
from ckpt.state.random_state import RandomState
from ckpt.state.stored import StoredPart
from ckpt.state.structure import Structure, encode, leaves, name_of
from ckpt.state.targets import Targets
from ckpt.torch_private import ShardedTensor

OWN_KINDS = (ModelState, OptimizerState, PerRank, RandomState)


class Part(Protocol):
    """How a part is saved and loaded.

    Attributes:
        kind: `model`, `optimizer`, `loader`, `per rank`, `part` or `value`: what it is when ranks differ.
    """

    kind: str

    def state_dict(self) -> Any:
        """Return its values, as they are."""

    def structures(self, value: Any, name: str) -> dict[Path, Structure]:
        """Return what flattening loses of these, by the path from which on it is noted."""

    def plan(self, part: StoredPart, targets: Targets) -> None:
        """Ask for what is stored of it."""

    def take(self, values: Mapping[str, Any]) -> None:
        """Take the loaded values, by stored name."""

    def live(self) -> dict[str, Any]:
        """Return the program's values by the stored names of the last plan."""

    def load_state_dict(self, state: Any) -> None:
        """Take values as `state_dict` returns them."""


@dataclass
class Description:
    """What the values of a save are, for comparisons between ranks.

    Attributes:
        parts: by name.
        kinds: of the parts, by name.
        buffers: names of buffers.
        united: parts that say `unites_ranks`: each rank has keys of its own, and those of all ranks are the state.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    united: set[str] = field(default_factory=set)


def part_of(name: str, value: Any, holder: dict[str, Any]) -> Part:
    """Return how a part is saved and loaded; `holder` is the dict that gets a plain value."""
    if isinstance(value, OWN_KINDS):
        return value
    if isinstance(value, nn.Module):
        return ModelState(value)
    if isinstance(value, Optimizer):
        return OptimizerState(None, value)
    if _has_state(value):
        return PartState(name, value)
    return PlainValue(name, value, holder)


def with_members(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict with the members of lists and dicts of objects with state as parts, `schedulers.0`."""
    members: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if _are_parts(value):
            for key in value if isinstance(value, Mapping) else range(len(value)):
                add(f"{name}.{key}", value[key])
        elif name in members:
            raise ConfigurationError(f"two parts have the name {name!r}: rename one of them")
        else:
            members[name] = value

    for name, value in state_dict.items():
        add(name, value)
    return members


def _are_parts(value: Any) -> bool:
    """Tell whether a value is a list or dict whose members all have a state of their own."""
    if type(value) not in (list, tuple, dict) or not value:
        return False
    members = value.values() if isinstance(value, dict) else value
    return all(_are_parts(member) or _has_state(member) for member in members)


def _has_state(value: Any) -> bool:
    # Asked in this order because asking for a protocol is slow, and there can be very many tensors.
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def values_to_save(
    state_dict: Mapping[str, Any], per_rank: Collection[str] = (), *, flattens: bool = True
) -> tuple[dict[str, Any], Description]:
    """Return the values of all parts, by name in order, and what they are.

    Args:
        per_rank: patterns of names whose values are each rank's own.
        flattens: what flattening loses is saved beside them; a planner of the caller's may not flatten.
    """
    values: dict[str, Any] = {}
    structures: dict[str, Any] = {}
    described = Description()
    state_dict = with_members(state_dict)

    def resolve(name: str) -> None:
        part = described.parts[name] = part_of(name, state_dict[name], {})
        value = own = part.state_dict()
        places: dict[Path, Any] = {}
        if per_rank and part.kind != "per rank":
            value = marked(own, name, per_rank, places)
            _refuse_shards(part, places, name)
        values[name] = value
        described.kinds[name] = part.kind
        if getattr(state_dict[name], "unites_ranks", False):
            described.united.add(name)
        if isinstance(part, ModelState):
            described.buffers |= {f"{name}.{buffer}" for buffer in part.buffer_names()}
        if flattens:
            found = part.structures(own, name)
            if found:
                structures[name] = texts_of(found, places)

    each_part({name: partial(resolve, name) for name in sorted_names(state_dict)})
    if structures:
        if STRUCTURE in values:
            raise ConfigurationError(
                f"a part cannot be named {STRUCTURE!r}: that is where structures are noted"
            )
        values[STRUCTURE] = structures
    return values, described


def _refuse_shards(part: Part, places: Mapping[Path, Any], name: str) -> None:
    """Refuse patterns for sharded tensors of what takes them back in place: a rank's elements alone do not fit there."""
    for place, value in {} if isinstance(part, PartState) else places.items():
        for path, leaf in leaves(value, place):
            if isinstance(leaf, DTensor | ShardedTensor):
                raise ConfigurationError(
                    f"{name_of((name, *path))!r} is sharded over ranks, and per_rank would save each rank's elements alone: "
                    "leave it out of the patterns of per_rank"
                )


def texts_of(structures: Mapping[Path, Structure], places: Collection[Path] = ()) -> Any:
    """Nest the texts of structures by what they are about, so that each parameter's, and each rank's, is one of its own."""
    nested: dict[str, Any] = {}
    for unit, structure in by_units(structures, places).items():
        text = encode(structure)
        if not unit:
            return text
        at = nested
        for key in unit[:-1]:
            at = at.setdefault(str(key), {})
        at[str(unit[-1])] = text
    return nested


def sorted_names(state_dict: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts, on all ranks in the same order: random states last, as others may draw."""
    return sorted(state_dict, key=lambda name: (isinstance(state_dict[name], RandomState), name))


def each_part(work: Mapping[str, Callable[[], object]]) -> None:
    """Do the work of each part, and raise the first error after all: in that of others ranks may talk to each other."""
    errors = []
    for do in work.values():
        try:
            do()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def training_state(
    *, model: Any = None, optimizer: Any = None, rng: bool = True, **parts: Any
) -> dict[str, Any]:
    """Make a state dict for `ckpt.save` and `ckpt.load`.

    Args:
        model: plain, compiled, or wrapped by DDP, FSDP, `fully_shard` or `parallelize_module`; or a list of modules.
        optimizer: that of the model, or several of them.
        rng: include the random states of Python, NumPy, torch and the current device. They are each
            rank's own, and are restored if the number of ranks is the same.
        parts: everything else, by name: objects with `state_dict` and `load_state_dict` (a
            scheduler, a loader), other models and optimizers, lists and dicts of these (their members
            are `schedulers.0`, ...), tensors, or plain values. None is left out.

    Raises:
        ConfigurationError: an optimizer without its model, or something that is no model or optimizer.
    """
    state = with_members({name: part for name, part in parts.items() if part is not None})
    if model is not None:
        state["model"] = ModelState(model)
    if optimizer is not None:
        if model is None:
            raise ConfigurationError(
                "optimizer= needs model=: optimizer state is saved under the names of the model's parameters"
            )
        state["optimizer"] = OptimizerState(state["model"], optimizer)
    for name, part in state.items():
        if isinstance(part, Optimizer):
            state[name] = OptimizerState(model_of(part, state), part)
    if rng:
        state["rng"] = RandomState()
    return state


def model_of(optimizer: Optimizer, state: Mapping[str, Any]) -> ModelState | None:
    """Find the model that holds all parameters of an optimizer."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for value in state.values():
        model = ModelState(value) if isinstance(value, nn.Module) else value
        if isinstance(model, ModelState) and wanted <= model.parameter_names()[0].keys():
            return model
    return None


def size_bytes(state: Any) -> int:
    """Estimate the size of a checkpoint: models, optimizers and tensors; the rest is small."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, ModelState | OptimizerState):
        return state.size_bytes()
    if isinstance(state, nn.Module):
        return ModelState(state).size_bytes()
    if isinstance(state, Optimizer):
        return OptimizerState(None, state).size_bytes()
    if isinstance(state, Mapping):
        return sum(map(size_bytes, state.values()))
    return sum(map(size_bytes, state)) if isinstance(state, list | tuple) else 0


def values_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all parts, by name in order, for a planner of the caller's."""
    return {name: part_of(name, state_dict[name], {}).state_dict() for name in sorted_names(state_dict)}


def put_back(state_dict: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put values that a planner of the caller's has loaded where the caller looks for them, as DCP does."""
    for name, loaded in values.items():
        part = part_of(name, state_dict.get(name), {})
        if isinstance(part, PlainValue):
            state_dict[name] = loaded
        else:
            part.load_state_dict(loaded)
