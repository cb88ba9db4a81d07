"""A training loop around torch_checkpointing's manager, in its default configuration but for storage and patience."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapters.life import Life, Reading, latest, loss_of, place, read_life, report, timed, toy_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, TorchSerialization
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from ckpt.trainer_integration.adapters.torch_checkpointing import StorageConfig

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def main(life: Life) -> None:
    dist.init_process_group("gloo")
    ours = StorageConfig()
    ours.create_storage()  # also for native runs: without CUDA torch_checkpointing cannot describe shards
    is_async = life.options.get("async", True)
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=200)
    manager = CheckpointManager(
        CheckpointManager.Config(
            items={
                "model": ItemSpec(resharder=DefaultResharder()),
                "optimizer": ItemSpec(resharder=DefaultResharder()),
                "step": ItemSpec(layout=LayoutInfo("step.json", JsonSerialization()), required=False),
                "loader": ItemSpec(layout=LayoutInfo("loader.pt", TorchSerialization()), required=False),
            },
            save=AsyncCheckpointSaverConfig(process_config=process)
            if is_async
            else SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False) if life.native else ours,
        )
    )
    model = toy_model(life.width)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reading = Reading(life)
    resumed_step = latest(life.root)
    if resumed_step is not None:
        into = state_of(model, optimizer, 0, reading, everywhere=True)
        loaded = manager.load(place(life.root, resumed_step), into, strict=True)
        assert loaded["step"] == resumed_step
        reading.loader.load_state_dict(loaded["loader"])
        set_state_dict(
            model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"], options=FLAT
        )
    for step, data in zip(range((resumed_step or 0) + 1, life.steps + 1), reading, strict=False):
        optimizer.zero_grad()
        loss_of(model, step, life.width).backward()  # type: ignore[no-untyped-call]
        with manager.lock():
            optimizer.step()
        reading.trained(step, data)
        if step % life.save_every == 0:
            with timed():
                manager.save(place(life.root, step), state_of(model, optimizer, step, reading))
                if life.options.get("fsync"):
                    make_durable(Path(place(life.root, step)))
    manager.close()
    report(life, model, optimizer, resumed_step=resumed_step)
    dist.destroy_process_group()


def make_durable(checkpoint: Path) -> None:
    """Do what torch_checkpointing leaves out: have the disk take all bytes, each rank some of the files."""
    dist.barrier()
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for path in [*files[dist.get_rank() :: dist.get_world_size()], checkpoint, checkpoint.parent]:
        opened = os.open(path, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)
    dist.barrier()


def state_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    reading: Reading,
    *,
    everywhere: bool = False,
) -> dict[str, Any]:
    """Make the items to save, of which the first rank has two more; `everywhere` to load into."""
    weights, moments = get_state_dict(model, optimizer, options=FLAT)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    if everywhere:
        return {**state, "step": step, "loader": None}  # torch_checkpointing makes what it finds
    of_first = {"step": step, "loader": reading.loader.state_dict_of_all_ranks()}
    return {**state, **of_first} if dist.get_rank() == 0 else state


if __name__ == "__main__":
    main(read_life())
