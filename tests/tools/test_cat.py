"""`ckpt cat` and `ckpt diff`: the values that are stored, by reading no more than needed."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import Ran, edit_index, flip, options_of, run, run_process
from support.ranks import run_ranks
from support.servers import S3Server
from support.states import SAVABLE_DTYPES, quantized, random_tensor, sharded_state

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.format.columns import Columns, TensorColumns
from ckpt.tools.cat import as_numpy


@pytest.fixture(scope="module")
def place(sharded_place: Path) -> Path:
    return sharded_place


@pytest.fixture(scope="module")
def stock(stock_place: Path) -> Path:
    return stock_place


def cat(*arguments: object, code: int = 0) -> dict[str, Any]:
    ran = run("cat", "--json", *arguments)
    assert ran.code == code, (ran.out, ran.err)
    return ran.json


def equal(found: Any, expected: torch.Tensor) -> None:
    """Values of JSON, NaN and Inf as texts."""

    def numbers(value: Any) -> Any:
        return [numbers(item) for item in value] if isinstance(value, list) else float(value)

    np.testing.assert_array_equal(np.array(numbers(found)), expected.double().numpy())


ROWS = random_tensor(12 * 64, 300)


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("[3, :5]", (3, slice(5))), ("[380:390, 7]", (slice(380, 390), 7)), ("[-1, -4:]", (-1, slice(-4, None))),
        ("[..., 0][", None), ("[383:386, 2:4]", (slice(383, 386), slice(2, 4))), ("[5]", (5,)), ("[..., 299]", (..., 299)),
        ("[10:5, 0]", (slice(10, 5), 0)), ("[2:3,1:2]", (slice(2, 3), slice(1, 2))), ("[ 0 , 0 ]", (0, 0)),
    ],
)  # fmt: skip
def test_slices(place: Path, stock: Path, text: str, index: Any) -> None:
    """Across two ranks' shards, of our format and of stock."""
    for where in (place, stock):
        if index is None:
            assert cat(where, f"sharded.rows{text}", code=3)["error"]["type"] == "NotFound"
            continue
        found = cat(where, f"sharded.rows{text}")
        expected = ROWS[index]
        assert found["shape"] == list(expected.shape)
        equal(found["values"], expected)


@pytest.mark.parametrize(
    "text", ["[768]", "[-769]", "[0, 0, 0]", "[..., ..., 0]", "[::2]", "[a]", "[1.5]", "[,]", "[1 2]"]
)
def test_what_is_no_slice(place: Path, text: str) -> None:
    assert cat(place, f"sharded.rows{text}", code=2)["error"]["type"] == "ConfigurationError"


def test_names_with_brackets(tmp_path: Path) -> None:
    ckpt.save({"w[0]": torch.tensor([1.0]), "w": torch.tensor([2.0])}, tmp_path)
    assert cat(tmp_path, "w[0]")["values"] == [1.0]
    assert cat(tmp_path, "w[0][0]")["values"] == 1.0
    assert cat(tmp_path, "w")["values"] == [2.0]


@pytest.mark.parametrize("dtype", SAVABLE_DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_tensor(7, 5, dtype=dtype)
    ckpt.save({"t": tensor}, tmp_path)
    expected = as_numpy(tensor)
    cat(tmp_path, "t", "--npy", tmp_path / "t.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "t.npy"), expected)
    found = cat(tmp_path, "t", "--stats")["statistics"]
    with np.errstate(all="ignore"):
        flat = expected.astype(np.complex128) if expected.dtype.kind == "c" else expected.astype(np.float64)
        flat = np.abs(flat) if flat.dtype.kind == "c" else flat
        finite = flat[np.isfinite(flat)]
    assert (found["count"], found["nan"], found["inf"]) == (35, np.isnan(flat).sum(), np.isinf(flat).sum())
    if finite.size:
        assert math.isclose(float(found["min"]), finite.min(), rel_tol=1e-6)
        assert math.isclose(float(found["max"]), finite.max(), rel_tol=1e-6)
        assert math.isclose(float(found["mean"]), finite.mean(), rel_tol=1e-6, abs_tol=1e-9)
    assert len(cat(tmp_path, "t")["values"]) == 7


def test_statistics_and_files_of_large_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece, each element once; the file appears when it is complete."""
    from ckpt.tools import cat as values

    monkeypatch.setattr(values, "_MAX_ELEMENTS", 1000)
    place = tmp_path / "c"
    tensor = torch.arange(50 * 300, dtype=torch.float32).reshape(50, 300)
    tensor[3, 4], tensor[5, 6], tensor[7, 8] = math.nan, math.inf, -math.inf
    ckpt.save({"t": tensor}, place)
    found = cat(place, "t")["statistics"]
    finite = tensor[torch.isfinite(tensor)].double()
    assert found == {
        "count": 15_000, "nan": 1, "inf": 2, "min": 0.0, "max": 14_999.0, "mean": pytest.approx(finite.mean().item()),
    }  # fmt: skip
    for text, index in (
        ("", ...),
        ("[3:40, 7]", (slice(3, 40), 7)),
        ("[:, 299:]", (slice(None), slice(299, None))),
        ("[4:4]", slice(4, 4)),
    ):
        cat(place, f"t{text}", "--npy", tmp_path / "t.npy")
        np.testing.assert_array_equal(np.load(tmp_path / "t.npy"), tensor[index].numpy())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("t.npy")] == ["t.npy"]
    assert (
        cat(place, "t", "--npy", tmp_path / "no" / "t.npy", code=2)["error"]["type"] == "ConfigurationError"
    )


def test_only_its_bytes_are_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}
    original = PosixStore.read_into

    def read_into(self: PosixStore, key: str, offset: int, buffers: Any) -> None:
        read[key] = read.get(key, 0) + sum(buffer.nbytes for buffer in buffers)
        original(self, key, offset, buffers)

    monkeypatch.setattr(PosixStore, "read_into", read_into)
    cat(place, "sharded.rows[700, :3]")
    data = {key: nbytes for key, nbytes in read.items() if key.endswith(".distcp")}
    assert len(data) == 1
    assert next(iter(data)).startswith("rank-00001/")
    assert sum(data.values()) <= 512 << 10  # one block
    assert not any(key.startswith("rank-00000") and key.endswith(".json") for key in read)


def test_damage_is_not_shown_as_values(place: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(place, tmp_path / "c"))
    (where,) = run("inspect", copy, "--json", "--tensor", "sharded.local").json["tensors"][0]["slices"]
    flip(copy / where["file"], where["offset"] + where["length"] // 2)
    found = cat(copy, "sharded.local", code=1)
    assert found["error"]["type"] == "IntegrityError"
    assert found["error"]["key"] == where["file"]


def test_a_gap_is_not_shown_as_values(place: Path, tmp_path: Path) -> None:
    import dataclasses

    copy = Path(shutil.copytree(place, tmp_path / "c"))

    def edit(columns: Columns) -> None:
        found = columns.entries["sharded.rows"]
        assert isinstance(found, TensorColumns)
        sizes = found.sizes.copy()
        sizes[0, 0] -= 1
        columns.entries["sharded.rows"] = dataclasses.replace(found, sizes=sizes)

    edit_index(copy, edit)
    for text in ("[380:390, 0]", "", "[383]"):
        assert cat(copy, f"sharded.rows{text}", code=1)["error"]["type"] == "FormatError"
    cat(copy, "sharded.rows[384:390, 0]")


def test_objects(place: Path, tmp_path: Path) -> None:
    assert cat(place, "step") == {"fqn": "step", "kind": "object", "type": "int", "repr": "100"}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt.save({"odd": [torch.Generator], "many": list(range(10_000)), "q": quantized()}, tmp_path)
    assert len(cat(tmp_path, "many")["repr"]) < 10_001
    assert cat(tmp_path, "odd", code=1)["error"]["type"] == "UnsafeContent"
    assert cat(tmp_path, "q", code=2)["error"]["type"] == "ConfigurationError"
    assert cat(tmp_path, "nothing", code=3)["error"]["type"] == "NotFound"


def test_cat_as_a_user(place: Path, s3: S3Server) -> None:
    ran = run_process("cat", place, "sharded.rows[0, :2]")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0] == "float32 (2,)"
    ran = run_process("cat", place, "sharded.rows")
    assert ran.out.splitlines()[1] == "count 230400"
    url = f"s3://{s3.new_bucket()}/c"
    ckpt.save({"t": torch.arange(9.0)}, url, storage_options=s3.options)
    assert cat(url, "t[2:4]", *options_of(s3.options))["values"] == [2.0, 3.0]


# -- diff ----------------------------------------------------------------------------------------------


def diff(*arguments: object, code: int = 0) -> dict[str, Any]:
    ran: Ran = run("diff", "--json", *arguments)
    assert ran.code == code, (ran.out, ran.err)
    found = ran.json
    if code < 2 and "same" in found:
        assert found["same"] == (code == 0)
    return found


def test_a_copy_is_the_same_by_checksum(
    place: Path, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("cp", place, tmp_path / "copy")
    found = diff(place, tmp_path / "copy")
    assert found["equal_by_checksum"] == found["tensors"] + found["objects"] > 80
    assert found["read_bytes"] == 0
    url = f"s3://{s3.new_bucket()}/copy"
    run("cp", place, url, "--dst-storage-options", json.dumps(s3.options))
    assert diff(place, url, "--b-storage-options", json.dumps(s3.options))["read_bytes"] == 0


def test_stock_and_ours(place: Path, stock: Path) -> None:
    found = diff(place, stock)
    assert (found["equal_by_checksum"], found["differences"]) == (0, [])
    assert found["read_bytes"] > 1_000_000


def test_differences_are_named_and_measured(tmp_path: Path) -> None:
    a = {
        "same": random_tensor(600, 700), "values": torch.arange(8.0), "nan": torch.tensor([math.nan, 1.0, math.nan, math.inf]),
        "shape": torch.ones(3), "dtype": torch.tensor([1.0, 2.0]), "cast": torch.tensor([1.0, 1.001]), "kind": torch.ones(2),
        "gone": torch.ones(4), "object": {"x": [1, 2]}, "equal object": {"y": 1}, "integers": torch.tensor([1, -(2**62)]),
        "unsigned": torch.tensor([5], dtype=torch.uint64), "flag": torch.tensor([True, False]),
    }  # fmt: skip
    b = {
        **a, "values": torch.tensor([0, 1, 2, 3, 4, 5, 6, 9.0]), "nan": torch.tensor([math.nan, math.nan, 2.0, math.inf]),
        "shape": torch.ones(3, 1), "dtype": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "cast": torch.tensor([1.0, 1.001], dtype=torch.bfloat16), "kind": "text", "object": {"x": [1, 3]}, "new": 1,
        "integers": torch.tensor([1, 2**62]), "unsigned": torch.tensor([2**64 - 1], dtype=torch.uint64),
        "flag": torch.tensor([True, True]),
    }  # fmt: skip
    del b["gone"]
    ckpt.save(a, tmp_path / "a")
    ckpt.save(b, tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b", code=1)
    by_name = {d["fqn"]: d for d in found["differences"]}
    facts = {name: (d["kind"], d["differing"], d["nan"]) for name, d in by_name.items()}
    assert facts == {
        "values": ("values", 1, 0), "nan": ("values", 2, 2), "shape": ("shape", 0, 0), "dtype": ("dtype", 0, 0),
        "cast": ("dtype", 1, 0), "kind": ("kind", 0, 0), "gone": ("only_a", 0, 0), "new": ("only_b", 0, 0), "integers": ("values", 1, 0), "unsigned": ("values", 1, 0), "flag": ("values", 1, 0),
    } | {name: fact for name, fact in facts.items() if name.startswith("object")}  # fmt: skip
    assert [name for name in facts if name.startswith("object")]
    assert (by_name["values"]["max_abs"], by_name["values"]["max_rel"]) == (2.0, pytest.approx(2 / 9))
    assert by_name["integers"]["max_abs"] == 2.0**63
    assert by_name["cast"]["max_abs"] == pytest.approx(0.001, rel=0.01)
    text = run("diff", tmp_path / "a", tmp_path / "b").out
    assert "- gone" in " ".join(text.split())
    assert diff(tmp_path / "a", tmp_path / "a")["differences"] == []


def _save_sharded(rank: int, place: str) -> None:
    state = sharded_state()
    state["local"][0, 0] = 5.0
    ckpt.save({"sharded": state}, place)


def test_another_sharding_and_changed_neighbours(place: Path, tmp_path: Path) -> None:
    """On four ranks in place of two; and one changed element in a block that many tensors share."""
    run_ranks(4, _save_sharded, str(tmp_path / "four"))
    found = diff(place, tmp_path / "four", code=1)
    changed = [d for d in found["differences"] if d["kind"] != "only_a"]
    assert [(d["fqn"], d["kind"], d["differing"]) for d in changed] == [("sharded.local", "values", 1)]
    run_ranks(2, _save_sharded, str(tmp_path / "two"))
    found = diff(place, tmp_path / "two", code=1)
    assert [d["fqn"] for d in found["differences"] if d["kind"] == "values"] == ["sharded.local"]
    assert found["read_bytes"] > 0


def test_objects_of_unsafe_kinds_are_compared_by_their_bytes(tmp_path: Path) -> None:
    for name, value in ("a", torch.Generator), ("b", torch.Generator), ("c", torch.Event):
        dcp.save({"o": [value]}, storage_writer=dcp.FileSystemWriter(tmp_path / name), no_dist=True)
    diff(tmp_path / "a", tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "c", code=1)["differences"][0]["kind"] == "object"


def test_quantized_tensors_are_compared_by_their_bytes(tmp_path: Path) -> None:
    for name, seed in ("a", 0), ("b", 0), ("c", 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt.save({"q": quantized(seed), "x": seed}, tmp_path / name)
    assert diff(tmp_path / "a", tmp_path / "b")["tensors"] == 1
    assert [d["fqn"] for d in diff(tmp_path / "a", tmp_path / "c", code=1)["differences"]] == ["q", "x"]


@pytest.mark.parametrize("broken", ["a", "b"])
def test_what_cannot_be_read_is_an_error(place: Path, tmp_path: Path, broken: str) -> None:
    copy = Path(shutil.copytree(place, tmp_path / "c"))
    next(copy.rglob("*.index")).unlink()
    arguments = (copy, place) if broken == "a" else (place, copy)
    assert diff(*arguments, code=1)["error"]["type"] == "NotVisible"
    assert diff(place, tmp_path / "nothing", code=3)["error"]["type"] == "NotFound"


def test_diff_as_a_user(place: Path, tmp_path: Path) -> None:
    ran = run_process("diff", place, place)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("same: ")


def test_a_difference_beyond_every_number(tmp_path: Path) -> None:
    for name, value in ("a", 1.7e308), ("b", -1.7e308):
        ckpt.save({"t": torch.tensor([value], dtype=torch.float64)}, tmp_path / name)
    ran = run("diff", tmp_path / "a", tmp_path / "b", "--json")
    (difference,) = ran.json["differences"]
    assert (ran.code, difference["kind"], difference["max_abs"]) == (1, "values", "inf")
