"""Lightning Fabric with DDP: a program with a `CheckpointManager`, whose model and optimizer Fabric has wrapped."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from adapters.life import Life, Reading, loss_of, place, read_life, report, timed, toy_model
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy

import ckpt


def main(life: Life) -> None:
    elastic = TorchElasticEnvironment()
    fabric = Fabric(
        accelerator="cpu",
        devices=elastic.world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[elastic],
    )
    fabric.launch()
    plain = toy_model(life.width)
    model: Any
    optimizer: Any
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    reading = Reading(life)
    parts = {"model": model, "optimizer": optimizer, "loader": reading.loader}
    resumed_step = None
    with ckpt.CheckpointManager(life.root, save=life.save_every, preflight=False) as manager:
        if not life.native and (restored := manager.restore(parts)):
            resumed_step = restored.step
        for step, data in zip(range((resumed_step or 0) + 1, life.steps + 1), reading, strict=False):
            optimizer.zero_grad()
            fabric.backward(loss_of(model, step, life.width))
            optimizer.step()
            reading.trained(step, data)
            if life.native and step % life.save_every == 0:
                fabric.save(place(life.root, step), {"model": model, "optimizer": optimizer})
            elif not life.native:
                with timed():
                    manager.step(step, parts)
    report(life, plain, optimizer.optimizer, resumed_step=resumed_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(read_life())
