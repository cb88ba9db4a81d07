"""Save and load Lightning's checkpoints with this library: for programs that import `lightning.pytorch`.

Those that import `pytorch_lightning` take the same names from `ckpt.trainer_integration.adapters.pytorch_lightning`.
"""

from __future__ import annotations

from ckpt.trainer_integration.adapters.host import require_host
from ckpt.trainer_integration.adapters.lightning_parts import adapt

require_host("lightning", oldest="2.6", before="2.7")

__all__ = ["CheckpointIO", "FSDPStrategy", "ModelCheckpoint", "ModelParallelStrategy"]

CheckpointIO, FSDPStrategy, ModelCheckpoint, ModelParallelStrategy = adapt("lightning.pytorch", __name__)
