"""Train with accelerate's own loop, sharded by FSDP2: `save_state` and `load_state` are all that change."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from adapters.hosts.huggingface import Texts, small_llama
from adapters.life import Life, Reading, read_life, report, timed
from torch.utils.data import DataLoader

import ckpt
from ckpt.errors import NotFound


def main(life: Life) -> None:
    PartialState(cpu=True)
    # accelerate knows FSDP on accelerators alone; torch's runs on gloo too
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=life.options["fsdp"], auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = small_llama(life.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=life.steps)
    loader = DataLoader(Texts(life.steps, accelerator.num_processes), batch_size=4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    reading = Reading(life)
    accelerator.register_for_checkpointing(reading.loader)
    resumed_step = resume(life, accelerator)
    batches = accelerator.skip_first_batches(loader, resumed_step or 0)
    for step, (batch, data) in enumerate(zip(batches, reading, strict=False), (resumed_step or 0) + 1):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        reading.trained(step, data)
        if step % life.save_every == 0:
            save(life, accelerator, f"{life.root}/step-{step:08d}")
    report(life, model, optimizer.optimizer, resumed_step=resumed_step)
    dist.destroy_process_group()


def save(life: Life, accelerator: Any, place: str) -> None:
    with timed():
        if life.native:
            accelerator.save_state(place)
        else:
            from ckpt.trainer_integration.adapters.accelerate import save_state

            save_state(accelerator, place)


def resume(life: Life, accelerator: Any) -> int | None:
    """Load the newest committed checkpoint, which the first rank looks for."""
    if life.native:
        return None
    from ckpt.trainer_integration.adapters.accelerate import load_state

    steps: list[int | None] = [None]
    if accelerator.is_main_process:
        with contextlib.suppress(NotFound):
            committed = [each.step for each in ckpt.list_checkpoints(life.root) if each.state == "committed"]
            steps = [max(filter(None, committed), default=None)]
    dist.broadcast_object_list(steps)
    if steps[0] is not None:
        load_state(accelerator, f"{life.root}/step-{steps[0]:08d}")
    return steps[0]


if __name__ == "__main__":
    main(read_life())
