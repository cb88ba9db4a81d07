"""Collect what transformers' `Trainer` needs to go on, for one checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration import keeping
from ckpt.trainer_integration.training_state import ModelState, OptimizerState, size_bytes, training_state

__all__ = ["SaveByRules", "keep_rule", "metrics_of", "model_state", "refuse_unsupported", "trainer_parts"]


class _TrainerState:
    """Make the text of Trainer's own state when it is saved."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> str:
        exportable = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        state = TrainerState(
            stateful_callbacks=[each for each in exportable if isinstance(each, ExportableState)]
        )
        own = dataclasses.asdict(self._trainer.state) | {"stateful_callbacks": state.stateful_callbacks}
        return json.dumps(own, indent=2, sort_keys=True)

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError  # Trainer reads it from a file


class _TrainedModel(ModelState):
    """Save what is trained of a model with adapters: not the frozen base."""

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._model, options=StateDictOptions(ignore_frozen_params=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state, options=StateDictOptions(strict=False))

    def size_bytes(self) -> int:
        return size_bytes([each for each in self._model.parameters() if each.requires_grad])


def model_state(trainer: Any) -> ModelState:
    """Choose how to save the model: without its frozen base if it has adapters."""
    has_adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", None)
    return (_TrainedModel if has_adapters else ModelState)(trainer.model)


def trainer_parts(trainer: Any) -> dict[str, Any]:
    """Collect all that `Trainer` restores; what is not of one rank alone comes from the first."""
    state: dict[str, Any] = {"model": model_state(trainer)}
    if trainer.is_world_process_zero():
        state |= {"trainer_state": _TrainerState(trainer), "training_args": trainer.args.to_json_string()}
    if not trainer.args.save_only_model:
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        state["optimizer"] = OptimizerState(trainer.model, optimizer)
        scaler = getattr(trainer.accelerator, "scaler", None)
        state |= training_state(scheduler=trainer.lr_scheduler, scaler=scaler)  # and random states
    return state


def metrics_of(state: Any) -> dict[str, float]:
    """Collect what was logged of this step, such as the evaluation that Trainer does before it saves."""
    logged = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    return {k: v for entry in logged for k, v in entry.items() if k != "step" and isinstance(v, int | float)}


def keep_rule(args: Any) -> keeping.KeepRule | None:
    """Return the rule for `save_total_limit`: the newest, and the best one if there is a metric for it."""
    limit, metric = args.save_total_limit, args.metric_for_best_model
    if limit is None or limit <= 0:
        return None
    if metric is None:
        return keeping.last(limit)
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    return keeping.last(max(1, limit - 1)) | keeping.best(1, name, "max" if args.greater_is_better else "min")


class SaveByRules(TrainerCallback):
    """Save after a step by the rules of the manager, and end the training after a preemption."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        manager = self._trainer.checkpoints
        manager.step(state.global_step, trainer_parts(self._trainer), metrics=metrics_of(state))
        if manager.preempted:
            control.should_training_stop = True


def refuse_unsupported(trainer: Any, *, missing: Sequence[str]) -> None:
    """Raise ConfigurationError for what cannot be saved, or would be left out of a checkpoint."""
    args = trainer.args
    wrong = {
        f"transformers {transformers.__version__} has no Trainer.{', '.join(missing)}: use another version": (
            missing
        ),
        "DeepSpeed shards and saves in a way of its own: use FSDP, or Trainer without this adapter": (
            trainer.is_deepspeed_enabled
        ),
        "torch_xla is not supported": trainer.is_fsdp_xla_enabled,
        "push_to_hub would push Trainer's own checkpoints: set hub_strategy='end'": (
            args.push_to_hub and args.hub_strategy != "end"
        ),
        "enable_jit_checkpoint saves without the ranks agreeing on it: give checkpoints={'save': "
        "saving.on_preemption()} instead": getattr(args, "enable_jit_checkpoint", False),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigurationError(text)
