"""Megatron-Core: `dist_checkpointing.save` and `load` of shards, as a distributed optimizer has them.

Every rank holds the parameters, owns a part of the rows of each, with the moments of Adam, and steps
these alone. The native run saves with Megatron-Core's own strategy, which needs a CUDA device in three
places (a tensor for an `all_reduce`, and `synchronize`): on these hosts without one they get the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from adapters.life import Life, Reading, loss_of, read_life, report, timed, toy_model
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch import nn

from ckpt.trainer_integration.adapters import megatron


class DistributedOptimizer:
    """AdamW on the rows of this rank, after which all ranks gather all rows."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.rows = {
            name: nn.Parameter(part_of(parameter.detach()).clone())
            for name, parameter in self.parameters.items()
        }
        self.adam = torch.optim.AdamW(self.rows.values(), lr=1e-2)
        for row in self.rows.values():
            row.grad = torch.zeros_like(row)
        self.adam.step()  # to have moments to load into
        for state in self.adam.state.values():
            state["step"].zero_()
        with torch.no_grad():
            for name, row in self.rows.items():
                row.copy_(part_of(self.parameters[name]))

    def step(self) -> None:
        for name, row in self.rows.items():
            gradient = self.parameters[name].grad
            assert gradient is not None
            row.grad = part_of(gradient).clone()
        self.adam.step()
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        for name, row in self.rows.items():
            parts = [torch.empty_like(row) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, row.detach())
            self.parameters[name].copy_(torch.cat(parts))

    def sharded_state_dict(self) -> dict[str, Any]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        state: dict[str, Any] = {}
        for name, row in self.rows.items():
            moments = self.adam.state[row]
            tensors = {"param": row.data, "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
            state[name] = {
                kind: ShardedTensor.from_rank_offsets(f"optimizer.{kind}.{name}", tensor, (0, rank, ranks))
                for kind, tensor in tensors.items()
            }
        return state


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def main(life: Life) -> None:
    dist.init_process_group("gloo")
    if life.native:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *_: None
    else:
        megatron.install()
    model = toy_model(life.width)
    optimizer = DistributedOptimizer(model)
    reading = Reading(life)
    resumed_step = None
    newest = None if life.native else megatron.latest_checkpoint(life.root)
    if newest is not None:
        state = {"model": optimizer.sharded_state_dict(), "random": random_state(None)}
        loaded = dist_checkpointing.load(state, newest, strict="raise_all")
        resumed_step = loaded["step"]
        reading.loader.load_state_dict(loaded["loader"])
        assert loaded["random"] == f"of step {resumed_step}"
        with torch.no_grad():
            for name, row in optimizer.rows.items():
                for kind, value in loaded["model"][name].items():
                    (row if kind == "param" else optimizer.adam.state[row][kind]).copy_(value)
                optimizer.adam.state[row]["step"].fill_(resumed_step)
        optimizer.gather()
    for step, data in zip(range((resumed_step or 0) + 1, life.steps + 1), reading, strict=False):
        model.zero_grad()
        loss_of(model, step, life.width).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        reading.trained(step, data)
        if step % life.save_every == 0:
            place = f"{life.root}/iter_{step:07d}"
            if life.native:
                os.makedirs(place, exist_ok=True)
            random = random_state(f"of step {step}")
            loader = reading.loader.state_dict_of_all_ranks()
            state = {
                "model": optimizer.sharded_state_dict(),
                "random": random,
                "step": step,
                "loader": loader,
            }
            with timed():
                dist_checkpointing.save(state, place)
    whole: dict[str, torch.Tensor] = {}
    for row in optimizer.rows.values():
        for kind in ("exp_avg", "exp_avg_sq"):
            parts = [torch.empty_like(row) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, optimizer.adam.state[row][kind])
            whole[f"{kind}.{len(whole)}"] = torch.cat(parts)
    report(
        life,
        None,
        None,
        resumed_step=resumed_step,
        state={"model": dict(model.state_dict()), "optimizer": whole},
    )
    dist.destroy_process_group()


def random_state(value: str | None) -> ShardedObject:
    return ShardedObject("random", value, (1,), (0,), replica_id=dist.get_rank())


if __name__ == "__main__":
    main(read_life())
