"""Save and load the sharded state dicts of Megatron-Core, on any storage, with one commit over all of it.

Megatron-Core writes `common.pt` and `metadata.json` beside the shards, by paths and without a commit.
Here the common state is one object of the checkpoint, and the commit record says what the place holds.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ckpt import api
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.errors import ConfigurationError, LoadFailed
from ckpt.reading.foreign_files import is_committed
from ckpt.reading.reader import CheckpointReader
from ckpt.trainer_integration.adapters.host import newest_checkpoint, require_host

require_host("megatron-core", oldest="0.16", before="0.17", module="megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import core, serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

__all__ = ["install", "latest_checkpoint", "uninstall"]

_COMMON = ShardedObject("common.pt", None, (1,), (0,))
_POLL_S = 0.05
_save_options: dict[str, Any] = {}
_load_options: dict[str, Any] = {}
_native: dict[Any, Any] = {}  # functions of Megatron-Core, by those that stand in their places


def install(
    *, storage_options: Mapping[str, Any] | None = None, trusted_objects: Collection[str] = ()
) -> None:
    """Have `dist_checkpointing` save and load with this library, for paths and URLs, until `uninstall`.

    Checkpoints that Megatron-Core wrote by itself are loaded by its own code.

    Args:
        storage_options: of URLs, as for `ckpt.save`.
        trusted_objects: names of objects that may be unpickled, as for `ckpt.load`.
    """
    uninstall()
    _save_options.update(storage_options=storage_options)
    _load_options.update(storage_options=storage_options, trusted_objects=trusted_objects)
    for owner, name, own in _PLACES:
        _native[own] = getattr(owner, name)
        setattr(owner, name, own)


def uninstall() -> None:
    """Undo `install`; harmless without it."""
    for owner, name, own in _PLACES if _native else ():
        setattr(owner, name, _native[own])
    for settings in (_native, _save_options, _load_options):
        settings.clear()


def latest_checkpoint(root: str) -> str | None:
    """Return the newest whole checkpoint below `root`, the same on all ranks; None if there is none."""
    whole = dist_checkpointing.check_is_distributed_checkpoint
    return newest_checkpoint(root, lambda place, _: whole(place), _load_options.get("storage_options"))


def _save(*values: Any, **named: Any) -> AsyncRequest | None:
    """Save as `dist_checkpointing.save`; the common state and all else become one checkpoint."""
    call = inspect.signature(_native[_save]).bind(*values, **named)
    call.apply_defaults()
    given = call.arguments
    strategy = given["sharded_strategy"] or serialization.get_default_save_sharded_strategy()
    if isinstance(strategy, tuple):
        strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *strategy)
    inner = getattr(strategy, "base_strategy", strategy)  # of a FullyParallelSaveStrategyWrapper
    if given["common_strategy"] is not None or not isinstance(inner, strategies.TorchDistSaveShardedStrategy):
        return _native[_save](*values, **named)
    state = given["sharded_state_dict"]
    if given["content_metadata"] is not None:
        state["content_metadata"] = given["content_metadata"]
    checks = given["validate_access_integrity"], given["preprocess_common_before_consistancy_check"]
    sharded, common = serialization.save_preprocess(state, *checks)
    sharded[_COMMON.key] = replace(_COMMON, data=common, replica_id=torch.distributed.get_rank())
    begin = strategy.async_save if given["async_sharded_save"] else strategy.save
    return begin(sharded, given["checkpoint_dir"])


def _save_shards(_: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> None:
    """Save from all ranks; the checkpoint is committed when this returns. Raises SaveFailed."""
    values, planner = _planned(sharded_state_dict)
    api.save(values, _place(checkpoint_dir), planner=planner, **_save_options)


def _begin_to_save_shards(_: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> AsyncRequest:
    """Copy the state, begin the upload, and return a request that ends when all ranks have committed.

    The upload runs in this process. What the host's queue starts in another one only waits for it.
    """
    values, planner = _planned(sharded_state_dict)
    future = api.async_save(values, _place(checkpoint_dir), planner=planner, **_save_options)
    with tempfile.NamedTemporaryFile(prefix="ckpt-save-", delete=False) as marker:
        future.add_done_callback(lambda _: Path(marker.name).unlink(missing_ok=True))
    return AsyncRequest(_wait_while_exists, (marker.name, os.getpid()), [future.result])


def _wait_while_exists(marker: str, saving_pid: int) -> None:
    """Wait for the end of a save by a process, which is this one or its parent."""
    while os.path.exists(marker) and saving_pid in (os.getpid(), os.getppid()):
        time.sleep(_POLL_S)


def _load_shards(self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> Any:
    """Load what the state dict asks for, on any number of ranks. Raises as `ckpt.load`."""
    place = _place(checkpoint_dir)
    if not _is_ours(place):
        return _native[_load_shards](self, sharded_state_dict, checkpoint_dir)
    groups, paths, names = strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
    shards = {key: group for key, group in groups.items() if isinstance(group[0], ShardedTensor)}
    mismatched, exact = {}, []
    for shard in (shard for group in shards.values() for shard in group):
        if shard.data is None:
            shard.init_data("cpu")
        if shard.allow_shape_mismatch:
            shard.data.detach().zero_()
            mismatched[shard.key] = shard
        else:
            exact.append(shard)
    values = {key: _packed(map(_whole, shards[key])) if key in shards else "" for key in groups}
    planner = strategies.MCoreLoadPlanner(
        shapes_validation_sharded_tensors=exact, allow_shape_mismatch_sharded_tensors=mismatched
    )
    with _errors_of_host():
        api.load(values, place, planner=planner, **_load_options)
    loaded = values | {key: [shard.data for shard in group] for key, group in shards.items()}
    state = strategies._replace_sharded_keys_with_state_dict_keys(loaded, paths, names)
    strategies._restore_dict_types(state, sharded_state_dict)
    return state


def _load_common(self: Any, checkpoint_dir: Any) -> Any:
    """Load the common state, on this rank alone."""
    if not _is_ours(_place(checkpoint_dir)):
        return _native[_load_common](self, checkpoint_dir)
    values: dict[str, Any] = {_COMMON.unique_key: ""}
    with _errors_of_host():
        api.load(values, _place(checkpoint_dir), no_dist=True, **_load_options)
    return values[_COMMON.unique_key][0]


def _reader(checkpoint_dir: Any, *settings: Any, **named: Any) -> Any:
    """Return what describes the tensors and objects of a checkpoint; the common state is none of them."""
    if not _is_ours(_place(checkpoint_dir)):
        return _native[_reader](checkpoint_dir, *settings, **named)
    with contextlib.closing(CheckpointReader(_place(checkpoint_dir), **_load_options)) as reader:
        metadata = reader.read_metadata()
    described = {k: v for k, v in metadata.state_dict_metadata.items() if k != _COMMON.unique_key}
    return SimpleNamespace(read_metadata=lambda: replace(metadata, state_dict_metadata=described))


def _load_strategies(checkpoint_dir: Any, sharded: Any = None, common: Any = None) -> tuple[Any, Any]:
    if not _is_ours(_place(checkpoint_dir)):
        return _native[_load_strategies](checkpoint_dir, sharded, common)  # type: ignore[no-any-return]
    chosen = sharded is not None and not isinstance(sharded, tuple)
    return sharded if chosen else strategies.TorchDistLoadShardedStrategy(), TorchCommonLoadStrategy()


def _maybe_load_config(checkpoint_dir: Any) -> core.CheckpointingConfig | None:
    if not _is_ours(_place(checkpoint_dir)):
        return _native[_maybe_load_config](checkpoint_dir)
    committed = is_committed(_place(checkpoint_dir), _load_options["storage_options"])
    return core.CheckpointingConfig("torch_dist") if committed else None


class _LoadFailed(LoadFailed, core.CheckpointingException):
    """A load failed: an error of this library, and the one of Megatron-Core that its callers catch."""


@contextlib.contextmanager
def _errors_of_host() -> Iterator[None]:
    """Let a failed load, such as one of a missing key or of another shape, be an error of Megatron-Core too."""
    try:
        yield
    except LoadFailed as error:
        facts: dict[str, Any] = {"failures": error.failures, "failed_ranks": error.failed_ranks}
        raise _LoadFailed(error.message, url=error.url, **facts) from error


class _Planner(strategies.MCoreSavePlanner):
    """Plan lists of tensors, which an asynchronous save has copied, as the shards that they are."""

    places_values = True
    """Ranks have other values under one name, and a save does not compare them."""

    def __init__(self, shards: Mapping[str, list[ShardedTensor]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._shards = {key: [shard.without_data() for shard in group] for key, group in shards.items()}

    def set_up_planner(self, state_dict: dict[str, Any], *settings: Any, **named: Any) -> None:
        values = dict(state_dict)
        for key, group in self._shards.items():
            values[key] = _packed(replace(s, data=d) for s, d in zip(group, state_dict[key], strict=True))
        super().set_up_planner(values, *settings, **named)


def _planned(sharded_state_dict: dict[str, Any]) -> tuple[dict[str, Any], _Planner]:
    """Return the tensors and objects that this rank saves by their keys, and what plans them."""
    if _COMMON.key not in sharded_state_dict:
        raise ConfigurationError(
            "this is not the `save` of Megatron-Core that megatron.install() replaces: call install() before"
            " `from megatron.core.dist_checkpointing import save`, or write dist_checkpointing.save(...)"
        )
    groups, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
    values: dict[str, Any] = {}
    shards: dict[str, list[ShardedTensor]] = {}
    for key, group in groups.items():
        if isinstance(group[0], ShardedTensor):
            shards[key] = [*map(_whole, group)]
            values[key] = [shard.data for shard in shards[key]]
        else:
            values[key] = io.BytesIO()
            torch.save([each.data for each in group], values[key])
    return values, _Planner(shards)


def _whole(shard: ShardedTensor) -> ShardedTensor:
    """Make the prepended axes of a shard axes of its tensor."""
    data = shard.data.detach()[(None,) * shard.prepend_axis_num + (...,)]
    return replace(shard, data=data, local_shape=tuple(data.shape), prepend_axis_num=0)


def _packed(shards: Any) -> LocalShardsContainer:
    return LocalShardsContainer([*map(CheckpointableShardedTensor.from_sh_ten, shards)])


def _place(checkpoint_dir: str | os.PathLike[str]) -> str:
    """Return the place; Megatron-Core makes a `Path` of some URLs, which loses a slash."""
    return re.sub(r"^([a-z][\w+.-]*):/(?=[^/])", r"\1://", os.fspath(checkpoint_dir))


def _is_ours(place: str) -> bool:
    """Tell whether this library is asked for a place: any URL, and a folder with a commit of it."""
    return "://" in place or os.path.exists(os.path.join(place, COMMIT_KEY))


_PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (serialization, "save", _save),
    (dist_checkpointing, "save", _save),
    (serialization, "verify_checkpoint_and_load_strategy", _load_strategies),
    (core, "maybe_load_config", _maybe_load_config),
    (strategies, "_get_filesystem_reader", _reader),
    (strategies.TorchDistSaveShardedStrategy, "save", _save_shards),
    (strategies.TorchDistSaveShardedStrategy, "async_save", _begin_to_save_shards),
    (strategies.TorchDistLoadShardedStrategy, "load", _load_shards),
    (TorchCommonLoadStrategy, "load_common", _load_common),
)
