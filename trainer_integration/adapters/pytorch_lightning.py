"""Save and load Lightning's checkpoints with this library: for programs that import `pytorch_lightning`.

Those that import `lightning.pytorch` take the same names from `ckpt.trainer_integration.adapters.lightning`.
"""

from __future__ import annotations

from ckpt.trainer_integration.adapters.host import require_host
from ckpt.trainer_integration.adapters.lightning_parts import adapt

require_host("pytorch-lightning", oldest="2.6", before="2.7")

__all__ = ["CheckpointIO", "FSDPStrategy", "ModelCheckpoint", "ModelParallelStrategy"]

CheckpointIO, FSDPStrategy, ModelCheckpoint, ModelParallelStrategy = adapt("pytorch_lightning", __name__)
