"""Real ranks exchange columns: what they save equals what DCP's plan saves, again and again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.states import digest, emptied, random_tensor, sharded_state
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.errors import SaveFailed
from ckpt.ranks.first_rank import FirstRank
from ckpt.save_plans.local import set_up_in_one_pass
from ckpt.torch_private import Shard as LocalShard
from ckpt.torch_private import StridedShard, set_local_shards


def mesh_state(seed: int = 0) -> dict[str, Any]:
    """HSDP, FSDP over TP, uneven and empty shards, plain tensors, objects, some of one rank alone; on four ranks."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()

    def tensor(*shape: int) -> torch.Tensor:
        return random_tensor(*shape, seed=seed)

    strided = DTensor.from_local(
        tensor(2, 3), both, (StridedShard(0, split_factor=2), Shard(0)), run_check=False
    )
    return {
        "model": {
            "hsdp": distribute_tensor(tensor(7, 4), both, [Replicate(), Shard(0)]),
            "two": distribute_tensor(tensor(5, 9), both, [Shard(0), Shard(1)]),
            "few": distribute_tensor(tensor(1, 3), both["dp"], [Shard(0)]),
            "strided": strided,
            "whole": distribute_tensor(tensor(6), both, [Replicate(), Replicate()]),
            "norm": tensor(64),
        },
        "optimizer": {"step": torch.tensor(3), "groups": [{"lr": 0.1}, {"lr": 0.2}]},
        f"loader{rank}": {"at": rank},
        f"rng{rank}": tensor(4),
    }


def stored(metadata: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for fqn, each in metadata.state_dict_metadata.items():
        found[fqn] = None
        if isinstance(each, TensorStorageMetadata):
            chunks = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in each.chunks)
            found[fqn] = each.size, each.properties.dtype, each.properties.requires_grad, chunks
    return found


def test_saves_what_dcp_saves_on_four_ranks(tmp_path: Path) -> None:
    run_ranks(4, _saves_what_dcp_saves, str(tmp_path))


def _saves_what_dcp_saves(rank: int, root: str) -> None:
    for number, make in enumerate((mesh_state, sharded_state)):
        state = make()
        ours = ckpt.save(state, f"{root}/ours{number}")
        dcp.save(state, storage_writer=ckpt.CheckpointWriter(f"{root}/dcp{number}"))
        by_dcp = ckpt.CheckpointReader(f"{root}/dcp{number}").read_metadata()
        stock = dcp.FileSystemReader(f"{root}/ours{number}").read_metadata()
        assert stored(ours) == stored(by_dcp) == stored(stock)
        assert ours.planner_data == by_dcp.planner_data == stock.planner_data
        again = make(seed=1)
        with mock.patch.object(FirstRank, "scatter_bytes", side_effect=AssertionError("planned anew")):
            ckpt.save(again, f"{root}/again{number}")
        for name, saved in (("ours", state), ("again", again)):
            for load in (ckpt.load, _stock_load):
                loaded = emptied(make(seed=2))
                load(loaded, f"{root}/{name}{number}")
                assert digest(loaded) == digest(saved)


def _stock_load(state: dict[str, Any], url: str) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(url))


def test_nested_shards_are_found_as_dcp_does() -> None:
    run_ranks(1, _finds_nested_shards)


def _finds_nested_shards(rank: int) -> None:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    nested, inner = sharded_tensor.rand(spec, 3, 4), sharded_tensor.rand(spec, 3, 4)
    metadata = nested.local_shards()[0].metadata
    set_local_shards(nested, [LocalShard(inner, metadata)])
    for state in ({"a": {"b": [torch.ones(2), 3]}}, {"a": {"w": nested}, "b": torch.ones(2)}):
        dcp_s, ours = DefaultSavePlanner(), DefaultSavePlanner()
        dcp_s.set_up_planner(state)
        with set_up_in_one_pass(ours):
            ours.set_up_planner(state)
        assert ours.flatten_sharded_tensors
        assert (list(ours.state_dict), ours.mappings) == (list(dcp_s.state_dict), dcp_s.mappings)
    shard = ours.state_dict["a.w"].local_shards()[0]
    assert shard.tensor is inner.local_shards()[0].tensor
    with pytest.raises(ValueError, match="duplicated"), set_up_in_one_pass(ours):
        ours.set_up_planner({"a": {"b": 1}, "a.b": 2})
    assert ours.flatten_sharded_tensors


def test_changes_between_saves(tmp_path: Path) -> None:
    run_ranks(2, _changes_between_saves, str(tmp_path))


def _changes_between_saves(rank: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def sharded(dtype: torch.dtype, *shape: int) -> DTensor:
        return distribute_tensor(random_tensor(*shape, dtype=dtype), mesh, [Shard(0)])

    states: list[dict[str, Any]] = [
        {"w": sharded(torch.float32, 8, 3), "b": torch.ones(4)},
        {"w": sharded(torch.bfloat16, 8, 3), "b": torch.ones(4)},
        {"w": sharded(torch.bfloat16, 9, 3), "b": torch.ones(4)},
        {"w": sharded(torch.bfloat16, 9, 3).redistribute(mesh, [Shard(1)]), "b": torch.ones(4)},
        {"w": sharded(torch.bfloat16, 9, 3).redistribute(mesh, [Replicate()]), "b": torch.ones(4)},
        {"w": sharded(torch.float32, 8, 3), f"b{rank}": torch.ones(4)},
        {"w": sharded(torch.float32, 8, 3), "b": torch.ones(4, requires_grad=True)},
    ]
    for _ in range(2):
        for number, state in enumerate(states):
            metadata = ckpt.save(state, f"{root}/{number}")
            loaded = emptied(state)
            ckpt.load(loaded, f"{root}/{number}")
            assert digest(loaded) == digest(state)
    described = metadata.state_dict_metadata["b"]
    assert isinstance(described, TensorStorageMetadata)
    assert described.properties.requires_grad


def test_changes_in_place_are_planned_anew(tmp_path: Path) -> None:
    """A state that is changed in place, on all ranks or on one, is described and planned anew on all."""
    run_ranks(2, _changes_in_place, str(tmp_path))


def _changes_in_place(rank: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    last: dict[str, Any] = {"own": torch.ones(3), "at": 1}
    state: dict[str, Any] = {
        "w": distribute_tensor(random_tensor(8, 4), mesh, [Shard(0)]),
        "b": torch.ones(4),
        "layers": [torch.ones(2), torch.zeros(2)],
        f"r{rank}": last,
        "step": 1,
    }
    cases: dict[str, Callable[[], object]] = {
        "dtype": lambda: _become(state["b"], state["b"].double()),
        "dtype of a DTensor": lambda: state.update(w=state["w"].double()),
        "shape": lambda: state["b"].resize_(6).fill_(2),
        "requires_grad": lambda: state["b"].requires_grad_(),
        "placements of a spec": lambda: _shard_by_columns(state["w"], mesh),
        "path of the same name": lambda: state.update(layers=dict(zip("01", state["layers"], strict=True))),
        "tensor that was an object": lambda: state.update(step=torch.tensor(1)),
        "object that was a tensor": lambda: state["layers"].update({"0": 5}),
        "new item": lambda: state.update(new=7),
        "item that is gone": lambda: state.pop("b"),
        "new item of one rank": lambda: rank == 1 and last.update(more=torch.ones(2)),
        "dtype on one rank": lambda: rank == 1 and _become(last["own"], last["own"].half()),
        "shape on one rank": lambda: rank == 1 and last["own"].resize_(5).fill_(1),
        "item of one rank that is gone": lambda: rank == 1 and last.pop("at"),
    }
    ckpt.save(state, f"{root}/first")
    for number, (kind, change) in enumerate(cases.items()):
        change()
        for is_new in (True, False):
            url = f"{root}/{number}-{is_new}"
            with mock.patch.object(
                FirstRank, "scatter_bytes", autospec=True, side_effect=_SCATTER
            ) as planned:
                ours = ckpt.save(state, url)
            assert planned.called == is_new, kind
            dcp.save(state, storage_writer=ckpt.CheckpointWriter(f"{url}-dcp"))
            by_dcp = ckpt.CheckpointReader(f"{url}-dcp").read_metadata()
            noted = "ckpt_structure.layers"  # that the keys are texts
            assert {name: each for name, each in stored(ours).items() if name != noted} == stored(by_dcp), (
                kind
            )
            paths = {name: path for name, path in ours.planner_data.items() if name != noted}
            assert paths == by_dcp.planner_data, kind
        if "grad" not in kind:
            loaded = emptied(state)
            ckpt.load(loaded, url)
            assert digest(loaded) == digest(state), kind


_SCATTER = FirstRank.scatter_bytes


def _become(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    tensor.data = other
    return True


def _shard_by_columns(tensor: DTensor, mesh: Any) -> None:
    """Change the placements in the spec that a tensor has, and its shard."""
    other = tensor.redistribute(mesh, [Shard(1)])
    tensor._spec.placements, tensor._local_tensor = other.placements, other.to_local()


class _OwnPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        return super().create_local_plan()


def test_one_rank_has_a_planner_of_its_own(tmp_path: Path) -> None:
    """All then plan as DCP does."""
    run_ranks(2, _own_planner, str(tmp_path))


def _own_planner(rank: int, root: str) -> None:
    state = {f"w{rank}": random_tensor(5), "b": torch.ones(3)}
    for step in range(2):
        ckpt.save(state, f"{root}/{step}", planner=_OwnPlanner() if rank == 1 else None)
        loaded = emptied(state)
        ckpt.load(loaded, f"{root}/{step}")
        assert digest(loaded) == digest(state)


def test_ranks_that_disagree_about_a_tensor(tmp_path: Path) -> None:
    messages = run_ranks(2, _disagree, str(tmp_path))
    assert len(set(messages)) == 1
    assert "'w' is a tensor of float32 (4,) on rank 0, and a tensor of float64 (4,) on rank 1" in messages[0]
    assert not list(tmp_path.rglob("*.distcp"))


def _disagree(rank: int, root: str) -> str:
    with pytest.raises(SaveFailed) as caught:
        ckpt.save({"w": torch.zeros(4, dtype=(torch.float32, torch.float64)[rank])}, f"{root}/a")
    return str(caught.value)
