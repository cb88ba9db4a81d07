"""Save the checkpoints of transformers' `Trainer` with this library: at URLs, each committed as one."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from ckpt.api import save
from ckpt.backends.base import put_bytes
from ckpt.backends.options import options_dict
from ckpt.backends.registry import normal_url, open_store
from ckpt.errors import ConfigurationError, NotFound
from ckpt.format.names import step_of
from ckpt.state import ModelState, OptimizerState, RandomState, training_state
from ckpt.trainer_integration import keeping, saving
from ckpt.trainer_integration.adapters.host import require_host
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.manager import CheckpointManager

require_host("transformers", oldest="5.10", before="6")
require_host("accelerate", oldest="1.12", before="2")

import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import ENV_VARS_TRUE_VALUES, SAFE_WEIGHTS_NAME

__all__ = ["Trainer", "install"]

_logger = logging.getLogger(__name__)

_Native: Any = transformers.Trainer
_LOCAL_FOLDER = "trainer_output"  # Trainer's own default


class Trainer(_Native):
    """Train as transformers' `Trainer`, with checkpoints of this library below `output_dir`, a path or URL.

    All that `Trainer` restores is in one commit: model, optimizer, scheduler, scaler, its own state with
    that of callbacks, and the random states of each rank. If `output_dir` is a URL, everything else that
    `Trainer` writes goes to a folder of its name in the local folder `trainer_output`.

    Args:
        checkpoints: keywords of `CheckpointManager`, such as `keep`, `storage_options` and `async_mode`.
            Without `keep`, `save_total_limit` counts. `save` adds rules to Trainer's `save_strategy`, such
            as `saving.on_preemption()`.
        args, kwargs: as for `Trainer`. `train_dataset` may be a `RescalableLoader` with `DataOptions(positions=True)`: its
            tokens are `input_ids` and `labels`, it needs `max_steps`, and its positions are saved.

    Attributes:
        checkpoints: the `CheckpointManager`.

    Raises:
        ConfigurationError: the training cannot be saved in this way.
    """

    args: Any
    checkpoint_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, *args: Any, checkpoints: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        call = inspect.signature(_Native).bind_partial(*args, **kwargs).arguments
        given = call.get("args")
        root = normal_url(given.output_dir).rstrip("/") if given is not None else ""
        if "://" in root:
            call["args"] = copy.copy(given)  # the caller may make a second Trainer of it
            call["args"].output_dir = os.path.join(_LOCAL_FOLDER, root.rpartition("/")[2])
        super().__init__(**call)
        if isinstance(self.train_dataset, RescalableLoader):  # its state says where it is
            self.args = copy.copy(self.args)
            self.args.ignore_data_skip = True
        self.checkpoint_root = root or normal_url(self.args.output_dir)
        _refuse_unsupported(self)
        options = {**self.checkpoint_options, **(checkpoints or {})}
        self._has_rules, self._storage_options = (
            "save" in options,
            options_dict(options.get("storage_options")),
        )
        options = {"save": saving.at_steps(()), **options, "keep": _keep_rule(self.args, options.get("keep"))}
        self.checkpoints = CheckpointManager(self.checkpoint_root, **options)
        self._restoring: dict[str, Any] | None = None

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        """Train; `resume_from_checkpoint` is True, the URL or path of a checkpoint, or one of Trainer's own.

        True goes on from the newest checkpoint that passes its checks, and begins anew without any.
        """
        if trial is not None:
            raise ConfigurationError("hyperparameter search is not supported: its trials share one folder")
        self._restoring = None
        how: dict[str, Any] = {"step": "latest-valid"}
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            place = normal_url(resume_from_checkpoint).rstrip("/")
            if os.path.isfile(os.path.join(place, TRAINER_STATE_NAME)):
                return super().train(place, None, **kwargs)
            root, _, name = _absolute(place).rpartition("/")
            step = step_of(name) if root == _absolute(self.checkpoint_root) else None
            how = {"initial": place} if step is None else {"step": step}
        state = {"trainer_state": ""}
        restored = self.checkpoints.restore(state, **how)
        if restored is None:
            folder = self.args.output_dir
            own = get_last_checkpoint(folder) if resume_from_checkpoint and os.path.isdir(folder) else None
            return super().train(own, None, **kwargs)
        if not resume_from_checkpoint:
            raise ConfigurationError(
                f"{restored.url} is a checkpoint of step {restored.step}: train(resume_from_checkpoint=True) goes "
                "on from there; to begin anew, choose another output_dir"
            )
        if "initial" in how and not restored.is_initial:
            _logger.warning(
                "the run has checkpoints of its own and goes on from %s, not from what it began with",
                restored.url,
            )
        with tempfile.TemporaryDirectory() as folder:  # where Trainer reads its own state
            self._restoring, self._state_file = how, Path(folder, TRAINER_STATE_NAME)
            self._state_file.write_text(state["trainer_state"])
            try:
                return super().train(folder, None, **kwargs)
            finally:
                self._restoring = None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, or its adapters, for `from_pretrained`; all ranks call it.

        At a URL, and of a model that FSDP keeps sharded, each rank writes some of the files.

        Args:
            output_dir: a folder or URL; default: that of the arguments.
        """
        place = normal_url(output_dir or (self.args.output_dir if _internal_call else self.checkpoint_root))
        plugin: Any = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        is_sharded = getattr(plugin, "fsdp_version", 1) == 2 and "FULL" not in str(plugin.state_dict_type)
        if "://" not in place and not is_sharded:  # else Trainer would write nothing
            super().save_model(place, _internal_call)
            return
        trained = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        adapters = get_model_state_dict(self.model, options=trained) if _has_adapters(self) else {}
        with tempfile.TemporaryDirectory() as folder:
            self._save(folder, state_dict=adapters)  # the configuration and the tokenizer too
            if not _has_adapters(self):
                Path(folder, SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # it has no weights
            if self.is_world_process_zero():
                with closing(open_store(place, self._storage_options)) as store:
                    for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                        put_bytes(store, file.relative_to(folder).as_posix(), file.read_bytes())
        if not _has_adapters(self):
            state = get_model_state_dict(self.model)
            save(state, place, storage_options=self._storage_options, format="safetensors")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push the model from a folder of its own: `output_dir` has checkpoints, which would go with it."""
        own, self.args = self.args, copy.copy(self.args)
        self.args.hub_model_id = own.hub_model_id or os.path.basename(os.path.abspath(own.output_dir))
        self.args.output_dir = os.path.join(own.output_dir, "hub")
        try:
            return super().push_to_hub(*args, **kwargs)
        finally:
            self.args = own

    def get_train_dataloader(self) -> Any:
        loader = self.train_dataset
        return _Inputs(loader) if isinstance(loader, RescalableLoader) else super().get_train_dataloader()

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Train on a batch; one of a `RescalableLoader` is recorded."""
        loader = self.train_dataset
        if not isinstance(loader, RescalableLoader):
            return super().training_step(model, inputs, *args, **kwargs)
        position = {name: inputs.pop(name) for name in ("shard", "position")}
        loss = super().training_step(model, inputs, *args, **kwargs)
        loader.record(position)
        return loss

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except _OlderCheckpointError:  # its state is in the file by now
            return self._inner_training_loop(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Make no step where the run has ended: Trainer alone makes one more each time it is resumed."""
        if self._restoring is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Save by the manager's rules too, once that the metrics of the step are known."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._has_rules:
            self.checkpoints.step(self.state.global_step, _parts_of(self), metrics=_metrics_of(self.state))
            self.control.should_training_stop |= self.checkpoints.preempted

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.checkpoints.wait_durable()
        best = None
        is_own = str(self.state.best_model_checkpoint).endswith(f"-{self.state.best_global_step}")
        if self.args.load_best_model_at_end and not is_own:  # else Trainer loads it
            self.state.best_model_checkpoint = None
            try:
                best = self.checkpoints.restore({"model": _model_state(self)}, step="best")
            except NotFound as error:
                _logger.warning("the best model is not loaded: %s", error)
        output = super()._finalize_training(*args, **kwargs)
        if best is not None:
            self.state.best_global_step, self.state.best_model_checkpoint = best.step, best.url
        return output

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        self.checkpoints.save(self.state.global_step, _parts_of(self), metrics=_metrics_of(self.state))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._restoring is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load all parts: only now does the optimizer exist."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._restoring is None:
            return
        self._random_state = _LaterRandomState()
        state = _parts_of(self) | {"trainer_state": "", "rng": self._random_state}
        self.checkpoints.restore(state, **self._restoring)
        if self._state_file.read_text() != state["trainer_state"]:
            self._state_file.write_text(state["trainer_state"])
            raise _OlderCheckpointError

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states, after the batches of the past have been skipped."""
        super()._load_rng_state(checkpoint)
        if self._restoring is not None:
            self._random_state.set()


class _LaterRandomState(RandomState):
    """Keep the random states of a checkpoint until they are to be set."""

    _loaded: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state

    def set(self) -> None:
        """Set them; those of another number of ranks were not loaded."""
        if self._loaded is not None:
            super().load_state_dict(self._loaded)


class _Inputs:
    """Make a loader's batches the inputs of a causal language model."""

    def __init__(self, loader: RescalableLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            tokens = batch.pop("tokens")
            yield {"input_ids": tokens, "labels": tokens, **batch}


def install(**checkpoints: Any) -> None:
    """Put `Trainer` in the place of transformers' own, for libraries that derive from it or make one.

    Call it before they are imported.

    Args:
        checkpoints: keywords of `CheckpointManager`.

    Raises:
        ConfigurationError: a class derives from transformers' `Trainer` already.
    """
    others = [each for each in _Native.__subclasses__() if each is not Trainer]
    derived = [f"{each.__module__}.{each.__name__}" for each in others]
    if derived:
        raise ConfigurationError(f"install() must be called before the import of {', '.join(derived)}")
    Trainer.checkpoint_options = checkpoints
    for module in ("transformers", "transformers.trainer"):
        vars(sys.modules[module])["Trainer"] = Trainer


class _OlderCheckpointError(Exception):
    """The newest checkpoint turned out to be damaged: the loop has to begin with an older one's state."""


class _TrainerState:
    """Make the text of Trainer's own state when it is saved; `Trainer` reads it from a file."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> str:
        parts = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        exportable = [each for each in parts if isinstance(each, ExportableState)]
        state = dataclasses.replace(self._trainer.state, stateful_callbacks=exportable)
        return json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True)

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def _absolute(place: str) -> str:
    return place if "://" in place else os.path.realpath(place)


def _has_adapters(trainer: Any) -> bool:
    return bool(getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", None))


def _metrics_of(state: Any) -> dict[str, float]:
    """Collect what was logged of this step, such as the evaluation that Trainer does before it saves."""
    logged = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    return {k: v for entry in logged for k, v in entry.items() if k != "step" and isinstance(v, int | float)}


def _model_state(trainer: Any) -> ModelState:
    return ModelState(trainer.model, frozen=not _has_adapters(trainer))


def _parts_of(trainer: Any) -> dict[str, Any]:
    """Collect all that `Trainer` restores; what is not of one rank alone comes from the first."""
    state: dict[str, Any] = {"model": _model_state(trainer)}
    if trainer.is_world_process_zero():
        state["trainer_state"] = _TrainerState(trainer)
    if isinstance(trainer.train_dataset, RescalableLoader):
        state["loader"] = trainer.train_dataset
    if not trainer.args.save_only_model:
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        state["optimizer"] = OptimizerState(trainer.model, optimizer)
        scaler = getattr(trainer.accelerator, "scaler", None)
        state |= training_state(scheduler=trainer.lr_scheduler, scaler=scaler)  # and random states
    return state


def _keep_rule(args: Any, keep: Any) -> keeping.KeepRule | None:
    """Return what to keep, by `keep` or `save_total_limit`, with the best one if there is a metric for it."""
    rule, limit, metric = keeping.as_rule(keep), args.save_total_limit or 0, args.metric_for_best_model
    counts = rule is None and limit > 0
    if counts:
        rule = keeping.last(limit if metric is None else max(1, limit - 1))
    if metric is None or not (counts or args.load_best_model_at_end):
        return rule
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    best = keeping.best(1, name, "max" if args.greater_is_better else "min")
    return best | (rule or keeping.every_steps(1))  # the first `best` is the one that is loaded at the end


def _refuse_unsupported(trainer: Any) -> None:
    """Raise ConfigurationError for what cannot be saved, or would be left out of a checkpoint."""
    args = trainer.args
    data = trainer.train_dataset
    version = transformers.__version__
    overridden = [name for name in vars(Trainer) if name.startswith("_") and not name.startswith("__")]
    missing = [name for name in overridden if not hasattr(_Native, name)]
    wrong = {
        f"transformers {version} has no Trainer.{', '.join(missing)}: use another version": missing,
        "a RescalableLoader needs a data set with options=DataOptions(positions=True) here": (
            isinstance(data, RescalableLoader) and not data.dataset.options.positions
        ),
        "a ShardedDataset has each rank's own data, which Trainer would deal out again: pass "
        "train_dataset=RescalableLoader(dataset, batch_size=...)": isinstance(data, ShardedDataset)
        and args.world_size > 1,
        "DeepSpeed shards and saves in a way of its own: use FSDP, or Trainer without this adapter": (
            trainer.is_deepspeed_enabled
        ),
        "torch_xla is not supported": trainer.is_fsdp_xla_enabled,
        "push_to_hub would push Trainer's own checkpoints: set hub_strategy='end'": (
            args.push_to_hub and args.hub_strategy != "end"
        ),
        "save_on_each_node is for disks that nodes do not share, but a checkpoint has parts of every rank: leave it "
        "out, and give an output_dir that all nodes share, or a URL": (
            args.save_on_each_node and "://" not in trainer.checkpoint_root
        ),
        "auto_find_batch_size begins the steps anew in the middle of a run, which has checkpoints of later ones: set "
        "per_device_train_batch_size": args.auto_find_batch_size,
        "enable_jit_checkpoint saves without the ranks agreeing on it: give checkpoints={'save': "
        "saving.on_preemption()} instead": getattr(args, "enable_jit_checkpoint", False),
        "use_adaptive_entropy keeps a file in Trainer's own checkpoints, which would not be in these": (
            getattr(args, "use_adaptive_entropy", False)
        ),
        "WANDB_LOG_MODEL=checkpoint and HF_MLFLOW_LOG_ARTIFACTS log Trainer's own checkpoints: unset them, and give "
        "checkpoints={'events': [WeightsAndBiases()]}, or MLflow()": (
            ("wandb" in args.report_to and os.getenv("WANDB_LOG_MODEL") == "checkpoint")
            or (
                "mlflow" in args.report_to
                and os.getenv("HF_MLFLOW_LOG_ARTIFACTS", "").upper() in ENV_VARS_TRUE_VALUES
            )
        ),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigurationError(text)
