"""Put this library, its peers and the floors behind one small protocol.

Each module is imported only in a process that measures it, in the environment that has its
packages.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from benchmarks.run.servers import Endpoint

__all__ = ["Contender", "Settings", "as_trained", "make", "versions"]

State = dict[str, torch.Tensor]

_MODULES = {
    "ours": ("benchmarks.contenders.ckpt_storage:Ours", ("ckpt-storage", "boto3", "awscrt")),
    "managed": ("benchmarks.contenders.ckpt_manager:Managed", ("ckpt-storage", "boto3", "awscrt")),
    "stock": ("benchmarks.contenders.stock:Stock", ("torch",)),
    "fsspec": ("benchmarks.contenders.fsspec_s3fs:FsspecS3fs", ("torch", "fsspec", "s3fs")),
    "s3torchconnector": ("benchmarks.contenders.s3torchconnector_dcp:S3TorchConnector", ("s3torchconnector",)),
    "msc": ("benchmarks.contenders.msc:MultiStorageClient", ("multi-storage-client", "boto3")),
    "torch_checkpointing": (
        "benchmarks.contenders.torch_checkpointing_manager:TorchCheckpointing",
        ("torch_checkpointing",),
    ),
    "safetensors": ("benchmarks.contenders.safetensors_files:Safetensors", ("safetensors",)),
    "torch_files": ("benchmarks.contenders.torch_files:TorchFiles", ("torch",)),
    "fastsafetensors": ("benchmarks.contenders.fastsafetensors_files:FastSafetensors", ("fastsafetensors",)),
    "runai": ("benchmarks.contenders.runai_streamer:RunaiStreamer", ("runai-model-streamer",)),
    "orbax": ("benchmarks.contenders.orbax_checkpoint:Orbax", ("orbax-checkpoint", "tensorstore", "jax")),
    "obstore": ("benchmarks.contenders.obstore_raw:Obstore", ("obstore",)),
    "s3dlio": ("benchmarks.contenders.s3dlio_raw:S3dlio", ("s3dlio",)),
    "sockets": ("benchmarks.contenders.floors.sockets:Sockets", ()),
    "files": ("benchmarks.contenders.floors.files:Files", ()),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The settings of a contender.

    Attributes:
        endpoint: the S3 endpoint, where the case has one.
        threads: transfers at the same time, for those who take it; 0 leaves it to the contender.
        options: its own settings of this case.
    """

    endpoint: Endpoint | None = None
    threads: int = 0
    options: dict[str, Any] = field(default_factory=dict)


class Contender(Protocol):
    """Saves and loads whole states. Peers that work through DCP also give its writer and reader."""

    def save(self, state: State, place: str) -> None: ...

    def load(self, state: State, place: str) -> None: ...


def make(name: str, settings: Settings) -> Contender:
    module, _, kind = _MODULES[name][0].partition(":")
    contender: Contender = getattr(importlib.import_module(module), kind)(settings)
    return contender


def as_trained(state: State) -> dict[str, Any]:
    """Nest the state as trainers do: with thousands of names at the top, DCP's search for Stateful
    would count.
    """
    return {"model": state}


def versions(name: str) -> dict[str, str]:
    """List the versions of a contender's packages in this environment."""
    versions = {}
    for package in _MODULES[name][1]:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
