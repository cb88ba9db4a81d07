"""Save and load runs of IBM's fms-fsdp: a `Checkpointer` with the same methods, on any storage.

Checkpoints are those of a `CheckpointManager` at `<ckpdir>/durable`, with the names of parameters and
moments that fms-fsdp gives them. Those that fms-fsdp wrote by itself are still loaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from ckpt import api
from ckpt.backends.base import exists, read_bytes
from ckpt.backends.registry import open_store
from ckpt.collective import place_of
from ckpt.errors import ConfigurationError
from ckpt.reading.foreign_files import ForeignFiles
from ckpt.reading.reader import CheckpointReader
from ckpt.state import ModelState, OptimizerState
from ckpt.trainer_integration.adapters.host import newest_checkpoint
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.keeping import KeepRule
from ckpt.trainer_integration.manager import CheckpointManager
from ckpt.trainer_integration.run.async_modes import AsyncMode

__all__ = ["Checkpointer"]

_METADATA_KEY = "metadata.pth"  # what fms-fsdp writes last
_LACKING = "groups without initial_lr"
_MAX_FILE_BYTES = 1 << 40
_NEVER = 1 << 62


class Checkpointer:
    """Do what fms-fsdp's class of this name does, with these differences:

    - a save is a checkpoint or it is none, `n_to_save` is obeyed, and a torn or damaged newest one is
      passed over;
    - the loader goes on from the step of the checkpoint that was chosen;
    - random states are saved, too.

    Args:
        ckpdir: a path or URL (`s3://...`, `cos://...`), below which `durable/` is made.
        n_to_save: checkpoints to keep.
        parallel_mode, rank, report_fn: as for fms-fsdp.
        local_rank, model_auto_placement: not used; the model stays where it is.
        keep: a rule in place of `n_to_save`; numbers passed to `save` count as metrics.
        async_mode: `off` waits for each save, as fms-fsdp does; `thread` and `process` upload
            meanwhile.
        storage_options: as for `ckpt.save`.
    """

    def __init__(
        self,
        ckpdir: str,
        n_to_save: int,
        parallel_mode: str,
        rank: int,
        local_rank: int | str,
        report_fn: Callable[..., None] | None = None,
        model_auto_placement: bool = False,
        *,
        keep: KeepRule | None = None,
        async_mode: AsyncMode = "off",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if parallel_mode not in ("fsdp", "hsdp", "ddp"):
            raise ConfigurationError(f"parallel_mode must be 'fsdp', 'hsdp' or 'ddp', not {parallel_mode!r}")
        self._root = str(ckpdir).rstrip("/")
        # Not `checkpoints/`: the datasets of fms-fsdp keep states there, and fail at names of other kinds.
        self.ckp_path = f"{self._root}/durable"
        self._options: dict[str, Any] = {"storage_options": storage_options}
        self._rank, self.report = rank, report_fn or self._print
        self._manager = CheckpointManager(
            self.ckp_path,
            save=_NEVER,  # fms-fsdp decides
            keep=n_to_save if keep is None else keep,
            async_mode=async_mode,
            **self._options,
        )

    def save(self, step: int, model: Any, optimizer: Any, dataloader: Any, **metadata: Any) -> None:
        """Save from all ranks. Raises SaveFailed; ConfigurationError if `metadata` is not plain values."""
        began_s = time.time()
        lacking = _add_initial_lr(optimizer)
        text = json.dumps({**metadata, "step": step, _LACKING: lacking}, default=_plain)
        parts = {**_parts(model, optimizer), "metadata": text}
        if isinstance(dataloader, RescalableLoader):
            parts["loader"] = dataloader
        elif dataloader is not None and not _in_workers(dataloader):
            parts["loader_state"] = {f"rank-{dist.get_rank():05d}": _loader_state(dataloader.dataset)}
        numbers = {name: value for name, value in metadata.items() if isinstance(value, int | float)}
        try:
            self._manager.save(step, metrics=numbers, **parts)
        finally:
            _drop_initial_lr(optimizer, lacking)
        self.report(f"Checkpoint of step {step}: {self.ckp_path}", model_save_time=time.time() - began_s)

    def load(
        self,
        model: Any,
        optimizer: Any,
        dataloader: Any,
        path: str = "",
        reset_stepcount: bool = False,
        strict: bool = True,
        is_compiled: bool = False,
    ) -> tuple[Any, Any, Any, int, int, bool]:
        """Load this run's newest checkpoint; without one what is at `path`: a checkpoint, several, or a file.

        Args:
            reset_stepcount: of `path` take the model alone.
            strict: of a single file, as for `load_state_dict`.
            is_compiled: the model is compiled, and a single file is not of a compiled one.

        Returns:
            model, optimizer, dataloader, step, tokens seen, and whether this run goes on.

        Raises:
            LoadFailed: there are checkpoints of this run, but none can be loaded.
        """
        loaders = model, optimizer, dataloader
        lacking = _add_initial_lr(optimizer)
        restored = self._manager.restore(**_parts(model, optimizer), metadata="")
        if restored is not None:
            metadata = json.loads(restored.state["metadata"])
            _drop_initial_lr(optimizer, metadata.get(_LACKING, []))
            folder = restored.url.rpartition("/")[2]
            self._load_loader(dataloader, f"{self.ckp_path}/{folder}", restored.step)
            self.report(f"Checkpoint {restored.url} loaded", step=restored.step)
            return *loaders, restored.step, metadata.get("tokens_seen", 0), True
        if (place := self._newest_at(f"{self._root}/checkpoints")) is not None:  # of fms-fsdp itself
            metadata = torch.load(io.BytesIO(self._read(place, _METADATA_KEY)), weights_only=True)
            self._load_from(place, model, optimizer, dataloader, metadata["step"])
            return *loaders, metadata["step"], metadata.get("tokens_seen", 0), True
        if reset_stepcount:
            optimizer = dataloader = None
        if os.path.isfile(path) or ("://" in path and path.endswith(".pth")):
            state = torch.load(io.BytesIO(self._read(*os.path.split(path))), "cpu", weights_only=True)
            (model._orig_mod if is_compiled else model).load_state_dict(state["model_state"], strict=strict)
            self.report(f"{path} is a single file: optimizer and dataloader are from scratch.")
        elif path and (place := self._newest_of_run(path)) is not None:
            self._load_from(place, model, optimizer, dataloader, 0)
            lacking = [] if optimizer is not None else lacking
        else:
            self.report(f"No valid checkpoint detected at {path or self.ckp_path}, starting from scratch.")
        _drop_initial_lr(loaders[1], lacking)
        return *loaders, 0, 0, False

    def close(self) -> None:
        """Wait for the save in flight. Raises SaveFailed if it failed."""
        self._manager.close()

    def _newest_of_run(self, path: str) -> str | None:
        """Choose a checkpoint at or below a path; for a run's `checkpoints/` one of ours beside it comes first."""
        run, _, name = path.rstrip("/").rpartition("/")
        ours = self._newest_at(f"{run}/durable") if name == "checkpoints" else None
        return ours or self._newest_at(path)

    def _newest_at(self, path: str) -> str | None:
        return newest_checkpoint(
            path,
            lambda place, state: state == "committed" or (state == "foreign" and self._is_native(place)),
            **self._options,
        )

    def _is_native(self, place: str) -> bool:
        with self._store(place) as store:
            return exists(store, _METADATA_KEY)

    def _load_from(self, place: str, model: Any, optimizer: Any, dataloader: Any, step: int) -> None:
        """Load a checkpoint that is not one of this run's manager."""
        if not self._is_native(place):
            state = {**_parts(model, optimizer), "metadata": ""}
            api.load(state, place, **self._options)
            _drop_initial_lr(optimizer, json.loads(state["metadata"]).get(_LACKING, []))
        else:  # as fms-fsdp does: names of a compiled model have a prefix
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                weights = {"model_state": model.state_dict()}
                api.load(weights, place, **self._options)
                model.load_state_dict(weights["model_state"])
                if optimizer is not None:
                    reader = CheckpointReader(place, **self._options)
                    moments = load_sharded_optimizer_state_dict(model.state_dict(), "optimizer_state", reader)
            if optimizer is not None:
                moments = FSDP.optim_state_dict_to_load(model, optimizer, moments["optimizer_state"])
                optimizer.load_state_dict(moments)
        self._load_loader(dataloader, place, step)
        self.report(f"Checkpoint {place_of(place)} loaded")

    def _load_loader(self, dataloader: Any, place: str, step: int) -> None:
        """Let the dataset take its state after `step`: that of the checkpoint, or of files that it keeps itself."""
        if dataloader is None:
            return
        if isinstance(dataloader, RescalableLoader):
            api.load({"loader": dataloader}, place, **self._options)
            return
        dataset, in_workers = dataloader.dataset, _in_workers(dataloader)
        with tempfile.TemporaryDirectory() as scratch:
            if self._is_native(place):
                folder = place
            elif not in_workers and self._fetch_loader_state(dataset, place, scratch):
                folder = scratch
            else:  # the main script of fms-fsdp saves no loader
                folder = os.path.join(dataset.path, f"step_{step}_ckp") if hasattr(dataset, "path") else ""
            if os.path.isdir(folder) and any("loader" in name for name in os.listdir(folder)):
                _take_state(dataset, folder, step, now=not in_workers)
            else:
                self.report(
                    f"There is no state of the loader in {folder or place_of(place)}: it is not set to step {step}."
                )

    def _fetch_loader_state(self, dataset: Any, place: str, folder: str) -> bool:
        """Write the files of the dataset's part; those of other ranks are there, but empty. False: it has none."""
        with contextlib.closing(ForeignFiles(place, **self._options)) as files:
            names = sorted(name for name in files.names if name.startswith("loader_state."))
            if names:
                first = len(names) * dataset.rank // dataset.worldsize
                last = -(-len(names) * (dataset.rank + 1) // dataset.worldsize)
                for number, name in enumerate(names):
                    data = files.open(name).read() if first <= number < last else b""
                    Path(folder, f"loader_state_{number}.pth").write_bytes(data)
        return bool(names)

    def _read(self, place: str, key: str) -> bytearray:
        with self._store(place) as store:
            return read_bytes(store, key, max_bytes=_MAX_FILE_BYTES)

    def _store(self, place: str) -> contextlib.closing[Any]:
        return contextlib.closing(open_store(place, **self._options))

    def _print(self, *texts: object, **values: object) -> None:
        if self._rank == 0:
            print(*texts, *(f"{name} = {value}" for name, value in values.items()), sep="\n")


def _parts(model: Any, optimizer: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {"model_state": ModelState(model)}
    if optimizer is not None:
        parts["optimizer_state"] = OptimizerState(model, optimizer)
    return parts


def _add_initial_lr(optimizer: Any) -> list[int]:
    """Add the key that fms-fsdp's scheduler makes only after `load`; return the indices of groups that lacked it."""
    lacking = []
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
        if "initial_lr" not in group:
            group["initial_lr"] = group["lr"]
            lacking.append(index)
    return lacking


def _drop_initial_lr(optimizer: Any, lacking: list[int]) -> None:
    for index in lacking if optimizer is not None else ():
        del optimizer.param_groups[index]["initial_lr"]


def _in_workers(dataloader: Any) -> bool:
    """Tell whether worker processes have the state of a loader, which this one cannot ask for."""
    return getattr(dataloader, "num_workers", 0) > 0


def _loader_state(dataset: Any) -> torch.Tensor:
    """Return the file that a dataset writes, as bytes in a tensor."""
    with tempfile.TemporaryDirectory() as folder:
        dataset.save_to_path(folder)
        (file,) = Path(folder).iterdir()
        return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


def _take_state(dataset: Any, folder: str, step: int, *, now: bool) -> None:
    """Have a dataset take its state from a folder; a `CheckpointDataset` takes what it believes to be the newest."""
    if not hasattr(dataset, "_validate_ckp_path"):
        dataset.load_from_path(folder)
        return
    dataset.step, dataset._validate_ckp_path = step, partial(_chosen, folder)
    if now:
        if dataset.is_setup:
            dataset.load_from_path(folder)
        else:
            dataset.setup()  # which loads, and does not again when the first batch is asked for
        del dataset._validate_ckp_path


def _chosen(folder: str, *_: Any, **__: Any) -> str:
    return folder


def _plain(value: Any) -> Any:
    """Return a number that NumPy or torch holds as one of Python."""
    if hasattr(value, "item"):
        return value.item()
    raise ConfigurationError(f"metadata of a checkpoint must be plain values, not a {type(value).__name__}")
