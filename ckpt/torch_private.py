"""Give every private name of torch that is used a name here, so that a new torch is tried in one file.

`tests/stock/test_torch_private.py` uses each of them, and sees that no other module does.
"""

# ruff: noqa: F401 (other modules import these names)

from __future__ import annotations

import contextlib
import copy
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._weights_only_unpickler import _get_allowed_globals as allowed_globals
from torch._weights_only_unpickler import _get_user_allowed_globals as user_allowed_globals
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint import (
    _async_process_executor,
    _storage_utils,
    default_planner,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import (
    _flatten_sharded_tensors as flatten_sharded_tensors,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.checkpoint.planner_helpers import _create_write_items as create_write_items

# `dcp.save` and `dcp.load` without what `ckpt.api` does in their place between all ranks (arguments,
# `state_dict()`), and without their warning that a single process may have been meant to be several.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict as save_state_dict
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened as is_fsdp_flattened
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils.data._utils import signal_handling as _worker_signals
from torch.utils.data._utils import worker as _worker

STORAGE_SETUP = "_storage_setup"
"""The function by which DCP finds a writer or reader."""

STORAGE_SETUP_MODULES = (_storage_utils, state_dict_saver, state_dict_loader)
"""They hold `STORAGE_SETUP`: the first defines it, the others import it by name."""

CALL_MODULES = (torch.distributed.checkpoint, state_dict_saver, state_dict_loader)
"""They hold `save`, `async_save` and `load`: the first for programs, the others define them, and call them by name."""

DEFAULT_STAGER = "DefaultStager"
"""The class of which `dcp.async_save`, in `STAGER_MODULE`, makes a stager when it is given none."""

STAGER_MODULE = state_dict_saver

WORKER_LOOP = "_worker_loop"
"""The function, in `WORKER_LOOP_MODULE`, that a `DataLoader` gives to the process of a worker."""

WORKER_LOOP_MODULE = _worker

WORKER_SIGNALS = "_set_worker_signal_handlers"
"""The function, in `WORKER_SIGNALS_MODULE`, that such a process calls first; that of other loaders' workers too."""

WORKER_SIGNALS_MODULE = _worker_signals

ProcessExecutor: Any = _async_process_executor._ProcessBasedAsyncCheckpointExecutor
"""The class that carries out `dcp.async_save` in another process."""

EXECUTE_SAVE = "_execute_save_impl"
"""Its static method that sends a state and a writer there, and waits for the metadata."""


def fsspec_storage() -> tuple[Any, ...]:
    """Return DCP's writer and reader for file systems of fsspec; nothing where DCP cannot use it."""
    for name in ("fsspec_filesystem", "_fsspec_filesystem"):  # the second is its name before torch 2.15
        with contextlib.suppress(Exception):  # as DCP itself
            module = importlib.import_module(f"torch.distributed.checkpoint.{name}")
            return module.FsspecWriter, module.FsspecReader
    return ()


archive_reader: Callable[[Any], Any] = torch._C.PyTorchFileReader
"""Opens a `torch.save` archive with torch's own parser."""


class _NothingToCheck(list[torch.Tensor]):
    """Takes no sparse tensor."""

    def append(self, tensor: torch.Tensor) -> None:
        """Drop it."""


@contextlib.contextmanager
def unchecked_sparse_tensors() -> Iterator[None]:
    """Let `torch.load` on this thread skip its check of sparse tensors, from torch 2.15 on.

    The check reads their elements, which tensors on the meta device do not have.
    """
    local = torch.serialization._serialization_tls
    before = getattr(local, "sparse_tensors_to_validate", None)
    if before is None:
        yield
        return
    local.sparse_tensors_to_validate = _NothingToCheck()
    try:
        yield
    finally:
        local.sparse_tensors_to_validate = before


storage_dtype: Callable[[str], torch.dtype] = torch.storage._get_dtype_from_pickle_storage_type
"""Returns the dtype of a typed storage, such as `FloatStorage`, by its name in a pickle."""

is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Tells whether a tensor is zeros without memory, as autograd makes them."""

default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store
"""Returns the store by which the ranks of the default process group found each other."""

set_group_timeout: Callable[[timedelta, Any], None] = dist.distributed_c10d._set_pg_timeout
"""Gives the collectives of a group another timeout."""


def caches_plans(planner: object) -> bool:
    """Tell whether a planner gives plans of earlier saves again, whatever it is given now."""
    return bool(getattr(planner, "_enable_plan_caching", False))


def replace_plan_validation(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what DCP checks its global plan with by what `make` makes of it, by `functools.wraps`, once."""
    stock = default_planner._validate_global_plan
    if not hasattr(stock, "__wrapped__"):
        default_planner._validate_global_plan = make(stock)


def has_cpu_backend(group: Any) -> bool:
    """Tell whether a process group, None is the default one, can send CPU tensors, as `dcp.async_save` demands."""
    return torch.device("cpu") in (group or dist.distributed_c10d._get_default_group())._device_types


def device_in_use() -> int | None:
    """Return the first GPU on which this process has a context; None if there is none. It makes none."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return next((number for number in range(torch.cuda.device_count()) if has_context(number)), None)


def async_save_process_is_alive() -> bool:
    """Tell whether this process has a process for its `dcp.async_save` calls, and that one is alive."""
    process = _async_process_executor._CHECKPOINT_PROCESS
    return process is not None and process._save_process.is_alive()


def forget_async_save_process() -> None:
    """Let the next `dcp.async_save` start a new process."""
    _async_process_executor._CHECKPOINT_PROCESS = None


def checkpoint_offset(tensor: torch.Tensor) -> int | None:
    """Return where in its archive the storage of a meta tensor lies; None if torch did not note it."""
    offset: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return offset


def changes_of(tensor: torch.Tensor) -> int:
    """Return how often torch changed the memory of a tensor, through whichever view of it.

    Raises RuntimeError for an inference tensor, which does not count.
    """
    return tensor._version


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Make a CPU storage in shared memory.

    torch takes all its pages from the system at once, in one thread, and from `/dev/shm`, of which a container may have
    64 MB. Where Python and the system can make a file of memory alone, pages come with the first copy, in many threads.
    """
    file, strategy = -1, torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if strategy == "file_descriptor":
        with contextlib.suppress(AttributeError, OSError):  # not every Python, nor every sandbox
            file = os.memfd_create("ckpt")
    if file < 0:
        return torch.UntypedStorage._new_shared(nbytes, device="cpu")  # type: ignore[no-any-return, no-untyped-call]
    try:
        os.ftruncate(file, nbytes)
        storage: Any = torch.UntypedStorage._new_shared_fd_cpu(file, nbytes)  # type: ignore[attr-defined]
    finally:
        os.close(file)
    # torch has a copy of it, which would outlive an exec, with the memory.
    os.set_inheritable(storage._share_fd_cpu_()[0], False)
    return storage  # type: ignore[no-any-return]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the shard of this rank, outside of autograd."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """Return the mesh, placements, shape and dtype of a DTensor, which compare equal if all do."""
    return tensor._spec


plain_attributes: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
"""Reads attributes of tensors inside it without asking their classes first, which takes a third longer."""


def dtensor_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Make a DTensor of the mesh and placements of `tensor` with `local` as the shard of this rank.

    `DTensor.from_local` does not take every placement. `local` must begin its storage: the DTensor
    takes its offset over, and where that is not 0, torch sends the memory of the DTensor, which has
    none, to another process, and crashes.
    """
    return DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)  # type: ignore[no-untyped-call]


def set_local_shards(tensor: ShardedTensor, shards: Sequence[Shard]) -> None:
    """Replace the shards of this rank."""
    tensor._local_shards = list(shards)


def group_names() -> Any:
    """Return the names of all process groups of this process, by group."""
    return dist.distributed_c10d._world.pg_names


def sharded_tensor_like(tensor: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    """Make a ShardedTensor with the shards of another one, of a dtype, and without their values."""
    shards = []
    for shard in tensor.local_shards():
        own = copy.copy(shard)
        own.tensor = torch.empty_like(shard.tensor, dtype=dtype)
        shards.append(own)
    metadata = copy.copy(tensor.metadata())
    metadata.tensor_properties = copy.copy(metadata.tensor_properties)
    metadata.tensor_properties.dtype = dtype
    make = ShardedTensor._init_from_local_shards_and_global_metadata
    return make(shards, metadata, process_group=tensor._process_group, sharding_spec=tensor.sharding_spec())


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer has hooks that see or change what `load_state_dict` is given."""
    return bool(
        optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    )
