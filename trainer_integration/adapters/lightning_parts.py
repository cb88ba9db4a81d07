"""What the adapters of Lightning add to its classes, in whichever of its two packages they are.

A checkpoint holds the tensors by name, and `meta`: all else that the Trainer saves, with placeholders in their place.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from ckpt.api import async_save, load, save
from ckpt.collective import place_of
from ckpt.errors import CheckpointError, ConfigurationError, LoadFailed, NotFound, UnsafeContent
from ckpt.ranks.group import Ranks
from ckpt.tools.ls import list_checkpoints
from ckpt.tools.remove import remove
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.run.restore import DAMAGE

__all__ = ["adapt"]

_logger = logging.getLogger(__name__)
_META, _TENSORS, _RECORD = "meta", ("state_dict", "optimizer_states"), "/commit.json"
_Visit = Callable[[str, torch.Tensor], Any]
_Base: Any = object  # in place of the class of Lightning to which `adapt` adds a part
_OPTIONS = {"threads", "memory_budget_bytes", "max_bandwidth_bytes_per_s", "timeout_s"}


def adapt(package: str, adapter: str) -> list[type]:
    """Make CheckpointIO, FSDPStrategy, ModelCheckpoint and ModelParallelStrategy.

    Args:
        package: of Lightning, that the program imports.
        adapter: the module that offers the classes: they are pickled by their names in it.
    """

    def made(name: str, part: type, base: str, **more: Any) -> type:
        module, _, class_name = f"{package}.{base}".rpartition(".")
        bases = part, getattr(importlib.import_module(module), class_name)
        return type(name, bases, {"__module__": adapter, "__doc__": part.__doc__, **more})

    io = made("CheckpointIO", Saving, "plugins.io.TorchCheckpointIO")
    return [
        io,
        made("FSDPStrategy", Sharded, "strategies.FSDPStrategy", io_type=io),
        made("ModelCheckpoint", Finding, "callbacks.ModelCheckpoint"),
        made("ModelParallelStrategy", Sharded, "strategies.ModelParallelStrategy", io_type=io),
    ]


class Saving(_Base):
    """Save checkpoints of Lightning to folders and URLs: `Trainer(plugins=[CheckpointIO()])`.

    Args:
        storage_options: of URLs, as for `ckpt.save`.
        weights_only: False: load all objects of checkpoints, which could run code. It counts where
            `fit` passes none: with a sharded strategy Lightning passes none to the strategy.
        async_save: copy the state, and upload it while the steps go on. Lightning's
            `AsyncCheckpointIO` works too, but then an old checkpoint goes before the new one is
            durable; here it waits.
        options: `threads`, `memory_budget_bytes`, `max_bandwidth_bytes_per_s`, `timeout_s`.
    """

    def __init__(
        self,
        storage_options: Mapping[str, Any] | None = None,
        *,
        async_save: bool = False,
        weights_only: bool | None = None,
        **options: Any,
    ) -> None:
        if unknown := options.keys() - _OPTIONS:
            raise ConfigurationError(f"CheckpointIO has no option {', '.join(sorted(unknown))}")
        self._storage_options, self._is_async, self._options = storage_options, async_save, options
        self._weights_only = weights_only
        self._in_flight: Future[Any] | None = None
        self._outdated: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save from this process alone, as Lightning asks for without a sharded strategy."""
        self.save_shards(checkpoint, os.fspath(path), storage_options, is_first=True, no_dist=True)

    def save_shards(
        self, checkpoint: Mapping[str, Any], url: str, storage_options: Any, *, is_first: bool, no_dist: bool
    ) -> None:
        """Save the tensors that this rank holds; the first rank adds `meta`."""
        tensors: dict[str, Any] = {}

        def take_out(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name in tensors or not _is_plain(tensor):
                return tensor  # it stays within `meta`
            tensors[name] = tensor
            return torch.empty(tuple(tensor.size()), dtype=tensor.dtype, device="meta")

        meta = _with_tensors(checkpoint, take_out)
        tags = {"step": str(checkpoint.get("global_step", 0))}
        if "optimizer_states" not in checkpoint:
            tags["weights_only"] = "true"
        self.teardown()
        self._outdated = [place for place in self._outdated if place != url]
        saved = (async_save if self._is_async else save)(
            {**tensors, _META: meta} if is_first else tensors,
            url,
            # Flattening would make texts of the numbers that are keys in `meta`.
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            tags=tags,
            no_dist=no_dist,
            **{**self._options_of(url, storage_options), **self._options},
        )
        self._in_flight = saved if isinstance(saved, Future) else None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Load a whole checkpoint in this process, also one that many ranks saved."""
        place = os.fspath(path)
        if _is_own_file(place):
            return super().load_checkpoint(place, weights_only=weights_only)
        return first_whole(self.candidates(place), lambda url: self._load_whole(url, weights_only))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, its commit first; while a save is in flight, when that is durable."""
        self._outdated.append(os.fspath(path))
        if self._in_flight is None:
            self._remove_outdated()

    def teardown(self) -> None:
        """Wait for the save in flight, then remove what it replaces; Lightning calls it at the end of `fit`.

        Raises SaveFailed: nothing goes before a later save is durable.
        """
        saving, self._in_flight = self._in_flight, None
        if saving is not None:
            saving.result()
            self._remove_outdated()

    def candidates(self, place: str) -> list[str]:
        """List what to load: `place`, or all of a folder, or from the record of its newest ("last") on."""
        self.teardown()
        itself = place.removesuffix(_RECORD)
        return self.newest(place if itself == place else os.path.dirname(itself)) or [itself]

    def newest(self, folder: str) -> list[str]:
        """List the committed checkpoints in a folder from which a run can go on, the newest first."""
        try:
            listed = list_checkpoints(folder, depth=1, **self._options_of(folder))
        except NotFound:
            return []
        whole = [each for each in listed if each.state == "committed" and "weights_only" not in each.tags]
        if any(not each.path for each in listed):  # a checkpoint itself
            return []
        return [f"{folder.rstrip('/')}/{each.path}" for each in reversed(whole)]

    def load_meta(self, url: str, weights_only: bool | None, **ranks: Any) -> dict[str, Any]:
        """Load `meta`: torch's safe types alone, unless `weights_only` is False."""
        state: dict[str, Any] = {_META: None}
        weights_only = self._weights_only if weights_only is None else weights_only
        trusted = [_META] if weights_only is False else []
        try:
            load(state, url, trusted_objects=trusted, **ranks, **self._options_of(url))
        except UnsafeContent as error:
            advice = "if you trust who wrote it, give the Trainer the plugin CheckpointIO(weights_only=False)"
            raise UnsafeContent(error.message, advice=advice, url=error.url, key=error.key) from None
        return dict(state[_META])

    def load_tensors(self, url: str, tensors: dict[str, Any], **ranks: Any) -> None:
        """Load tensors in place, by name."""
        if tensors:
            load(tensors, url, **ranks, **self._options_of(url))

    def _load_whole(self, url: str, weights_only: bool | None) -> dict[str, Any]:
        meta = self.load_meta(url, weights_only, no_dist=True)
        tensors: dict[str, Any] = {}

        def allocate(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                tensor = tensors.setdefault(name, torch.empty_like(tensor, device="cpu"))
            return tensor

        whole = _with_tensors(meta, allocate)
        self.load_tensors(url, tensors, no_dist=True)
        return whole

    def _options_of(self, place: str, storage_options: Any = None) -> dict[str, Any]:
        options = {**(self._storage_options or {}), **(storage_options or {})}
        return {"storage_options": options} if options and "://" in place else {}

    def _remove_outdated(self) -> None:
        while self._outdated:
            place = self._outdated.pop()
            if os.path.islink(place):  # `save_last="link"`: what it leads to stays
                os.unlink(place)
                continue
            try:
                with contextlib.suppress(NotFound):
                    remove(place, **self._options_of(place))
            except CheckpointError as error:
                _logger.warning("%s stays: %s", place_of(place), error)


class Sharded(_Base):
    """Save the shards of all ranks, and load them on any number of ranks; arguments as for Lightning's class."""

    io_type: type[Saving]
    _checkpoint_io: Any

    @property
    def checkpoint_io(self) -> Any:
        if self._checkpoint_io is None:
            self._checkpoint_io = self.io_type()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def setup_environment(self) -> None:
        """Look at the CheckpointIO; Lightning calls it before anything is trained."""
        if not isinstance(self.checkpoint_io, Saving):
            text = f"{type(self).__name__} saves through the CheckpointIO of its adapter, not {self.checkpoint_io!r}"
            raise ConfigurationError(
                f"{text}: leave it out, or pass plugins=[CheckpointIO(...)] of the adapter"
            )
        super().setup_environment()

    @property
    def gathers(self) -> bool:
        """Tell whether the first rank saves the whole state, as Lightning has it for one file."""
        is_fsdp = hasattr(self, "_state_dict_type")
        return self._state_dict_type == "full" if is_fsdp else not self._save_distributed_checkpoint

    def _state_options(self) -> states.StateDictOptions:
        return states.StateDictOptions(full_state_dict=self.gathers, cpu_offload=self.gathers)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return states.get_model_state_dict(self.model, options=self._state_options())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # within a LightningOptimizer
        return states.get_optimizer_state_dict(self.model, optimizer, options=self._state_options())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        url, is_first = self.broadcast(os.fspath(filepath)), self.is_global_zero
        if is_first or not self.gathers:
            saving = self.checkpoint_io.save_shards
            saving(checkpoint, url, storage_options, is_first=is_first, no_dist=self.gathers)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        place, saving = os.fspath(checkpoint_path), self.checkpoint_io
        with contextlib.closing(Ranks(None, no_dist=False)) as ranks:
            urls = ranks.from_first(lambda: None if _is_own_file(place) else saving.candidates(place))
        if urls is None:
            return super().load_checkpoint(place, weights_only=weights_only)
        return first_whole(urls, lambda url: self._load_shards(url, weights_only))

    def _load_shards(self, url: str, weights_only: bool | None) -> dict[str, Any]:
        meta = self.checkpoint_io.load_meta(url, weights_only)
        optimizers, saved = self.optimizers, meta.get("optimizer_states", [])
        own: dict[str, Any] = {"state_dict": states.get_model_state_dict(self.model)}
        if self.lightning_module.trainer.state.fn == "fit" and "optimizer_states" in meta:
            if len(saved) != len(optimizers):
                raise LoadFailed(f"{len(saved)} optimizers were saved, there are {len(optimizers)}", url=url)
            own["optimizer_states"] = [states.get_optimizer_state_dict(self.model, o) for o in optimizers]
        stored: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        _with_tensors({name: meta[name] for name in own}, stored.setdefault)
        _with_tensors(own, tensors.setdefault)
        anew = [name for name in tensors if name not in stored and name.startswith("optimizer_states.")]
        for name in anew:  # of parameters that had no gradient yet
            for part in _local(tensors.pop(name)):
                part.zero_()
        if anew:
            _logger.warning("optimizer state not in the checkpoint begins at zero: %s", sorted(anew)[:5])
        if self.lightning_module.strict_loading and tensors.keys() != stored.keys():
            lacks, more = tensors.keys() - stored.keys(), stored.keys() - tensors.keys()
            text = f"the checkpoint lacks {len(lacks)} tensors {sorted(lacks)[:5]}, the module {len(more)} {sorted(more)[:5]}"
            raise LoadFailed(f"{text}; strict_loading=False of the module loads the rest", url=url)
        self.checkpoint_io.load_tensors(url, {name: tensors[name] for name in tensors if name in stored})
        weights = {
            name: value if isinstance(value, torch.Tensor) else meta["state_dict"].get(name, value)
            for name, value in own["state_dict"].items()
        }
        states.set_model_state_dict(self.model, weights)
        for number, state in enumerate(own.get("optimizer_states", ())):
            state["param_groups"] = saved[number]["param_groups"]
            states.set_optimizer_state_dict(self.model, optimizers[number], state)
        return {name: value for name, value in meta.items() if name not in _TENSORS}

    def teardown(self) -> None:
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()


class Finding(_Base):
    """Find the newest durable checkpoint in `dirpath` for `ckpt_path="last"`, whatever its name.

    Batches of a `RescalableLoader` are recorded when they are trained on, and checkpoints have its positions of all ranks.
    """

    _last: str | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        strategy = trainer.strategy
        own_way = type(strategy).save_checkpoint.__qualname__ != "Strategy.save_checkpoint"
        if not isinstance(_saving_of(strategy), Saving) or (own_way and not isinstance(strategy, Sharded)):
            raise ConfigurationError(
                f"ModelCheckpoint of the adapter does not reach what {type(strategy).__name__} saves: use FSDPStrategy "
                "or ModelParallelStrategy of the adapter, or with one device or DDP plugins=[CheckpointIO()]"
            )
        super().setup(trainer, pl_module, stage)
        self._since_step: list[Any] = []
        # Each rank has looked for itself, before it could talk to the others: some that load and some
        # that do not would wait for each other.
        _agree(strategy, 'ckpt_path="last"', self._last)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        _agree(trainer.strategy, "the step gone on from", checkpoint.get("global_step"))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._since_step.append(batch)
        if not trainer.fit_loop.epoch_loop._should_accumulate():  # the optimizer has made its step
            for each in self._since_step:
                _record(trainer.fit_loop._combined_loader.iterables, each)
            self._since_step.clear()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Replace the positions of a loader by those of all ranks: Lightning saves the first rank's."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        loaders = trainer.fit_loop._combined_loader.flattened if states else []
        stateful = [loader for loader in loaders if isinstance(loader, Stateful)]
        for number, loader in enumerate(stateful):
            if isinstance(loader, RescalableLoader):
                states[number] = loader.state_dict_of_all_ranks()

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        saving = _saving_of(trainer.strategy)
        if isinstance(saving, Saving):
            # Lightning sets `dirpath` later, in `setup`; this is how it finds the same folder here.
            folder = self._ModelCheckpoint__resolve_ckpt_dir(trainer)
            durable = saving.newest(os.fspath(folder))
            if durable:
                self._last = place_of(durable[0])
                return {durable[0] + _RECORD}
        found = {path for path in super()._find_last_checkpoints(trainer) if _is_own_file(path)}
        if not found:  # Lightning advises `save_last=True`, which changes nothing here
            warnings.filterwarnings("ignore", message=r".*there is no last checkpoint available")
            _logger.info("there is no checkpoint to resume from yet: the training begins at its first step")
        return found


def _record(loaders: Any, batch: Any) -> None:
    """Record a batch that was trained on, or each loader's of a list or dict; None of one that ended before the others."""
    if isinstance(loaders, Mapping):
        for name, loader in loaders.items():
            _record(loader, batch[name])
    elif isinstance(loaders, list | tuple):
        for loader, part in zip(loaders, batch, strict=True):
            _record(loader, part)
    elif isinstance(loaders, RescalableLoader) and batch is not None:
        loaders.record(batch)


def _agree(strategy: Any, name: str, value: Any) -> None:
    first = strategy.broadcast(value)
    if strategy.reduce_boolean_decision(bool(first != value), all=False):
        text = f"{name} is {first} on rank 0, {value} on rank {strategy.global_rank}"
        raise LoadFailed(f"{text}: another process saves here, or the ranks do not reach the same storage")


def _saving_of(strategy: Any) -> Any:
    saving = strategy.checkpoint_io
    while hasattr(saving, "checkpoint_io"):  # AsyncCheckpointIO, say
        saving = saving.checkpoint_io
    return saving


def first_whole(urls: Iterable[str], attempt: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return what `attempt` loads from the first URL that is not damaged; raise the first error if all are."""
    first: CheckpointError | None = None
    for url in urls:
        try:
            return attempt(url)
        except DAMAGE as error:
            first = first or error
            _logger.warning("%s is passed over: %s", place_of(url), error)
    assert first is not None
    raise first


def _with_tensors(checkpoint: Mapping[str, Any], visit: _Visit) -> dict[str, Any]:
    """Copy a checkpoint of Lightning, with what `visit` makes of the tensors of model and optimizers."""
    return {key: _walk(value, key, visit) if key in _TENSORS else value for key, value in checkpoint.items()}


def _walk(value: Any, name: str, visit: _Visit) -> Any:
    """Copy nested dicts and lists, with what `visit` makes of each tensor and its name."""
    if isinstance(value, torch.Tensor):
        return visit(name, value)
    if isinstance(value, dict):
        copied = copy.copy(value)  # with the attributes of a module's state dict
        for key, inner in value.items():
            copied[key] = _walk(inner, f"{name}.{key}", visit)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_walk(inner, f"{name}.{number}", visit) for number, inner in enumerate(value))
    return value


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether DCP saves a tensor in parts, and an empty one takes it up again."""
    if hasattr(tensor, "device_mesh") or hasattr(tensor, "local_shards"):  # FSDP1 has ShardedTensors
        return True
    is_own = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_own and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _is_own_file(place: str) -> bool:
    """Tell whether Lightning itself saved here: a file, or a folder with its `meta.pt`."""
    if "://" in place or place.endswith(_RECORD):
        return False
    return os.path.isfile(place) or os.path.isfile(os.path.join(place, "meta.pt"))


def _local(tensor: Any) -> list[torch.Tensor]:
    """Return what this rank has of it."""
    return [shard.tensor for shard in tensor.local_shards()] if hasattr(tensor, "local_shards") else [tensor]
