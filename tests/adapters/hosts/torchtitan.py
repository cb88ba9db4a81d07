"""A training loop around torchtitan's checkpoint manager: its trainer itself needs triton and a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from adapters.life import Life, Reading, loss_of, read_life, report, timed, toy_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """Flatten optimizer state to names of parameters, as torchtitan's container does."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


class Values:
    """A part with a few plain values, such as the trainer's own state."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


def main(life: Life) -> None:
    async_mode = life.options.get("async_mode", "disabled")
    dist.init_process_group("cpu:gloo" if life.native else "gloo")
    if life.native:
        from torchtitan.components.checkpointer.dcp import CheckpointManager
    else:
        from ckpt.trainer_integration.adapters.torchtitan import CheckpointManager
    model = toy_model(life.width)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reading = Reading(life)
    trainer = Values(step=0, ntokens_seen=0)
    config = CheckpointManager.Config(
        enable=True, folder=life.root, interval=life.save_every, keep_latest_k=2, async_mode=async_mode,
        last_save_model_only=False,
    )  # fmt: skip
    manager = config.build(
        dataloader=Values(position=3) if life.native else reading.loader,
        model_parts=[model],
        optimizers=Optimizers(model, optimizer),
        lr_schedulers=Values(last_epoch=1),
        states={"train_state": trainer},
        sd_adapter=None,
        base_folder=life.scratch,
    )
    resumed_step = trainer.values["step"] if manager.load() else None
    for step, data in zip(range(trainer.values["step"] + 1, life.steps + 1), reading, strict=False):
        trainer.values["step"] = step
        optimizer.zero_grad()
        loss_of(model, step, life.width).backward()  # type: ignore[no-untyped-call]
        manager.maybe_wait_for_staging()
        optimizer.step()
        reading.trained(step, data)
        with timed():
            manager.save(step, last_step=step == life.steps)
    manager.close()
    report(life, model, optimizer, resumed_step=resumed_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(read_life())
