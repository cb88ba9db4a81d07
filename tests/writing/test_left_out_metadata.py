"""A `.metadata` for stock readers that would be too large is left out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import run, run_json
from torch.distributed.checkpoint.filesystem import FileSystemReader

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.stock.metadata_writer import estimated_bytes, pickled_metadata


def save(place: Path, value: float = 1.0, **more: Any) -> None:
    ckpt.save({"t": torch.full((9,), value)}, place, no_dist=True, **more)


def load(place: Path) -> float:
    state = {"t": torch.zeros(9)}
    ckpt.load(state, place, no_dist=True)
    return float(state["t"][0])


def test_it_is_left_out_and_convert_is_the_way_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "a"
    save(place)
    assert (place / ".metadata").exists()
    with caplog.at_level(logging.WARNING):
        save(place, 2.0, stock_metadata_max_bytes=0)
    (line,) = caplog.messages
    assert "stock_metadata_max_bytes is 0" in line
    assert f"`ckpt convert {place} DST --to dcp`" in line
    assert not (place / ".metadata").exists(), "that of the replaced checkpoint"
    assert load(place) == 2.0
    result = run_json("verify", place)
    assert (result["ok"], result["stock_readers"], result["warnings"]) == (True, False, [])
    assert "left out" in run("verify", place).out
    assert run_json("inspect", place)["stock_readers"] is False
    assert run_json("cp", place, tmp_path / "copy")["already_there"] is False
    assert run_json("cp", place, tmp_path / "copy")["already_there"] is True
    assert not (tmp_path / "copy" / ".metadata").exists()
    assert run_json("gc", place, "--grace", "0s")["restored"] == []
    assert run("convert", place, tmp_path / "stock", "--to", "dcp").code == 0
    state = {"t": torch.zeros(9)}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "stock"), no_dist=True)
    assert torch.equal(state["t"], torch.full((9,), 2.0))
    save(place, 3.0)
    assert (place / ".metadata").exists()
    assert run_json("rm", place)["keys"][:2] == [".metadata", "commit.json"]


@pytest.mark.parametrize("size", [-1, True, "1GB"])
def test_no_size(tmp_path: Path, size: Any) -> None:
    with pytest.raises((ConfigurationError, ckpt.errors.SaveFailed), match="stock_metadata_max_bytes"):
        save(tmp_path / "a", stock_metadata_max_bytes=size)


def test_the_estimate_is_close() -> None:
    from ckpt.format.columns import Columns, TensorColumns

    rows = torch.arange(100).numpy()
    column = TensorColumns("bfloat16", (1000, 7), False, rows[:, None] * [10, 0], rows[:, None] * 0 + [10, 7], rows,
                           rows * 1000, rows + 300)  # fmt: skip
    columns = Columns(
        [f"rank-{n:05d}/{'a' * 16}-0.distcp" for n in rows], {f"layer.{n}": column for n in range(9)}
    )
    size_bytes = len(pickled_metadata(columns))
    estimated = estimated_bytes(columns)
    assert abs(estimated - size_bytes) < 0.2 * size_bytes
    for limit in (0, estimated - 1, estimated, estimated + 1, 2 * estimated, 10 * estimated):
        assert (estimated_bytes(columns, limit) > limit) == (
            estimated > limit
        )  # a bound may do, if it is below
