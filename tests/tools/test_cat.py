"""`ckpt cat`: show the values that are stored, reading no more than needed."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import edit_index, flip, options_of, run, run_json, run_process
from support.servers import S3Server
from support.states import SAVABLE_DTYPES, quantized, random_tensor

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.format.columns import Columns, TensorColumns
from ckpt.tools.cat import object_text

cat = functools.partial(run_json, "cat")
ROWS = random_tensor(12 * 64, 300)


def numbers(tensor: torch.Tensor) -> Any:
    """Convert to NumPy; dtypes that it lacks become wider ones."""
    if tensor.dtype.is_complex and tensor.dtype.itemsize == 4:  # torch 2.15 has two
        return tensor.to(torch.complex64).numpy()
    exotic = tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4 and tensor.dtype != torch.float16
    return (tensor.float() if exotic else tensor).numpy()


def assert_equal(values: Any, expected: torch.Tensor) -> None:
    """Compare values of JSON, in which NaN and Inf are texts."""

    def numbers(value: Any) -> Any:
        return [numbers(item) for item in value] if isinstance(value, list) else float(value)

    np.testing.assert_array_equal(np.array(numbers(values)), expected.double().numpy())


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("[3, :5]", (3, slice(5))), ("[380:390, 7]", (slice(380, 390), 7)), ("[-1, -4:]", (-1, slice(-4, None))),
        ("[..., 0][", None), ("[383:386, 2:4]", (slice(383, 386), slice(2, 4))), ("[5]", (5,)), ("[..., 299]", (..., 299)),
        ("[10:5, 0]", (slice(10, 5), 0)), ("[2:3,1:2]", (slice(2, 3), slice(1, 2))), ("[ 0 , 0 ]", (0, 0)),
    ],
)  # fmt: skip
def test_slices(sharded_place: Path, stock_place: Path, text: str, index: Any) -> None:
    """Across two ranks' shards, of our format and of stock."""
    for place in (sharded_place, stock_place):
        if index is None:
            assert cat(place, f"sharded.rows{text}", code=3)["error"]["type"] == "NotFound"
            continue
        printed = cat(place, f"sharded.rows{text}")
        assert printed["shape"] == list(ROWS[index].shape)
        assert_equal(printed["values"], ROWS[index])


@pytest.mark.parametrize(
    "text", ["[768]", "[-769]", "[0, 0, 0]", "[..., ..., 0]", "[::2]", "[a]", "[1.5]", "[,]", "[1 2]"]
)
def test_bad_slices_are_refused(sharded_place: Path, text: str) -> None:
    assert cat(sharded_place, f"sharded.rows{text}", code=2)["error"]["type"] == "ConfigurationError"


def test_names_with_brackets(tmp_path: Path) -> None:
    ckpt.save({"w[0]": torch.tensor([1.0]), "w": torch.tensor([2.0])}, tmp_path)
    assert cat(tmp_path, "w[0]")["values"] == [1.0]
    assert cat(tmp_path, "w[0][0]")["values"] == 1.0
    assert cat(tmp_path, "w")["values"] == [2.0]


@pytest.mark.parametrize("dtype", SAVABLE_DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_tensor(7, 5, dtype=dtype)
    ckpt.save({"t": tensor}, tmp_path)
    expected = numbers(tensor)
    cat(tmp_path, "t", "--npy", tmp_path / "t.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "t.npy"), expected)
    statistics = cat(tmp_path, "t", "--stats")["statistics"]
    with np.errstate(all="ignore"):
        flat = expected.astype(np.complex128) if expected.dtype.kind == "c" else expected.astype(np.float64)
        flat = np.abs(flat) if flat.dtype.kind == "c" else flat
        finite = flat[np.isfinite(flat)]
    counts = (statistics["count"], statistics["nan"], statistics["inf"])
    assert counts == (35, np.isnan(flat).sum(), np.isinf(flat).sum())
    if finite.size:
        assert math.isclose(float(statistics["min"]), finite.min(), rel_tol=1e-6)
        assert math.isclose(float(statistics["max"]), finite.max(), rel_tol=1e-6)
        assert math.isclose(float(statistics["mean"]), finite.mean(), rel_tol=1e-6, abs_tol=1e-9)
    assert len(cat(tmp_path, "t")["values"]) == 7


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element once; the file appears when it is complete."""
    monkeypatch.setattr("ckpt.tools.cat._MAX_ELEMENTS", 1000)
    place = tmp_path / "c"
    tensor = torch.arange(50 * 300, dtype=torch.float32).reshape(50, 300)
    tensor[3, 4], tensor[5, 6], tensor[7, 8] = math.nan, math.inf, -math.inf
    ckpt.save({"t": tensor}, place)
    mean = tensor[torch.isfinite(tensor)].double().mean().item()
    assert cat(place, "t")["statistics"] == {
        "count": 15_000, "nan": 1, "inf": 2, "min": 0.0, "max": 14_999.0, "mean": pytest.approx(mean),
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
    refused = cat(place, "t", "--npy", tmp_path / "no" / "t.npy", code=2)
    assert refused["error"]["type"] == "ConfigurationError"


@pytest.mark.parametrize("arguments", [(), ("--stats",)])
def test_only_the_bytes_of_a_slice_are_read(
    sharded_place: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """And of the manifests only those of its files, also where what is stored is checked first."""
    monkeypatch.setattr("ckpt.tools.cat.GROWTH_SLACK_BYTES", 0)
    read_bytes: dict[str, int] = {}
    original = PosixStore.read_into

    def read_into(self: PosixStore, key: str, offset: int, buffers: Any) -> None:
        read_bytes[key] = read_bytes.get(key, 0) + sum(buffer.nbytes for buffer in buffers)
        original(self, key, offset, buffers)

    monkeypatch.setattr(PosixStore, "read_into", read_into)
    cat(sharded_place, "sharded.rows[700, :3]", *arguments)
    ((key, data_bytes),) = [item for item in read_bytes.items() if item[0].endswith(".distcp")]
    assert key.startswith("rank-00001/")
    assert data_bytes <= 512 << 10  # one block
    assert not any(key.startswith("rank-00000") and key.endswith(".json") for key in read_bytes)


def test_damage_is_not_shown_as_values(sharded_place: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sharded_place, tmp_path / "c"))
    (stored,) = run_json("inspect", copy, "--tensor", "sharded.local")["tensors"][0]["slices"]
    flip(copy / stored["file"], stored["offset"] + stored["length"] // 2)
    error = cat(copy, "sharded.local", code=1)["error"]
    assert (error["type"], error["key"]) == ("IntegrityError", stored["file"])


def test_a_gap_is_not_shown_as_values(sharded_place: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sharded_place, tmp_path / "c"))

    def edit(columns: Columns) -> None:
        rows = columns.entries["sharded.rows"]
        assert isinstance(rows, TensorColumns)
        sizes = rows.sizes.copy()
        sizes[0, 0] -= 1
        columns.entries["sharded.rows"] = dataclasses.replace(rows, sizes=sizes)

    edit_index(copy, edit)
    for text in ("[380:390, 0]", "", "[383]"):
        assert cat(copy, f"sharded.rows{text}", code=1)["error"]["type"] == "FormatError"
    cat(copy, "sharded.rows[384:390, 0]")


def test_empty_tensors_of_absurd_shapes(tmp_path: Path) -> None:
    """A few bytes of records: one that no array can have, and one of a million empty rows."""
    ckpt.save({"t": torch.empty(0, 3)}, tmp_path / "c")

    def reshape(*size: int) -> None:
        def edit(columns: Columns) -> None:
            tensor = columns.entries["t"]
            assert isinstance(tensor, TensorColumns)
            chunk = np.zeros((1, len(size)), dtype=np.int64)
            columns.entries["t"] = dataclasses.replace(tensor, size=size, offsets=chunk, sizes=chunk)

        edit_index(tmp_path / "c", edit)

    reshape(0, 1 << 61, 1 << 61)
    for arguments in (), ("--npy", tmp_path / "t.npy"):
        assert cat(tmp_path / "c", "t", *arguments, code=1)["error"]["type"] == "FormatError"
    assert cat(tmp_path / "c", "t", "--stats")["statistics"]["count"] == 0
    reshape(1 << 20, 0)
    assert cat(tmp_path / "c", "t")["values"] == []


def test_objects(sharded_place: Path, tmp_path: Path) -> None:
    assert cat(sharded_place, "step") == {"fqn": "step", "kind": "object", "type": "int", "repr": "100"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt.save({"odd": [torch.Generator], "many": list(range(10_000)), "q": quantized()}, tmp_path)
    assert len(cat(tmp_path, "many")["repr"]) < 10_001
    for name, code, error in (
        ("odd", 1, "UnsafeContent"),
        ("q", 2, "ConfigurationError"),
        ("nothing", 3, "NotFound"),
    ):
        assert cat(tmp_path, name, code=code)["error"]["type"] == error


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("modl.h.weight", "model.h.weight"), ("model.h.wieght[0]", "model.h.weight"), ("stpe", "step")],
)
def test_unknown_names_are_answered_with_near_ones(tmp_path: Path, typed: str, meant: str) -> None:
    names = {f"model.layers.{number}.weight": torch.ones(1) for number in range(200)}
    ckpt.save({**names, "model.h.weight": torch.ones(2, 2), "step": 1}, tmp_path)
    assert f"did you mean '{meant}'" in cat(tmp_path, typed, code=3)["error"]["message"]
    assert "did you mean" not in cat(tmp_path, "something else", code=3)["error"]["message"]


def test_groups_of_names(tmp_path: Path) -> None:
    groups = {str(number): {"lr": 0.1 * number, "betas": (0.9, 0.95)} for number in range(30)}
    ckpt.save({"optim": groups, "w": {"a": torch.ones(2), "b": torch.ones(700)}}, tmp_path)
    ran = run("cat", tmp_path, "w")
    assert ran.out.splitlines() == [
        "w is a group of 2 names:", "w.a  float32 (2,)    [1.0, 1.0]", "w.b  float32 (700,)",
    ]  # fmt: skip
    lines = run("cat", tmp_path, "optim.*.lr").out.splitlines()
    assert lines[:2] == ["optim.*.lr is a group of 30 names:", "optim.0.lr   object  0.0"]
    assert lines[3].split() == ["optim.2.lr", "object", "0.2"]
    assert (len(lines), lines[-1]) == (22, "... and 10 more; `ckpt inspect` shows them")
    group = cat(tmp_path, "optim.3")
    assert (group["kind"], group["count"], group["names"]) == ("group", 2, ["optim.3.betas", "optim.3.lr"])
    assert cat(tmp_path, "*.b")["fqn"] == "w.b"


class _Counted:
    shown = 0

    def __repr__(self) -> str:
        _Counted.shown += 1
        return "x"


@pytest.mark.parametrize("kind", [list, tuple, dict, OrderedDict])
def test_objects_that_share_their_parts(kind: type) -> None:
    """A few kilobytes of a pickle can be 50**5 elements, if each part is shown wherever it is."""
    value: Any = _Counted()
    for _ in range(3):
        value = kind(enumerate([value] * 60))
    _Counted.shown = 0
    assert len(object_text(value)) <= 10_000
    assert 0 < _Counted.shown < 30_000


def test_small_tensors_of_many_dimensions(tmp_path: Path) -> None:
    ckpt.save({"m": {"a": torch.ones([1] * 9), "b": torch.tensor(2.0)}}, tmp_path)
    lines = run("cat", tmp_path, "m").out.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["[[[[[[[[[1.0]]]]]]]]]", "2.0"]


@pytest.mark.long
def test_cat_as_a_user(sharded_place: Path) -> None:
    ran = run_process("cat", sharded_place, "sharded.rows[0, :2]")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0] == "float32 (2,)"
    ran = run_process("cat", sharded_place, "sharded.rows")
    assert ran.out.splitlines()[1] == "count 230400"


def test_cat_on_s3(s3: S3Server) -> None:
    url = f"s3://{s3.new_bucket()}/c"
    ckpt.save({"t": torch.arange(9.0)}, url, storage_options=s3.options)
    assert cat(url, "t[2:4]", *options_of(s3.options))["values"] == [2.0, 3.0]


@pytest.mark.smoke
def test_files_in_memory_and_no_bytes(tmp_path: Path) -> None:
    """What `ckpt.load` gives back, the commands show: old TransformerEngine has such state."""
    state = {"file": io.BytesIO(b"abc"), "nothing": b"", "n": 1}
    ckpt.save(state, tmp_path / "a")
    ckpt.save({**state, "file": io.BytesIO(b"xyz")}, tmp_path / "b")
    assert run("cat", tmp_path / "a", "nothing").code == 0
    assert run("cat", tmp_path / "a", "file").out == "BytesIO(b'abc')\n"
    assert cat(tmp_path / "a", "file")["type"] == "BytesIO"
    shown = run("inspect", tmp_path / "a")
    assert (shown.code, "values are not shown" in shown.out) == (0, False)
    assert [each.fqn for each in ckpt.diff(tmp_path / "a", tmp_path / "b").differences] == ["file"]


def test_a_group_has_no_file(tmp_path: Path) -> None:
    ckpt.save({"m": {"a": torch.ones(2), "b": torch.ones(2)}}, tmp_path / "c")
    for option in (("--npy", tmp_path / "o.npy"), ("--stats",)):
        ran = run("cat", tmp_path / "c", "m", *option)
        assert (ran.code, "a group of 2 names" in ran.err) == (2, True)
    assert not (tmp_path / "o.npy").exists()
