"""Train with Lightning and FSDP2, and go on from the newest checkpoint: run it twice, or kill it in between.

pip install 'lightning>=2.6,<2.7'       # and s3fs for s3://
python examples/lightning/train_with_lightning.py /tmp/run --devices 2
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt.trainer_integration.adapters.lightning import ModelCheckpoint, ModelParallelStrategy


class Model(pl.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch), batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([*torch.randn(4096, 16)], batch_size=32)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", help="folder or URL of the run's checkpoints")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    checkpoints = ModelCheckpoint(
        dirpath=options.root, filename="{step}", every_n_train_steps=10, save_top_k=2, monitor="loss"
    )
    trainer = pl.Trainer(
        accelerator="auto",
        devices=options.devices,
        strategy=ModelParallelStrategy(data_parallel_size=options.devices, tensor_parallel_size=1),
        max_steps=options.steps,
        callbacks=[checkpoints],
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), ckpt_path="last")
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}; the best checkpoint: {checkpoints.best_model_path}")


if __name__ == "__main__":
    main()
