"""Check the arguments of a save or load, and take the values out of its state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

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
    if planner is not None and (isinstance(planner, type) or not hasattr(planner, "set_up_planner")):
        raise ConfigurationError(f"planner must be a planner of DCP, not {planner!r:.100}")


def values_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Replace every Stateful by its state dict, on all ranks in the same order."""
    try:
        keys = sorted(state_dict)
    except TypeError:
        raise ConfigurationError("the keys of state_dict must all be str") from None
    return {key: _value(state_dict[key]) for key in keys}


def _value(value: Any) -> Any:
    # Asked in this order because asking for a protocol is slow, and there can be very many tensors.
    return value if isinstance(value, torch.Tensor) or not isinstance(value, Stateful) else value.state_dict()


def put_back(state_dict: dict[str, Any], values: dict[str, Any]) -> None:
    """Put the loaded values where the caller looks for them (as DCP does)."""
    for key, loaded in values.items():
        target = state_dict.get(key)
        if isinstance(target, Stateful):
            target.load_state_dict(loaded)
        else:
            state_dict[key] = loaded
