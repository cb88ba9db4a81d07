"""What was saved comes back bit for bit: every kind of state, every store."""

from __future__ import annotations

import copy
import errno
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.servers import S3Server
from support.states import (
    SAVABLE_DTYPES,
    bits,
    digest,
    emptied,
    plain_state,
    quantized,
    random_tensor,
)
from support.strict_s3 import StrictS3

import ckpt
from ckpt.errors import NotFound, NotVisible
from ckpt.options import LoadOptions
from ckpt.reading.slices import OpenCheckpoint
from ckpt.tools.cat import select, write_npy

ON_MOTO = [pytest.param(scheme, marks=pytest.mark.server) for scheme in ("s3", "cos", "fsspec+s3")]


@pytest.fixture(params=["posix", "memory", "strict", *ON_MOTO])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A fresh place in each store, and its storage options."""
    match request.param:
        case "posix":
            return str(tmp_path / "run" / "step-1"), {}
        case "memory":
            return f"memory://{tmp_path.name}/step-1", {}
        case "strict":
            return "s3://bucket/run/step-1", request.getfixturevalue("server").options
        case scheme:
            s3: S3Server = request.getfixturevalue("s3")
            return f"{scheme}://{s3.new_bucket()}/run/step-1", s3.options


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


@pytest.mark.parametrize("count", [500, pytest.param(3000, marks=pytest.mark.long)])
def test_many_small_tensors(count: int, tmp_path: Path) -> None:
    state = {f"t{i}": random_tensor(i % 40, 3, seed=i) for i in range(count)}
    ckpt.save(state, tmp_path)
    loaded = emptied(state)
    ckpt.load(loaded, tmp_path)
    assert digest(loaded) == digest(state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["posix", "strict"])
def test_tensors_of_many_parts_and_requests(kind: str, tmp_path: Path, server: StrictS3) -> None:
    url, options = (str(tmp_path), {}) if kind == "posix" else ("s3://bucket/c", server.options)
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
    assert loaded["objects"] == state["objects"]  # all keys below the names that were asked for
    loaded = {"objects": {"text": ""}}
    ckpt.load(loaded, tmp_path, options=LoadOptions(strict=False))
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


@pytest.mark.parametrize("kind", ["posix", pytest.param("strict", marks=pytest.mark.long)])
def test_async_save_at_the_end_of_a_program(kind: str, tmp_path: Path, server: StrictS3) -> None:
    """The program's last line is the save; the interpreter waits for it, and for the threads it needs."""
    url, options = (str(tmp_path / "c"), {}) if kind == "posix" else ("s3://bucket/c", server.options)
    program = (
        "import sys, json, torch, ckpt\n"
        "state = {f't{i}': torch.full((2_000_000,), float(i)) for i in range(5)}\n"
        "ckpt.async_save(state, sys.argv[1], storage_options=json.loads(sys.argv[2]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, url, json.dumps(options)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    loaded = {f"t{i}": torch.zeros(2_000_000) for i in range(5)}
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


def _dcp_save(state: dict[str, Any], writer: ckpt.CheckpointWriter, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, **kwargs)


@pytest.mark.parametrize("kind", ["folder", "memory", "s3"])
def test_what_is_not_there_is_a_file_not_found_error(tmp_path: Path, server: StrictS3, kind: str) -> None:
    """Programs catch Python's own error for that; it crosses processes with its context."""
    place = {"folder": str(tmp_path / "none"), "memory": "memory://none/x", "s3": "s3://bucket/none"}[kind]
    options = server.options if kind == "s3" else None
    with pytest.raises(FileNotFoundError) as caught:
        ckpt.load({"w": torch.zeros(1)}, place, storage_options=options)
    error = caught.value
    assert isinstance(error, NotFound)
    assert error.errno == errno.ENOENT
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(same), vars(same), same.errno) == (str(error), vars(error), errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        ckpt.list_checkpoints(place, storage_options=options)


def test_a_file_that_goes_while_an_array_is_written_is_not_the_arrays(tmp_path: Path) -> None:
    ckpt.save({"w": torch.zeros(1000)}, tmp_path / "c")
    (data,) = (tmp_path / "c").rglob("*.distcp")
    with OpenCheckpoint(tmp_path / "c") as checkpoint:
        data.unlink()
        with pytest.raises((NotFound, NotVisible)):
            write_npy(checkpoint, select(checkpoint, "w"), str(tmp_path / "w.npy"), lambda *_: None)
    assert not list(tmp_path.glob("*.tmp"))
