"""Train with FSDP2 and plain `dcp.save`; go on from the newest checkpoint that is whole.

    torchrun --nproc-per-node 2 examples/dcp/train_dcp.py s3://bucket/run

Kill it at any moment, and start it again, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.errors import NotFound

STEPS, SAVE_EVERY = 20, 5


def main(root: str) -> None:
    ckpt.install()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())

    start = newest_step(root)
    if start:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=f"{root}/step-{start}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(start + 1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if step % SAVE_EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{root}/step-{step}")
    if dist.get_rank() == 0:
        print(f"went on from step {start}, trained to step {STEPS}")
    dist.destroy_process_group()


def newest_step(root: str) -> int:
    """Look for the newest committed checkpoint on the first rank; return its step, or 0, on all."""
    steps = [0]
    if dist.get_rank() == 0:
        with contextlib.suppress(NotFound):  # on the first start
            steps += [each.step or 0 for each in ckpt.list_checkpoints(root) if each.state == "committed"]
    newest = [max(steps)]
    dist.broadcast_object_list(newest)
    return newest[0]


if __name__ == "__main__":
    main(sys.argv[1])
