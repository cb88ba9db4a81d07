"""The private names of torch that the library uses: each still does what is asked of it, and stands in one file."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import io
import re
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.rooms import ROOT, modules
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import _async_process_executor, default_planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import dataloader

from ckpt import torch_private

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
HOME = ROOT / "ckpt/torch_private.py"
_PRIVATE = re.compile(r"\._(?!_)")


def private_names(source: str) -> Iterator[str]:
    """Yield the private names that a file imports from torch, or takes out of torch's modules and objects."""
    home = _attributes_of_home()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if _is_private(node.module, alias)
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_private(None, alias))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr in home:
            if ast.unparse(node.value) != "self":
                yield ast.unparse(node)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("torch.", "dist.", "dcp.")):
            yield from (name for name in [ast.unparse(node)] if _PRIVATE.search(name))


@functools.cache
def _attributes_of_home() -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(HOME.read_text())) if isinstance(node, ast.Attribute)}


def _is_private(module: str | None, alias: ast.alias) -> bool:
    name = f"{module}.{alias.name}" if module else alias.name
    return name.startswith("torch.") and _PRIVATE.search(name) is not None


@pytest.mark.slow
def test_no_other_module_uses_private_names_of_torch() -> None:
    for module, path in modules().items():
        if path != HOME:
            assert not list(private_names(path.read_text())), module


@pytest.mark.parametrize(
    "line",
    [
        "from torch._utils import x",
        "from torch.storage import _x",
        "import torch._C",
        "torch._C.x",
        "dist.distributed_c10d._world",
        "value._local_tensor",
    ],
)
def test_the_search_finds_them(line: str) -> None:
    assert list(private_names(line))


def test_dcp_chooses_its_storage_in_these_modules() -> None:
    choices = [getattr(module, torch_private.STORAGE_SETUP) for module in torch_private.STORAGE_SETUP_MODULES]
    assert len(set(choices)) == 1
    assert list(inspect.signature(choices[0]).parameters) == ["storage", "checkpoint_id", "reader"]


def test_dcp_makes_its_stager_by_this_name() -> None:
    for name in ("save", "async_save", "load"):
        assert (
            len({getattr(module, name) for module in torch_private.CALL_MODULES if hasattr(module, name)})
            == 1
        )
    made = getattr(torch_private.STAGER_MODULE, torch_private.DEFAULT_STAGER)
    assert isinstance(made(StagingOptions(False, False, False, False)), AsyncStager)
    assert list(inspect.signature(made).parameters) == ["config"]
    assert f"{torch_private.DEFAULT_STAGER}(" in inspect.getsource(dcp.async_save)


def test_fsspec() -> None:
    writer, reader = torch_private.fsspec_storage()
    assert issubclass(writer, dcp.FileSystemWriter)
    assert issubclass(reader, dcp.FileSystemReader)
    for kind in (writer, reader, dcp.FileSystemWriter, dcp.FileSystemReader):
        assert "path" in inspect.signature(kind.__init__).parameters


def test_async_saves_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    execute_save = getattr(torch_private.ProcessExecutor, torch_private.EXECUTE_SAVE)
    assert {"checkpoint_id", "storage_writer"} <= inspect.signature(execute_save).parameters.keys()
    assert "self._save_process" in inspect.getsource(_async_process_executor._AsyncCheckpointProcess)
    assert _async_process_executor._CHECKPOINT_PROCESS is None
    assert not torch_private.async_save_process_is_alive()
    monkeypatch.setattr(_async_process_executor, "_CHECKPOINT_PROCESS", "one")
    torch_private.forget_async_save_process()
    assert _async_process_executor._CHECKPOINT_PROCESS is None


def test_workers_of_data_loaders_start_by_these_names() -> None:
    loop = getattr(torch_private.WORKER_LOOP_MODULE, torch_private.WORKER_LOOP)
    handlers = getattr(torch_private.WORKER_SIGNALS_MODULE, torch_private.WORKER_SIGNALS)
    assert f"target=_utils.worker.{torch_private.WORKER_LOOP}," in inspect.getsource(dataloader)
    assert f"signal_handling.{torch_private.WORKER_SIGNALS}()" in inspect.getsource(loop)
    assert callable(handlers)


def test_saves_and_loads() -> None:
    common = {"planner", "process_group", "no_dist"}
    functions: list[tuple[Any, str]] = [
        (torch_private.save_state_dict, "storage_writer"),
        (torch_private.load_state_dict, "storage_reader"),
    ]
    for function, storage in functions:
        assert {"state_dict", storage, *common} <= inspect.signature(function).parameters.keys()


def test_metadata() -> None:
    names = [field.name for field in fields(torch_private.StorageInfo)]
    assert names == ["relative_path", "offset", "length", "transform_descriptors"]
    assert torch_private.StorageInfo.__name__ == "_StorageInfo"  # in pickles
    (chunk,) = torch_private.create_chunk_list(torch.zeros(2, 3))
    assert (chunk.offsets, chunk.sizes) == (torch.Size([0, 0]), torch.Size([2, 3]))
    (item,) = torch_private.create_write_items("w", torch.zeros(2, 3))
    assert item.tensor_data is not None
    assert (item.index.fqn, item.tensor_data.chunk) == ("w", chunk)
    state = {"a": [1, {"b": 2}]}
    assert torch_private.unflatten_state_dict(*torch_private.flatten_state_dict(state)) == state


def test_stream_extensions() -> None:
    assert list(torch_private.ExtensionRegistry().from_descriptor_list([])) == []
    assert callable(torch_private.StreamTransformExtension.transform_from)


def test_archives_and_pickles() -> None:
    file = io.BytesIO()
    tensor = torch.arange(6.0)
    torch.save(tensor, file)
    file.seek(0)
    reader = torch_private.archive_reader(file)
    assert "data.pkl" in reader.get_all_records()
    assert "torch._utils._rebuild_tensor_v2" in torch_private.allowed_globals()
    assert isinstance(torch_private.user_allowed_globals(), dict)  # type: ignore[no-untyped-call]
    assert torch_private.storage_dtype("FloatStorage") is torch.float32
    file.seek(0)
    offset = torch_private.checkpoint_offset(torch.load(file, map_location="meta", weights_only=True))
    assert offset is not None
    assert file.getvalue()[offset : offset + 24] == tensor.numpy().tobytes()
    assert torch_private.checkpoint_offset(tensor) is None


def test_tensors() -> None:
    assert torch_private.is_zero_tensor(torch._efficientzerotensor(3))
    assert not torch_private.is_zero_tensor(torch.zeros(3))
    tensor = torch.zeros(3)
    before = torch_private.changes_of(tensor)
    tensor.detach()[1:].add_(1)
    assert torch_private.changes_of(tensor) == before + 1
    storage = torch_private.shared_storage(100)
    assert storage.is_shared()
    assert storage.nbytes() == 100


def test_sparse_tensors_without_memory_are_loaded() -> None:
    file = io.BytesIO()
    torch.save(torch.eye(3).to_sparse(), file)
    file.seek(0)
    with torch_private.unchecked_sparse_tensors():
        assert torch.load(file, map_location="meta", weights_only=True).is_meta


@pytest.mark.skipif(TORCH < (2, 15), reason="torch checks them from 2.15 on")
def test_the_check_of_sparse_tensors_comes_back() -> None:
    wrong = torch.sparse_coo_tensor(torch.tensor([[7]]), torch.ones(1), (3,), check_invariants=False)
    file = io.BytesIO()
    torch.save(wrong, file)
    file.seek(0)
    with torch_private.unchecked_sparse_tensors():
        torch.load(file, weights_only=True)
    file.seek(0)
    with pytest.warns(UserWarning, match="sparse tensor invariants"), pytest.raises(RuntimeError):
        torch.load(file, weights_only=True)


def test_process_groups_and_sharded_tensors() -> None:
    run_ranks(1, _process_groups_and_sharded_tensors)


def _process_groups_and_sharded_tensors(rank: int) -> None:
    assert torch_private.has_cpu_backend(None)
    assert torch_private.device_in_use() is None
    store: Any = torch_private.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    before = len(torch_private.group_names())
    group = dist.new_group(backend="gloo")
    assert len(torch_private.group_names()) == before + 1
    torch_private.set_group_timeout(timedelta(seconds=77), group)

    whole = torch.arange(12.0).reshape(3, 4)
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [ShardPlacement(0)])
    assert torch.equal(torch_private.local_tensor(tensor), whole)
    other = torch_private.dtensor_like(tensor, whole + 1)
    assert torch_private.spec_of(tensor) == torch_private.spec_of(other)
    with torch_private.plain_attributes():
        assert (tensor.shape, tensor.requires_grad) == (whole.shape, False)
    assert torch.equal(torch_private.local_tensor(other), whole + 1)
    assert (other.placements, other.device_mesh) == (tensor.placements, tensor.device_mesh)

    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    sharded = copy.copy(sharded_tensor.rand(spec, 3, 4))
    metadata = sharded.local_shards()[0].metadata
    assert isinstance(metadata, torch_private.ShardMetadata)
    torch_private.set_local_shards(sharded, [torch_private.Shard(whole, metadata)])
    assert isinstance(sharded, torch_private.ShardedTensor)
    assert sharded.local_shards()[0].tensor is whole
    nested = copy.copy(sharded_tensor.rand(spec, 3, 4))
    torch_private.set_local_shards(nested, [torch_private.Shard(sharded, metadata)])
    flat = torch_private.flatten_sharded_tensors({"nested": nested, "whole": whole})
    assert flat["whole"] is whole
    assert flat["nested"].local_shards()[0].tensor is whole

    original = sharded_tensor.rand(spec, 3, 4)
    kept = original.local_shards()[0].tensor.clone()
    other_dtype = torch_private.sharded_tensor_like(original, torch.bfloat16)
    assert (other_dtype.dtype, other_dtype.size()) == (torch.bfloat16, original.size())
    other_dtype.local_shards()[0].tensor.fill_(7)
    assert torch.equal(original.local_shards()[0].tensor, kept)
    assert original.dtype is torch.float32


def test_optimizers_say_whether_they_have_load_hooks() -> None:
    for register in ("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        assert not torch_private.has_load_hooks(optimizer)
        getattr(optimizer, register)(lambda *_: None)
        assert torch_private.has_load_hooks(optimizer)


def test_a_planner_says_whether_it_caches_plans() -> None:
    assert torch_private.caches_plans(DefaultSavePlanner(enable_plan_caching=True))
    assert not torch_private.caches_plans(DefaultSavePlanner())
    assert not torch_private.caches_plans(None)


def test_plans() -> None:
    placement = torch_private.StridedShard(0, split_factor=2)
    assert (placement.dim, type(placement).__name__) == (0, "_StridedShard")
    stock: Any = default_planner._validate_global_plan
    assert list(inspect.signature(stock).parameters) == ["global_plan", "metadata"]
    torch_private.replace_plan_validation(lambda each: each)  # also tested where it is used
    source = inspect.getsource(DefaultSavePlanner._create_global_plan)
    assert "_validate_global_plan(global_plan, metadata)" in source


def _names_handed_on() -> Iterator[str]:
    for node in ast.parse(HOME.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names if _is_private(node.module, alias)]
            yield from (name for name in names if not name.startswith("_"))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from (
                target.id
                for target in ast.walk(node)
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
            )


def test_every_name_is_tried_here() -> None:
    source = (ROOT / "tests/stock/test_torch_private.py").read_text()
    for name in _names_handed_on():
        assert f"torch_private.{name}" in source, name


def test_fsdp1_marks_what_it_flattens() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not torch_private.is_fsdp_flattened(parameter)
    parameter._fsdp_flattened = True  # type: ignore[attr-defined]
    assert torch_private.is_fsdp_flattened(parameter)
