"""Give torchtitan a checkpoint manager that commits: name its `Config` in place of torchtitan's own.

torchtitan decides when to save, what the state is, and how; `ckpt.CheckpointManager` saves it,
removes old checkpoints, and finds the one to go on from.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.api import load
from ckpt.errors import ConfigurationError, LoadFailed, NotFound
from ckpt.format.names import step_of
from ckpt.options import ManagerOptions, SaveOptions
from ckpt.ranks.group import Ranks
from ckpt.tools.ls import list_checkpoints
from ckpt.trainer_integration.adapters.host import require_host
from ckpt.trainer_integration.keeping import last
from ckpt.trainer_integration.manager import CheckpointManager as Manager
from ckpt.trainer_integration.run.async_modes import AsyncMode as UploadMode
from ckpt.trainer_integration.saving import at_steps

require_host("torchtitan", oldest="0.3.0", before="0.4")

from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.components.checkpointer.dcp import CheckpointManager as TitanManager
from torchtitan.tools.utils import GarbageCollection

__all__ = ["CheckpointManager"]

_logger = logging.getLogger(__name__)

_MAX_NAMES = 20
_UPLOADS: dict[str, UploadMode] = {
    "disabled": "off",
    "async": "thread",
    "async_with_pinned_mem": "process",
}


class CheckpointManager(TitanManager):
    """Save and restore a torchtitan run with this library, on paths and URLs.

    Its `Config` takes every setting of torchtitan's own, and all of them are obeyed. Checkpoints
    are the folders `step-<number>` (eight digits) below `folder`; torchtitan's own at the same
    place are gone on from, and stay.

    Raises:
        ConfigurationError: a setting is wrong, or the place cannot be used.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanManager.Config):
        """Settings of torchtitan's `CheckpointManager`, and two more.

        Attributes:
            storage_options: as for `ckpt.save`. torchtitan logs its settings: leave credentials to
                the environment.
            trusted_objects: as for `ckpt.load`; for checkpoints whose objects need more than
                torch's safe types.
        """

        storage_options: dict[str, str] = field(default_factory=dict)
        trusted_objects: list[str] = field(default_factory=list)

        def __post_init__(self) -> None:
            TitanManager.Config.__post_init__(self)

    save_future: Future[None] | None

    def __init__(self, config: Config, **components: Any) -> None:
        plain = copy.copy(config)
        plain.async_mode, plain.keep_latest_k = "disabled", 0  # ours: no thread that purges, no group
        super().__init__(plain, **components)
        if not self.enable:
            return
        self.keep_latest_k = config.keep_latest_k
        self._is_async = config.async_mode != AsyncMode.DISABLED
        self._options, self._trusted = config.storage_options or None, config.trusted_objects
        self._manager = Manager(
            self.folder,
            save=at_steps(()),  # torchtitan decides
            keep=last(config.keep_latest_k) if config.keep_latest_k else None,
            async_mode=_UPLOADS[config.async_mode],
            preflight=not config.load_only,
            storage_options=self._options,
            options=ManagerOptions(save_options=SaveOptions(trusted_objects=self._trusted)),
        )

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> None:
        """Save a step as `ckpt.CheckpointManager` does; for Hugging Face's format as torchtitan does."""
        if to_hf:
            super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
            return
        step = step_of(checkpoint_id)
        assert step is not None, checkpoint_id
        self._manager.save(step, state_dict)
        self.save_future = Future()  # for `maybe_wait_for_saving`; the manager has the outcome
        if not self._is_async:
            self.maybe_wait_for_saving()
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load any checkpoint as `ckpt.load` does; in Hugging Face's format as torchtitan does."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        options = self._options if "://" in checkpoint_id else None
        load(state_dict, checkpoint_id, storage_options=options, trusted_objects=self._trusted)
        self.states[MODEL].load_state_dict(state_dict)

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        with contextlib.closing(Ranks(None, no_dist=False, purpose="manager")) as ranks:
            own, stock = ranks.from_first(self._steps)
            if step == -1 and own and max(stock, default=-1) > max(own):
                step = max(stock)  # torchtitan's own manager has trained on
            if step in stock - own:
                self.dcp_load(self._states_to_load(step == 0), self._create_checkpoint_id(step), False, False)
                return True
            begins_from = None if own or not stock or step != -1 else max(stock)
            newest = max(own, default=begins_from)
            is_seed = (newest if step == -1 else step) == 0
            states = self._states_to_load(is_seed)
            restored = self._manager.restore(
                states,
                step="latest-valid" if step == -1 else step,
                initial=None if begins_from is None else self._create_checkpoint_id(begins_from),
                strict=False,  # like torchtitan, which ignores keys that are left over
                trusted_objects=self._trusted,
            )
            if restored is None:
                return self._load_initial()
            if ranks.most([len(restored.missing)])[0]:
                lacks = ", ".join(restored.missing[:_MAX_NAMES]) or "keys that other ranks ask for"
                # Reads of a damaged checkpoint may have changed the optimizer: a seed cannot follow here.
                advice = "; load_step=0 begins from this seed" if restored.step == 0 and not is_seed else ""
                raise LoadFailed(f"the checkpoint lacks {lacks}{advice}", url=restored.url)
        self.states[MODEL].load_state_dict(states)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def _steps(self) -> tuple[set[int], set[int]]:
        """Return the steps with a checkpoint of this library, and of stock PyTorch."""
        steps: dict[str, set[int]] = {"committed": set(), "foreign": set()}
        with contextlib.suppress(NotFound):
            for listed in list_checkpoints(self.folder, storage_options=self._options, depth=1):
                if listed.step is not None and listed.path:
                    steps.setdefault(listed.state, set()).add(listed.step)
        return steps["committed"], steps["foreign"]

    def _load_initial(self) -> bool:
        """Begin from `initial_load_path`, or from the model's files in Hugging Face's format, if asked to."""
        place = self.initial_load_path
        if place is None and not self.initial_load_in_hf:
            _logger.info("there is no checkpoint in %s: this is a fresh start", self.folder)
            return False
        place = place or getattr(self.sd_adapter, "hf_assets_path", None)
        if not place:
            raise ConfigurationError(
                "initial_load_in_hf needs initial_load_path, or a model with hf_assets_path: there is neither"
            )
        states = self._states_to_load(self.initial_load_model_only)
        self.dcp_load(states, place, self.initial_load_in_hf, self.initial_load_in_hf_quantized)
        return True

    def _save_last_step(self, curr_step: int) -> None:
        super()._save_last_step(curr_step)
        self.maybe_wait_for_saving()

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._manager.wait_durable()

    def _purge_stale_checkpoints(self) -> None:
        """Leave it to the manager: it removes a checkpoint when a newer one has become durable."""

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "_manager"):
            self._manager.close()
