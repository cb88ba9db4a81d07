"""Safetensors models of other programs: the commands show them, and check what can be checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.commands import run, run_json

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
FILES = {
    FIRST: {"layers.0.weight": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(7)},
    SECOND: {"layers.1.weight": torch.ones(2, 3, dtype=torch.bfloat16)},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for file, tensors in FILES.items():
        safetensors.torch.save_file(tensors, folder / file)
    write_index(folder, {name: file for file, tensors in FILES.items() for name in tensors})
    (folder / "config.json").write_text("{}")
    return folder


def write_index(folder: Path, files: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_it_is_shown(model: Path) -> None:
    shown = run_json("inspect", model)
    assert (shown["format"], shown["commit"], shown["objects"]) == ("safetensors", None, [])
    tensors = {each["fqn"]: (each["dtype"], each["shape"], each["nbytes"]) for each in shown["tensors"]}
    assert tensors == {
        "layers.0.weight": ("float32", [2, 3], 24),
        "layers.1.weight": ("bfloat16", [2, 3], 12),
        "step": ("int64", [], 8),
    }
    text = run("inspect", model).out
    assert "another program (no checksums, no commit record)" in text
    assert "int64 = 7" in text
    assert "[3. 4. 5.]" in run("cat", model, "layers.0.weight").out
    assert run("diff", model, model).code == 0


def test_it_is_checked_without_checksums(model: Path) -> None:
    ran = run("verify", model)
    assert ran.code == 0
    assert "no checksums: the bytes of 3 tensors could not be checked" in ran.out
    report = run_json("verify", model)
    assert (report["ok"], report["checked_files"], report["unchecked_items"]) == (True, 2, 3)
    assert report["strays"] == []  # config.json belongs to it


def cut(model: Path) -> None:
    (model / SECOND).write_bytes((model / SECOND).read_bytes()[:-1])


def swap(model: Path) -> None:
    write_index(model, dict.fromkeys(["layers.0.weight", "step"], SECOND) | {"layers.1.weight": FIRST})


@pytest.mark.parametrize(
    ("spoil", "kinds", "key", "text"),
    [
        (lambda model: (model / SECOND).unlink(), ["missing"], SECOND, "is not there"),
        (cut, ["record"], SECOND, "the tensors take 12 bytes, but the data 11"),
        (swap, ["disagreement"] * 2, SECOND, "does not hold"),
        (lambda model: (model / INDEX).write_text("{}"), ["record"], INDEX, "no weight_map"),
        (lambda model: (model / FIRST).write_bytes(b"x" * 40), ["record"], FIRST, "declares a header"),
    ],
)
def test_what_does_not_fit_is_damage(
    model: Path, spoil: Callable[[Path], Any], kinds: list[str], key: str, text: str
) -> None:
    spoil(model)
    report = run_json("verify", model, code=1)
    assert [damage["kind"] for damage in report["damages"]] == kinds
    assert report["format"] == "safetensors"
    assert report["damages"][0]["key"] == key
    assert text in report["damages"][0]["message"]
    assert "could not be checked" not in run("verify", model).out


def test_two_files_that_contradict_each_other(model: Path) -> None:
    (model / INDEX).unlink()
    assert run("verify", model).code == 0
    safetensors.torch.save_file(FILES[FIRST], model / "more.safetensors")
    (damage,) = run_json("verify", model, code=1)["damages"]
    assert "no index says which counts" in damage["message"]
