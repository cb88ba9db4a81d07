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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import UnsafeContent
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
    "enum": (Colour.RED, f"{__name__}.Colour"),
    "int enum": (Level.LOW, f"{__name__}.Level"),
    "datetime": (datetime.datetime(2026, 11, 28), "datetime.datetime"),
    "timedelta": (datetime.timedelta(1), "datetime.timedelta"),
    "namedtuple": (Pair(1, 2), f"{__name__}.Pair"),
    "namedtuple of a tensor": (Pair(torch.ones(2), 2), f"{__name__}.Pair"),
    "deque": (collections.deque([1]), "collections.deque"),
    "frozenset": (frozenset({1}), "builtins.frozenset"),
    "numpy scalar": (np.float64(1.5), "numpy.dtype"),
    "numpy array": (np.arange(3), "numpy.ndarray"),
    "path": (Path("/a"), "pathlib.PosixPath"),
    "dataclass": (Settings(), f"{__name__}.Settings"),
    "range": (range(3), "builtins.range"),
    "slice": (slice(1, 2), "builtins.slice"),
    "decimal": (decimal.Decimal("1.5"), "decimal.Decimal"),
    "in a tuple": ((1, [Settings()]), f"{__name__}.Settings"),
    "in a large object": ((torch.zeros(2 << 20), Settings()), f"{__name__}.Settings"),
}
LOADED: dict[str, Any] = {
    "set": {1, 2}, "complex": 1 + 2j, "dtype": torch.bfloat16, "size": torch.Size([1, 2]),
    "device": torch.device("cpu"), "layout": torch.sparse_coo, "bytes": b"\0a", "bytearray": bytearray(b"a"),
    "tuple": (1, ("a", None), 2.5), "large number": 1 << 100, "infinity": float("inf"), "true": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_warned_before() -> Iterator[None]:
    refused_objects._known.clear()
    yield
    refused_objects._known.clear()


def test_each_class_is_named_once_with_its_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    now = datetime.datetime.now()
    state = {"a": {"when": (1, now)}, **{f"date{n}": now for n in range(4)}, "colour": Colour.RED}
    for place in ("1", "2"):
        ckpt.save(state, tmp_path / place)
    texts = caplog.messages
    assert len(texts) == 2
    assert "refuse 'a.when', 'date0', 'date1' and 2 more, as datetime.datetime is none" in texts[0]
    assert "trusted_objects=['a.when', 'date0', 'date1'" in texts[0]
    assert f"'colour', as {__name__}.Colour" in texts[1]
    with pytest.raises(UnsafeContent):
        ckpt.load({"colour": None}, tmp_path / "1")
    loaded: dict[str, Any] = {"colour": None}
    (trusted,) = re.findall(r"trusted_objects=\['(\w+)'\]", texts[1])
    ckpt.load(loaded, tmp_path / "1", trusted_objects=[trusted])
    assert loaded == {"colour": Colour.RED}


def test_nothing_is_said_of_what_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    state = {
        "text": "cposix\nsystem\n",
        "file": io.BytesIO(b"cposix\nsystem\n"),
        "plain": (1, 2.5, None, b"", {1}),
        "shapes": (torch.Size([1, 2]), torch.float32, torch.ones(2)),
        "declared": datetime.date(2026, 11, 22),
    }
    with torch.serialization.safe_globals([datetime.date]):
        ckpt.save(state, tmp_path)
        ckpt.load(dict.fromkeys(state), tmp_path)
    assert caplog.messages == []


@pytest.mark.parametrize("kind", REFUSED)
def test_values_in_parts_of_a_manager(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The name is that of the value, inside its part."""
    value, name = REFUSED[kind]
    caplog.set_level(logging.WARNING)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.step(1, {"part": Part(value)})
    warned = [text for text in caplog.messages if f"as {name} is none of torch's safe types" in text]
    assert len(warned) == 1, caplog.messages
    assert "will refuse 'part.inner.value'" in warned[0]
    assert "trusted_objects=['part.inner.value']" in warned[0]
    part = Part(None)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager, pytest.raises(UnsafeContent):
        manager.restore({"part": part})
    ckpt.load({"part": part}, tmp_path / "step-00000001", trusted_objects=["part.inner.value"])
    assert repr(part.value) == repr(value)


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
