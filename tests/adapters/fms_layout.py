"""Save as fms-fsdp does, whose class is in no wheel: the same calls of torch, the same files.

With FMS_FSDP_CHECKOUT, a checkout of github.com/foundation-model-stack/fms-fsdp (tried: 5a296af), its own class
is taken.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType


class NativeCheckpointer:
    """The `save` of fms-fsdp's `Checkpointer`."""

    def __init__(self, ckpdir: str) -> None:
        self._root = Path(ckpdir, "checkpoints")
        self._root.mkdir(exist_ok=True)

    def save(self, step: int, model: Any, optimizer: Any, dataloader: Any, **metadata: Any) -> None:
        folder = self._root / f"step_{step}_ckp"
        folder.mkdir(exist_ok=True)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {
                "model_state": model.state_dict(),
                "optimizer_state": FSDP.sharded_optim_state_dict(model, optimizer),
            }
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=True)
        dcp.save(state, storage_writer=writer, process_group=model.process_group)
        if dataloader is not None:
            dataloader.dataset.save_to_path(str(folder))
        if dist.get_rank() == 0:
            torch.save({**metadata, "step": step}, folder / "metadata.pth")


def native_checkpointer(ckpdir: str) -> Any:
    """Make fms-fsdp's own checkpointer if there is a checkout of it, else what saves the same."""
    checkout = os.environ.get("FMS_FSDP_CHECKOUT")
    if checkout is None:
        return NativeCheckpointer(ckpdir)
    source = Path(checkout, "fms_fsdp/utils/checkpointing_utils.py")
    spec = importlib.util.spec_from_file_location("fms_fsdp_checkpointing_utils", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Checkpointer(ckpdir, 1000, "fsdp", dist.get_rank(), "cpu", report_fn=lambda *_, **__: None)


class CountingDataset:
    """A dataset that keeps its place as those of fms-fsdp do: a file for each rank, cut anew for other ranks."""

    def __init__(self) -> None:
        self.rank, self.worldsize = dist.get_rank(), dist.get_world_size()
        self.position = 0

    def save_to_path(self, path: str) -> None:
        torch.save({"position": self.position}, os.path.join(path, f"loader_state_{self.rank}.pth"))

    def load_from_path(self, path: str) -> None:
        files = sorted(name for name in os.listdir(path) if "loader" in name)
        first = len(files) * self.rank // self.worldsize
        self.position = torch.load(os.path.join(path, files[first]))["position"]


class CountingLoader:
    """A loader without worker processes."""

    num_workers = 0

    def __init__(self) -> None:
        self.dataset = CountingDataset()
