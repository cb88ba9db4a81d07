"""`ckpt.save(..., format="safetensors")`: folders that transformers reads, and that are checkpoints."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.saves import kill_self
from support.servers import S3Server
from support.states import digest, emptied, random_tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import ckpt
import ckpt.models.exchange
import ckpt.ranks.messages
from ckpt.backends.base import put_bytes
from ckpt.backends.bodies import CheckedBody
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store
from ckpt.errors import AlreadyExists, ConfigurationError, IntegrityError, NotCommitted, SaveFailed
from ckpt.models.exchange import ModelExchange
from ckpt.models.writer import ModelWriter
from ckpt.ranks.group import Ranks
from ckpt.ranks.messages import Messages

INDEX = "model.safetensors.index.json"


def model_state() -> dict[str, torch.Tensor]:
    """Names and tensors of many dtypes and shapes."""
    return {
        "layers.0.weight": random_tensor(300, 70),
        "layers.10.weight": random_tensor(64, 33, dtype=torch.bfloat16),
        "layers.2.weight": random_tensor(5, 4, 3, dtype=torch.float16),
        "fp8": torch.arange(12).reshape(3, 4).to(torch.float8_e4m3fn),
        "complex": torch.complex(random_tensor(7), random_tensor(7, seed=1)),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "empty.too": torch.empty(3, 0),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "transposed": random_tensor(20, 30).t(),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Read a folder as transformers does: by its index, with the library of the format."""
    index = json.loads((folder / INDEX).read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        here = safetensors.torch.load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in here)
        tensors |= here
    assert set(tensors) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in tensors.values())
    return tensors


@pytest.mark.smoke
def test_a_model_is_read_by_all(tmp_path: Path) -> None:
    state = model_state()
    ckpt.save(state, tmp_path, format="safetensors", max_shard_size="20KB", tags={"step": "7"})
    assert digest(read_all(tmp_path)) == digest(dict(state))
    assert len([*tmp_path.glob("model-*-of-*.safetensors")]) == 3
    loaded = emptied(state)
    ckpt.load(loaded, tmp_path)
    assert digest(loaded) == digest(state)
    assert not (tmp_path / ".metadata").exists()


def _layouts(rank: int, size: int) -> dict[str, Any]:
    """Shard a model's state in every way that trainers do."""
    state = model_state()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    rows = {"layers.0.weight", "layers.10.weight", "fp8", "complex", "flags", "transposed", "bytes", "empty"}
    sharded: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) if name in rows else tensor
        for name, tensor in state.items()
    }
    sharded["layers.2.weight"] = distribute_tensor(
        state["layers.2.weight"], mesh, [Shard(1)], src_data_rank=None
    )
    sharded["replicated"] = distribute_tensor(random_tensor(9, 9), mesh, [Replicate()], src_data_rank=None)
    if size == 4:
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sharded["both"] = distribute_tensor(random_tensor(37, 11), two, [Shard(0), Shard(1)])
        sharded["hybrid"] = distribute_tensor(
            random_tensor(37, 11), two, [Replicate(), Shard(0)], src_data_rank=None
        )
    return sharded


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_ranks_write_whole_tensors(size: int, how: str, tmp_path: Path) -> None:
    run_ranks(size, _save_sharded, str(tmp_path), size, how)
    expected = model_state() | {"replicated": random_tensor(9, 9)}
    if size == 4:
        expected |= {"both": random_tensor(37, 11), "hybrid": random_tensor(37, 11)}
    assert digest(read_all(tmp_path)) == digest(expected)
    loaded = emptied(expected)
    ckpt.load(loaded, tmp_path)
    assert digest(loaded) == digest(expected)
    commit = ckpt.inspect(tmp_path).commit
    assert commit is not None
    assert commit.world_size == size
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["rank-00000"]
    assert ckpt.verify(tmp_path).damages == []


def _save_sharded(rank: int, url: str, size: int, how: str) -> None:
    ckpt.models.exchange.WINDOW_BYTES = 4096  # many windows
    options: dict[str, Any] = {"format": "safetensors", "max_shard_size": "3KB"}
    state = _layouts(rank, size)
    if how == "save":
        ckpt.save(state, url, **options)
        return
    future = ckpt.async_save(state, url, **options)
    for tensor in state.values():
        with torch.no_grad():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()
    future.result()


def _objects(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_commands_know_models(tmp_path: Path) -> None:
    """Verify, list, copy, replace, collect and remove; what is not this library's stays."""
    place, state = tmp_path / "run" / "step-3", model_state()
    ckpt.save(state, place, format="safetensors", max_shard_size="20KB")
    (place / "config.json").write_text("{}")
    checked = ckpt.verify(place)
    assert (checked.damages, checked.warnings, [stray.key for stray in checked.strays or ()]) == (
        [],
        [],
        ["config.json"],
    )
    assert checked.checked_files == 3
    (listed,) = ckpt.list_checkpoints(tmp_path / "run")
    assert (listed.state, listed.latest, listed.step) == ("committed", True, 3)
    copied = tmp_path / "copied"
    ckpt.copy(place, copied)
    assert ckpt.copy(place, copied).already_there
    assert digest(read_all(copied)) == digest(state)
    assert ckpt.verify(copied).damages == []
    before = _objects(copied)
    ckpt.save({"only": torch.ones(3)}, copied, format="safetensors")
    assert digest(read_all(copied)) == digest({"only": torch.ones(3)})
    assert not {name for name in before & _objects(copied) if name.startswith("model-")}
    (copied / INDEX).unlink()
    assert [warning.key for warning in ckpt.verify(copied).warnings] == [INDEX]
    assert ckpt.collect_garbage(copied, grace_s=-1).restored == [""]
    assert digest(read_all(copied)) == digest({"only": torch.ones(3)})
    ckpt.remove(place)
    assert _objects(place) == {"config.json"}


def test_damage_is_found(tmp_path: Path) -> None:
    ckpt.save(model_state(), tmp_path, format="safetensors")
    (file,) = tmp_path.glob("model-*.safetensors")
    data = bytearray(file.read_bytes())
    for at in (9, len(data) // 2, len(data) - 1):  # the header has no item of its own
        data[at] ^= 1
        file.write_bytes(data)
        (damage,) = ckpt.verify(tmp_path).damages
        assert (damage.kind, damage.key) == ("checksum", file.name)
        data[at] ^= 1
    file.write_bytes(data)
    index = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).write_bytes(index.replace(b"model-", b"model_"))
    (damage,) = ckpt.verify(tmp_path).damages
    assert (damage.kind, damage.key) == ("stock_metadata", INDEX)


def test_what_stands_there_already_stays(tmp_path: Path) -> None:
    foreign = {"model.safetensors": b"x", INDEX: b"{}", ".metadata": b"foreign"}
    foreign |= dict.fromkeys(("model-00001-of-00001.safetensors", "other.safetensors.index.json"), b"foreign")
    for number, (name, data) in enumerate(foreign.items()):
        place = tmp_path / str(number)
        place.mkdir()
        (place / name).write_bytes(data)
        with pytest.raises(SaveFailed, match="another program"):
            ckpt.save(model_state(), place, format="safetensors")
        assert os.listdir(place) == [name]
        if len(data) < 3:  # a sparse file that is larger than any index
            os.truncate(place / name, 65 << 20)
            with pytest.raises(SaveFailed, match="another program"):
                ckpt.save(model_state(), place, format="safetensors")
    ours: tuple[dict[str, Any], dict[str, Any]] = ({}, {"format": "safetensors"})
    for first, second in (ours, ours[::-1]):
        place = tmp_path / f"again{len(first)}"
        ckpt.save({"t": torch.ones(2)}, place, **first)
        before = _objects(place)
        with pytest.raises(SaveFailed, match="another format") as caught:
            ckpt.save({"t": torch.zeros(2)}, place, **second)
        assert isinstance(caught.value.failures[0], AlreadyExists)
        assert _objects(place) == before


@pytest.mark.parametrize(
    ("state", "more", "message"),
    [
        ({"model": {"w": torch.ones(2)}}, {}, "'model' is a dict"),
        ({"w": torch.ones(2), "step": 7}, {}, "'step' is a int"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, {}, "complex128"),
        ({"w": torch.eye(3).to_sparse()}, {}, "sparse"),
        ({"w": torch.ones(2, device="meta")}, {}, "meta"),
        ({"__metadata__": torch.ones(2)}, {}, "__metadata__"),
        ({}, {}, "empty"),
        ({"w": torch.ones(2)}, {"max_shard_size": "5 apples"}, "max_shard_size"),
        ({"w": torch.ones(2)}, {"max_shard_size": 0}, "max_shard_size"),
        ({"w": torch.ones(2)}, {"planner": torch.distributed.checkpoint.DefaultSavePlanner()}, "planner"),
        ({"w": torch.ones(2)}, {"format": "gguf"}, "gguf"),
        ({"w": torch.ones(2)}, {"format": "ckpt", "max_shard_size": 5}, "max_shard_size"),
    ],
)
def test_what_no_model_has_is_an_error_at_once(
    state: Any, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ckpt.save(state, tmp_path / "c", **{"format": "safetensors", **more})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "name", ["", "a\0b", 'a"b\\', "x" * 100_000, "\u2028", "\x1b[31m", "e\u0301", "a/b", ".."]
)
def test_names_that_a_header_can_hold(tmp_path: Path, name: str) -> None:
    state = {name: random_tensor(3), "other": random_tensor(2)}
    ckpt.save(state, tmp_path, format="safetensors")
    assert digest(read_all(tmp_path)) == digest(state)
    loaded = emptied(state)
    ckpt.load(loaded, tmp_path)
    assert digest(loaded) == digest(state)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", "a.\udfff"])
def test_names_that_no_header_can_hold(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="a tensor of a model cannot be named"):
        ckpt.save({"a": torch.ones(2), name: torch.ones(2)}, tmp_path / "model", format="safetensors")
    assert not (tmp_path / "model").exists()


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    weight = random_tensor(30, 4)
    state = {"embed": weight, "head": weight, "view": weight[:10], "same": weight.clone()}
    ckpt.async_save(state, tmp_path, format="safetensors").result()
    assert digest(read_all(tmp_path)) == digest({name: state[name] for name in ("embed", "view", "same")})
    target = torch.zeros(30, 4)
    loaded = {"embed": target, "head": target, "view": torch.zeros(10, 4), "same": torch.zeros(30, 4)}
    ckpt.load(loaded, tmp_path)
    assert digest(loaded) == digest(state)


def test_a_killed_rank_leaves_no_model(tmp_path: Path) -> None:
    """What was there stays as it was, for transformers too; a torn first save is nothing to anybody."""
    old = {"old": torch.ones(3)}
    ckpt.save(old, tmp_path / "again", format="safetensors")
    for place, kind in ((tmp_path / "first", NotCommitted), (tmp_path / "again", None)):
        result = run_ranks(2, _one_is_killed, str(place), killed=[1])[0]
        assert result[0] == [0, 1]
        assert "rank 1 does not answer" in result[1]
        if kind is None:
            assert digest(read_all(place)) == digest(old)
            loaded = emptied(old)
            ckpt.load(loaded, place)
            assert digest(loaded) == digest(old)
            assert ckpt.verify(place).damages == []
            continue
        assert not (place / INDEX).exists()
        assert [listed.state for listed in ckpt.list_checkpoints(place)] == ["incomplete"]
        with pytest.raises(kind):
            ckpt.load({"a": torch.zeros(3)}, place)
        assert ckpt.collect_garbage(place, grace_s=-1).items
        assert not place.exists()
    left = _objects(tmp_path / "again")
    ckpt.collect_garbage(tmp_path / "again", grace_s=-1)
    assert digest(read_all(tmp_path / "again")) == digest(old)
    assert len(_objects(tmp_path / "again")) < len(left)


def _one_is_killed(rank: int, url: str) -> Any:
    write, files = PosixStore._write, itertools.count()

    def killing(store: PosixStore, temporary: str, body: Any, key: str) -> None:
        if key.startswith("model-") and next(files) == 1:
            with body.part(0, body.nbytes):  # it was given a part of another rank's
                kill_self()
        write(store, temporary, body, key)

    if rank == 1:
        pytest.MonkeyPatch().setattr(PosixStore, "_write", killing)
    mesh = init_device_mesh("cpu", (2,))
    state = {
        f"w{n}": distribute_tensor(random_tensor(64, 64), mesh, [Shard(0)], src_data_rank=None)
        for n in range(6)
    }
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state, url, format="safetensors", max_shard_size=20_000, timeout_s=20.0)
    return sorted(caught.value.failures), str(caught.value)


def test_the_device_of_one_rank_fails(tmp_path: Path) -> None:
    """A fault that computing left behind shows before the ranks wait for each other's parts."""
    for failures, message in run_ranks(2, _one_device_fails, str(tmp_path / "c")):
        assert failures == [1]
        assert "device-side assert" in message
    assert not _objects(tmp_path / "c")


def _one_device_fails(rank: int, url: str) -> Any:
    class Stream:
        def synchronize(self) -> None:
            raise RuntimeError("device-side assert triggered")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            patch.setattr(torch.accelerator, "current_stream", Stream)
        with pytest.raises(SaveFailed) as caught:
            ckpt.save({"w": random_tensor(64, 64)}, url, format="safetensors", timeout_s=10.0)
    return sorted(caught.value.failures), str(caught.value)


def test_one_rank_fails(tmp_path: Path) -> None:
    """All ranks are told why, nothing is left, and the ranks can save again."""
    for failures, message in run_ranks(2, _one_fails, str(tmp_path / "c")):
        assert failures == [0, 1]  # the first has stopped for the other
        assert "No space left" in message
    assert digest(read_all(tmp_path / "c")) == digest({"w0": random_tensor(64, 64)})
    assert len([name for name in _objects(tmp_path / "c") if name.startswith("model-")]) == 1


def _one_fails(rank: int, url: str) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    state = {
        f"w{n}": distribute_tensor(random_tensor(64, 64), mesh, [Shard(0)], src_data_rank=None)
        for n in range(6)
    }

    def full(store: PosixStore, temporary: str, body: Any, key: str) -> None:
        with store._translated(key, "write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write, begin = PosixStore._write, ModelExchange.__init__
    exchanges: list[ModelExchange] = []

    def noting(exchange: ModelExchange, *args: Any) -> None:
        begin(exchange, *args)
        exchanges.append(exchange)

    def after_the_failure(store: PosixStore, temporary: str, body: Any, key: str) -> None:
        assert not exchanges or exchanges[0]._served.wait(30)
        write(store, temporary, body, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelExchange, "__init__", noting)
        patch.setattr(PosixStore, "_write", full if rank == 1 else after_the_failure)
        with pytest.raises(SaveFailed) as caught:
            ckpt.save(state, url, format="safetensors", max_shard_size=20_000, timeout_s=20.0)
    dist.barrier()
    assert not _objects(Path(url))
    dist.barrier()
    ckpt.save({"w0": state["w0"]}, url, format="safetensors")
    return sorted(caught.value.failures), str(caught.value)


def test_models_in_a_bucket(s3: S3Server) -> None:
    """Saved and loaded by ranks, in parts; anybody's folders load from there too."""
    options = s3.options
    url = f"s3://{s3.new_bucket()}/step-1"
    run_ranks(2, _save_to_bucket, url, options)
    assert ckpt.verify(url, storage_options=options).damages == []
    expected = {"a": random_tensor(4000, 1000), "b": random_tensor(8)}
    loaded = emptied(expected)
    ckpt.load(loaded, url, storage_options=options)
    assert digest(loaded) == digest(expected)
    store = open_store(f"{url}-theirs", options)
    store.put("model.safetensors", CheckedBody(safetensors.torch.save(expected)))
    loaded = emptied(expected)
    ckpt.load(loaded, f"{url}-theirs", storage_options=options)
    assert digest(loaded) == digest(expected)
    ckpt.remove(url, storage_options=options)
    assert [stat.key for stat in open_store(url, options).list()] == []


def _save_to_bucket(rank: int, url: str, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in {"a": random_tensor(4000, 1000), "b": random_tensor(8)}.items()
    }
    for _ in range(2):
        ckpt.save(state, url, format="safetensors", storage_options=options)


def test_the_index_for_others_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the commit, which comes after all files: a save that is killed anywhere is no model."""
    put, keys = PosixStore.put, []

    def noting(store: PosixStore, key: str, body: Any, **more: Any) -> None:
        keys.append(re.sub("[0-9a-f]{16}", "token", key))
        put(store, key, body, **more)

    monkeypatch.setattr(PosixStore, "put", noting)
    ckpt.save(
        {"a": torch.ones(3), "b": torch.ones(3)}, tmp_path, format="safetensors", max_shard_size=12, threads=1
    )
    files = [f"model-token-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert keys == [*files, "rank-00000/token.json", "rank-00000/token.index", "commit.json", INDEX]


def test_leftovers_where_there_are_no_folders() -> None:
    store = open_store(url := "memory://models/run/step-1")
    put_bytes(store, "model-0123456789abcdef-00001-of-00002.safetensors", b"whole")
    put_bytes(store, "model-00001-of-00002.safetensors", b"not of this library")
    (listed,) = ckpt.list_checkpoints("memory://models/run")
    assert (listed.path, listed.state) == ("step-1", "incomplete")
    assert ckpt.collect_garbage(url).young == 1  # a store that dates nothing


def test_the_index_belongs_to_the_model(tmp_path: Path) -> None:
    """One that has lost its commit is a leftover; one that another program wrote anew is ours still."""
    ckpt.save({"w": torch.ones(3)}, tmp_path, format="safetensors")
    sealed = (tmp_path / INDEX).read_bytes()
    index = {"weight_map": json.loads(sealed)["weight_map"]}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert ["ckpt gc" in warning.message for warning in ckpt.verify(tmp_path).warnings] == [True]
    assert ckpt.verify(tmp_path).damages == []
    ckpt.save({"w": torch.zeros(3)}, tmp_path, format="safetensors")
    assert digest(read_all(tmp_path)) == digest({"w": torch.zeros(3)})
    expected = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).write_text(json.dumps(index))  # its files are gone meanwhile
    os.utime(tmp_path / INDEX, (time.time() + 60,) * 2)
    assert ckpt.collect_garbage(tmp_path, grace_s=-90).restored == [""]
    assert (tmp_path / INDEX).read_bytes() == expected
    (tmp_path / INDEX).write_text(json.dumps(index))
    ckpt.remove(tmp_path)
    assert not tmp_path.exists()

    (tmp_path / "run" / "step-1").mkdir(parents=True)
    (orphan := tmp_path / "run" / "step-1" / INDEX).write_bytes(sealed)
    assert [item.key for item in ckpt.collect_garbage(tmp_path / "run", grace_s=-1).items] == [INDEX]
    assert not orphan.exists()
    orphan.parent.mkdir(parents=True)
    orphan.write_text(json.dumps(index))  # of anybody
    (orphan.parent / "rank-00000").mkdir()
    (orphan.parent / "rank-00000" / "0123456789abcdef.json").write_bytes(b"left")
    garbage = ckpt.collect_garbage(tmp_path / "run", grace_s=-1)
    assert ([item.key for item in garbage.items], garbage.young) == (["rank-00000/0123456789abcdef.json"], 0)
    assert orphan.exists()


def test_what_changes_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, weight = PosixStore._write, torch.zeros(4096)

    def changing(store: PosixStore, temporary: str, body: Any, key: str) -> None:
        write(store, temporary, body, key)
        if key.startswith("model-"):
            weight.add_(1)

    monkeypatch.setattr(PosixStore, "_write", changing)
    with pytest.raises(SaveFailed, match="'w' was changed while it was saved"):
        ckpt.save({"w": weight}, tmp_path, format="safetensors")
    assert _objects(tmp_path) == set()


def test_tensors_that_count_no_changes(tmp_path: Path) -> None:
    with torch.inference_mode():
        state = {"w": torch.arange(5.0)}
    ckpt.save(state, tmp_path, format="safetensors")
    assert torch.equal(read_all(tmp_path)["w"], torch.arange(5.0))


def test_a_damaged_commit_still_tells_the_format(tmp_path: Path) -> None:
    """What it stands for may be replaced, by the same format alone."""
    ckpt.save({"w": torch.ones(3)}, tmp_path, format="safetensors", tags={"run": "a"})
    commit = (tmp_path / "commit.json").read_bytes()
    (tmp_path / "commit.json").write_bytes(commit.replace(b'"run":"a"', b'"run":"b"'))
    with pytest.raises(IntegrityError):
        ckpt.load({"w": torch.zeros(3)}, tmp_path)
    with pytest.raises(SaveFailed, match="another format"):
        ckpt.save({"w": torch.zeros(3)}, tmp_path)
    ckpt.save({"w": torch.zeros(3)}, tmp_path, format="safetensors")
    assert torch.equal(read_all(tmp_path)["w"], torch.zeros(3))


def test_the_plans_do_not_hold_the_layout(tmp_path: Path) -> None:
    """DCP pickles the plan of each rank by itself."""
    ranks, plans = 8, []
    for rank in range(ranks):
        chunk = ChunkStorageMetadata(torch.Size([64 * rank, 0]), torch.Size([64, 4096]))
        tensor = TensorWriteData(
            chunk, TensorProperties(dtype=torch.bfloat16), torch.Size([64 * ranks, 4096])
        )
        items = [
            WriteItem(MetadataIndex(f"w{n}", chunk.offsets), WriteItemType.SHARD, tensor_data=tensor)
            for n in range(20)
        ]
        plans.append(SavePlan(items, storage_data=({}, "0123456789abcdef")))
    writer = ModelWriter(tmp_path, max_shard_bytes=1 << 20)
    sizes = [len(pickle.dumps(plan)) for plan in writer.prepare_global_plan(plans)]
    assert all(size <= len(pickle.dumps(plan)) for size, plan in zip(sizes, plans, strict=True))


def test_ranks_that_talk_over_the_callers_group(tmp_path: Path) -> None:
    run_ranks(2, _over_one_group, str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def _over_one_group(rank: int, url: str) -> None:
    """Messages of two saves do not mix; a group without messages between CPUs is an error at once."""
    purposes: tuple[Any, Any] = ("foreground", "background")
    calls = [Ranks(None, no_dist=False, purpose=purpose) for purpose in (*purposes, "background")]
    each = [Messages(ranks) for ranks in calls]
    if rank == 0:
        for number, messages in enumerate(each):
            messages.send(torch.full((1,), number), 1, 7)
    else:
        received = [torch.full((1,), -1) for _ in each]
        waits = [each[number].receive(received[number], 0, 7) for number in (2, 1, 0)]
        for wait in waits:
            wait()
        assert torch.cat(received).tolist() == [0, 1, 2]
    other = SimpleNamespace(get_backend=lambda group: "nccl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt.ranks.messages, "dist", other)
        with pytest.raises(ConfigurationError, match="process_group of gloo"):
            ckpt.save({"w": torch.ones(2)}, url, format="safetensors")
