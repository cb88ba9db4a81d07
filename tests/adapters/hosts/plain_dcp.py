"""A plain program with `dcp.save` and `dcp.load`: `ckpt.install()` is all that changes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapters.life import Life, Reading, latest, loss_of, place, read_life, report, timed, toy_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt


def main(life: Life) -> None:
    dist.init_process_group("gloo")
    if not life.native:
        ckpt.install()
    model = toy_model(life.width)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reading = Reading(life)
    own = {} if life.native else {"loader": reading.loader}
    resumed_step = latest(life.root)
    if resumed_step is not None:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, **own}
        dcp.load(state, checkpoint_id=place(life.root, resumed_step))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step, data in zip(range((resumed_step or 0) + 1, life.steps + 1), reading, strict=False):
        optimizer.zero_grad()
        loss_of(model, step, life.width).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        reading.trained(step, data)
        if step % life.save_every == 0:
            weights, moments = get_state_dict(model, optimizer)
            with timed():
                dcp.save(
                    {"model": weights, "optimizer": moments, **own}, checkpoint_id=place(life.root, step)
                )
    report(life, model, optimizer, resumed_step=resumed_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(read_life())
