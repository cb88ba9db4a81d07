"""Digest a state dict as names and hashes: equal digests mean equal bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["digest"]


def digest(state: Any) -> dict[str, str]:
    """Map names to hashes (of tensors) or values (all else).

    Collective if the state holds DTensors.
    """
    return dict(_entries(state, ""))


def _entries(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _entries(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _entries(inner, f"{name}.{number}")
    elif isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole = whole.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(data).hexdigest()}"
    else:
        yield name, json.dumps(value)
