"""What a notebook shows of a checkpoint and of a restore; checkpoints as a table of pandas."""

from __future__ import annotations

import html.parser
from pathlib import Path

import pandas
import torch

import ckpt
from ckpt.trainer_integration.run.restore import PassedOver, Restored

_EMPTY = {"br"}


class _Page(html.parser.HTMLParser):
    """Reads a fragment; fails on a tag that is not closed, on a script and on an address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "link", "iframe")
        assert not {name for name, _ in attrs} - {"style"}
        assert all(
            "url(" not in (value or "") and "#" not in (value or "") for _, value in attrs
        )  # nor a colour
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_contents_of_a_checkpoint(tmp_path: Path) -> None:
    state = {"model": {f"layers.{n}.weight": torch.zeros(4, 4) for n in range(50)}, "step": 7}
    ckpt.save(state, tmp_path / "step-7", tags={"note": "<script>alert(1)</script>"})
    shown = ckpt.inspect(tmp_path / "step-7")._repr_html_()
    page = _Page(shown)
    for text in (
        f"{tmp_path}/step-7",
        "800 parameters, 50 tensors, 1 object",
        "note=<script>alert(1)</script>",
    ):
        assert text in page.texts
    assert "the largest 20 of 50 tensors" in page.texts
    assert sum(text.startswith("model.layers.") for text in page.texts) == 20
    assert len(shown) < 32_000


def test_hostile_names_stay_text_and_short(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\x1b[31m" + "n" * 100_000
    ckpt.save({name: torch.zeros(3)}, tmp_path / "step-1")
    shown = ckpt.inspect(tmp_path / "step-1")._repr_html_()
    page = _Page(shown)
    assert any(text.startswith("<img src=x onerror=alert(1)>\\x1b[31m") for text in page.texts)
    assert len(shown) < 8_000


def test_what_a_restore_returns(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.step(3, model=model, epoch=2)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        restored = manager.restore(model=model, epoch=0)
    assert isinstance(restored, Restored)
    texts = _Page(restored._repr_html_()).texts
    assert texts[0] == restored.url
    assert texts[1:3] == ["step", "3"]
    assert texts[texts.index("epoch") + 1] == "2"


def test_a_restore_that_passed_over_a_checkpoint() -> None:
    passed = PassedOver(9, "run/step-9", "bytes 0-9 of <data> do not match")
    restored = Restored(8, "run/step-8", (passed,), ("model.bias",), {"lr": 0.1, "w": torch.zeros(2)})
    texts = _Page(restored._repr_html_()).texts
    assert texts[texts.index("step 9 passed over") + 1] == "bytes 0-9 of <data> do not match"
    assert texts[texts.index("missing") + 1] == "model.bias"
    assert texts[texts.index("w") + 1] == "Tensor"


def test_checkpoints_are_rows_of_a_data_frame(tmp_path: Path) -> None:
    for step in (10, 20):
        ckpt.save({"w": torch.zeros(3)}, tmp_path / f"step-{step}", tags={"step": str(step)})
    frame = pandas.DataFrame(ckpt.list_checkpoints(tmp_path)).set_index("step")
    assert list(frame.index) == [10, 20]
    assert list(frame["state"]) == ["committed", "committed"]
    assert frame.loc[frame["latest"], "path"].item() == "step-20"
    assert frame["size_bytes"].sum() > 0
