"""Objects that can be saved, but that a load will refuse: the save says so, and what to do."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import io
import logging
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import ConfigurationError, UnsafeContent
from ckpt.options import ManagerOptions, SaveOptions
from ckpt.writing import refused_objects


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    first: Any
    second: int


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


class Part:
    """A part of a trainer, with one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"value": self.value}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["inner"]["value"]


REFUSED: dict[str, tuple[Any, str]] = {
    "dataclass": (Settings(), f"{__name__}.Settings"),
    "in a tuple": ((1, [Settings()]), f"{__name__}.Settings"),
    "in a deque": (collections.deque([Settings()]), f"{__name__}.Settings"),
    "in a large object": ((torch.zeros(2 << 20), Settings()), f"{__name__}.Settings"),
    "namespace": (types.SimpleNamespace(a=1), "types.SimpleNamespace"),
    "function": (len, "builtins.len"),
}
LOADED: dict[str, Any] = {
    "set": {1, 2}, "complex": 1 + 2j, "dtype": torch.bfloat16, "size": torch.Size([1, 2]),
    "device": torch.device("cpu"), "layout": torch.sparse_coo, "bytes": b"\0a", "bytearray": bytearray(b"a"),
    "tuple": (1, ("a", None), 2.5), "large number": 1 << 100, "infinity": float("inf"), "true": True,
    "enum": Colour.RED, "int enum": Level.LOW, "datetime": datetime.datetime(2026, 11, 28), "namedtuple": Pair(1, 2),
    "deque": collections.deque([1]), "frozenset": frozenset({1}), "numpy scalar": np.float64(1.5), "path": Path("/a"),
    "range": range(3), "slice": slice(1, 2), "decimal": decimal.Decimal("1.5"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_warned_before() -> Iterator[None]:
    refused_objects._looked_at.clear()
    yield
    refused_objects._looked_at.clear()


def test_each_class_is_named_once_with_its_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    now = Settings()
    state = {
        "a": {"when": (1, now)},
        **{f"date{n}": now for n in range(4)},
        "space": types.SimpleNamespace(a=1),
    }
    for place in ("1", "2"):
        ckpt.save(state, tmp_path / place)
    texts = caplog.messages
    assert len(texts) == 2
    assert f"refuse 'a.when', 'date0', 'date1' and 2 more, as {__name__}.Settings is none" in texts[0]
    assert "trusted_objects=['a.when', 'date0', 'date1'" in texts[0]
    assert "'space', as types.SimpleNamespace" in texts[1]
    with pytest.raises(UnsafeContent):
        ckpt.load({"space": None}, tmp_path / "1")
    loaded: dict[str, Any] = {"space": None}
    (trusted,) = re.findall(r"trusted_objects=\['(\w+)'\]", texts[1])
    ckpt.load(loaded, tmp_path / "1", trusted_objects=[trusted])
    assert loaded == {"space": types.SimpleNamespace(a=1)}


def test_nothing_is_said_of_what_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    state = {
        "text": "cposix\nsystem\n",
        "file": io.BytesIO(b"cposix\nsystem\n"),
        "values": (1, 2.5, None, b"", {1}),
        "shapes": (torch.Size([1, 2]), torch.float32, torch.ones(2)),
        "declared": types.SimpleNamespace(),
        "plain": datetime.date(2026, 11, 22),
    }
    with torch.serialization.safe_globals([types.SimpleNamespace]):
        ckpt.save(state, tmp_path)
        ckpt.load(dict.fromkeys(state), tmp_path)
    assert caplog.messages == []


@pytest.mark.parametrize("kind", REFUSED)
def test_values_in_parts_of_a_manager(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The name is that of the value, inside its part; a save that is not planned back warns."""
    value, name = REFUSED[kind]
    caplog.set_level(logging.WARNING)
    with ckpt.CheckpointManager(tmp_path, save=1, options=ManagerOptions(resume_check="off")) as manager:
        manager.step(1, {"part": Part(value)})
        manager.step(2, {"part": Part(value)})
    warned = [text for text in caplog.messages if f"as {name} is none of torch's safe types" in text]
    assert len(warned) == 1, caplog.messages
    assert "will refuse 'part.inner.value'" in warned[0]
    assert "trusted_objects=['part.inner.value']" in warned[0]
    part = Part(None)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager, pytest.raises(UnsafeContent):
        manager.restore({"part": part})
    ckpt.load({"part": part}, tmp_path / "step-00000001", trusted_objects=["part.inner.value"])
    assert repr(part.value) == repr(value)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("mode", ["thread", "off"])
def test_a_save_that_is_planned_back_refuses_them_by_name(tmp_path: Path, kind: str, mode: Any) -> None:
    value, _ = REFUSED[kind]
    with (
        ckpt.CheckpointManager(tmp_path, save=1, async_mode=mode) as manager,
        pytest.raises(
            ConfigurationError, match=r"'part\.inner\.value' is .* that a load refuses .*trusted_objects="
        ),
    ):
        manager.step(1, {"part": Part(value)})
    assert not [*tmp_path.rglob("commit.json")]
    with pytest.raises(ConfigurationError, match=r"'part\.inner\.value' is .* that a load refuses"):
        ckpt.save({"part": Part(value)}, tmp_path / "c", options=SaveOptions(resume_check=True))


@pytest.mark.parametrize("way", ["of the options", "of the restore"])
def test_those_that_a_program_trusts_are_saved_and_restored(
    tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    names = ["part.*"]
    options = SaveOptions(trusted_objects=names if way == "of the options" else ())
    trusted: dict[str, Any] = {} if way == "of the options" else {"trusted_objects": names}
    for step in (1, 2):
        part = Part(Settings(step))
        with ckpt.CheckpointManager(
            tmp_path, save=1, options=ManagerOptions(save_options=options)
        ) as manager:
            assert (manager.restore({"part": part}, **trusted) is None) == (step == 1)
            assert part.value == Settings(1)
            manager.step(step, {"part": part})
    assert [text for text in caplog.messages if "refuse" in text] == []


def test_a_second_run_and_a_second_name_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for place, names in (("a/1", "x"), ("a/2", "xy"), ("b/1", "x"), ("b/2", "x")):
        ckpt.save({name: Settings() for name in names}, tmp_path / place)
    assert [re.findall(r"refuse ('\w+'),", text) for text in caplog.messages] == [["'x'"], ["'y'"], ["'x'"]]


def test_what_reads_like_a_class_does_not_hide_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    ckpt.save({"text": "cbuiltins\nlen\n"}, tmp_path / "1")
    assert caplog.messages == []
    ckpt.save({"text": "cbuiltins\nlen\n", "len": len}, tmp_path / "2")
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "value",
    [10**900, ["__reduce__"], np.array([object]), {"a": (1, 10**900)}],
    ids=str.split("number hook objects nested"),
)
def test_values_that_only_seem_to_load_are_refused(tmp_path: Path, value: Any) -> None:
    """They need no class that is refused."""
    with pytest.raises(ConfigurationError, match="'value"):
        ckpt.save({"value": value}, tmp_path, options=SaveOptions(resume_check=True))


def test_keys_of_an_enum_of_a_function_are_refused(tmp_path: Path) -> None:
    class Local(enum.Enum):
        ONE = 1

    with pytest.raises(
        ConfigurationError, match=r"members of .*<locals>.*Local, which is made in a function"
    ):
        ckpt.save({"a": {Local.ONE: torch.ones(1)}}, tmp_path, options=SaveOptions(resume_check=True))


def test_large_objects_are_planned_back_without_their_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("ckpt.state.refused_values.load_fault", lambda pickled: seen.append(pickled.nbytes))
    state = {"a": (torch.zeros(1 << 20), Pair(torch.zeros(1 << 20), 2)), "b": (torch.zeros(1 << 20), 1)}
    ckpt.save(state, tmp_path, options=SaveOptions(resume_check=True))
    assert len(seen) == 1
    assert seen[0] < 1 << 14


@pytest.mark.parametrize("kind", LOADED)
def test_nothing_is_said_of_values_in_parts_that_load(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    part = Part(None)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.step(1, {"part": Part(LOADED[kind])})
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.restore({"part": part})
    assert (type(part.value), part.value) == (type(LOADED[kind]), LOADED[kind])
    assert [text for text in caplog.messages if "will refuse" in text] == []
