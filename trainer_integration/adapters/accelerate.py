"""Save and load what `Accelerator.save_state` saves, with this library: at URLs, committed as one.

-accelerator.save_state("out/step-500")
+save_state(accelerator, "s3://bucket/run/step-500")
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.api import load, save
from ckpt.errors import ConfigurationError
from ckpt.state import ModelState, OptimizerState, RandomState
from ckpt.trainer_integration.adapters.host import require_host
from ckpt.trainer_integration.dataset import ShardedDataset

require_host("accelerate", oldest="1.12", before="2")

from accelerate import Accelerator
from accelerate.utils import DistributedType

__all__ = ["accelerator_state", "load_state", "save_state"]

_UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def save_state(accelerator: Accelerator, url: str | os.PathLike[str], **options: Any) -> None:
    """Save all that was given to `accelerator.prepare` and `register_for_checkpointing`; all ranks call it.

    Args:
        accelerator: after `prepare`.
        url: the checkpoint, `s3://bucket/run/step-500`, or a path.
        options: keywords of `ckpt.save`.

    Raises:
        ConfigurationError: as `accelerator_state`.
        SaveFailed: on every rank, whichever failed.
    """
    save(accelerator_state(accelerator), url, **options)


def load_state(accelerator: Accelerator, url: str | os.PathLike[str], **options: Any) -> None:
    """Load what `save_state` has saved, on any number of ranks; `options` are keywords of `ckpt.load`.

    Raises as `accelerator_state` and `ckpt.load`.
    """
    load(accelerator_state(accelerator), url, **options)


def accelerator_state(accelerator: Accelerator) -> dict[str, Any]:
    """Make the state dict of an accelerator, for `ckpt.save`, `ckpt.load` and `CheckpointManager`.

    Models and optimizers are saved by the names of their parameters, each rank the shards that it holds,
    whatever the `state_dict_type` of FSDP is. Random states and stateful data loaders are each rank's own.

    Raises:
        ConfigurationError: nothing was prepared, or it is sharded by DeepSpeed, Megatron-LM or torch_xla,
            or hooks of `register_save_state_pre_hook` want to write files, or a `ShardedDataset` was prepared.
    """
    models, optimizers = accelerator._models, [each.optimizer for each in accelerator._optimizers]
    _check(accelerator, models, optimizers)
    state: dict[str, Any] = _numbered("model", [ModelState(model) for model in models])
    if len(models) == 1 and optimizers:
        state["optimizer"] = OptimizerState(models[0], optimizers)
    elif optimizers:
        pairs = zip(models, optimizers, strict=True)
        state |= _numbered("optimizer", [OptimizerState(*pair) for pair in pairs])
    state |= _numbered("scheduler", accelerator._schedulers)
    state |= _numbered("custom", accelerator._custom_objects)
    loaders = [each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)]
    state |= _numbered("loader", [_OwnOfRank(accelerator, loader) for loader in loaders])
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state | {"accelerator": _Step(accelerator), "rng": RandomState()}


class _Step:
    """Save and load how far the accumulation of gradients has come."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]


class _OwnOfRank:
    """Save and load a state that each rank has of its own."""

    def __init__(self, accelerator: Accelerator, part: Any) -> None:
        self._part, self._name = part, f"rank-{accelerator.process_index}-of-{accelerator.num_processes}"

    def state_dict(self) -> dict[str, Any]:
        return {self._name: self._part.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._part.load_state_dict(state[self._name])


def _numbered(name: str, parts: Sequence[Any]) -> dict[str, Any]:
    return {name if number == 0 else f"{name}_{number}": part for number, part in enumerate(parts)}


def _check(accelerator: Accelerator, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    if not models:
        raise ConfigurationError("nothing to save: give the model to accelerator.prepare() first")
    if accelerator.distributed_type in _UNSUPPORTED:
        raise ConfigurationError(
            f"{accelerator.distributed_type.value} shards and saves in a way of its own: use accelerator.save_state, "
            "or FSDP"
        )
    if len(models) > 1 and len(optimizers) not in (0, len(models)):
        raise ConfigurationError(
            f"{len(models)} models with {len(optimizers)} optimizers: which belongs to which is not known; prepare "
            "one optimizer for each model, in the same order"
        )
    # An IterableDatasetShard has the data set within.
    data = [getattr(each.dataset, "dataset", each.dataset) for each in accelerator._dataloaders]
    if accelerator.num_processes > 1 and any(isinstance(each, ShardedDataset) for each in data):
        raise ConfigurationError(
            "a ShardedDataset has each rank's own data, which accelerate would deal out again: leave it out of prepare(), "
            "iterate over a RescalableLoader, and register_for_checkpointing() that"
        )
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        raise ConfigurationError(
            "hooks of register_save_state_pre_hook write files, which would not be part of the checkpoint: remove "
            "them, and register_for_checkpointing() an object that has the state"
        )
