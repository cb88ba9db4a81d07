"""What several ranks saved comes back bit for bit on any number of ranks, however it is sharded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.states import (
    bits,
    digest,
    emptied,
    fsdp_model,
    random_tensor,
    sharded_state,
)
from support.strict_s3 import StrictS3
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import ckpt


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        pytest.param(2, (1, 3), marks=pytest.mark.smoke),
        (2, (2, 4)),
        *((saved_on, (1, 2, 3, 4)) for saved_on in (1, 3, 4)),
    ],
)
def test_reshard(saved_on: int, loaded_on: Sequence[int], tmp_path: Path, server: StrictS3) -> None:
    """Saved on 1 to 4 ranks, loaded on 1 to 4."""
    places = [(f"{tmp_path}/c", {}), ("s3://bucket/c", server.options)]
    expected = run_ranks(saved_on, _save_sharded, places)[0]
    for ranks in loaded_on:
        for found in run_ranks(ranks, _load_sharded, places):
            assert found == [expected, expected]


def _save_sharded(rank: int, places: list[tuple[str, dict[str, Any]]]) -> Any:
    state = sharded_state()
    for url, options in places:
        ckpt.save(state, url, storage_options=options)
    return digest(state)


def _load_sharded(rank: int, places: list[tuple[str, dict[str, Any]]]) -> Any:
    found = []
    for url, options in places:
        loaded = emptied(sharded_state(seed=5))
        ckpt.load(loaded, url, storage_options=options)
        found.append(digest(loaded))
    return found


def test_fsdp2_model_and_optimizer(tmp_path: Path) -> None:
    expected = run_ranks(3, _save_fsdp2, str(tmp_path))[0]
    for world in (1, 2, 4):
        for found in run_ranks(world, _load_fsdp2, str(tmp_path)):
            assert found == expected


def _save_fsdp2(rank: int, url: str) -> Any:
    model, optimizer = fsdp_model(steps=3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    ckpt.save(state, url)
    return digest(state)


def _load_fsdp2(rank: int, url: str) -> Any:
    model, optimizer = fsdp_model(seed=99, steps=1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    ckpt.load(state, url)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return digest({"model": model_state, "optimizer": optimizer_state})


def test_hsdp_model(tmp_path: Path) -> None:
    expected = run_ranks(4, _save_hsdp, str(tmp_path))
    assert all(found == expected[0] for found in expected)
    for found in run_ranks(2, _load_fsdp2_model, str(tmp_path)):
        assert found == expected[0]


def _save_hsdp(rank: int, url: str) -> Any:
    model, _ = fsdp_model(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    ckpt.save({"model": model.state_dict()}, url)
    return digest(model.state_dict())


def _load_fsdp2_model(rank: int, url: str) -> Any:
    model, _ = fsdp_model(seed=42)
    state = {"model": model.state_dict()}
    ckpt.load(state, url)
    return digest(state["model"])


def test_fsdp1_model(tmp_path: Path) -> None:
    expected = run_ranks(2, _fsdp1, str(tmp_path), True)
    found = run_ranks(2, _fsdp1, str(tmp_path), False)
    assert found == expected


def _fsdp1(rank: int, url: str, saving: bool) -> Any:
    from support.states import Model
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so
    model = FullyShardedDataParallel(Model(0 if saving else 7), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        if saving:
            ckpt.save(state, url)
        else:
            ckpt.load(state, url)
            model.load_state_dict(state["model"])
    with FullyShardedDataParallel.summon_full_params(model):
        return digest({name: parameter.data for name, parameter in model.named_parameters()})


def test_sharded_tensor(tmp_path: Path) -> None:
    run_ranks(2, _sharded_tensor, str(tmp_path))


def _sharded_tensor(rank: int, url: str) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    warnings.simplefilter("ignore")
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    saved = sharded_tensor.rand(spec, 11, 6)
    ckpt.save({"t": saved}, url)
    loaded = sharded_tensor.zeros(spec, 11, 6)
    ckpt.load({"t": loaded}, url)
    assert bits(saved.local_shards()[0].tensor) == bits(loaded.local_shards()[0].tensor)


def test_rank_without_anything_to_write(tmp_path: Path) -> None:
    """All items are replicated and land on the first rank; the second still takes part in the commit."""
    run_ranks(2, _save_replicated, str(tmp_path))
    assert len(list(tmp_path.rglob("*.distcp"))) == 1


def _save_replicated(rank: int, url: str) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    state = {"t": torch.arange(10.0), "n": 5}
    ckpt.save(state, url, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    loaded = emptied(state)
    ckpt.load(loaded, url)
    assert digest(loaded) == digest(state)


def test_part_of_the_ranks(tmp_path: Path) -> None:
    run_ranks(3, _save_in_subgroup, str(tmp_path))


def _save_in_subgroup(rank: int, url: str) -> None:
    group = dist.new_group([1, 2])
    if rank != 0:
        state = {"t": torch.arange(10.0)}
        ckpt.save(state, url, process_group=group)
        loaded = emptied(state)
        ckpt.load(loaded, url, process_group=group)
        assert digest(loaded) == digest(state)
    dist.barrier()


def test_dcp_functions_on_several_ranks(tmp_path: Path) -> None:
    run_ranks(2, _dcp_on_ranks, str(tmp_path))


def _dcp_on_ranks(rank: int, url: str) -> None:
    state = sharded_state()
    writer = ckpt.CheckpointWriter(url)
    for _ in range(2):
        dcp.save(state, storage_writer=writer)
    loaded = emptied(sharded_state(seed=3))
    dcp.load(loaded, storage_reader=ckpt.CheckpointReader(url))
    assert digest(loaded) == digest(state)


def test_plan_caching(tmp_path: Path) -> None:
    """DCP then reuses the plans of the first save; names must be new all the same."""
    run_ranks(2, _save_with_cached_plans, str(tmp_path))


def _save_with_cached_plans(rank: int, root: str) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    names = set()
    for step in range(3):
        state = sharded_state(seed=step)
        metadata = ckpt.save(
            state, f"{root}/step-{step}", planner=DefaultSavePlanner(enable_plan_caching=True)
        )
        names |= {info.relative_path for info in metadata.storage_data.values()}
    for step in range(3):
        loaded = emptied(sharded_state(seed=50))
        ckpt.load(loaded, f"{root}/step-{step}")
        assert digest(loaded) == digest(sharded_state(seed=step))
    assert len(names) == 3 * 2


def test_async_save_on_several_ranks(tmp_path: Path) -> None:
    run_ranks(2, _async_on_ranks, str(tmp_path))


def _async_on_ranks(rank: int, root: str) -> None:
    futures = [ckpt.async_save(sharded_state(seed=step), f"{root}/step-{step}") for step in range(3)]
    for step, future in enumerate(futures):
        future.result(60)
        loaded = emptied(sharded_state(seed=50))
        ckpt.load(loaded, f"{root}/step-{step}")
        assert digest(loaded) == digest(sharded_state(seed=step))


def test_dcp_async_save_threads_and_processes(tmp_path: Path) -> None:
    run_ranks(1, _dcp_async_save, str(tmp_path))


def _dcp_async_save(rank: int, root: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    for kind in AsyncCheckpointerType:
        values = random_tensor(100, dtype=torch.complex64, seed=2)
        state = {"t": random_tensor(1000, seed=1), "n": 3, "conjugated": values.conj(), "pair": (values, 1)}
        url = f"{root}/{kind.name}"
        future: Any = dcp.async_save(
            state, storage_writer=ckpt.CheckpointWriter(url), async_checkpointer_type=kind
        )
        future.result(100)
        loaded = emptied(state)
        ckpt.load(loaded, url)
        assert digest(loaded) == digest(state)
