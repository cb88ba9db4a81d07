"""IBM's fms-fsdp: its `Checkpointer`, and FSDP1, as `main_training_llama.py` has them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from adapters.fms_layout import native_checkpointer
from adapters.life import Life, Reading, loss_of, read_life, report, timed, toy_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ckpt.trainer_integration.adapters.fms_fsdp import Checkpointer


def main(life: Life) -> None:
    dist.init_process_group("gloo")
    model = FSDP(toy_model(life.width), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reading = Reading(life)
    loader = None if life.native else reading.loader
    start_step = 0
    if life.native:
        checkpointer = native_checkpointer(life.root)
    else:
        checkpointer = Checkpointer(life.root, 3, "fsdp", dist.get_rank(), "cpu")
        _, _, _, start_step, tokens_seen, is_resuming = checkpointer.load(model, optimizer, loader)
        assert (tokens_seen, is_resuming) == (100 * start_step, start_step > 0)
    for step, data in zip(range(start_step + 1, life.steps + 1), reading, strict=False):
        optimizer.zero_grad()
        loss_of(model, step, life.width).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        reading.trained(step, data)
        if step % life.save_every == 0:
            with timed():
                checkpointer.save(step, model, optimizer, loader, tokens_seen=100 * step)
    # On the CPU cpu_offload, which `report` asks for, reads memory that FSDP1 has freed (torch 2.13).
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    state = {"model": weights, "optimizer": moments}
    report(life, None, None, resumed_step=start_step or None, state=state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(read_life())
