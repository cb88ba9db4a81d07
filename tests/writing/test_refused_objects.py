"""Objects that can be saved, but that a load will refuse: the save says so, and what to do."""

from __future__ import annotations

import datetime
import enum
import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import UnsafeContent
from ckpt.writing import refused_objects


class Colour(enum.Enum):
    RED = 1


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
