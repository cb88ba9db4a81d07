"""`ckpt.install`: DCP's own functions with this library's storage, in programs that only pass a `checkpoint_id`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint import (
    _async_process_executor,
    _storage_utils,
    state_dict_loader,
    state_dict_saver,
)

from ckpt.reading.reader import CheckpointReader
from ckpt.writing.writer import CheckpointWriter

__all__ = ["install", "uninstall"]

_CHOICE = "_storage_setup"
"""The function by which DCP finds a writer or reader; two modules have imported it by name."""

_MODULES: tuple[ModuleType, ...] = (_storage_utils, state_dict_saver, state_dict_loader)
_PROCESS = _async_process_executor._ProcessBasedAsyncCheckpointExecutor

_stock_choice: Callable[..., Any] = getattr(_storage_utils, _CHOICE)
_stock_execute_save: Callable[..., Any] = _PROCESS.execute_save


def install(*, storage_options: Mapping[str, Any] | None = None) -> None:
    """Let `dcp.save`, `dcp.load` and `dcp.async_save` with a `checkpoint_id` use this library, in this process.

    A path, `s3://`, `cos://`, or any other place that `ckpt.save` takes. A `storage_writer` or `storage_reader` that
    is passed explicitly is used as it is. Called again, it takes the new options.

    Args:
        storage_options: for all places, as for `ckpt.save`.
    """

    def choose(storage: Any, checkpoint_id: str | os.PathLike[str] | None, reader: bool = False) -> Any:
        if storage or not checkpoint_id:
            return _stock_choice(storage, checkpoint_id, reader)
        kind = CheckpointReader if reader else CheckpointWriter
        return kind(checkpoint_id, storage_options=storage_options)

    def execute_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The other process, in which nothing is installed, would choose for itself.
        if kwargs.get("storage_writer") is None and kwargs.get("checkpoint_id"):
            kwargs["storage_writer"] = CheckpointWriter(
                kwargs["checkpoint_id"], storage_options=storage_options
            )
        return _stock_execute_save(self, *args, **kwargs)

    for module in _MODULES:
        setattr(module, _CHOICE, choose)
    _PROCESS.execute_save = execute_save  # type: ignore[method-assign]


def uninstall() -> None:
    """Undo `install`; harmless without it."""
    for module in _MODULES:
        setattr(module, _CHOICE, _stock_choice)
    _PROCESS.execute_save = _stock_execute_save  # type: ignore[method-assign]
