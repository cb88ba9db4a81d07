"""Storage for torch.distributed.checkpoint: fast, never torn, checked end to end, readable by stock PyTorch.

    ckpt.save(state_dict, "s3://bucket/run/step-1000")
    ckpt.load(state_dict, "s3://bucket/run/step-1000")

`CheckpointWriter` and `CheckpointReader` go into DCP's
own functions, and after `install()` those work as they are. In a training loop, `CheckpointManager`
says when to save, what to keep, and where to go on from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt import embeddings, errors, ops, options
    from ckpt.acceptance.roundtrip import roundtrip
    from ckpt.api import async_save, load, save
    from ckpt.content.checks import Checks
    from ckpt.conversion.convert import convert
    from ckpt.dcp_hook import install, uninstall
    from ckpt.draining.drain import drain
    from ckpt.local_first.options import LocalTier
    from ckpt.provenance.check import verify_signed
    from ckpt.provenance.export import sign_export
    from ckpt.provenance.sign import sign
    from ckpt.reading.reader import CheckpointReader
    from ckpt.references.frozen import frozen
    from ckpt.scrubbing.scrub import scrub
    from ckpt.state.per_rank import per_rank
    from ckpt.tools.copy import copy
    from ckpt.tools.diff import diff
    from ckpt.tools.doctor import doctor
    from ckpt.tools.gc import collect_garbage
    from ckpt.tools.inspect import inspect
    from ckpt.tools.ls import list_checkpoints
    from ckpt.tools.remove import remove
    from ckpt.tools.verify import verify
    from ckpt.trainer_integration.manager import CheckpointManager
    from ckpt.tuning.tune import tune
    from ckpt.watching.watch import watch
    from ckpt.writing.background import SaveFuture
    from ckpt.writing.stager import Stager
    from ckpt.writing.writer import CheckpointWriter

    __version__: str

__all__ = [
    "CheckpointManager",
    "CheckpointReader",
    "CheckpointWriter",
    "Checks",
    "LocalTier",
    "SaveFuture",
    "Stager",
    "async_save",
    "collect_garbage",
    "convert",
    "copy",
    "diff",
    "doctor",
    "drain",
    "embeddings",
    "errors",
    "frozen",
    "inspect",
    "install",
    "list_checkpoints",
    "load",
    "ops",
    "options",
    "per_rank",
    "remove",
    "roundtrip",
    "save",
    "scrub",
    "sign",
    "sign_export",
    "tune",
    "uninstall",
    "verify",
    "verify_signed",
    "watch",
]

# Imported when first used: `import ckpt` itself loads neither torch nor any SDK.
_HOMES = {
    "CheckpointManager": "ckpt.trainer_integration.manager",
    "Checks": "ckpt.content.checks",
    "LocalTier": "ckpt.local_first.options",
    "CheckpointReader": "ckpt.reading.reader",
    "CheckpointWriter": "ckpt.writing.writer",
    "SaveFuture": "ckpt.writing.background",
    "Stager": "ckpt.writing.stager",
    "async_save": "ckpt.api",
    "collect_garbage": "ckpt.tools.gc",
    "convert": "ckpt.conversion.convert",
    "copy": "ckpt.tools.copy",
    "diff": "ckpt.tools.diff",
    "doctor": "ckpt.tools.doctor",
    "drain": "ckpt.draining.drain",
    "frozen": "ckpt.references.frozen",
    "inspect": "ckpt.tools.inspect",
    "install": "ckpt.dcp_hook",
    "list_checkpoints": "ckpt.tools.ls",
    "load": "ckpt.api",
    "per_rank": "ckpt.state.per_rank",
    "remove": "ckpt.tools.remove",
    "roundtrip": "ckpt.acceptance.roundtrip",
    "save": "ckpt.api",
    "scrub": "ckpt.scrubbing.scrub",
    "sign": "ckpt.provenance.sign",
    "sign_export": "ckpt.provenance.export",
    "tune": "ckpt.tuning.tune",
    "uninstall": "ckpt.dcp_hook",
    "verify": "ckpt.tools.verify",
    "verify_signed": "ckpt.provenance.check",
    "watch": "ckpt.watching.watch",
}


def __getattr__(name: str) -> Any:
    if name in ("embeddings", "errors", "ops", "options"):
        return importlib.import_module(f"ckpt.{name}")
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ckpt-storage")
    except PackageNotFoundError:  # an uninstalled checkout
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
