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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ckpt import api
from ckpt.backends.base import exists
from ckpt.backends.registry import open_store
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.errors import LoadFailed, NotFound
from ckpt.ranks.group import Ranks
from ckpt.reading.reader import CheckpointReader
from ckpt.tools.ls import list_checkpoints
from ckpt.trainer_integration.adapters.host import require_host

require_host("megatron-core", oldest="0.16", before="0.17", module="megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import core, serialization, validation
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

__all__ = ["LoadStrategy", "SaveStrategy", "install", "latest_checkpoint", "uninstall"]

_COMMON = ShardedObject("common.pt", None, (1,), (0,))
_POLL_S = 0.05
_save_options: dict[str, Any] = {}
_load_options: dict[str, Any] = {}
_replaced: list[tuple[Any, str, Any]] = []


def install(
    *, storage_options: Mapping[str, Any] | None = None, trusted_objects: Collection[str] = ()
) -> None:
    """Have `dist_checkpointing` save and load with this library, for paths and URLs, until `uninstall`.

    `SaveStrategy` and `LoadStrategy` become the strategies of the format `torch_dist`. Checkpoints that
    Megatron-Core wrote by itself are loaded by its own strategy.

    Args:
        storage_options: of URLs, as for `ckpt.save`.
        trusted_objects: names of objects that may be unpickled, as for `ckpt.load`.
    """
    uninstall()
    _save_options.update(storage_options=storage_options)
    _load_options.update(storage_options=storage_options, trusted_objects=trusted_objects)
    for module, name, value in (
        (torch_strategies, "TorchDistSaveShardedStrategy", SaveStrategy),
        (torch_strategies, "TorchDistLoadShardedStrategy", LoadStrategy),
        (serialization, "verify_checkpoint_and_load_strategy", _verify_checkpoint_and_load_strategy),
        (core, "maybe_load_config", _maybe_load_config),
        (validation, "maybe_load_config", _maybe_load_config),
        (serialization, "save", _save),
        (dist_checkpointing, "save", _save),
    ):
        _replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)


def uninstall() -> None:
    """Undo `install`; harmless without it."""
    while _replaced:
        setattr(*_replaced.pop())
    _save_options.clear()
    _load_options.clear()


def latest_checkpoint(root: str) -> str | None:
    """Return the newest committed checkpoint below `root`, the same on all ranks; None if there is none."""

    def find() -> str | None:
        with contextlib.suppress(NotFound):
            listed = list_checkpoints(root, storage_options=_save_options.get("storage_options"), depth=1)
            names = [each.path for each in listed if each.latest and each.state == "committed"]
            return f"{root.rstrip('/')}/{names[0]}" if names else None
        return None

    with contextlib.closing(Ranks(None, no_dist=False)) as ranks:
        return ranks.from_first(find)


class SaveStrategy(torch_strategies.TorchDistSaveShardedStrategy):
    """Save ShardedTensors and ShardedObjects through `ckpt.save`; no CUDA call is made."""

    def __init__(self, backend: str = "torch_dist", version: int = 1, *settings: Any, **named: Any) -> None:
        super().__init__(backend, version, *settings, **named)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save from all ranks; the checkpoint is committed when this returns. Raises SaveFailed."""
        api.save(self._values(sharded_state_dict), checkpoint_dir, planner=self._planner(), **_save_options)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]
    ) -> AsyncRequest:
        """Copy the state, begin the upload, and return a request that ends when all ranks have committed.

        The upload runs in this process. What the host's queue starts in another one only waits for it.
        """
        values, planner = self._values(sharded_state_dict), self._planner()
        future = api.async_save(values, checkpoint_dir, planner=planner, **_save_options)
        descriptor, marker = tempfile.mkstemp(prefix="ckpt-save-")
        os.close(descriptor)
        future.add_done_callback(lambda _: os.unlink(marker))
        return AsyncRequest(_wait_while_exists, (marker, os.getpid()), [lambda: future.result() and None])

    def _values(self, sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
        groups, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        return {key: _packed(group) for key, group in groups.items()}

    def _planner(self) -> torch_strategies.MCoreSavePlanner:
        decentral = self.keep_only_main_replica
        return torch_strategies.MCoreSavePlanner(
            dedup_replicated_tensors=not decentral,
            can_run_decentralized_global_plan=decentral,
            flatten_state_dict=False,
        )


class LoadStrategy(torch_strategies.TorchDistLoadShardedStrategy):
    """Load through `ckpt.load`, on any number of ranks; checkpoints of Megatron-Core itself as it does."""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Load what the state dict asks for. Raises as `ckpt.load`."""
        place = _place(checkpoint_dir)
        if not _is_ours(place):
            return super().load(sharded_state_dict, checkpoint_dir)
        groups, paths, names = torch_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        shards = [each for group in groups.values() for each in group if isinstance(each, ShardedTensor)]
        for shard in shards:
            if shard.data is None:
                shard.init_data(torch.device("cpu"))
            if shard.allow_shape_mismatch:
                shard.data.detach().zero_()
        values = {
            key: _packed(group) if isinstance(group[0], ShardedTensor) else ""
            for key, group in groups.items()
        }
        planner = torch_strategies.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[each for each in shards if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                each.key: each for each in shards if each.allow_shape_mismatch
            },
        )
        api.load(values, place, planner=planner, **_load_options)
        loaded = {
            key: [each.data for each in groups[key]] if isinstance(value, _Shards) else value
            for key, value in values.items()
        }
        state = torch_strategies._replace_sharded_keys_with_state_dict_keys(loaded, paths, names)
        torch_strategies._restore_dict_types(state, sharded_state_dict)
        return state

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> dict[str, Any]:
        """Describe the tensors of a checkpoint, without their data."""
        place = _place(checkpoint_dir)
        if metadata is None and _is_ours(place):
            metadata = _metadata_of(place)
        return super().load_tensors_metadata(checkpoint_dir, metadata)  # type: ignore[no-any-return]

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Describe the tensors and objects of a checkpoint, without their data."""
        place = _place(checkpoint_dir)
        if not _is_ours(place):
            return super().load_sharded_metadata(checkpoint_dir)  # type: ignore[no-any-return]
        metadata = _metadata_of(place)
        tensors = self.load_tensors_metadata(checkpoint_dir, metadata)
        objects = metadata.state_dict_metadata.keys() - tensors.keys() - {_COMMON.unique_key}
        return {key: ShardedObject.empty_from_unique_key(key) for key in sorted(objects)} | tensors


class _CommonStrategy(TorchCommonLoadStrategy):
    """Load the common state, without `weights_only=False`."""

    def load_common(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        place, key = _place(checkpoint_dir), _COMMON.unique_key
        values: dict[str, Any] = {key: ""}
        try:
            api.load(values, place, no_dist=True, **_load_options)
        except LoadFailed:
            if not os.path.exists(
                os.path.join(place, _COMMON.key)
            ):  # the strategies alone: as Megatron-Core does
                raise
            return super().load_common(place)
        return values[key][0]


class _Shards(LocalShardsContainer):
    """The shards that this rank has of a tensor: one that an asynchronous save can copy."""

    def __init__(self, local_shards: list[CheckpointableShardedTensor]) -> None:
        super().__init__(local_shards)
        for name, shard in self._named():
            setattr(self, name, shard.data)

    def _named(self) -> Iterator[tuple[str, ShardedTensor]]:
        for number, shard in enumerate(self._local_shards):
            yield f"shard_{number}", shard._sh_ten

    def __tensor_flatten__(self) -> tuple[list[str], list[ShardedTensor]]:
        return [name for name, _ in self._named()], [shard.without_data() for _, shard in self._named()]

    @staticmethod
    def __tensor_unflatten__(parts: Mapping[str, Any], shards: list[ShardedTensor], *_: Any) -> _Shards:
        copies = [replace(shard, data=data) for shard, data in zip(shards, parts.values(), strict=True)]
        return _Shards([CheckpointableShardedTensor.from_sh_ten(copied) for copied in copies])


def _packed(group: list[Any]) -> Any:
    """Make of shards or objects of one key what DCP saves; prepended axes become axes of the tensors."""
    if not isinstance(group[0], ShardedTensor):
        stream = io.BytesIO()
        torch.save([each.data for each in group], stream)
        return stream
    shards = []
    for shard in group:
        axes = shard.prepend_axis_num
        data = shard.data.detach()[(None,) * axes] if axes else shard.data.detach()
        whole = replace(shard, data=data, local_shape=tuple(data.shape), prepend_axis_num=0)
        shards.append(CheckpointableShardedTensor.from_sh_ten(whole))
    return _Shards(shards)


def _save(*values: Any, **named: Any) -> AsyncRequest | None:
    """Save as `dist_checkpointing.save`; the common state and all else become one checkpoint."""
    original = _original("save")
    call = inspect.signature(original).bind(*values, **named)
    call.apply_defaults()
    given = call.arguments
    strategy = given["sharded_strategy"] or serialization.get_default_save_sharded_strategy()
    if isinstance(strategy, tuple):
        strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *strategy)
    inner = getattr(strategy, "base_strategy", strategy)  # of a FullyParallelSaveStrategyWrapper
    if given["common_strategy"] is not None or not isinstance(inner, SaveStrategy):
        return original(*values, **named)
    state = given["sharded_state_dict"]
    if given["content_metadata"] is not None:
        state["content_metadata"] = given["content_metadata"]
    checks = given["validate_access_integrity"], given["preprocess_common_before_consistancy_check"]
    sharded, common = serialization.save_preprocess(state, *checks)
    sharded[_COMMON.key] = replace(_COMMON, data=common, replica_id=torch.distributed.get_rank())
    if given["async_sharded_save"]:
        return strategy.async_save(sharded, given["checkpoint_dir"])
    strategy.save(sharded, given["checkpoint_dir"])
    return None


def _verify_checkpoint_and_load_strategy(
    checkpoint_dir: Any, sharded_strategy: Any = None, common_strategy: Any = None
) -> tuple[Any, Any]:
    if not _is_ours(_place(checkpoint_dir)):
        original = _original("verify_checkpoint_and_load_strategy")
        return original(checkpoint_dir, sharded_strategy, common_strategy)  # type: ignore[no-any-return]
    chosen = sharded_strategy is not None and not isinstance(sharded_strategy, tuple)
    return sharded_strategy if chosen else LoadStrategy(), _CommonStrategy()


def _maybe_load_config(checkpoint_dir: str) -> core.CheckpointingConfig | None:
    if not _is_ours(_place(checkpoint_dir)):
        return _original("maybe_load_config")(checkpoint_dir)
    with contextlib.closing(
        open_store(_place(checkpoint_dir), _load_options.get("storage_options"))
    ) as store:
        return core.CheckpointingConfig("torch_dist") if exists(store, COMMIT_KEY) else None


def _original(name: str) -> Any:
    return next(original for _, replaced, original in _replaced if replaced == name)


def _place(checkpoint_dir: str | os.PathLike[str]) -> str:
    """Return the place; Megatron-Core makes a `Path` of some URLs, which loses a slash."""
    return re.sub(r"^([a-z][\w+.-]*):/(?=[^/])", r"\1://", os.fspath(checkpoint_dir))


def _is_ours(place: str) -> bool:
    """Tell whether this library is asked for a place: any URL, and a folder with a commit of it."""
    if "://" in place:
        return not place.startswith("msc://")
    return os.path.exists(os.path.join(place, COMMIT_KEY))


def _metadata_of(place: str) -> Any:
    with contextlib.closing(CheckpointReader(place, **_load_options)) as reader:
        return reader.read_metadata()


def _wait_while_exists(marker: str, saving_pid: int) -> None:
    """Wait for the end of a save by a process, which is this one or its parent."""
    while os.path.exists(marker) and saving_pid in (os.getpid(), os.getppid()):
        time.sleep(_POLL_S)
