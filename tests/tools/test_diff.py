"""`ckpt diff`: name what differs, comparing checksums where that is enough."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.clock import SkippingClock
from support.commands import flip, run, run_json, run_process
from support.ranks import run_ranks
from support.servers import S3Server
from support.states import quantized, random_tensor, sharded_state, transformer_state

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.consistency.environment import replaced
from ckpt.stock.same_objects import same_objects


def diff(*arguments: object, code: int = 0) -> dict[str, Any]:
    printed = run_json("diff", *arguments, code=code)
    if code < 2 and "same" in printed:
        assert printed["same"] == (code == 0)
    return printed


def test_copies_are_equal_by_checksum(sharded_place: Path, tmp_path: Path) -> None:
    run("cp", sharded_place, tmp_path / "copy")
    printed = diff(sharded_place, tmp_path / "copy")
    assert printed["equal_by_checksum"] == printed["tensors"] + printed["objects"] > 80
    assert printed["read_bytes"] == 0


def test_copies_on_s3_are_equal_by_checksum(sharded_place: Path, s3: S3Server) -> None:
    url, options = f"s3://{s3.new_bucket()}/copy", json.dumps(s3.options)
    run("cp", sharded_place, url, "--dst-storage-options", options)
    assert diff(sharded_place, url, "--b-storage-options", options)["read_bytes"] == 0


def test_stock_and_ours(sharded_place: Path, stock_place: Path) -> None:
    printed = diff(sharded_place, stock_place)
    assert (printed["equal_by_checksum"], printed["differences"]) == (0, [])
    assert printed["read_bytes"] > 1_000_000


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.long)])
def test_objects_nested_deeper_than_python_goes(tmp_path: Path, full: bool) -> None:
    """They can be saved where the limit is higher; nothing here calls itself."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        for name, innermost in (("a", 1), ("same", 1), ("other", 2)):
            value: Any = innermost
            for _ in range(1000):
                value = [value]
            ckpt.save({"deep": value}, tmp_path / name)
    finally:
        sys.setrecursionlimit(limit)
    options = ["--full"] if full else []
    assert diff(tmp_path / "a", tmp_path / "same", *options)["differences"] == []
    (difference,) = diff(tmp_path / "a", tmp_path / "other", *options, code=1)["differences"]
    assert (difference["fqn"], difference["kind"]) == ("deep", "object")


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
    differences = {each["fqn"]: each for each in diff(tmp_path / "a", tmp_path / "b", code=1)["differences"]}
    facts = {fqn: (each["kind"], each["differing"], each["nan"]) for fqn, each in differences.items()}
    assert facts == {
        "values": ("values", 1, 0), "nan": ("values", 2, 2), "shape": ("shape", 0, 0), "dtype": ("dtype", 0, 0),
        "cast": ("dtype", 1, 0), "kind": ("kind", 0, 0), "gone": ("only_a", 0, 0), "new": ("only_b", 0, 0), "integers": ("values", 1, 0), "unsigned": ("values", 1, 0), "flag": ("values", 1, 0),
    } | {fqn: fact for fqn, fact in facts.items() if fqn.startswith("object")}  # fmt: skip
    assert [fqn for fqn in facts if fqn.startswith("object")]
    values = differences["values"]
    assert (values["max_abs"], values["max_rel"]) == (2.0, pytest.approx(2 / 9))
    assert differences["integers"]["max_abs"] == 2.0**63
    assert differences["cast"]["max_abs"] == pytest.approx(0.001, rel=0.01)
    text = run("diff", tmp_path / "a", tmp_path / "b").out
    assert "- gone" in " ".join(text.split())
    assert diff(tmp_path / "a", tmp_path / "a")["differences"] == []


def _save_sharded(rank: int, place: str) -> None:
    state = sharded_state()
    state["local"][0, 0] = 5.0
    ckpt.save({"sharded": state}, place)


def test_another_sharding_and_changed_neighbours(sharded_place: Path, tmp_path: Path) -> None:
    """On four ranks in place of two; and one changed element in a block that many tensors share."""
    run_ranks(4, _save_sharded, str(tmp_path / "four"))
    differences = diff(sharded_place, tmp_path / "four", code=1)["differences"]
    changed = [each for each in differences if each["kind"] != "only_a"]
    assert [(each["fqn"], each["kind"], each["differing"]) for each in changed] == [
        ("sharded.local", "values", 1)
    ]
    run_ranks(2, _save_sharded, str(tmp_path / "two"))
    printed = diff(sharded_place, tmp_path / "two", code=1)
    assert [each["fqn"] for each in printed["differences"] if each["kind"] == "values"] == ["sharded.local"]
    assert printed["read_bytes"] > 0


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
    differences = diff(tmp_path / "a", tmp_path / "c", code=1)["differences"]
    assert [each["fqn"] for each in differences] == ["q", "x"]


def test_differences_are_grouped_with_small_values(tmp_path: Path) -> None:
    before, after = transformer_state(6), transformer_state(6, step=1100, lr=0.0004)
    for tensor in after["model"].values():
        tensor += 1
    after["extra"], before["gone"] = 1, 2
    ckpt.save(before, tmp_path / "a")
    ckpt.save(after, tmp_path / "b")
    lines = run("diff", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert len(lines) <= 40
    rows = {" ".join(line.split()[:2]): line for line in lines}
    assert "1000 -> 1100" in rows["~ step"]
    assert "0.00085 -> 0.0004" in rows["~ param_groups.0..1.lr"]
    assert "x 6" in rows["~ layers.0..5"]
    assert rows["+ extra"].split()[2:5] == ["only", "in", "B:"]
    assert lines[-2].startswith("different: ")
    assert "1 only in A, 1 only in B" in lines[-2]
    every = run("diff", tmp_path / "a", tmp_path / "b", "--all").out
    assert every.count("q_proj.weight") == 12
    differences = {each["fqn"]: each for each in diff(tmp_path / "a", tmp_path / "b", code=1)["differences"]}
    assert (differences["step"]["a_value"], differences["step"]["b_value"]) == ("1000", "1100")
    state = differences["optim.state.lm_head.weight.step"]
    assert (state["a_value"], state["b_value"]) == ("1000.0", "1100.0")


def test_small_tensors_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, plus in ("a", 0.0), ("b", 1.0):
        ckpt.save({str(number): torch.full((5,), number + plus) for number in range(100)}, tmp_path / name)
    reads: list[str] = []
    original = PosixStore.read_into

    def read_into(self: PosixStore, key: str, offset: int, buffers: Any) -> None:
        reads.append(key)
        original(self, key, offset, buffers)

    monkeypatch.setattr(PosixStore, "read_into", read_into)
    printed = diff(tmp_path / "a", tmp_path / "b", code=1)
    assert {each["fqn"] for each in printed["differences"]} == {str(number) for number in range(100)}
    assert {each["max_abs"] for each in printed["differences"]} == {1.0}
    assert len([key for key in reads if key.endswith(".distcp")]) == 2


def test_a_damaged_copy_is_the_same_by_its_records_only(tmp_path: Path) -> None:
    ckpt.save({"t": torch.arange(1000.0), "o": [1]}, tmp_path / "a")
    run("cp", tmp_path / "a", tmp_path / "b")
    (path,) = (tmp_path / "b").rglob("*.distcp")
    flip(path, 2000)
    ran = run("diff", tmp_path / "a", tmp_path / "b")
    assert (ran.code, ran.out[:21]) == (0, "same by their records")
    assert diff(tmp_path / "a", tmp_path / "b", "--full", code=1)["error"]["type"] == "IntegrityError"
    run("cp", tmp_path / "a", tmp_path / "c")
    full = diff(tmp_path / "a", tmp_path / "c", "--full")
    assert (full["equal_by_checksum"], full["read_bytes"]) == (0, 4000)


@pytest.mark.parametrize("broken", ["a", "b"])
def test_an_unreadable_checkpoint_is_an_error(sharded_place: Path, tmp_path: Path, broken: str) -> None:
    copy = Path(shutil.copytree(sharded_place, tmp_path / "c"))
    next(copy.rglob("*.index")).unlink()
    arguments = (copy, sharded_place) if broken == "a" else (sharded_place, copy)
    with replaced(SkippingClock()):  # it is waited for
        assert diff(*arguments, code=1)["error"]["type"] == "NotVisible"
    assert diff(sharded_place, tmp_path / "nothing", code=3)["error"]["type"] == "NotFound"


@pytest.mark.long
def test_diff_as_a_user(sharded_place: Path) -> None:
    ran = run_process("diff", sharded_place, sharded_place)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("same by their records: ")


def test_a_difference_beyond_every_number(tmp_path: Path) -> None:
    for name, value in ("a", 1.7e308), ("b", -1.7e308):
        ckpt.save({"t": torch.tensor([value], dtype=torch.float64)}, tmp_path / name)
    (difference,) = diff(tmp_path / "a", tmp_path / "b", code=1)["differences"]
    assert (difference["kind"], difference["max_abs"]) == ("values", "inf")


def _differences(place: Path, a: dict[str, Any], b: dict[str, Any]) -> dict[str, dict[str, Any]]:
    for name, state in ("a", a), ("b", b):
        ckpt.save(state, place / name)
    printed = run_json("diff", place / "a", place / "b", code=1)
    return {each["fqn"]: each for each in printed["differences"]}


def test_dtypes_without_numbers_are_compared_by_their_bytes(tmp_path: Path) -> None:
    before, after = (torch.tensor([1, 2, last], dtype=torch.uint8) for last in (3, 4))
    fp4 = torch.float4_e2m1fn_x2
    a = {"fp4": before.view(fp4), "same": before.view(fp4), "cast": before.view(fp4), "x": torch.ones(1)}
    b = {"fp4": after.view(fp4), "same": before.view(fp4), "cast": before, "x": torch.zeros(1)}
    differences = _differences(tmp_path, a, b)
    facts = {fqn: (each["kind"], each["differing"]) for fqn, each in differences.items()}
    assert facts == {"fp4": ("values", 1), "cast": ("dtype", 0), "x": ("values", 1)}
    assert "'fp4': values of dtype" in run("cat", tmp_path / "a", "fp4").err


def test_integers_are_compared_exactly(tmp_path: Path) -> None:
    a = {"i": torch.tensor([2**53]), "mixed": torch.tensor([2**53 + 1])}
    b = {"i": torch.tensor([2**53 + 1]), "mixed": torch.tensor([2.0**53]).double()}
    a["far"] = torch.tensor([1.5e308], dtype=torch.float64)
    differences = _differences(tmp_path, a, {**b, "far": -a["far"]})
    facts = {fqn: (each["differing"], each["max_abs"]) for fqn, each in differences.items()}
    assert facts == {"i": (1, 1.0), "mixed": (1, 1.0), "far": (1, "inf")}
    assert differences["far"]["max_rel"] == 2.0


def test_objects_are_compared_by_their_values(tmp_path: Path) -> None:
    """Not by whether two names share one part."""
    text, part = "ab", [1, math.nan]
    shared: list[Any] = [[1]]
    for _ in range(40):
        shared = [shared, shared]
    a = {"text": (text, text), "parts": ([part, part],), "shared": (shared,), "type": (1,), "keys": ({1: 2},)}
    b = {"text": (text, "".join("ab")), "parts": ([[1, math.nan], part],), "shared": ([shared[0], shared[0]],),
         "type": (True,), "keys": ({True: 2},)}  # fmt: skip
    assert _differences(tmp_path, a, b).keys() == {"type", "keys"}


@pytest.mark.slow
def test_objects_nested_deeply_are_compared() -> None:
    def nested(value: Any) -> Any:
        for _ in range(100_000):
            value = [value]
        return value

    assert same_objects(nested(1), nested(1))
    assert not same_objects(nested(1), nested(2))
    tensors = {"t": torch.ones(2)}
    assert same_objects(OrderedDict(tensors), OrderedDict(t=torch.ones(2)))
    assert not same_objects(tensors, {"t": torch.zeros(2)})
    assert not same_objects(io.BytesIO(b"a"), io.BytesIO(b"b"))


def test_names_of_a_tensor_and_an_object_are_counted_apart(tmp_path: Path) -> None:
    for name, state in ("a", {"x": torch.ones(2), "y": 1}), ("b", {"x": 5, "y": torch.ones(1)}):
        ckpt.save(state, tmp_path / name)
    verdict = run("diff", tmp_path / "a", tmp_path / "b").out.splitlines()[-1]
    assert "0 tensors and 0 objects are the same, 2 a tensor in one and an object in the other" in verdict
