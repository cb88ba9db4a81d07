"""Run Meta's `torch_checkpointing`: its manager, on local files."""

from __future__ import annotations

from typing import Any

import torch
from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager, SyncCheckpointSaverConfig
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import CheckpointLoaderConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.contenders import Settings

__all__ = ["TorchCheckpointing"]


class TorchCheckpointing:
    """Saves in `threads` threads, a file per tensor if there are several; loads in place.

    It never syncs to disk.

    Option `direct`: direct I/O, its default. Its unaligned writes fail on ext4 and XFS with "Invalid
    argument", so it is off by default here.
    """

    def __init__(self, settings: Settings) -> None:
        writer = CheckpointWriterConfig(file_write_max_threads=settings.threads or 1)
        save: Any = SyncCheckpointSaverConfig(writer_config=writer)
        if settings.options.get("asynchronous"):
            staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
            save = AsyncCheckpointSaverConfig(writer_config=writer, staging_config=staging)
        load = CheckpointLoaderConfig(use_mmap=settings.options.get("mmap", True))
        storage = LocalFileSystemStorageConfig(use_direct_io=settings.options.get("direct", False))
        config = CheckpointManager.Config(save=save, load=load, storage_config=storage)
        self._manager = CheckpointManager(config)
        self._split = settings.threads > 1

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        self._manager.save(place, self._items(state))

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        items = self._manager.load(place, into=self._items(state))
        loaded: Any = items if self._split else items["state"]
        for name, tensor in state.items():
            # It may return tensors of its own; a trainer then has to copy them into its model.
            other = loaded[_key(name) if self._split else name]
            if tensor is not other:
                tensor.copy_(other)

    def async_save(self, state: dict[str, torch.Tensor], place: str) -> Any:
        """Begin a save; return once the state is copied, when training may go on."""
        future = self._manager.save(place, self._items(state))
        staging: Any = self._manager._staging_future
        if staging is not None:
            staging.result()
        return future

    def _items(self, state: dict[str, torch.Tensor]) -> dict[str, Any]:
        if self._split:
            return {_key(name): tensor for name, tensor in state.items()}
        return {"state": state}

    def close(self) -> None:
        self._manager.close()


def _key(name: str) -> str:
    """Replace the dots, which names of items may not have."""
    return name.replace(".", "_")
