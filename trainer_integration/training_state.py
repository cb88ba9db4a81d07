"""Collect a training job's state: model and optimizer by FQN, random states by rank.

Names and shards are those of `torch.distributed.checkpoint.state_dict`, the same however a model is
sharded, wrapped or compiled. No tensor is gathered.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

from ckpt.errors import ConfigurationError

__all__ = ["ModelState", "OptimizerState", "RandomState", "size_bytes", "training_state"]

_logger = logging.getLogger(__name__)

_ADAM_MOMENTS = 2


def training_state(
    *, model: nn.Module | None = None, optimizer: Any = None, rng: bool = True, **parts: Any
) -> dict[str, Any]:
    """Make a state dict of `Stateful` values for `ckpt.save` and `ckpt.load`.

    Args:
        model: plain, compiled, or wrapped by DDP, FSDP, `fully_shard` or `parallelize_module`.
        optimizer: that of the model, or several of them.
        rng: include the random states of Python, NumPy, torch and the current device. They are each
            rank's own, and are restored if the number of ranks is the same.
        parts: everything else, by name: objects with `state_dict` and `load_state_dict` (a
            scheduler, a loader), tensors, or plain values. None is left out.

    Raises:
        ConfigurationError: an optimizer without its model.
    """
    state = {name: part for name, part in parts.items() if part is not None}
    if model is not None:
        state["model"] = ModelState(model)
    if optimizer is not None:
        if model is None:
            raise ConfigurationError(
                "optimizer= needs model=: optimizer state is saved under the names of the model's parameters"
            )
        state["optimizer"] = OptimizerState(model, optimizer)
    if rng:
        state["rng"] = RandomState()
    return state


class ModelState:
    """Save and load a model's parameters and buffers by FQN.

    Without `frozen`, parameters that are not trained stay as they are, and are not saved: the base of adapters.
    """

    def __init__(self, model: nn.Module, *, frozen: bool = True) -> None:
        self._model, self._frozen = model, frozen
        self._options = StateDictOptions(ignore_frozen_params=not frozen, strict=frozen)

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._model, options=self._options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state, options=self._options)

    def size_bytes(self) -> int:
        saved = [part for part in self._model.parameters() if self._frozen or part.requires_grad]
        return _shards(self._model) * size_bytes([*saved, *self._model.buffers()])


class OptimizerState:
    """Save and load the state of a model's optimizers by the FQNs of its parameters."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]) -> None:
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)

    def state_dict(self) -> dict[str, Any]:
        fresh = [optimizer for optimizer in self._optimizers if not optimizer.state]
        state = get_optimizer_state_dict(self._model, self._optimizers)
        for optimizer in fresh:
            for values in optimizer.state.values():
                # To have something to save or load into, torch took a step without gradients.
                if isinstance(values.get("step"), torch.Tensor):
                    values["step"].zero_()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self._optimizers, optim_state_dict=state)

    def size_bytes(self) -> int:
        """Estimate the size; an optimizer that has not stepped yet counts as Adam."""
        total = 0
        for optimizer in self._optimizers:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            total += size_bytes(optimizer.state) if optimizer.state else _ADAM_MOMENTS * size_bytes(trained)
        return _shards(self._model) * total


class RandomState:
    """Save and load this rank's random states."""

    def state_dict(self) -> dict[str, Any]:
        rank, ranks = _rank_and_world_size()
        version, numbers, gauss = random.getstate()
        own = {"python": [version, list(numbers), gauss], "torch": _text(torch.get_rng_state())}
        if torch.accelerator.is_available():
            own["device"] = _text(torch.get_device_module().get_rng_state())
        if "numpy" in sys.modules:
            kind, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
            own["numpy"] = [kind, keys.tolist(), *rest]
        # As text they are one item, which loads without unpickling.
        return {"ranks": ranks, f"rank-{rank:05d}": json.dumps(own)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rank, ranks = _rank_and_world_size()
        if state["ranks"] != ranks:
            _logger.info(
                "random states are not restored: %s ranks saved them, %d ranks load", state["ranks"], ranks
            )
            return
        own = json.loads(state[f"rank-{rank:05d}"])
        version, numbers, gauss = own["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(_tensor(own["torch"]))
        if "device" in own and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(_tensor(own["device"]))
        if "numpy" in own and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(tuple(own["numpy"]))


def size_bytes(state: Any) -> int:
    """Estimate the size of a checkpoint: models, optimizers and tensors; the rest is small."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, ModelState | OptimizerState):
        return state.size_bytes()
    if isinstance(state, Mapping):
        return sum(map(size_bytes, state.values()))
    return sum(map(size_bytes, state)) if isinstance(state, list | tuple) else 0


def _shards(model: nn.Module) -> int:
    """Count the ranks among which FSDP1 cut the parameters; others show whole parameters."""
    wrapped = FullyShardedDataParallel.fsdp_modules(model)
    if not wrapped or wrapped[0].sharding_strategy == ShardingStrategy.NO_SHARD:
        return 1
    group = wrapped[0].process_group
    return 1 if group is None else int(group.size())


def _rank_and_world_size() -> tuple[int, int]:
    is_initialized = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if is_initialized else (0, 1)


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(bytes(tensor.cpu().tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
