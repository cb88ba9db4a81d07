"""Save and load the shards of a tensor-parallel layer with Megatron-Core, on a folder or a URL.

    pip install 'megatron-core>=0.16,<0.17'
    torchrun --nproc-per-node 2 examples/megatron/train_megatron.py s3://bucket/run

Kill it at any moment, and start it again, on 1, 2, 4 or 8 ranks. It runs on the CPU.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from ckpt.trainer_integration.adapters import megatron

STEPS, SAVE_EVERY, ROWS, COLUMNS = 20, 5, 64, 32


def main(root: str) -> None:
    megatron.install()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight = torch.zeros(ROWS // ranks, COLUMNS)  # this rank's rows of a column-parallel layer

    start = 0
    if (newest := megatron.latest_checkpoint(root)) is not None:
        state = {"weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank, ranks))}
        loaded = dist_checkpointing.load(state, newest)
        weight, start = loaded["weight"], loaded["step"]
    for step in range(start + 1, STEPS + 1):
        weight += 1.0
        if step % SAVE_EVERY == 0:
            place = f"{root}/iter_{step:07d}"
            state = {
                "weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank, ranks)),
                "step": step,
            }
            dist_checkpointing.save(state, place)
    assert bool((weight == STEPS).all())
    if rank == 0:
        print(f"went on from step {start}, trained to step {STEPS}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
