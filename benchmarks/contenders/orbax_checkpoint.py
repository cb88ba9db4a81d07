"""Run Orbax: `StandardCheckpointer` of numpy arrays, on local files."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import orbax.checkpoint as ocp
import torch

from benchmarks.contenders import Settings

__all__ = ["Orbax"]


class Orbax:
    """Defaults (OCDBT, zarr; it compresses with zstd); the arrays are the tensors' memory.

    What a load returns is copied into the trainer's tensors.
    """

    def __init__(self, settings: Settings) -> None:
        self._checkpointer = ocp.StandardCheckpointer()

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        self._checkpointer.save(place, _arrays(state))
        self._checkpointer.wait_until_finished()

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        loaded = self._checkpointer.restore(place, _arrays(state))["model"]
        for name, tensor in state.items():
            tensor.copy_(torch.from_numpy(loaded[name]))


def _arrays(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"model": {name: tensor.numpy() for name, tensor in state.items()}}
