"""Save and load Lightning's checkpoints with this library: for programs that import `pytorch_lightning`.

Those that import `lightning.pytorch` take the same names from `ckpt.trainer_integration.adapters.lightning`.
"""

from __future__ import annotations

from ckpt.trainer_integration.adapters.host import require_host
from ckpt.trainer_integration.adapters.lightning_parts import Finding, Saving, Sharded

require_host("pytorch-lightning", oldest="2.6", before="2.7")

from pytorch_lightning import callbacks, strategies
from pytorch_lightning.plugins.io import TorchCheckpointIO

__all__ = ["CheckpointIO", "FSDPStrategy", "ModelCheckpoint", "ModelParallelStrategy"]


class CheckpointIO(Saving, TorchCheckpointIO):
    """Save checkpoints of Lightning to folders and URLs: `Trainer(plugins=[CheckpointIO()])`."""


class ModelParallelStrategy(Sharded, strategies.ModelParallelStrategy):
    """Save the shards of all ranks; arguments are those of Lightning's class."""

    io_type = CheckpointIO

    @property
    def gathers(self) -> bool:
        return not self._save_distributed_checkpoint


class FSDPStrategy(Sharded, strategies.FSDPStrategy):
    """Save the shards of all ranks; arguments are those of Lightning's class."""

    io_type = CheckpointIO

    @property
    def gathers(self) -> bool:
        return bool(self._state_dict_type == "full")


class ModelCheckpoint(Finding, callbacks.ModelCheckpoint):
    """Find the newest durable checkpoint in `dirpath` for `ckpt_path="last"`, whatever its name."""

    strategy_type = strategies.Strategy
