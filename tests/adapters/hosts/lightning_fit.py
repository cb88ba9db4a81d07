"""Lightning: FSDP2 in a `ModelParallelStrategy`, or DDP with a `CheckpointIO` (option `strategy`)."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from adapters.life import Life, Reading, loss_of, read_life, report, timed, toy_model
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from ckpt.trainer_integration.adapters import lightning as adapter

warnings.simplefilter("ignore")  # the host's own, of the number of workers and the like


class Toy(pl.LightningModule):
    """The toy model. The data of a step are read and noted; the loss goes by the step, the same on all ranks."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self.save_hyperparameters({"width": life.width})
        self.life, self.resumed_step = life, None
        if life.options["strategy"] == "ddp":
            self.model = toy_model(life.width)

    def configure_model(self) -> None:
        if self.life.options["strategy"] != "ddp" and not hasattr(self, "model"):
            self.model = toy_model(self.life.width)
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.resumed_step = checkpoint["global_step"]

    def training_step(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        step = self.trainer.global_step + 1
        self.reading.note(step, data["tokens"])
        return loss_of(self.model, step, self.life.width)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        self.reading = Reading(self.life)
        return self.reading.loader


def strategy_of(life: Life) -> Any:
    if life.options["strategy"] == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    kind = ModelParallelStrategy if life.native else adapter.ModelParallelStrategy
    return kind(
        data_parallel_size=life.options["world_size"],
        tensor_parallel_size=1,
        save_distributed_checkpoint=life.options["strategy"] == "sharded",
    )


def main(life: Life) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    elastic = TorchElasticEnvironment()
    life.options["world_size"] = elastic.world_size()  # type: ignore[index]
    kind = ModelCheckpoint if life.native else adapter.ModelCheckpoint
    saving = kind(
        dirpath=life.root, filename="step-{step}", auto_insert_metric_name=False,
        every_n_train_steps=life.save_every, save_top_k=2, monitor="step", mode="max",
    )  # fmt: skip
    plugins: list[Any] = [elastic]
    is_async = life.options.get("async_save", False)
    if not life.native and (
        is_async or life.options["strategy"] == "ddp"
    ):  # the adapter's strategies have one
        plugins.append(adapter.CheckpointIO(async_save=is_async))
    trainer = pl.Trainer(
        accelerator="cpu", devices=elastic.world_size(), strategy=strategy_of(life), plugins=plugins,
        callbacks=[saving], max_steps=life.steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=life.scratch,
    )  # fmt: skip
    save = trainer.save_checkpoint

    def save_timed(*args: Any, **options: Any) -> None:
        with timed():
            save(*args, **options)

    trainer.save_checkpoint = save_timed
    module = Toy(life)
    trainer.fit(module, ckpt_path="last")
    assert trainer.global_step == life.steps
    assert len(saving.best_k_models) == 2
    optimizer = trainer.strategy.optimizers[0]
    report(life, module.model, optimizer, resumed_step=module.resumed_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(read_life())
