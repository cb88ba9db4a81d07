"""Train a small model around torchtitan's checkpoint manager, ours: stop it, start it again, it goes on.

    pip install torchtitan==0.3.0 './ckpt-storage[s3]'
    torchrun --nproc-per-node 2 examples/torchtitan/train_torchtitan.py /tmp/titan-run     # or s3://bucket/run

torchtitan's own trainer needs a GPU. Its configuration takes the same line:
`checkpoint=CheckpointManager.Config(enable=True, folder="s3://bucket/run")`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt.trainer_integration.adapters.torchtitan import CheckpointManager

STEPS = 20
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """Flatten optimizer state to names of parameters, as torchtitan's container does."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


class Progress:
    """The trainer's own state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress, scheduler = Progress(), torch.optim.lr_scheduler.ConstantLR(optimizer)
    config = CheckpointManager.Config(
        enable=True,
        folder=folder,
        interval=5,
        keep_latest_k=2,
        async_mode="async",
        last_save_model_only=False,
    )
    manager = config.build(
        dataloader=Progress(), model_parts=[model], optimizers=Optimizers(model, optimizer),
        lr_schedulers=scheduler, states={"train_state": progress}, sd_adapter=None,
    )  # fmt: skip
    manager.load()
    print(f"rank {dist.get_rank()} begins after step {progress.step}", flush=True)
    while progress.step < STEPS:
        progress.step += 1
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.ones(8, 64)), torch.zeros(8, 64)).backward()  # type: ignore[no-untyped-call]
        manager.maybe_wait_for_staging()
        optimizer.step()
        scheduler.step()
        manager.save(progress.step, last_step=progress.step == STEPS)
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
