"""Run fastsafetensors: its parallel saver and its loader, on local files, without GPU Direct Storage."""

from __future__ import annotations

import glob
import os

import torch
from fastsafetensors import ParallelSaver, SafeTensorsFileLoader, SingleGroup

from benchmarks.contenders import Settings

__all__ = ["FastSafetensors"]


class FastSafetensors:
    """Saves `threads` shards in as many threads; what a load returns is copied into the trainer's tensors.

    Option `fsync`: as of its saver.
    """

    def __init__(self, settings: Settings) -> None:
        self._threads = settings.threads or 4
        self._fsync = settings.options.get("fsync", False)

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        os.makedirs(place)
        saver = ParallelSaver(num_shards=self._threads, num_threads=self._threads, fsync=self._fsync)
        saver.save(state, os.path.join(place, "model"))

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        loader = SafeTensorsFileLoader(
            SingleGroup(), "cpu", nogds=True, max_threads=self._threads, disable_cache=False
        )
        loader.add_filenames({0: sorted(glob.glob(os.path.join(place, "*.safetensors")))})
        try:
            buffers = loader.copy_files_to_device()
            for name, tensor in state.items():
                tensor.copy_(buffers.get_tensor(name))
            buffers.close()
        finally:
            loader.close()
