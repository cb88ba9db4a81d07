"""Save the checkpoints of transformers' `Trainer` with this library: at URLs, each committed as one."""

from __future__ import annotations

import copy
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ckpt.backends.registry import normal_url
from ckpt.errors import ConfigurationError, NotFound
from ckpt.tools.ls import step_of
from ckpt.trainer_integration import saving
from ckpt.trainer_integration.adapters.host import require_host
from ckpt.trainer_integration.manager import CheckpointManager
from ckpt.trainer_integration.training_state import RandomState

require_host("transformers", oldest="5.10", before="6")
require_host("accelerate", oldest="1.12", before="2")

import transformers
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ckpt.trainer_integration.adapters.transformers_state import (
    SaveByRules,
    keep_rule,
    metrics_of,
    model_state,
    refuse_unsupported,
    trainer_parts,
)

__all__ = ["Checkpoints", "Trainer", "install"]

_logger = logging.getLogger(__name__)

_Native: Any = transformers.Trainer
_AnyTrainer: Any = object  # or a class that derives from it: type checkers cannot know
_LOCAL_FOLDER = "trainer_output"  # Trainer's own default


class Checkpoints(_AnyTrainer):
    """Give a subclass of `Trainer` checkpoints of this library, at a path or URL.

        class MyTrainer(Checkpoints, SFTTrainer): ...

    All that `Trainer` restores is in one commit: model, optimizer, scheduler, scaler, its own state with
    that of callbacks, and the random states of each rank. They are below `output_dir`. If that is a URL,
    everything else that `Trainer` writes goes to the local folder `trainer_output`.

    Args:
        checkpoints: keywords of `CheckpointManager`, such as `keep`, `storage_options` and `async_mode`.
            Without `keep`, `save_total_limit` counts. `save` adds rules to Trainer's `save_strategy`, such
            as `saving.on_preemption()`.
        args, kwargs: as for `Trainer`.

    Attributes:
        checkpoints: the `CheckpointManager`.

    Raises:
        ConfigurationError: the training cannot be saved in this way.
    """

    checkpoint_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, *args: Any, checkpoints: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        roots: list[str] = []

        def with_local_folder(value: Any) -> Any:
            if not isinstance(value, transformers.TrainingArguments):
                return value
            roots.append(normal_url(value.output_dir))
            value = copy.copy(value)  # the caller may make a second Trainer of it
            value.output_dir = _LOCAL_FOLDER if "://" in roots[0] else value.output_dir
            return value

        args = tuple(map(with_local_folder, args))
        super().__init__(*args, **{name: with_local_folder(value) for name, value in kwargs.items()})
        refuse_unsupported(self, missing=[name for name in _OVERRIDDEN if not hasattr(_Native, name)])
        self.checkpoint_root = (roots[0] if roots else normal_url(self.args.output_dir)).rstrip("/")
        options = {**self.checkpoint_options, **(checkpoints or {})}
        if "save" in options:
            self.add_callback(SaveByRules(self))
        options = {"save": saving.at_steps(()), "keep": keep_rule(self.args), **options}
        self.checkpoints = CheckpointManager(self.checkpoint_root, **options)
        self._restoring: dict[str, Any] | None = None

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        """Train; `resume_from_checkpoint` is True, the URL or path of a checkpoint, or one of Trainer's own.

        True goes on from the newest checkpoint that passes its checks, and begins anew without any.
        """
        if trial is not None:
            raise ConfigurationError("hyperparameter search is not supported: its trials share one folder")
        self._restoring = None
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            place = normal_url(resume_from_checkpoint).rstrip("/")
            if os.path.isfile(os.path.join(place, TRAINER_STATE_NAME)):
                return super().train(place, None, **kwargs)
            root, _, name = place.rpartition("/")
            step = step_of(name) if root == self.checkpoint_root else None
            how = {"initial": place} if step is None else {"step": step}
        else:
            how = {"step": "latest-valid"}
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
        with tempfile.TemporaryDirectory() as folder:  # where Trainer reads its own state
            self._restoring, self._state_file = how, Path(folder, TRAINER_STATE_NAME)
            self._state_file.write_text(state["trainer_state"])
            try:
                return super().train(folder, None, **kwargs)
            finally:
                self._restoring = None

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the model as `Trainer` does, in a local folder."""
        if output_dir is not None and "://" in output_dir:
            raise ConfigurationError(
                "save_model writes local folders; `ckpt convert CHECKPOINT URL --to safetensors --weights-only "
                r"--rename '^model\.='` makes a model's folder of a checkpoint, at any URL"
            )
        super().save_model(output_dir, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except _OlderCheckpointError:  # its state is in the file by now
            return self._inner_training_loop(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.checkpoints.wait_durable()
        if self.args.load_best_model_at_end and self.state.best_global_step is not None:
            self._load_best_model()
        return super()._finalize_training(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        self.checkpoints.save(self.state.global_step, trainer_parts(self), metrics=metrics_of(self.state))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._restoring is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load all parts: only now does the optimizer exist."""
        if self._restoring is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = trainer_parts(self) | {"trainer_state": "", "rng": RandomState().state_dict()}
        self.checkpoints.restore(state, **self._restoring)
        self._random_state = state["rng"]
        if self._state_file.read_text() != state["trainer_state"]:
            self._state_file.write_text(state["trainer_state"])
            raise _OlderCheckpointError

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._restoring is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states, after the batches of the past have been skipped."""
        if self._restoring is None:
            super()._load_rng_state(checkpoint)
        else:
            RandomState().load_state_dict(self._random_state)

    def _load_best_model(self) -> None:
        if self.state.best_model_checkpoint is not None:  # one of Trainer's own
            super()._load_best_model()
            return
        step = self.state.best_global_step
        try:
            self.checkpoints.restore({"model": model_state(self)}, step=step)
        except NotFound as error:
            _logger.warning("the best model, of step %d, is not loaded, as it was not saved: %s", step, error)


class Trainer(Checkpoints, _Native):
    """Train as transformers' `Trainer`, with checkpoints of this library."""


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


_OVERRIDDEN = [name for name in vars(Checkpoints) if name.startswith("_") and not name.startswith("__")]
