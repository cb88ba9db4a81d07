"""What was saved comes back bit for bit: every kind of state, every store, any number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.servers import S3Server
from support.states import (
    SAVABLE_DTYPES,
    bits,
    digest,
    emptied,
    fsdp_model,
    plain_state,
    quantized,
    random_tensor,
    sharded_state,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import ckpt


@pytest.fixture(params=["posix", "s3", "cos", "s3fs", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> tuple[str, dict[str, Any]]:
    """A fresh place in each store, and its storage options."""
    match request.param:
        case "posix":
            return str(tmp_path / "run" / "step-1"), {}
        case "memory":
            return f"memory://{tmp_path.name}/step-1", {}
        case "s3":
            return f"s3://{s3.new_bucket()}/run/step-1", s3.options
        case "cos":
            return f"cos://{s3.new_bucket()}/run/step-1", s3.options
        case _:
            return f"fsspec+s3://{s3.new_bucket()}/run/step-1", s3.options


def test_plain_state(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    state = plain_state()
    ckpt.save(state, url, storage_options=options)
    for verify in (True, False):
        loaded = emptied(state)
        ckpt.load(loaded, url, storage_options=options, verify=verify)
        assert digest(loaded) == digest(state)


def test_overwrite(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    for seed in (1, 2, 3):
        state = plain_state(seed)
        ckpt.save(state, url, storage_options=options)
        loaded = emptied(state)
        ckpt.load(loaded, url, storage_options=options)
        assert digest(loaded) == digest(state)


def test_overwrite_leaves_only_the_new_objects(tmp_path: Path) -> None:
    writer = ckpt.CheckpointWriter(tmp_path)
    for seed in (1, 2):
        _dcp_save(plain_state(seed), writer)
        names = sorted(path.name.split("-")[0].split(".")[0] for path in (tmp_path / "rank-00000").iterdir())
        assert len(set(names)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "commit.json", "rank-00000"]


@pytest.mark.parametrize("dtype", SAVABLE_DTYPES, ids=str)
def test_views_of_all_dtypes_load_into_views(tmp_path: Path, dtype: torch.dtype) -> None:
    source, target = random_tensor(40, 30, dtype=dtype), random_tensor(30, 40, dtype=dtype, seed=9)
    ckpt.save({"t": source[::2, 3:].t()}, tmp_path)
    loaded = {"t": target[:27, ::2]}
    ckpt.load(loaded, tmp_path)
    assert bits(loaded["t"]) == bits(source[::2, 3:].t())
    assert bits(target[27:]) == bits(random_tensor(30, 40, dtype=dtype, seed=9)[27:])


def test_dtype_is_cast_to_that_of_the_target(tmp_path: Path) -> None:
    saved = torch.arange(2000.0).reshape(40, 50) / 7
    ckpt.save({"t": saved}, tmp_path)
    loaded = {"t": torch.zeros(40, 50, dtype=torch.bfloat16)}
    ckpt.load(loaded, tmp_path)
    assert torch.equal(loaded["t"], saved.to(torch.bfloat16))


def test_views_write_only_their_bytes(tmp_path: Path) -> None:
    storage = torch.zeros(8_000_000)
    ckpt.save({"view": storage[100:116]}, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.distcp")) < 4096


def test_many_small_tensors(tmp_path: Path) -> None:
    state = {f"t{i}": random_tensor(i % 40, 3, seed=i) for i in range(3000)}
    ckpt.save(state, tmp_path)
    loaded = emptied(state)
    ckpt.load(loaded, tmp_path)
    assert digest(loaded) == digest(state)


@pytest.mark.parametrize("kind", ["posix", "s3"])
def test_tensors_of_many_parts_and_requests(kind: str, tmp_path: Path, s3: S3Server) -> None:
    url, options = (str(tmp_path), {}) if kind == "posix" else (f"s3://{s3.new_bucket()}/c", s3.options)
    state = {
        "big": random_tensor(9_000_001, dtype=torch.float32),
        "gaps": random_tensor(3000, 2500, dtype=torch.bfloat16, seed=1)[:, 1::2],
        "tiny": random_tensor(3),
    }
    ckpt.save(state, url, storage_options=options)
    loaded = {**emptied(state), "gaps": random_tensor(1250, 3000, dtype=torch.bfloat16, seed=2).t()}
    ckpt.load(loaded, url, storage_options=options)
    assert digest(loaded) == digest(state)


def test_subset_of_keys(tmp_path: Path) -> None:
    state = plain_state()
    ckpt.save(state, tmp_path)
    loaded: dict[str, Any] = {"large": torch.zeros(700, 1000), "objects": {"text": ""}}
    ckpt.load(loaded, tmp_path)
    assert bits(loaded["large"]) == bits(state["large"])
    assert loaded["objects"] == {"text": "ü"}


def test_stateful_objects(tmp_path: Path) -> None:
    class Counter:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, "tensor": torch.full((3,), float(self.value))}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert torch.equal(state["tensor"], torch.full((3,), float(state["value"])))
            self.value = state["value"]

    ckpt.save({"counter": Counter(5)}, tmp_path)
    counter = Counter(0)
    ckpt.load({"counter": counter}, tmp_path)
    assert counter.value == 5


def test_async_save_is_not_reached_by_later_changes(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "t": torch.ones(1_000_000),
        "view": torch.ones(100)[10:20],
        "o": {"list": [1, 2]},
    }
    future = ckpt.async_save(state, tmp_path / "1")
    state["t"].zero_()
    state["view"].zero_()
    state["o"]["list"].append(3)
    second = ckpt.async_save(state, tmp_path / "2")
    future.result(60)
    second.result(60)
    for name, value, objects in (("1", 1.0, [1, 2]), ("2", 0.0, [1, 2, 3])):
        loaded: dict[str, Any] = {
            "t": torch.full((1_000_000,), 9.0),
            "view": torch.zeros(10),
            "o": {"list": []},
        }
        ckpt.load(loaded, tmp_path / name)
        assert torch.equal(loaded["t"], torch.full((1_000_000,), value))
        assert torch.equal(loaded["view"], torch.full((10,), value))
        assert loaded["o"]["list"] == objects


def test_async_save_of_every_kind(tmp_path: Path) -> None:
    state = plain_state()
    ckpt.async_save(state, tmp_path).result(60)
    loaded = emptied(state)
    ckpt.load(loaded, tmp_path)
    assert digest(loaded) == digest(state)


def test_async_save_on_several_ranks(tmp_path: Path) -> None:
    run_ranks(2, _async_on_ranks, str(tmp_path))


def _async_on_ranks(rank: int, root: str) -> None:
    futures = [ckpt.async_save(sharded_state(seed=step), f"{root}/step-{step}") for step in range(3)]
    for step, future in enumerate(futures):
        future.result(60)
        loaded = emptied(sharded_state(seed=50))
        ckpt.load(loaded, f"{root}/step-{step}")
        assert digest(loaded) == digest(sharded_state(seed=step))


@pytest.mark.parametrize("kind", ["posix", "s3"])
def test_async_save_at_the_end_of_a_program(kind: str, tmp_path: Path, s3: S3Server) -> None:
    """The program's last line is the save; the interpreter waits for it, and for the threads it needs."""
    url, options = (str(tmp_path / "c"), {}) if kind == "posix" else (f"s3://{s3.new_bucket()}/c", s3.options)
    program = (
        "import sys, json, torch, ckpt\n"
        "state = {f't{i}': torch.full((5_000_000,), float(i)) for i in range(5)}\n"
        "ckpt.async_save(state, sys.argv[1], storage_options=json.loads(sys.argv[2]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, url, json.dumps(options)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    loaded = {f"t{i}": torch.zeros(5_000_000) for i in range(5)}
    ckpt.load(loaded, url, storage_options=options)
    assert [int(tensor[-1]) for tensor in loaded.values()] == [0, 1, 2, 3, 4]


def test_global_settings_of_torch_do_not_matter(tmp_path: Path) -> None:
    state = {"t": random_tensor(300, 400), "strided": random_tensor(300, 400)[:, ::2]}
    loaded = emptied(state)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    try:
        ckpt.save(state, tmp_path)
        ckpt.load(loaded, tmp_path)
    finally:
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
    assert digest(loaded) == digest(state)


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized tensors
def test_quantized_tensors(tmp_path: Path) -> None:
    state = {"q": quantized(), "t": random_tensor(10)}
    ckpt.save(state, tmp_path)
    loaded = {"q": quantized(seed=5), "t": torch.zeros(10)}
    ckpt.load(loaded, tmp_path)
    assert torch.equal(loaded["q"].int_repr(), state["q"].int_repr())
    assert loaded["q"].q_scale() == state["q"].q_scale()


def test_dcp_async_save_threads_and_processes(tmp_path: Path) -> None:
    run_ranks(1, _dcp_async_save, str(tmp_path))


def _dcp_async_save(rank: int, root: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    for kind in AsyncCheckpointerType:
        state = {"t": random_tensor(1000, seed=1), "n": 3}
        url = f"{root}/{kind.name}"
        future: Any = dcp.async_save(
            state, storage_writer=ckpt.CheckpointWriter(url), async_checkpointer_type=kind
        )
        future.result(100)
        loaded = emptied(state)
        ckpt.load(loaded, url)
        assert digest(loaded) == digest(state)


def test_reset_moves_writer_and_reader(tmp_path: Path) -> None:
    writer, reader = ckpt.CheckpointWriter(tmp_path / "0"), ckpt.CheckpointReader(tmp_path / "0")
    for seed in (1, 2):
        _dcp_save({"t": random_tensor(50, seed=seed)}, writer, checkpoint_id=tmp_path / str(seed))
    for seed in (1, 2):
        loaded = {"t": torch.zeros(50)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(loaded, storage_reader=reader, checkpoint_id=tmp_path / str(seed))
        assert bits(loaded["t"]) == bits(random_tensor(50, seed=seed))
    assert not (tmp_path / "0").exists()


def test_a_reader_sees_what_is_committed_now(tmp_path: Path) -> None:
    """DCP does not reset a reader between two loads, and the checkpoint may have been replaced."""
    reader = ckpt.CheckpointReader(tmp_path)
    for seed in (1, 2):
        ckpt.save({"t": random_tensor(50, seed=seed)}, tmp_path)
        loaded = {"t": torch.zeros(50)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(loaded, storage_reader=reader)
        assert bits(loaded["t"]) == bits(random_tensor(50, seed=seed))


def test_metadata_returned_names_the_files(tmp_path: Path) -> None:
    metadata = ckpt.save({"t": torch.ones(5)}, tmp_path, tags={"purpose": "test"})
    (info,) = metadata.storage_data.values()
    assert (tmp_path / info.relative_path).stat().st_size >= info.length
    assert '"tags":{"purpose":"test"}' in (tmp_path / "commit.json").read_text()


# -- several ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "saved_on", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 3, 4))]
)
def test_reshard(saved_on: int, tmp_path: Path, s3: S3Server) -> None:
    """Saved on 1 to 4 ranks, loaded on 1 to 4."""
    places = [(f"{tmp_path}/c", {}), (f"s3://{s3.new_bucket()}/c", s3.options)]
    expected = run_ranks(saved_on, _save_sharded, places)[0]
    for loaded_on in (1, 2, 3, 4):
        for found in run_ranks(loaded_on, _load_sharded, places):
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


def _dcp_save(state: dict[str, Any], writer: ckpt.CheckpointWriter, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, **kwargs)
