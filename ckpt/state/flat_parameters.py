"""Name what FSDP1 keeps in flat parameters, and cut the states of optimizers into those of the parameters in them.

FSDP1 itself does so, one unit at a time, and talks to its ranks for it: all of them call these functions.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FlatParameter,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.optim import Optimizer

from ckpt.state.canonical_names import without_attributes
from ckpt.torch_private import is_fsdp_flattened

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


def is_wrapped(model: nn.Module) -> bool:
    """Tell whether FSDP1 has wrapped a model, or modules of it."""
    # torch's own answer takes three times as long, and nearly all models have none.
    has_some = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return has_some and bool(FullyShardedDataParallel.fsdp_modules(model))


@contextlib.contextmanager
def sharded_states(model: nn.Module) -> Iterator[None]:
    """Let FSDP1 give and take shards; nothing for other models."""
    if not is_wrapped(model):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        ):
            yield


def shards(model: nn.Module) -> int:
    """Count the ranks among which FSDP1 cut the parameters; others show whole parameters."""
    wrapped = FullyShardedDataParallel.fsdp_modules(model)
    if not wrapped or wrapped[0].sharding_strategy == ShardingStrategy.NO_SHARD:
        return 1
    group = wrapped[0].process_group
    return 1 if group is None else int(group.size())


def are_shards(parameters: Iterable[torch.Tensor]) -> bool:
    """Tell whether parameters are shards of FSDP1: flat ones, or views into these."""
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return not is_alone and any(
        isinstance(each, FlatParameter) or is_fsdp_flattened(each) for each in parameters
    )


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers as FSDP1 shows them in a sharded state dict, by canonical name."""
    with sharded_states(model), torch.no_grad():
        return {without_attributes(name): value for name, value in model.state_dict().items()}


def names_by_group(model: nn.Module, optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of the parameters of each group; a flat parameter has those in it."""
    flat = {
        id(module._flat_param): module
        for module in FullyShardedDataParallel.fsdp_modules(model)
        if getattr(module, "_flat_param", None) is not None
    }
    prefixes = {id(module): name for name, module in model.named_modules()}
    groups = []
    for group in optimizer.param_groups:
        own: list[str] = []
        for parameter in group[_PARAMS]:
            if isinstance(parameter, FlatParameter):
                prefix = prefixes[id(flat[id(parameter)])]
                own += [without_attributes(f"{prefix}.{name}".lstrip(".")) for name in parameter._fqns]
            else:
                own.append(names[id(parameter)])
        groups.append(own)
    return groups


def state_by_name(
    model: nn.Module, optimizer: Optimizer, packed: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """Return the state of an optimizer by canonical name, of its state dict by number."""
    if not _has_any_state(model, packed):
        own = names_by_group(model, optimizer, names)
        groups = [{**group, _PARAMS: params} for group, params in zip(packed[_GROUPS], own, strict=True)]
        return {_STATE: {}, _GROUPS: groups}
    with sharded_states(model), _others_frozen(model, optimizer):
        group = _process_group(model)
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer, packed, group=group)
    return {
        _STATE: {without_attributes(name): value for name, value in state[_STATE].items()},
        _GROUPS: [{**group, _PARAMS: [*map(without_attributes, group[_PARAMS])]} for group in state[_GROUPS]],
    }


@contextlib.contextmanager
def _others_frozen(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Show parameters of other optimizers as frozen: FSDP1 wants the state of all others in a unit."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group[_PARAMS]}
    others = [each for each in model.parameters() if each.requires_grad and id(each) not in own]
    if any(isinstance(each, FlatParameter) for each in others):  # flat ones have their state on their own
        others = []
    try:
        for each in others:
            each.requires_grad_(False)
        yield
    finally:
        for each in others:
            each.requires_grad_(True)


def _has_any_state(model: nn.Module, packed: Mapping[str, Any]) -> bool:
    """Tell whether any rank has a state: one that holds no element of a parameter may have none of it."""
    group = _process_group(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    has_some = torch.tensor([bool(packed[_STATE])], dtype=torch.int32, device=device)
    dist.all_reduce(has_some, dist.ReduceOp.MAX, group=group)
    return bool(has_some.item())


def state_by_number(
    model: nn.Module, optimizer: Optimizer, names: Sequence[Sequence[Any]], state: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Return the states of flat parameters, by number, of those of the parameters in them, by name.

    Args:
        names: of the parameters of each group, by canonical name.
    """
    if not state:
        return {}
    with sharded_states(model), torch.no_grad():
        raw = {without_attributes(name): name for name in model.state_dict()}
    groups = [
        {**group, _PARAMS: [raw[name] for name in own]}
        for group, own in zip(optimizer.param_groups, names, strict=True)
    ]
    given = {_STATE: {raw[name]: value for name, value in state.items()}, _GROUPS: groups}
    with sharded_states(model):
        group = _process_group(model)
        packed = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, given, group=group)
    result: dict[Any, Any] = packed[_STATE]
    return result


def _process_group(model: nn.Module) -> Any:
    """Return the ranks among which FSDP1 shards; None if these are not all that hold a copy."""
    module = FullyShardedDataParallel.fsdp_modules(model)[0]
    if "HYBRID" in module.sharding_strategy.name or isinstance(module.process_group, tuple):
        return None
    return module.process_group
