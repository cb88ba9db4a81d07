"""`ckpt.load` reads folders of safetensors files, whoever wrote them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.states import digest, emptied, random_tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import ckpt
from ckpt.backends import paths
from ckpt.backends.base import ObjectStat, put_bytes
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.errors import ConfigurationError, FormatError, LoadFailed, NotCommitted, Truncated, UnsafeContent
from ckpt.format.model_index import find_models
from ckpt.reading.reader import CheckpointReader

STATE = {
    "layers.0.weight": random_tensor(6, 40),
    "layers.0.bias": random_tensor(6, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}


def write_shards(folder: Path) -> None:
    """Write the state as two files with an index."""
    folder.mkdir()
    files: dict[str, dict[str, torch.Tensor]] = {
        "model-00001-of-00002.safetensors": {},
        "model-00002-of-00002.safetensors": {},
    }
    for number, (name, tensor) in enumerate(STATE.items()):
        files[f"model-0000{number % 2 + 1}-of-00002.safetensors"][name] = tensor
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, folder / name)
    index = {
        "metadata": {},
        "weight_map": {name: file for file, tensors in files.items() for name in tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.smoke
def test_one_file_and_files_with_an_index(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    safetensors.torch.save_file(STATE, tmp_path / "one" / "model.safetensors")
    write_shards(tmp_path / "shards")
    for folder in (tmp_path / "one", tmp_path / "shards"):
        state = emptied(STATE)
        ckpt.load(state, folder)
        assert digest(state) == digest(STATE)
    as_double = {"layers.0.weight": torch.zeros(6, 40, dtype=torch.float64)}
    ckpt.load(as_double, tmp_path / "shards")
    assert torch.equal(as_double["layers.0.weight"], STATE["layers.0.weight"].double())
    with pytest.raises(LoadFailed, match="the checkpoint lacks"):
        ckpt.load({"other": torch.zeros(2)}, tmp_path / "shards")


def test_tied_tensors_need_one_name(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"wte": torch.arange(4.0), "other": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    tied = torch.zeros(4)
    state = {"head": tied, "wte": tied.detach(), "other": torch.zeros(2)}
    ckpt.load(state, tmp_path)
    assert torch.equal(state["head"], torch.arange(4.0))
    with pytest.raises(LoadFailed, match="head"):
        ckpt.load({"head": torch.zeros(4), "wte": torch.zeros(4)}, tmp_path)


def test_folders_that_are_not_one_model(tmp_path: Path) -> None:
    write_shards(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors.index.json").unlink()
    state = emptied(STATE)
    ckpt.load(state, tmp_path / "a")  # no name is twice in them
    assert digest(state) == digest(STATE)
    safetensors.torch.save_file({"scalar": torch.ones(1)}, tmp_path / "a" / "more.safetensors")
    with pytest.raises(FormatError, match="'scalar' is in"):
        ckpt.load(emptied(STATE), tmp_path / "a")
    (tmp_path / "a" / "x.safetensors.index.json").write_text("{}")
    (tmp_path / "a" / "y.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="2 models"):
        ckpt.load(emptied(STATE), tmp_path / "a")


@pytest.mark.parametrize("other", ["adapter_model", "model"])
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize("has_index", [True, False])
def test_what_a_save_left_is_no_model(tmp_path: Path, format: Any, has_index: bool, other: str) -> None:
    """Nor is what it stands beside: that may be the model that it was to replace."""
    ckpt.save({"w": torch.ones(2)}, tmp_path, format=format)
    (tmp_path / "commit.json").unlink()
    if not has_index:
        for key in (".metadata", "model.safetensors.index.json"):
            (tmp_path / key).unlink(missing_ok=True)
    assert_not_committed(tmp_path)
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / f"{other}.safetensors")
    assert "name one of them" in assert_not_committed(tmp_path)
    ckpt.convert(tmp_path / f"{other}.safetensors", tmp_path / "named")
    state = {"w": torch.ones(2)}
    ckpt.load(state, tmp_path / "named")
    assert torch.equal(state["w"], torch.zeros(2))


@pytest.mark.parametrize("left", ["file", "index", "folder"])
def test_any_part_of_a_save_is_a_trace_of_it(tmp_path: Path, left: str) -> None:
    if left == "file":
        name = "model-0123456789abcdef-00001-of-00002.safetensors"
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / name)
    elif left == "index":
        ckpt.save({"w": torch.ones(2)}, tmp_path / "whole", format="safetensors")
        (tmp_path / "whole" / "model.safetensors.index.json").rename(
            tmp_path / "model.safetensors.index.json"
        )
    else:
        (tmp_path / "rank-00000").mkdir()
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert_not_committed(tmp_path)


def assert_not_committed(folder: Path) -> str:
    with pytest.raises(NotCommitted) as caught:
        ckpt.load({"w": torch.zeros(2)}, folder)
    with pytest.raises(NotCommitted):
        ckpt.convert(folder, folder / "converted", to="ckpt")
    return caught.value.message


class Waited(Exception):
    """A load began to wait."""


def test_where_storage_lags_a_commit_is_waited_for_if_one_can_be_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(seconds: float) -> None:
        raise Waited

    monkeypatch.setattr(paths, "filesystem_type", lambda path: "nfs4")
    monkeypatch.setattr(environment, "sleep", wait)
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")

    def load(**options: Any) -> bool:
        state = {"w": torch.zeros(2)}
        ckpt.load(state, tmp_path, **options)
        dcp.load(again := {"w": torch.zeros(2)}, storage_reader=CheckpointReader(tmp_path, **options))
        return torch.equal(state["w"], torch.ones(2)) and torch.equal(again["w"], state["w"])

    assert load()
    assert load(visibility_timeout_s=0)
    with pytest.raises(LoadFailed, match="Waited"):
        load(visibility_timeout_s=60)  # the caller knows better
    (tmp_path / "rank-00000").mkdir()
    with pytest.raises(LoadFailed, match="Waited"):
        load()
    (tmp_path / "rank-00000").rmdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "moved")
    with pytest.raises(LoadFailed, match="Waited"):
        load()


def test_a_folder_of_a_hugging_face_cache(tmp_path: Path) -> None:
    write_shards(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    state = emptied(STATE)
    ckpt.load(state, snapshot)
    assert digest(state) == digest(STATE)


@pytest.mark.long
def test_a_rank_that_fails_before_dcp_begins_tells_the_others(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert run_ranks(2, _load_with_a_fault, str(tmp_path)) == [[[1], True]] * 2


def _load_with_a_fault(rank: int, folder: str) -> Any:
    def fault(*args: Any) -> dict[str, Any]:
        raise FormatError("a fault of this rank")

    outcomes = []
    for step in ("adopt", "without_tied"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(CheckpointReader, step, fault)
            with pytest.raises(LoadFailed, match="a fault of this rank") as caught:
                ckpt.load({"w": torch.zeros(2)}, folder, timeout_s=10.0, planner=dcp.DefaultLoadPlanner())
        outcomes.append(sorted(caught.value.failures))
    state = {"w": torch.zeros(2)}
    ckpt.load(state, folder, timeout_s=20.0)  # the ranks have not lost each other
    return [outcomes[0], outcomes[0] == outcomes[1] and torch.equal(state["w"], torch.ones(2))]


def test_of_a_file_and_an_index_the_file_is_read(tmp_path: Path) -> None:
    """As transformers does."""
    write_shards(tmp_path / "a")
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a" / "model.safetensors")
    state = {"w": torch.zeros(2)}
    ckpt.load(state, tmp_path / "a")
    assert torch.equal(state["w"], torch.ones(2))


def test_a_folder_of_many_objects_is_not_listed_whole() -> None:
    store = open_store("memory://many-objects")
    for number in range(1500):
        put_bytes(store, f"step-{number}/x", b"")
    with pytest.MonkeyPatch.context() as patch:
        listed, list_all = 0, store.list

        def counting(prefix: str = "") -> Iterator[ObjectStat]:
            nonlocal listed
            for stat in list_all(prefix):
                listed += 1
                yield stat

        patch.setattr(store, "list", counting)
        assert find_models(store) == []
        assert listed <= 1001


def write_raw(path: Path, header: str | dict[str, Any], data: bytes) -> None:
    raw = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F4", (4, 3)), ("F6_E2M3", (4, 2)), ("F6_E3M2", (8,)), ("F2048", (4, 2))]
)
@pytest.mark.parametrize("has_index", [True, False])
def test_a_dtype_that_torch_lacks_is_an_error_only_if_it_is_asked_for(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], has_index: bool
) -> None:
    header = {
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "q": {"dtype": dtype, "shape": shape, "data_offsets": [8, 14]},
    }
    name = "model-00001-of-00001.safetensors" if has_index else "model.safetensors"
    write_raw(tmp_path / name, header, torch.ones(2).numpy().tobytes() + bytes(6))
    if has_index:
        index = {"weight_map": dict.fromkeys(header, name)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = {"w": torch.zeros(2)}
    ckpt.load(state, tmp_path)
    assert torch.equal(state["w"], torch.ones(2))
    for target in (torch.zeros(4, 2), torch.zeros(6, dtype=torch.uint8)):
        with pytest.raises(FormatError, match=f"'q' has the dtype '{dtype}'") as caught:
            ckpt.load({**state, "q": target}, tmp_path)
        assert caught.value.key == name
    with pytest.raises(CheckpointException, match=f"'q' has the dtype '{dtype}'"):
        dcp.load({"q": torch.zeros(4, 2)}, storage_reader=CheckpointReader(tmp_path))
    with pytest.raises(FormatError, match=f"'q' has the dtype '{dtype}'"):  # it would lose the tensor
        ckpt.convert(tmp_path, tmp_path / "converted", to="ckpt")


def described(begin: Any = 0, end: Any = 8, dtype: Any = "F32", shape: Any = (2,)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'"a":{described()},"b":{described(4, 12)}', "overlaps"),
        (f'"a":{described()},"b":{described(4, 12, "F2048")}', "overlaps"),
        (f'"a":{described()},"b":{described(0, 16, "F2048")}', "overlaps"),
        (f'"a":{described()},"b":{described(12, 16, "F2048")}', "gap"),
        (f'"a":{described(-8, 0)}', "impossible data_offsets"),
        (f'"a":{described(16, 0, "F2048")}', "impossible data_offsets"),
        (f'"a":{described(0, 1 << 63)}', "impossible data_offsets"),
        (f'"a":{described(0, 16, "F4", (2, 8))}', "do not fit"),
        (f'"a":{described(0, 16, "F4", (31,))}', "do not fit"),
        (f'"a":{described(0, 16, "F4", ())}', "do not fit"),
        (f'"a":{described(0, 16, "F6_E2M3", (21,))}', "do not fit"),
        (f'"a":{described(0, 0, "F4", (0, 1 << 61, 8))}', "impossible shape"),
        (f'"a":{described(0, 16)}', "do not fit"),
        (f'"a":{described(0, 16, "F4", (-2,))}', "impossible shape"),
        (f'"a":{described(0, 16, "../F4")}', "impossible dtype"),
        (f'"a":{described(0, 16, None)}', "impossible dtype"),
        (f'"a":{described()},"a":{described(8, 16)}', "twice"),
        (f'"a":{described()},"b":{described(8, 24)}', "do not fit"),
        (f'"a":{described()}', "the tensors take 8 bytes"),
    ],
)
def test_hostile_headers(tmp_path: Path, header: str, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", "{" + header + "}", bytes(16))
    with pytest.raises(FormatError, match=message):
        ckpt.load({"a": torch.zeros(2)}, tmp_path)


def test_a_header_of_100_mb_is_not_read(tmp_path: Path) -> None:
    """The file has so many bytes indeed: it is sparse."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((100 << 20).to_bytes(8, "little") + b"{")
    os.truncate(path, 101 << 20)
    with pytest.MonkeyPatch.context() as patch:
        read = 0
        original = PosixStore.read_into

        def counting(store: PosixStore, key: str, offset: int, buffers: Any) -> None:
            nonlocal read
            read += sum(buffer.nbytes for buffer in buffers)
            original(store, key, offset, buffers)

        patch.setattr(PosixStore, "read_into", counting)
        with pytest.raises(FormatError, match="declares a header"):
            ckpt.load({"a": torch.zeros(2)}, tmp_path)
    assert read < 1 << 20


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "..", "", "a\u0000b", 7]
)
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, file: Any) -> None:
    (tmp_path / "a").mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    index = {"weight_map": {"w": file}}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="not a name in this folder"):
        ckpt.load({"w": torch.zeros(2)}, tmp_path / "a")


def test_one_file_under_two_names(tmp_path: Path) -> None:
    """An index may list a file often; without one, nothing says which of two counts. A link does not lead out."""
    safetensors.torch.save_file({"w": torch.ones(2), "v": torch.ones(3)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}))
    ckpt.load(state := {"w": torch.zeros(2), "v": torch.zeros(3)}, tmp_path)
    assert torch.equal(state["v"], torch.ones(3))
    index.write_text('{"weight_map":{"w":"a.safetensors","w":"a.safetensors"}}')
    with pytest.raises(FormatError, match="twice"):
        ckpt.load(state, tmp_path)
    index.write_text('{"weight_map":{"w":"a.safetensors","u":"a.safetensors"}}')
    with pytest.raises(FormatError, match="'u', which this file does not hold"):
        ckpt.load({"w": torch.zeros(2)}, tmp_path)
    index.unlink()
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(FormatError, match=r"is in 'a\.safetensors' and in 'b\.safetensors'"):
        ckpt.load(state, tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").symlink_to(tmp_path / "a.safetensors")
    with pytest.raises(UnsafeContent):
        ckpt.load(state, tmp_path / "in")


@pytest.mark.parametrize("damage", ["header", "offsets", "short", "index"])
def test_damaged_folders_are_refused(damage: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "a")
    file = tmp_path / "a" / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    if damage == "header":
        file.write_bytes((1 << 40).to_bytes(8, "little") + data[8:])
    elif damage == "offsets":
        file.write_bytes(data.replace(b'"shape":[6,40]', b'"shape":[6,41]'))
    elif damage == "short":
        file.write_bytes(data[:-1])
    else:
        index = {"weight_map": {"w": "../a/model-00001-of-00002.safetensors"}}
        (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((FormatError, Truncated)):
        ckpt.load(emptied(STATE), tmp_path / "a")


def test_the_offsets_of_parts_may_be_hostile(tmp_path: Path) -> None:
    for said in (
        "{}",
        '{"w":1}',
        '{"w":{"saved_offsets":[-1]}}',
        '{"w":{"saved_offsets":[1,1]}}',
        "[",
        "[[1]]",
    ):
        metadata = {"DCP_SHARDING_INFO": said}
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", metadata)
        with pytest.raises(FormatError):
            ckpt.load({"w": torch.zeros(2)}, tmp_path)
    far = {"DCP_SHARDING_INFO": '{"w":{"saved_offsets":[4611686018427387900]}}'}
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", far)
    with pytest.raises((FormatError, LoadFailed)):
        ckpt.load({"w": torch.zeros(2)}, tmp_path)


def test_each_rank_reads_its_bytes(tmp_path: Path) -> None:
    """Of a sharded tensor each byte is read once, by all ranks together; DCP's parts of ranks are put together."""
    whole = {"a": random_tensor(4000, 500), "b": random_tensor(7, 3)}
    safetensors.torch.save_file(whole, tmp_path / "model.safetensors")
    results = run_ranks(2, _load_sharded, str(tmp_path), str(tmp_path / "dcp"))
    for read_bytes, found in results:
        assert found == digest(whole)
        assert 0.49 < read_bytes / (4 * 4000 * 500) < 0.51


def _load_sharded(rank: int, folder: str, other: str) -> tuple[int, Any]:
    mesh = init_device_mesh("cpu", (2,))
    read = 0
    original = PosixStore.read_into

    def counting(store: PosixStore, key: str, offset: int, buffers: Any) -> None:
        nonlocal read
        read += sum(buffer.nbytes for buffer in buffers)
        original(store, key, offset, buffers)

    def empty() -> dict[str, Any]:
        return {
            "a": distribute_tensor(torch.zeros(4000, 500), mesh, [Shard(0)]),
            "b": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)]),
        }

    state = empty()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixStore, "read_into", counting)
        ckpt.load(state, folder)
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(other, save_distributed=True))
    dist.barrier()
    again = empty()
    ckpt.load(again, other)
    return read, digest({name: tensor.full_tensor() for name, tensor in again.items()})
