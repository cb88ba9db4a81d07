"""Train a small model, saved by torch_checkpointing into our storage: stop it, start it again, it goes on.

pip install torch_checkpointing==0.1.1 './ckpt-storage[s3]'
torchrun --nproc-per-node 2 examples/torch_checkpointing/train_torch_checkpointing.py /tmp/tc-run     # or s3://bucket/run
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec

import ckpt
from ckpt.errors import NotFound
from ckpt.trainer_integration.adapters.torch_checkpointing import StorageConfig

STEPS = 20
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def main(root: str) -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    items = {name: ItemSpec(resharder=DefaultResharder()) for name in ("model", "optimizer")}
    manager = CheckpointManager(CheckpointManager.Config(items=items, storage_config=StorageConfig(root)))
    first = 1
    if (latest := latest_step(root)) is not None:
        weights, moments = get_state_dict(model, optimizer, options=FLAT)
        manager.load(f"step-{latest}", {"model": weights, "optimizer": moments}, strict=True)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
        first = latest + 1
    print(f"rank {dist.get_rank()} begins with step {first}", flush=True)
    for step in range(first, STEPS + 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.ones(8, 64)), torch.zeros(8, 64)).backward()  # type: ignore[no-untyped-call]
        with manager.lock():
            optimizer.step()
        if step % 5 == 0:
            weights, moments = get_state_dict(model, optimizer, options=FLAT)
            manager.save(f"step-{step}", {"model": weights, "optimizer": moments})
    manager.close()
    dist.destroy_process_group()


def latest_step(root: str) -> int | None:
    """Find the newest committed checkpoint: the first rank looks, and tells the others."""
    steps: list[int | None] = [None]
    if dist.get_rank() == 0:
        with contextlib.suppress(NotFound):
            steps = [next((each.step for each in ckpt.list_checkpoints(root) if each.latest), None)]
    dist.broadcast_object_list(steps)
    return steps[0]


if __name__ == "__main__":
    main(sys.argv[1])
