"""Let DCP's own functions use this library's storage, without another line changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.reading.reader import CheckpointReader
from ckpt.torch_private import STORAGE_SETUP, STORAGE_SETUP_MODULES, ProcessExecutor
from ckpt.writing.writer import CheckpointWriter

_stock_choice: Callable[..., Any] = getattr(STORAGE_SETUP_MODULES[0], STORAGE_SETUP)
_stock_execute_save: Callable[..., Any] = ProcessExecutor.execute_save


def install(*, storage_options: Mapping[str, Any] | None = None) -> None:
    """Let `dcp.save`, `dcp.load` and `dcp.async_save` with a `checkpoint_id` use this library.

    For this process only. The `checkpoint_id` is any place that `ckpt.save` takes. A
    `storage_writer` or `storage_reader` that is passed explicitly is used as it is. A second call
    replaces the options.

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

    for module in STORAGE_SETUP_MODULES:
        setattr(module, STORAGE_SETUP, choose)
    ProcessExecutor.execute_save = execute_save


def uninstall() -> None:
    """Undo `install`; does nothing without it."""
    for module in STORAGE_SETUP_MODULES:
        setattr(module, STORAGE_SETUP, _stock_choice)
    ProcessExecutor.execute_save = _stock_execute_save
