"""Train with Ray Train and FSDP2, and go on from the newest checkpoint: run it twice, or kill a worker.

pip install 'ray[train]>=2.51,<2.70'
python examples/ray/train_with_ray.py /tmp/runs --workers 2     # or s3://bucket/runs
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt.trainer_integration.adapters.ray import CheckpointManager, url_of


def train(config: dict[str, Any]) -> None:
    device = ray.train.torch.get_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with CheckpointManager(save=10, keep=2) as manager:
        restored = manager.restore(model=model, optimizer=optimizer)
        for step in range(restored.step + 1 if restored else 1, config["steps"] + 1):
            batch = torch.randn(32, 16, device=device)
            loss = nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            manager.step(step, model=model, optimizer=optimizer, metrics={"loss": loss.item()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("storage", help="folder or s3:// URL for Ray's experiments")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    result = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=ray.train.RunConfig(
            name="ckpt-example",
            storage_path=options.storage,
            failure_config=ray.train.FailureConfig(max_failures=2),
        ),
    ).fit()
    print("the newest checkpoint:", url_of(result.checkpoint))


if __name__ == "__main__":
    main()
