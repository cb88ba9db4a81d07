"""Check the arguments of a save or load."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ckpt.errors import ConfigurationError


def check_arguments(state_dict: object, url: object, planner: object) -> None:
    """Raise ConfigurationError with the right call for what is easily mistaken."""
    if isinstance(state_dict, str | os.PathLike) and not isinstance(url, str | os.PathLike):
        raise ConfigurationError("the arguments are swapped: the state dict comes first, then the place")
    if not isinstance(state_dict, Mapping):
        text = f"state_dict must be a dict, not a {type(state_dict).__name__}"
        names = {torch.nn.Module: "model", torch.optim.Optimizer: "optimizer", torch.Tensor: "tensor"}
        for kind, name in names.items():
            if isinstance(state_dict, kind):
                text += f': write {{"{name}": {name}}}'
        raise ConfigurationError(text)
    if not all(isinstance(name, str) for name in state_dict):
        raise ConfigurationError("the keys of state_dict must all be str")
    if planner is not None and (isinstance(planner, type) or not hasattr(planner, "set_up_planner")):
        raise ConfigurationError(f"planner must be a planner of DCP, not {planner!r:.100}")
