"""Train as fms-fsdp's `main_training_llama.py` does, with FSDP1 and the `Checkpointer` of the adapter.

    torchrun --nproc-per-node 2 examples/fms_fsdp/train_fms.py s3://bucket/run

Kill it at any moment, and start it again, on any number of ranks. It runs on the CPU, and needs no fms-fsdp.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ckpt.trainer_integration.adapters.fms_fsdp import Checkpointer

STEPS, SAVE_EVERY = 20, 5


def main(ckpt_save_path: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    model = FSDP(layers, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())

    checkpointer = Checkpointer(ckpt_save_path, 2, "fsdp", dist.get_rank(), 0)
    model, optimizer, _, start_step, tokens_seen, is_resuming = checkpointer.load(model, optimizer, None)
    for step in range(start_step + 1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        tokens_seen += 8
        if step % SAVE_EVERY == 0:
            checkpointer.save(step, model, optimizer, None, tokens_seen=tokens_seen)
    if dist.get_rank() == 0:
        print(
            f"went on from step {start_step}, trained to step {STEPS}: {tokens_seen} tokens, {is_resuming=}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
