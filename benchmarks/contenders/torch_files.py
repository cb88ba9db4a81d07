"""Run `torch.save` and `torch.load`, on local files."""

from __future__ import annotations

import os

import torch

from benchmarks.contenders import Settings, as_trained

__all__ = ["TorchFiles"]


class TorchFiles:
    """One file, written by one thread; what a load returns is copied into the trainer's tensors. It never syncs to disk.

    Option `mmap`: as of `torch.load`.
    """

    def __init__(self, settings: Settings) -> None:
        self._mmap = settings.options.get("mmap", False)

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        os.makedirs(place)
        torch.save(as_trained(state), os.path.join(place, "state.pt"))

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        loaded = torch.load(os.path.join(place, "state.pt"), weights_only=True, mmap=self._mmap)
        for name, tensor in state.items():
            tensor.copy_(loaded["model"][name])
