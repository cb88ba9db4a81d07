"""An FSDP2 trainer to copy: resumes by itself, on any number of ranks, from any storage, and ends
well on SIGTERM.

    torchrun --nproc-per-node 2 examples/train_with_manager.py --root s3://bucket/run

What concerns checkpoints is in `main`. The model and the data (the Python standard library's
sources, byte by byte) are there to be replaced.
"""

from __future__ import annotations

import argparse
import logging
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import ckpt
from ckpt.trainer_integration import keeping, saving
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.events import JsonLines
from ckpt.trainer_integration.sources import MapSource

GLOBAL_BATCH = 12  # divisible by 1, 2, 3, 4, 6 and 12 ranks: the same batches on each


def main() -> None:
    options = arguments()
    device = start_process_group()
    torch.manual_seed(dist.get_rank())
    model = build_model(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    loader = RescalableLoader(build_dataset(options), batch_size=GLOBAL_BATCH // dist.get_world_size())
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with ckpt.CheckpointManager(
        options.root,
        save=saving.every_steps(options.save_every) | saving.last_step() | saving.on_preemption(grace_s=25),
        keep=keeping.last(2) | keeping.every_steps(1000),
        local=options.local_folder,
        max_undurable_s=3600,
        events=[JsonLines(options.events)] if options.events else [],
    ) as manager:
        restored = manager.restore(**parts)
        first = restored.step + 1 if restored else 1
        for step, tokens in zip(range(first, options.steps + 1), loader, strict=False):
            loss = train_step(model, optimizer, tokens.to(device))
            scheduler.step()
            say(f"step {step:5d}  loss {mean(loss):.4f}")
            manager.step(step, last=step == options.steps, **parts)
            if manager.preempted:
                say(f"preempted after step {step}; it is durable")
                break
    dist.destroy_process_group()
    if manager.preempted and step < options.steps:
        raise SystemExit(options.preempted_status)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Model(nn.Module):
    """A small language model over bytes."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(layers)]
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


def build_model(options: argparse.Namespace, device: torch.device) -> nn.Module:
    model = Model(options.width, options.layers, options.length).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch.compile(model) if options.compile else model  # type: ignore[return-value]


def build_dataset(options: argparse.Namespace) -> ShardedDataset:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    documents = [
        torch.frombuffer(bytearray(b"\n" + path.read_bytes()), dtype=torch.uint8).numpy() for path in sources
    ]
    return ShardedDataset(MapSource(documents), sequence_length=options.length + 1, shards=60, eos_token=0)


def start_process_group() -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return torch.device("cuda")
    dist.init_process_group("gloo")
    return torch.device("cpu")


def mean(loss: torch.Tensor) -> float:
    """Average over all ranks."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", required=True, help="where the run's checkpoints go: a folder or URL")
    parser.add_argument("--local-folder", help="a folder on this node's own disk, where saves go first")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument(
        "--preempted-status",
        type=int,
        default=0,
        help="exit status after a preemption: platforms that start failed jobs again need another than 0",
    )
    parser.add_argument("--events", help="append what happens to checkpoints to this file, as lines of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("ckpt.manager").setLevel(logging.INFO)
    main()
