"""The structure of states: what flattening loses comes back, and what a checkpoint says of it is not trusted."""

from __future__ import annotations

import copy
import json
import logging
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parts import Part

import ckpt
from ckpt.errors import CheckpointError, FormatError
from ckpt.state.stored import StoredState, StoredValue
from ckpt.state.structure import build, decode, leaves, structure_of


class Stats(dict[str, Any]):
    def __init__(self, window: list[int]) -> None:
        super().__init__()
        self.window = window


class Rows(list[Any]):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


class Ordered(OrderedDict[str, Any]):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit


class Defaults(defaultdict[str, Any]):
    def __init__(self, limit: int) -> None:
        super().__init__(list)
        self.limit = limit


class Counts(Counter[str]):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit


@pytest.mark.parametrize("kind", [Stats, Ordered, Defaults, Counts])
@pytest.mark.parametrize("is_part", [True, False])
def test_classes_whose_constructor_wants_more(kind: Any, is_part: bool, tmp_path: Path) -> None:
    saved = kind(7)
    live = kind(8)
    saved["loss"] = 3
    live["other"] = 0
    ckpt.save({"s": Part(saved) if is_part else saved}, tmp_path)
    if is_part:
        part = Part(live)
        ckpt.load({"s": part}, tmp_path)
        loaded = part.value
    else:
        live.pop("other")
        state = {"s": live}
        ckpt.load(state, tmp_path)
        loaded = state["s"]
    assert type(loaded) is kind
    assert {**loaded} == {"loss": 3}
    assert vars(loaded) == vars(live)
    if kind is Defaults:
        assert loaded["new"] == []


def test_lists_of_a_class_of_their_own(tmp_path: Path) -> None:
    saved = Rows(3)
    live = Rows(4)
    saved.extend([torch.ones(2), {"a": 1}])
    ckpt.save({"p": Part(saved), "v": {"rows": saved}}, tmp_path)
    part = Part(live)
    state = {"rows": Rows(5)}
    ckpt.load({"p": part, "v": state}, tmp_path)
    assert (type(part.value), part.value.width, len(part.value)) == (Rows, 4, 2)
    ckpt.load({"p": (other := Part([]))}, tmp_path)
    assert type(other.value) is list
    assert other.value[1] == {"a": 1}


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "1e-05", "True", "None", "(1, 2)", "nan"])
def test_texts_that_read_like_other_keys(text: str, tmp_path: Path) -> None:
    live = {"0": 0, "-1": -1, "2.5": 2.5, "1e-05": 1e-05, "True": True, "None": None, "(1, 2)": (1, 2)}
    live["nan"] = float("nan")
    ckpt.save({"p": Part({text: 1}), "v": {text: 1}}, tmp_path)
    part = Part({live[text]: 9})
    state = dict[str, Any](v={live[text]: 9})
    ckpt.load({"p": part, **state}, tmp_path)
    ckpt.load(state, tmp_path)
    assert part.value == {text: 1}
    assert state["v"] == {text: 1}


def test_other_texts_cost_no_note() -> None:
    assert structure_of({"0.weight": 1, "layer": {"bias": 2}}, "x") == {}
    assert [*structure_of({"a": {"0": 1}}, "x")] == [("a",)]


def test_dicts_that_hold_nothing_stay(tmp_path: Path) -> None:
    ckpt.save({"c": {"x": 5}}, tmp_path)
    kept: OrderedDict[str, Any] = OrderedDict()
    state: dict[str, Any] = {"c": {"x": 1, "cache": {}, "deep": {"more": kept}}}
    ckpt.load(state, tmp_path)
    assert state["c"] == {"x": 5, "cache": {}, "deep": {"more": {}}}
    assert state["c"]["deep"]["more"] is kept


def test_a_part_beside_a_flat_name(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"a": {"c": 2}, "a.b": 1}
    ckpt.save(saved, tmp_path)
    state: dict[str, Any] = {"a": {"c": 0}, "a.b": 0}
    ckpt.load(state, tmp_path)
    assert state == saved


def test_what_only_one_side_has_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    ckpt.save({"p": Part({"a": 1, "old": 2})}, tmp_path)
    ckpt.load({"p": Part({"a": 0, "new": 3})}, tmp_path)
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert any("the program has, and the checkpoint lacks" in text and "p.new" in text for text in logged)
    assert any("the checkpoint has, and the program lacked" in text and "p.old" in text for text in logged)


# -- what is not trusted -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"a": ["enum", 5, ["int", "1"]]},
        {"a": ["int", [1]]},
        {"a": ["int"]},
        {"a": "int"},
        {"a": ["int", "1"], "b": ["int", "1"]},
        {"a": ["int", "1"], "b": ["bool", "True"]},
    ],
)
def test_keys_that_are_none(keys: dict[str, Any]) -> None:
    text = json.dumps([[[], {"keys": keys}]])
    with pytest.raises(FormatError):
        build({(key,): 1 for key in keys}, decode(text, "x"), None, "x")


def test_a_key_beside_the_text_of_one() -> None:
    structure = decode(json.dumps([[[], {"keys": {"a": ["str", "b"]}}]]), "x")
    with pytest.raises(FormatError, match="two members"):
        build({("a",): 1, ("b",): 2}, structure, None, "x")


def test_depth_is_bounded() -> None:
    key = '["tuple",[' * 4000 + '["int","1"]' + "]]" * 4000
    with pytest.raises(FormatError):
        decode(f'[[[],{{"keys":{{"a":{key}}}}}]]', "x")
    path = ("a",) * 3000
    with pytest.raises(FormatError):
        build({path: 1}, {}, None, "x")
    with pytest.raises(FormatError, match="nested 3000 deep"):
        StoredState([StoredValue("x")], {"x": path})


class Lazy(types.ModuleType):
    asked: list[str]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.asked.append(name)
        raise AttributeError(name)


def test_a_key_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Lazy("lazy_module")
    module.asked = []
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    text = json.dumps([[[], {"keys": {"a": ["enum", "lazy_module:certify", ["int", "1"]]}}]])
    with pytest.raises(FormatError, match="has not imported"):
        build({("a",): 1}, decode(text, "x"), None, "x")
    assert module.asked == []


class Color(Enum):
    RED = 1


def test_a_structure_is_refused_before_a_tensor_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save({"p": Part({Color.RED: 1, "t": torch.ones(2)})}, tmp_path)
    monkeypatch.delattr(sys.modules[__name__], "Color")
    live = torch.zeros(2)
    with pytest.raises(CheckpointError, match="has not imported"):
        ckpt.load({"p": Part({"t": live})}, tmp_path)
    assert live.tolist() == [0.0, 0.0]


def test_what_was_noted_comes_back() -> None:
    value = {1: {"0": [{}, {}]}, "x": Counter({"a": 2}), "y": defaultdict(int, b=1)}
    again = build(dict(leaves(value)), structure_of(value, "x"), None, "x")
    assert again == value
    assert {key: type(item) for key, item in again.items()} == {1: dict, "x": Counter, "y": defaultdict}
    assert copy.deepcopy(again) == value
