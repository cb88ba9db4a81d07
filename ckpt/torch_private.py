"""Give every private name of torch that this library uses a name here, so that a new torch is tried in one file.

`tests/stock/test_torch_private.py` uses each of them, and sees that no other module does.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._weights_only_unpickler import _get_allowed_globals as allowed_globals
from torch._weights_only_unpickler import _get_user_allowed_globals as user_allowed_globals
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint import (
    _async_process_executor,
    _storage_utils,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list

# `dcp.save` and `dcp.load` without what `ckpt.api` does in their place between all ranks (arguments,
# `state_dict()`), and without their warning that a single process may have been meant to be several.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict as save_state_dict
from torch.distributed.tensor import DTensor

__all__ = [
    "STORAGE_SETUP",
    "ExtensionRegistry",
    "FakeTensor",
    "FakeTensorMode",
    "MemoryFormat",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "StorageInfo",
    "StreamTransformExtension",
    "allowed_globals",
    "archive_reader",
    "async_save_process_is_alive",
    "checkpoint_offset",
    "create_chunk_list",
    "default_store",
    "dtensor_like",
    "flatten_state_dict",
    "forget_async_save_process",
    "group_names",
    "is_zero_tensor",
    "load_state_dict",
    "local_tensor",
    "modules_with_storage_setup",
    "process_executor",
    "save_state_dict",
    "set_group_timeout",
    "set_local_shards",
    "shared_storage",
    "storage_dtype",
    "unflatten_state_dict",
    "user_allowed_globals",
]

STORAGE_SETUP = "_storage_setup"
"""The function by which DCP finds a writer or reader."""


def modules_with_storage_setup() -> tuple[ModuleType, ...]:
    """Return the modules that hold `STORAGE_SETUP`: the first defines it, the others import it by name."""
    return (_storage_utils, state_dict_saver, state_dict_loader)


def process_executor() -> Any:
    """Return the class that carries out `dcp.async_save` in another process."""
    return _async_process_executor._ProcessBasedAsyncCheckpointExecutor


def async_save_process_is_alive() -> bool:
    """Tell whether this process has a process for its `dcp.async_save` calls, and that one is alive."""
    process = _async_process_executor._CHECKPOINT_PROCESS
    return process is not None and process._save_process.is_alive()


def forget_async_save_process() -> None:
    """Let the next `dcp.async_save` start a new process."""
    _async_process_executor._CHECKPOINT_PROCESS = None


def archive_reader(file: Any) -> Any:
    """Open a `torch.save` archive with torch's own parser."""
    return torch._C.PyTorchFileReader(file)


def storage_dtype(name: str) -> torch.dtype:
    """Return the dtype of a typed storage, such as `FloatStorage`, by its name in a pickle."""
    dtype: torch.dtype = torch.storage._get_dtype_from_pickle_storage_type(name)
    return dtype


def checkpoint_offset(tensor: torch.Tensor) -> int | None:
    """Return where in its archive the storage of a fake tensor lies; None if torch did not note it."""
    offset: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return offset


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Tell whether `tensor` is zeros without memory, as autograd makes them."""
    return tensor._is_zerotensor()


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Make a CPU storage in shared memory."""
    return torch.UntypedStorage._new_shared(nbytes, device="cpu")  # type: ignore[no-any-return, no-untyped-call]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the shard of this rank, outside of autograd."""
    return tensor._local_tensor


def dtensor_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Make a DTensor of the mesh and placements of `tensor` with `local` as the shard of this rank.

    `DTensor.from_local` does not take every placement that a DTensor can have. The DTensor is first made around
    nothing: it takes over the storage offset of what it is made around, and where that is not 0, torch sends the
    memory of the DTensor, which has none, to another process, and crashes.
    """
    made = DTensor(local.new_empty(0), tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    made._local_tensor = local
    return made


def set_local_shards(tensor: ShardedTensor, shards: Sequence[Shard]) -> None:
    """Replace the shards of this rank."""
    tensor._local_shards = list(shards)


def default_store() -> Any:
    """Return the store by which the ranks of the default process group found each other."""
    return dist.distributed_c10d._get_default_store()


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Give the collectives of `group` another timeout."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def group_names() -> Any:
    """Return the names of all process groups of this process, by group."""
    return dist.distributed_c10d._world.pg_names
