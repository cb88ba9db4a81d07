"""`ckpt convert` for the tests, and what is in its results, read by those whose formats they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

import ckpt
from ckpt.torch_private import flatten_state_dict, load_state_dict
from support.commands import run
from support.states import digest

FORMATS = ("ckpt", "dcp", "torch", "safetensors")
ENDINGS = {"ckpt": "", "dcp": "", "torch": ".pt", "safetensors": ""}


def convert(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The command's JSON."""
    ran = run("convert", "--json", *arguments)
    assert ran.code == code, (ran.code, ran.out, ran.err)
    assert len(ran.err.splitlines()) == (1 if code else 0)
    return ran.json


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """A state as DCP flattens it, every tensor as shape, dtype and hash."""
    found: dict[str, Any] = digest(flatten_state_dict(state)[0])
    return found


def tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Those of a nested state, flat."""
    found = flatten_state_dict(state)[0]
    return {name: digest(value) for name, value in found.items() if isinstance(value, torch.Tensor)}


def read(place: Path, form: str) -> dict[str, Any]:
    """All of a result, read by its own library, nested where the format is."""
    if form == "torch":
        found: dict[str, Any] = torch.load(place, weights_only=True, mmap=True)
        return found
    if form == "safetensors":
        return read_safetensors(place)
    if form == "ckpt":
        assert ckpt.verify(place).ok
    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(place)
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def read_safetensors(place: Path) -> dict[str, Any]:
    """A file, or a folder with one file or with an index."""
    index = place / "model.safetensors.index.json"
    if place.is_file():
        return dict(safetensors.torch.load_file(place))
    if not index.exists():
        return dict(safetensors.torch.load_file(place / "model.safetensors"))
    found: dict[str, Any] = {}
    files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    for file in sorted(set(files.values())):
        held = safetensors.torch.load_file(place / file)
        assert set(held) == {name for name, other in files.items() if other == file}
        found |= held
    return found
