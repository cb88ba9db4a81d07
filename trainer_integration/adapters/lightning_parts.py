"""What the adapters of Lightning add to its classes, in whichever of its two packages they are.

A checkpoint holds the tensors of model and optimizers by name, and `meta`: all the rest that the
Trainer saves (loops, callbacks, hyperparameters), with placeholders where the tensors were.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckpt.api import async_save, load, save
from ckpt.errors import (
    CheckpointError,
    CommitConflict,
    ConfigurationError,
    FormatError,
    IntegrityError,
    LoadFailed,
    NotCommitted,
    NotFound,
    NotVisible,
    UnsafeContent,
)
from ckpt.tools.ls import list_checkpoints
from ckpt.tools.remove import remove

__all__ = ["Finding", "Saving", "Sharded"]

_logger = logging.getLogger(__name__)
_META, _TENSORS = "meta", ("state_dict", "optimizer_states")
_RECORD = "/commit.json"
_DAMAGE = (IntegrityError, FormatError, NotVisible, NotCommitted, NotFound, CommitConflict)


class Saving:
    """Save what Lightning hands to a `CheckpointIO` with `ckpt.save`, load it, and remove it.

    Args:
        storage_options: of URLs, as for `ckpt.save`.
        async_save: copy the state, and upload it while the steps go on. Lightning's
            `AsyncCheckpointIO` works too, but then an old checkpoint goes before the new one is
            durable; here it waits.
        options: `threads`, `memory_budget_bytes`, `max_bandwidth_bytes_per_s`, `timeout_s`.
    """

    def __init__(
        self, storage_options: Mapping[str, Any] | None = None, *, async_save: bool = False, **options: Any
    ) -> None:
        self._storage_options, self._is_async, self._options = storage_options, async_save, options
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

        meta = {
            name: _walk(value, name, take_out) if name in _TENSORS else value
            for name, value in checkpoint.items()
        }
        tags = {"step": str(checkpoint.get("global_step", 0))}
        if "optimizer_states" not in checkpoint:
            tags["weights_only"] = "true"
        self.settle()
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
            return super().load_checkpoint(place, weights_only=weights_only)  # type: ignore[misc]
        return first_whole(self.candidates(place), lambda url: self._load_whole(url, weights_only))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, its commit first; while a save is in flight, when that is durable."""
        self._outdated.append(os.fspath(path))
        if self._in_flight is None:
            self._remove_outdated()

    def teardown(self) -> None:
        """Settle: Lightning calls it at the end of `fit`."""
        self.settle()

    def settle(self) -> None:
        """Wait for the save in flight, then remove what it replaces.

        Raises SaveFailed: nothing goes before a later save is durable.
        """
        saving, self._in_flight = self._in_flight, None
        if saving is not None:
            saving.result()
            self._remove_outdated()

    def candidates(self, place: str) -> list[str]:
        """List what to load for `place`: itself, or if it is a folder of checkpoints, these, newest first.

        "last" comes here as the record of the newest: if that is damaged, older ones follow.
        """
        self.settle()
        if place.endswith(_RECORD):
            place = place.removesuffix(_RECORD)
            return self.newest(os.path.dirname(place)) or [place]
        return self.newest(place) or [place]

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
        trusted = [_META] if weights_only is False else []
        try:
            load(state, url, trusted_objects=trusted, **ranks, **self._options_of(url))
        except UnsafeContent as error:
            advice = "if you trust who wrote it, pass weights_only=False to fit, validate, test or predict"
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
            own = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
            return tensors.setdefault(name, own) if tensor.is_meta else own

        whole = {
            name: _walk(value, name, allocate) if name in _TENSORS else value for name, value in meta.items()
        }
        self.load_tensors(url, tensors, no_dist=True)
        return whole

    def _options_of(self, place: str, storage_options: Any = None) -> dict[str, Any]:
        options = {**(self._storage_options or {}), **(storage_options or {})}
        return {"storage_options": options} if options and "://" in place else {}

    def _remove_outdated(self) -> None:
        while self._outdated:
            place = self._outdated.pop()
            if _is_own_file(place):
                super().remove_checkpoint(place)  # type: ignore[misc]
                continue
            try:
                remove(place, **self._options_of(place))
            except NotFound:
                pass
            except CheckpointError as error:
                _logger.warning("%s stays: %s", place, error)


class Sharded:
    """Save the shards of all ranks, in place of Lightning's writer; load them on any number of ranks."""

    io_type: Callable[[], Saving]
    model: Any
    optimizers: Any
    lightning_module: Any
    _checkpoint_io: Any

    @property
    def checkpoint_io(self) -> Any:
        if self._checkpoint_io is None:
            self._checkpoint_io = self.io_type()
        return super().checkpoint_io  # type: ignore[misc]

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def setup_environment(self) -> None:
        """Look at the CheckpointIO; Lightning calls it before anything is trained."""
        if not isinstance(self.checkpoint_io, Saving):
            raise ConfigurationError(
                f"{type(self).__name__} saves through the CheckpointIO of its adapter, not {self.checkpoint_io!r}: "
                "leave it out, or pass plugins=[CheckpointIO(...)] of the adapter"
            )
        super().setup_environment()  # type: ignore[misc]

    @property
    def gathers(self) -> bool:
        """Tell whether the first rank saves the whole state, as Lightning has it for one file."""
        raise NotImplementedError

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model, options=self._state_options())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # within a LightningOptimizer
        return get_optimizer_state_dict(self.model, optimizer, options=self._state_options())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        url, is_first = self.broadcast(os.fspath(filepath)), self.is_global_zero  # type: ignore[attr-defined]
        if is_first or not self.gathers:
            saving = self.checkpoint_io.save_shards
            saving(checkpoint, url, storage_options, is_first=is_first, no_dist=self.gathers)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        place = os.fspath(checkpoint_path)
        urls: Any = None
        if self.is_global_zero:  # type: ignore[attr-defined]
            try:
                urls = [] if _is_own_file(place) else self.checkpoint_io.candidates(place)
            except CheckpointError as error:
                urls = error
        urls = self.broadcast(urls)  # type: ignore[attr-defined]
        if isinstance(urls, CheckpointError):
            raise urls
        if not urls:
            return super().load_checkpoint(place, weights_only=weights_only)  # type: ignore[misc, no-any-return]
        return first_whole(urls, lambda url: self._load_shards(url, weights_only))

    def _load_shards(self, url: str, weights_only: bool | None) -> dict[str, Any]:
        meta = self.checkpoint_io.load_meta(url, weights_only)
        own: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        if self.lightning_module.trainer.state.fn == "fit" and "optimizer_states" in meta:
            own["optimizer_states"] = [get_optimizer_state_dict(self.model, each) for each in self.optimizers]
            if len(meta["optimizer_states"]) != len(self.optimizers):
                saved, now = len(meta["optimizer_states"]), len(self.optimizers)
                raise LoadFailed(f"the checkpoint has {saved} optimizers, the module {now}", url=url)
        stored = _named({name: meta[name] for name in own})
        tensors = _named(own)
        anew = [name for name in tensors if name not in stored and name.startswith("optimizer_states.")]
        for name in anew:  # of parameters that had no gradient yet
            _zero(tensors.pop(name))
        if anew:
            _logger.warning("optimizer state that the checkpoint lacks begins at zero: %s", _some(anew))
        if self.lightning_module.strict_loading and tensors.keys() != stored.keys():
            lacks, more = tensors.keys() - stored.keys(), stored.keys() - tensors.keys()
            text = f"the checkpoint lacks {_some(lacks)}; the module lacks {_some(more)}"
            raise LoadFailed(f"{text}; strict_loading=False of the module loads the rest", url=url)
        self.checkpoint_io.load_tensors(url, {name: tensors[name] for name in tensors if name in stored})
        weights = {
            name: value if isinstance(value, torch.Tensor) else meta["state_dict"].get(name, value)
            for name, value in own["state_dict"].items()
        }
        set_model_state_dict(self.model, weights)
        for number, state in enumerate(own.get("optimizer_states", ())):
            state["param_groups"] = meta["optimizer_states"][number]["param_groups"]
            set_optimizer_state_dict(self.model, self.optimizers[number], state)
        return {name: value for name, value in meta.items() if name not in _TENSORS}

    def _state_options(self) -> StateDictOptions:
        return StateDictOptions(full_state_dict=self.gathers, cpu_offload=self.gathers)

    def teardown(self) -> None:
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()  # type: ignore[misc]


class Finding:
    """Find the newest durable checkpoint for `ckpt_path="last"`, and refuse what cannot be saved."""

    strategy_type: Any
    dirpath: Any

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        strategy = trainer.strategy
        is_own_way = type(strategy).save_checkpoint is not self.strategy_type.save_checkpoint
        if is_own_way and not isinstance(strategy, Sharded):
            name = type(strategy).__name__
            raise ConfigurationError(
                f"{name} does not save through a CheckpointIO, so nothing here reaches its checkpoints: use "
                "FSDPStrategy or ModelParallelStrategy of the adapter, or Lightning's own ModelCheckpoint"
            )
        if not isinstance(_saving_of(strategy), Saving):
            raise ConfigurationError(
                "ModelCheckpoint of the adapter needs its CheckpointIO: Trainer(plugins=[CheckpointIO()])"
            )
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        saving = _saving_of(trainer.strategy)
        if isinstance(saving, Saving):
            # Lightning sets `dirpath` later, in `setup`; this is how it finds the same folder here.
            folder = self._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
            durable = saving.newest(os.fspath(folder))
            if durable:
                return {durable[0] + _RECORD}
        return {path for path in super()._find_last_checkpoints(trainer) if _is_own_file(path)}  # type: ignore[misc]


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
        except _DAMAGE as error:
            first = first or error
            _logger.warning("%s is passed over: %s", url, error)
    assert first is not None
    raise first


def _walk(value: Any, name: str, visit: Callable[[str, torch.Tensor], Any]) -> Any:
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


def _named(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        _walk(value, name, tensors.setdefault)
    return tensors


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether DCP saves a tensor in parts, and an empty one takes it up again."""
    if hasattr(tensor, "device_mesh") or hasattr(tensor, "local_shards"):
        return True
    is_own = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_own and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _zero(tensor: Any) -> None:
    if hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            shard.tensor.zero_()
    else:
        tensor.zero_()


def _is_own_file(place: str) -> bool:
    """Tell whether Lightning itself saved here: a file, or a folder with its `meta.pt`."""
    if "://" in place or place.endswith(_RECORD):
        return False
    return os.path.isfile(place) or os.path.isfile(os.path.join(place, "meta.pt"))


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} tensor(s) {', '.join(sorted(names)[:5])}{more}"
