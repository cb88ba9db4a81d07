"""States of models, optimizers and other parts: the checkpoint says what there is, the program where it belongs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.state.model_state import ModelState
    from ckpt.state.optimizer_state import OptimizerState
    from ckpt.state.random_state import RandomState
    from ckpt.state.state_parts import size_bytes, training_state

__all__ = ["ModelState", "OptimizerState", "RandomState", "size_bytes", "training_state"]

_HOMES = {
    "ModelState": "model_state",
    "OptimizerState": "optimizer_state",
    "RandomState": "random_state",
    "size_bytes": "state_parts",
    "training_state": "state_parts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt.state' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ckpt.state.{_HOMES[name]}"), name)
