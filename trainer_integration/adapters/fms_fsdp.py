"""Save and load runs of IBM's fms-fsdp: a `Checkpointer` with the same methods, on any storage.

Checkpoints are those of a `CheckpointManager` at `<ckpdir>/checkpoints`, with the names of parameters and
moments that fms-fsdp gives them. Those that fms-fsdp wrote by itself are still loaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from ckpt import api
from ckpt.backends.base import exists, read_bytes
from ckpt.backends.bodies import BytesBody
from ckpt.backends.registry import open_store
from ckpt.errors import ConfigurationError, NotFound
from ckpt.ranks.group import Ranks
from ckpt.reading.reader import CheckpointReader
from ckpt.tools.ls import list_checkpoints
from ckpt.trainer_integration.keeping import KeepRule
from ckpt.trainer_integration.manager import CheckpointManager
from ckpt.trainer_integration.run.async_modes import AsyncMode
from ckpt.trainer_integration.training_state import ModelState, OptimizerState

__all__ = ["Checkpointer"]

_METADATA_KEY = "metadata.pth"  # what fms-fsdp writes last
_LOADER_KEY = re.compile(r"loader_state_(\d+)\.pth")
_MAX_FILE_BYTES = 1 << 40
_NEVER = 1 << 62


class Checkpointer:
    """Do what fms-fsdp's class of this name does, with these differences:

    - a save is a checkpoint or it is none, `n_to_save` is obeyed, and a torn or damaged newest one is
      passed over;
    - the loader goes on from the checkpoint that was chosen; one with worker processes keeps its own state;
    - random states are saved, too.

    Args:
        ckpdir: a path or URL (`s3://...`, `cos://...`), below which `checkpoints/` is made.
        n_to_save: checkpoints to keep.
        parallel_mode, rank, local_rank, report_fn, model_auto_placement: as for fms-fsdp.
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
        self.ckp_path = f"{self._root}/checkpoints"
        self._storage_options = storage_options
        self._rank, self._device = rank, "cuda" if model_auto_placement else local_rank
        self.report = report_fn or self._print
        self._manager = CheckpointManager(
            self.ckp_path,
            save=_NEVER,  # fms-fsdp decides
            keep=n_to_save if keep is None else keep,
            async_mode=async_mode,
            storage_options=storage_options,
        )

    def save(self, step: int, model: Any, optimizer: Any, dataloader: Any, **metadata: Any) -> None:
        """Save from all ranks. Raises SaveFailed; ConfigurationError if `metadata` is not plain values."""
        began_s = time.time()
        parts: dict[str, Any] = {"model_state": ModelState(model)}
        if optimizer is not None:
            parts["optimizer_state"] = OptimizerState(model, optimizer)
        if (dataset := _dataset_of(dataloader)) is not None:
            parts["loader_state"] = {f"rank-{dist.get_rank():05d}": _loader_state(dataset)}
        parts["metadata"] = json.dumps({**metadata, "step": step}, default=_plain)
        numbers = {name: value for name, value in metadata.items() if isinstance(value, int | float)}
        self._manager.save(step, metrics=numbers, **parts)
        self.report(
            f"Checkpoint of step {step} saved in {self.ckp_path}", model_save_time=time.time() - began_s
        )

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
        parts: dict[str, Any] = {"model_state": ModelState(model), "metadata": ""}
        if optimizer is not None:
            parts["optimizer_state"] = OptimizerState(model, optimizer)
        restored = self._manager.restore(**parts)
        if restored is not None:
            folder = restored.url.rpartition("/")[2]
            metadata = json.loads(restored.state["metadata"])
            self._load_loader(dataloader, f"{self.ckp_path}/{folder}", restored.step)
            self.report(f"Checkpoint {restored.url} loaded", step=restored.step)
            return *loaders, restored.step, metadata.get("tokens_seen", 0), True
        if (place := self._newest_at(self.ckp_path)) is not None:  # of fms-fsdp itself
            metadata = torch.load(io.BytesIO(self._read(place, _METADATA_KEY)), weights_only=True)
            self._load_from(place, model, optimizer, dataloader, metadata["step"])
            return *loaders, metadata["step"], metadata.get("tokens_seen", 0), True
        if _is_file(path):
            state = torch.load(io.BytesIO(self._read(*os.path.split(path))), "cpu", weights_only=True)
            target = model._orig_mod if is_compiled else model
            target.load_state_dict(state["model_state"], strict=strict)
            self._to_device(model)
            self.report(f"{path} is a single file: optimizer and dataloader are from scratch.")
        elif path and (place := self._newest_at(path)) is not None:
            rest = (None, None) if reset_stepcount else (optimizer, dataloader)
            self._load_from(place, model, rest[0], rest[1], 0)
        else:
            self.report(f"No valid checkpoint detected at {path or self.ckp_path}, starting from scratch.")
        return *loaders, 0, 0, False

    def save_single_file(self, step: int, model: Any, is_compiled: bool = False, **metadata: Any) -> None:
        """Write the whole model to `<ckpdir>/pth/step_<N>/consolidated.00.pth`; the first rank holds it meanwhile."""
        # Without a device there is nothing to offload, and torch 2.13 then returns memory that FSDP1 has freed.
        options = StateDictOptions(full_state_dict=True, cpu_offload=torch.accelerator.is_available())
        weights = get_model_state_dict(model, options=options)
        place = f"{self._root}/pth/step_{step}"

        def write() -> None:
            with tempfile.TemporaryFile() as file, self._store(place) as store:
                torch.save({**metadata, "step": step, "model_state": weights}, file)
                file.flush()
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                store.put("consolidated.00.pth", BytesBody(memoryview(pages)))

        with contextlib.closing(Ranks(None, no_dist=False)) as ranks:
            ranks.from_first(write)

    def close(self) -> None:
        """Wait for the save in flight. Raises SaveFailed if it failed."""
        self._manager.close()

    def _newest_at(self, path: str) -> str | None:
        """Choose a checkpoint at or below a path, on the first rank: the one of the highest step."""

        def is_whole(place: str, state: str) -> bool:
            if state != "foreign":
                return state == "committed"
            with self._store(place) as store:
                return exists(store, _METADATA_KEY)

        def choose() -> str | None:
            try:
                listed = list_checkpoints(path, storage_options=self._storage_options, depth=1)
            except NotFound:
                return None
            for each in sorted(listed, key=lambda each: -1 if each.step is None else each.step, reverse=True):
                place = f"{path.rstrip('/')}/{each.path}".rstrip("/")
                if is_whole(place, each.state):
                    return place
            return None

        with contextlib.closing(Ranks(None, no_dist=False)) as ranks:
            return ranks.from_first(choose)

    def _load_from(self, place: str, model: Any, optimizer: Any, dataloader: Any, step: int) -> None:
        """Load a checkpoint that is not one of this run's manager."""
        options: dict[str, Any] = {"storage_options": self._storage_options}
        with self._store(place) as store:
            is_ours = not exists(store, _METADATA_KEY)
        if is_ours:
            parts: dict[str, Any] = {"model_state": ModelState(model)}
            if optimizer is not None:
                parts["optimizer_state"] = OptimizerState(model, optimizer)
            api.load(parts, place, **options)
        else:  # as fms-fsdp does: names of a compiled model have a prefix
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                weights = {"model_state": model.state_dict()}
                api.load(weights, place, **options)
                model.load_state_dict(weights["model_state"])
                if optimizer is not None:
                    moments = load_sharded_optimizer_state_dict(
                        model.state_dict(), "optimizer_state", CheckpointReader(place, **options)
                    )["optimizer_state"]
            if optimizer is not None:
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, moments))
        self._to_device(model)
        self._load_loader(dataloader, place, step)
        self.report(f"Checkpoint {api.place_of(place)} loaded")

    def _load_loader(self, dataloader: Any, place: str, step: int) -> None:
        """Let the dataset read the files of its part after `step`; those of other ranks are there, but empty."""
        if (dataset := _dataset_of(dataloader)) is None:
            if dataloader is not None:
                self.report(
                    "The loader has worker processes, which keep its state: it is not part of checkpoints."
                )
            return
        with self._store(place) as store, tempfile.TemporaryDirectory() as scratch:
            keys = {
                int(match[1]): stat.key for stat in store.list() if (match := _LOADER_KEY.fullmatch(stat.key))
            }
            tensors: dict[str, Any] = {}
            if not keys:
                with contextlib.closing(
                    CheckpointReader(place, storage_options=self._storage_options)
                ) as reader:
                    stored = reader.read_metadata().state_dict_metadata
                tensors = {name: stored[name] for name in sorted(stored) if name.startswith("loader_state.")}
            count = len(keys) or len(tensors)
            if not count:
                self.report(f"Checkpoint {api.place_of(place)} has no state of a loader: it begins anew")
                return
            folder = Path(scratch, f"step_{step}_ckp")
            folder.mkdir()
            first, last = (
                count * dataset.rank // dataset.worldsize,
                -(-count * (dataset.rank + 1) // dataset.worldsize),
            )
            wanted = {
                name: torch.empty(tensors[name].size, dtype=torch.uint8) for name in [*tensors][first:last]
            }
            if wanted:
                api.load(wanted, place, no_dist=True, storage_options=self._storage_options)
            for number in range(count):
                data: bytes | bytearray = b""
                if first <= number < last:
                    data = (
                        self._read(place, keys[number])
                        if keys
                        else wanted[[*tensors][number]].numpy().tobytes()
                    )
                (folder / f"loader_state_{number}.pth").write_bytes(data)
            _read_state(dataset, folder)

    def _to_device(self, model: Any) -> None:
        if torch.accelerator.is_available():
            model.to(self._device)

    def _read(self, place: str, key: str) -> bytearray:
        with self._store(place) as store:
            return read_bytes(store, key, max_bytes=_MAX_FILE_BYTES)

    def _store(self, place: str) -> contextlib.closing[Any]:
        return contextlib.closing(open_store(place, self._storage_options))

    def _print(self, *texts: object, **values: object) -> None:
        if self._rank == 0:
            print(*texts, *(f"{name} = {value}" for name, value in values.items()), sep="\n")


def _is_file(path: str) -> bool:
    return os.path.isfile(path) or ("://" in path and path.endswith(".pth"))


def _dataset_of(dataloader: Any) -> Any:
    """Return the dataset whose state is to be saved; None if it is in worker processes."""
    workers: int = getattr(dataloader, "num_workers", 0)
    return None if dataloader is None or workers else dataloader.dataset


def _loader_state(dataset: Any) -> torch.Tensor:
    """Return the file that a dataset writes, as bytes in a tensor."""
    with tempfile.TemporaryDirectory() as folder:
        dataset.save_to_path(folder)
        (file,) = Path(folder).iterdir()
        return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


def _read_state(dataset: Any, folder: Path) -> None:
    """Have a dataset read its state from a folder; a `CheckpointDataset` looks for it below paths of its own."""
    if not hasattr(dataset, "load_path"):
        dataset.load_from_path(str(folder))
        return
    paths, (dataset.path, dataset.load_path) = (dataset.path, dataset.load_path), (str(folder.parent),) * 2
    try:
        if dataset.is_setup:
            dataset.load_from_path(dataset.load_path)
        else:
            dataset.setup()  # which loads, and does not again when the first batch is asked for
    finally:
        dataset.path, dataset.load_path = paths


def _plain(value: Any) -> Any:
    """Return a number that NumPy or torch holds as one of Python."""
    if hasattr(value, "item"):
        return value.item()
    raise ConfigurationError(f"metadata of a checkpoint must be plain values, not a {type(value).__name__}")
