"""Train a small byte-level GPT under FSDP2, with checkpoints on any storage, resumable on any
number of ranks.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --root s3://bucket/run --steps 100

It reads the Python standard library's sources, which every machine has. Each run resumes from the
last committed checkpoint below `--root`, if there is one, however many ranks wrote it.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from state_digest import digest
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import ckpt

GLOBAL_BATCH = 6  # divisible by 1, 2, 3 and 6 ranks


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        result: torch.Tensor = hidden + self.dropout(self.mlp(self.norm2(hidden)))
        return result


class GPT(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads=4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Text:
    """Random windows of the standard library's sources.

    All ranks draw the same batch and take their share, so the order of the data does not depend on
    the number of ranks.
    """

    def __init__(self, length: int, seed: int) -> None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.data = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8
        )
        self.length = length
        self.generator = torch.Generator().manual_seed(seed)
        self.samples_drawn = 0

    def batch(self, rank: int, world_size: int) -> torch.Tensor:
        starts = torch.randint(len(self.data) - self.length, (GLOBAL_BATCH,), generator=self.generator)
        self.samples_drawn += GLOBAL_BATCH
        mine = starts.chunk(world_size)[rank]
        return torch.stack([self.data[start : start + self.length + 1] for start in mine.tolist()]).long()


class TrainState(Stateful):
    """The state of a run: model, optimizer, scheduler, step, position in the data, random states."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, text: Text) -> None:
        self.model, self.optimizer, self.scheduler, self.text = model, optimizer, scheduler, text
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "samples_drawn": self.text.samples_drawn,
            "random": {"data": self.text.generator.get_state(), "torch": torch.get_rng_state()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.text.samples_drawn = state["step"], state["samples_drawn"]
        self.text.generator.set_state(state["random"]["data"])
        torch.set_rng_state(state["random"]["torch"])


def main() -> None:
    options = arguments()
    device = start_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state = build(options, device)
    say(f"{world_size} rank(s), {sum(p.numel() for p in state.model.parameters()) / 1e6:.1f} M parameters")
    url = resume(state, options)
    say(f"resumed from {url}" if url else "no committed checkpoint, starting from scratch")
    report(options, "loaded", state)
    model = torch.compile(state.model) if options.compile else state.model
    while state.step < options.steps:
        started_s = time.monotonic()
        tokens = state.text.batch(rank, world_size).to(device)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad()
        state.step += 1
        dist.all_reduce(loss, dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM)
        mean = loss.item() / (1 if device.type == "cuda" else world_size)
        say(f"step {state.step:4d}  loss {mean:.4f}  {time.monotonic() - started_s:.2f} s")
        if state.step % options.save_every == 0:
            save(state, options)
    report(options, "final", state)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", required=True, help="where checkpoints go: a folder or URL")
    parser.add_argument("--storage-options", type=json.loads, default={}, help="JSON")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument(
        "--report", type=Path, help="write digests of the loaded and final states here (JSON)"
    )
    return parser.parse_args()


def start_process_group() -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return torch.device("cuda")
    dist.init_process_group("gloo")
    return torch.device("cpu")


def build(options: argparse.Namespace, device: torch.device) -> TrainState:
    torch.manual_seed(options.seed)
    model = GPT(options.width, options.layers, options.length).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    return TrainState(model, optimizer, scheduler, Text(options.length, options.seed))


def place(options: argparse.Namespace, step: int) -> str:
    return f"{options.root.rstrip('/')}/step-{step:06d}"


def save(state: TrainState, options: argparse.Namespace) -> None:
    url, started_s = place(options, state.step), time.monotonic()
    say(f"saving {url}")
    metadata = ckpt.save({"train": state}, url, storage_options=options.storage_options)
    seconds = time.monotonic() - started_s
    megabytes = sum(info.length for info in metadata.storage_data.values()) / 1e6
    say(f"saved {url}: {megabytes:.1f} MB in {seconds:.2f} s ({megabytes / seconds:.0f} MB/s)")


def resume(state: TrainState, options: argparse.Namespace) -> str | None:
    """Load the last committed checkpoint.

    Its place follows from the step, so nothing has to be listed.
    """
    for step in range(options.steps - options.steps % options.save_every, 0, -options.save_every):
        try:
            ckpt.load({"train": state}, place(options, step), storage_options=options.storage_options)
        except (ckpt.errors.NotFound, ckpt.errors.NotCommitted):
            continue  # on all ranks alike
        return place(options, step)
    return None


def report(options: argparse.Namespace, name: str, state: TrainState) -> None:
    """Note the state's digest; every rank takes part, the first one writes."""
    if options.report is None:
        return
    hashes = digest({"train": state.state_dict()})
    if dist.get_rank() == 0:
        reports = json.loads(options.report.read_text()) if options.report.exists() else {}
        options.report.write_text(json.dumps({**reports, name: {"step": state.step, "digest": hashes}}))


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
