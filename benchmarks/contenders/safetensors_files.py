"""Run safetensors' own `save_file` and `load_file`, on local files."""

from __future__ import annotations

import os

import torch
from safetensors.torch import load_file, save_file

from benchmarks.contenders import Settings

__all__ = ["Safetensors"]


class Safetensors:
    """One file, written by one thread; what a load returns is copied into the trainer's tensors. It never syncs to disk."""

    def __init__(self, settings: Settings) -> None:
        self._file = "model.safetensors"

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        os.makedirs(place)
        save_file(state, os.path.join(place, self._file))

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        loaded = load_file(os.path.join(place, self._file))
        for name, tensor in state.items():
            tensor.copy_(loaded[name])
