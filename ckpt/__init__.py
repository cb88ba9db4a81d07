"""Storage for torch.distributed.checkpoint: fast, never torn, checked end to end, readable by stock PyTorch.

    import ckpt

    ckpt.save(state_dict, "s3://bucket/run/step-1000")
    ckpt.load(state_dict, "s3://bucket/run/step-1000")

or, with DCP's own functions:

    dcp.save(state_dict, storage_writer=ckpt.CheckpointWriter("s3://bucket/run/step-1000"))
    dcp.load(state_dict, storage_reader=ckpt.CheckpointReader("s3://bucket/run/step-1000"))

or, without another line changed: `ckpt.install()`, then `dcp.save(state_dict, checkpoint_id="s3://...")`. In a
training loop, `ckpt.CheckpointManager` says when to save, what to keep, and where to go on from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt import errors
    from ckpt.acceptance.run import roundtrip
    from ckpt.adoption import install, uninstall
    from ckpt.api import async_save, load, save
    from ckpt.catalog import list_checkpoints
    from ckpt.comparison import diff
    from ckpt.conversion import convert
    from ckpt.copying import copy
    from ckpt.diagnosis import doctor
    from ckpt.garbage import collect_garbage
    from ckpt.inspection import inspect
    from ckpt.reader import CheckpointReader
    from ckpt.removal import remove
    from ckpt.stager import Stager
    from ckpt.trainer_integration.manager import CheckpointManager
    from ckpt.verification import verify
    from ckpt.writer import CheckpointWriter

__all__ = [
    "CheckpointManager",
    "CheckpointReader",
    "CheckpointWriter",
    "Stager",
    "async_save",
    "collect_garbage",
    "convert",
    "copy",
    "diff",
    "doctor",
    "errors",
    "inspect",
    "install",
    "list_checkpoints",
    "load",
    "remove",
    "roundtrip",
    "save",
    "uninstall",
    "verify",
]

# Imported when first used: `import ckpt` itself loads neither torch nor any SDK.
_HOMES = {
    "CheckpointManager": "ckpt.trainer_integration.manager",
    "CheckpointReader": "ckpt.reader",
    "CheckpointWriter": "ckpt.writer",
    "Stager": "ckpt.stager",
    "async_save": "ckpt.api",
    "collect_garbage": "ckpt.garbage",
    "convert": "ckpt.conversion",
    "copy": "ckpt.copying",
    "diff": "ckpt.comparison",
    "doctor": "ckpt.diagnosis",
    "inspect": "ckpt.inspection",
    "install": "ckpt.adoption",
    "list_checkpoints": "ckpt.catalog",
    "load": "ckpt.api",
    "remove": "ckpt.removal",
    "roundtrip": "ckpt.acceptance.run",
    "save": "ckpt.api",
    "uninstall": "ckpt.adoption",
    "verify": "ckpt.verification",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("ckpt.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
