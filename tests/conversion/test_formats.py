"""`ckpt convert`: from every format into every other and back, the same bits."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from support.conversions import ENDINGS, FORMATS, convert, flat, read, tensors
from support.servers import S3Server
from support.states import SAVABLE_DTYPES, digest, plain_state, random_tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import ckpt

NOT_IN_SAFETENSORS = [dtype for dtype in SAVABLE_DTYPES if dtype.is_complex and dtype != torch.complex64]


def state() -> dict[str, Any]:
    """Everything at once: dtypes, shapes, views, shared memory, nested dicts and lists, objects."""
    found = plain_state(7)
    found["dtypes"] = {str(d).removeprefix("torch."): found["dtypes"][str(d)] for d in SAVABLE_DTYPES}
    return found


def write(place: Path, form: str, saved: dict[str, Any]) -> None:
    """What a conversion begins with, written by those whose format it is."""
    if form == "ckpt":
        ckpt.save(saved, place, tags={"step": "7"})
    elif form == "dcp":
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    elif form == "torch":
        torch.save(saved, place)
    else:
        place.mkdir()
        safetensors.torch.save_file(saved, place / "model.safetensors", metadata={"format": "pt"})


def in_safetensors() -> dict[str, Any]:
    found = {f"w.{d}": random_tensor(5, 9, dtype=d) for d in SAVABLE_DTYPES if d not in NOT_IN_SAFETENSORS}
    return {
        **found,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "large": random_tensor(3, 1_000_001),
    }


@pytest.fixture(scope="module", params=["ckpt", "dcp", "torch"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    form: str = request.param
    place = tmp_path_factory.mktemp("originals") / f"{form}{ENDINGS[form]}"
    write(place, form, state())
    return form, place


@pytest.mark.parametrize("target", ["ckpt", "dcp", "torch"])
def test_nested_states_with_objects(original: tuple[str, Path], target: str, tmp_path: Path) -> None:
    form, place = original
    result = tmp_path / f"result{ENDINGS[target]}"
    done = convert(place, result, "--to", target)
    expected = digest(state())
    assert digest(read(result, target)) == expected
    assert (done["source_format"], done["format"], done["dropped"]) == (form, target, {})
    flattened = flat(state())
    assert (done["tensors"] + done["objects"], done["files"] >= 1) == (len(flattened), True)
    if target == "ckpt" and form == "ckpt":
        commit = ckpt.inspect(result).commit
        assert commit is not None
        assert commit.tags == {"step": "7"}


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(FORMATS, 2)))
def test_there_and_back(one: str, other: str, tmp_path: Path) -> None:
    saved = in_safetensors()
    first, second, third = (
        tmp_path / f"{number}{ENDINGS[form]}" for number, form in enumerate((one, other, one))
    )
    write(first, one, saved)
    convert(first, second, "--to", other)
    convert(second, third, "--to", one)
    assert digest(read(second, other)) == digest(saved) == digest(read(third, one))


def test_dtypes_that_safetensors_lack_are_named(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3), "wide": torch.zeros(3, dtype=torch.complex128)}, tmp_path / "a.pt")
    error = convert(tmp_path / "a.pt", tmp_path / "a.safetensors", code=2)["error"]
    assert "'wide' is complex128" in error["message"]
    assert "--exclude" in error["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors", "--exclude", "wide")
    assert list(read(tmp_path / "a.safetensors", "safetensors")) == ["a"]


@pytest.mark.parametrize("value", [io.BytesIO(b"abc"), b"", (1, {"deep": io.BytesIO()})])
def test_objects_that_torch_would_refuse_to_load_are_named(tmp_path: Path, value: Any) -> None:
    ckpt.save({"a": torch.ones(3), "state": {"extra": value}, "n": 5}, tmp_path / "a")
    error = convert(tmp_path / "a", tmp_path / "a.pt", code=2)["error"]
    assert "'state.extra' is nothing that torch.load(weights_only=True) loads" in error["message"]
    assert "--exclude it" in error["message"]
    assert not (tmp_path / "a.pt").exists()
    convert(tmp_path / "a", tmp_path / "a.pt", "--exclude", "state.*")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["n"] == 5


@pytest.mark.parametrize("size", ["1TB", "1TiB", "1.5 GiB"])
def test_units_of_shard_sizes(tmp_path: Path, size: str) -> None:
    ckpt.save({"a": torch.ones(3)}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "hf", "--to", "safetensors", "--max-shard-size", size)
    assert list(read(tmp_path / "hf", "safetensors")) == ["a"]


def test_the_same_as_torchs_own_tools(tmp_path: Path) -> None:
    """The two that do part of the job: the same state, the same structure for planners."""
    torch.save(state(), tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "theirs")
    convert(tmp_path / "a.pt", tmp_path / "ours", "--to", "dcp")
    theirs, ours = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("theirs", "ours"))
    assert ours.planner_data == theirs.planner_data
    assert set(ours.state_dict_metadata) == set(theirs.state_dict_metadata)
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "theirs.pt")
    convert(tmp_path / "ours", tmp_path / "ours.pt")
    found = [torch.load(tmp_path / name, weights_only=True) for name in ("theirs.pt", "ours.pt")]
    assert digest(found[0]) == digest(found[1]) == digest(state())


def test_a_torch_file_is_what_torch_writes(tmp_path: Path) -> None:
    """Byte for byte, but for the CRCs, which only Python's zipfile would look at, and names of the archive."""
    saved = {"model": {"w": random_tensor(50, 60), "b": random_tensor(3, dtype=torch.bfloat16)}, "step": 3}
    torch.save(saved, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    torch.serialization.set_crc32_options(False)
    try:
        with open(tmp_path / "c.pt", "wb") as file:
            torch.save(saved, file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "c.pt").read_bytes()


def test_torch_to_torch_keeps_what_flattening_would_lose(tmp_path: Path) -> None:
    """Numbers as keys, as optimizers have, and empty dicts and lists."""
    saved = {
        "state": {0: {"exp_avg": random_tensor(4)}, 1: {}},
        "groups": [{"params": [0, 1], "lr": 0.1}],
        "none": [],
    }
    torch.save(saved, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert digest(torch.load(tmp_path / "b.pt", weights_only=True)) == digest(saved)


def test_tensors_inside_of_objects(tmp_path: Path) -> None:
    saved = {"w": random_tensor(9), "pair": (random_tensor(3), [random_tensor(2, 2)], "x")}
    torch.save(saved, tmp_path / "a.pt")
    for target in ("dcp", "ckpt", "torch"):
        result = tmp_path / f"{target}{ENDINGS[target]}"
        convert(tmp_path / "a.pt", result, "--to", target)
        found = read(result, target)["pair"]
        assert digest(found) == digest(saved["pair"])


def test_tensors_inside_of_one_object_keep_their_own_signs(tmp_path: Path) -> None:
    """A conjugated or negated view is only marked as such in the file; its neighbour is not."""
    one, other = random_tensor(3, dtype=torch.complex64), random_tensor(3, dtype=torch.complex64, seed=1)
    negated = random_tensor(3, dtype=torch.complex64, seed=2).conj().imag
    pair = (one.conj(), other, negated, random_tensor(3))
    torch.save({"w": random_tensor(9), "pair": pair}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    values = torch.load(tmp_path / "b.pt", weights_only=True)["pair"]
    assert [value.tolist() for value in values] == [value.tolist() for value in pair]


def test_sharded_checkpoints(sharded_place: Path, stock_place: Path, tmp_path: Path) -> None:
    """Two ranks' FSDP and tensor-parallel shards become whole tensors."""
    results = []
    for name, place in (("ours", sharded_place), ("stock", stock_place)):
        convert(place, tmp_path / f"{name}.pt")
        results.append(digest(torch.load(tmp_path / f"{name}.pt", weights_only=True)))
    dcp_to_torch_save(stock_place, tmp_path / "torch.pt")
    expected = digest(torch.load(tmp_path / "torch.pt", weights_only=True))
    assert results == [expected, expected]
    assert expected["step"] == 100


def test_safetensors_files_are_in_order(tmp_path: Path) -> None:
    """The library refuses gaps and overlaps by itself; names, dtypes and the note of the format are ours to get right."""
    saved = in_safetensors()
    write(tmp_path / "ckpt", "ckpt", saved)
    convert(tmp_path / "ckpt", tmp_path / "one.safetensors")
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: digest(file.get_tensor(name)) for name in file.keys()} == digest(saved)  # noqa: SIM118
    raw = (tmp_path / "one.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in saved.items())


def test_over_s3(s3: S3Server, tmp_path: Path) -> None:
    """Several files and parts, both ways; the index comes last."""
    saved = {**in_safetensors(), "huge": random_tensor(9_000_001, dtype=torch.bfloat16)}
    torch.save(saved, tmp_path / "a.pt")
    bucket, options = (
        s3.new_bucket(),
        [f"--storage-options={key}={value}" for key, value in s3.options.items()],
    )
    steps = [
        (tmp_path / "a.pt", f"s3://{bucket}/hf", "--to", "safetensors", "--max-shard-size", "1MB"),
        (f"s3://{bucket}/hf", f"s3://{bucket}/b.pt"),
        (f"s3://{bucket}/b.pt", f"s3://{bucket}/run/dcp", "--to", "dcp"),
        (f"s3://{bucket}/run/dcp", f"s3://{bucket}/run/ours"),
    ]
    for source, target, *more in steps:
        local = ["--storage-options", "{}"] if str(source).startswith("/") else options
        convert(source, target, *more, *local, *[f"--dst-{option[2:]}" for option in options])
    convert(f"s3://{bucket}/run/ours", tmp_path / "back.pt", *options, "--dst-storage-options", "{}")
    assert digest(torch.load(tmp_path / "back.pt", weights_only=True)) == digest(saved)
    keys = [found["Key"] for found in s3.client().list_objects_v2(Bucket=bucket, Prefix="hf/")["Contents"]]
    assert len(keys) >= 3
    assert "hf/model.safetensors.index.json" in keys
    assert tensors(saved) == digest(saved)
