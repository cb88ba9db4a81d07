"""Real ranks exchange columns: what they save equals what DCP's plan saves, again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.states import digest, emptied, random_tensor, sharded_state
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.errors import SaveFailed
from ckpt.ranks.first_rank import FirstRank
from ckpt.torch_private import StridedShard


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
