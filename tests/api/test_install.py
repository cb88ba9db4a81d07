"""`ckpt.install`: unmodified DCP calls use this library, until `ckpt.uninstall`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.strict_s3 import StrictS3
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckpt


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    ckpt.uninstall()


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((300,), value), "step": int(value)}


def is_ours(place: Path) -> bool:
    return (place / "commit.json").exists()


def loads(place: Any, value: float) -> bool:
    state = state_of(-1)
    dcp.load(state, checkpoint_id=place)
    return bool((state["weight"] == value).all()) and state["step"] == value


@pytest.mark.parametrize("kind", [str, Path])
def test_save_and_load(tmp_path: Path, kind: Any) -> None:
    ckpt.install()
    place = kind(tmp_path / "a")
    dcp.save(state_of(1), checkpoint_id=place)
    assert is_ours(tmp_path / "a")
    assert loads(place, 1)
    dcp.async_save(state_of(2), checkpoint_id=place).result()  # type: ignore[union-attr]
    assert is_ours(tmp_path / "a")
    assert loads(place, 2)
    dcp.save(state_of(3), checkpoint_id=tmp_path / "b", no_dist=True)
    assert is_ours(tmp_path / "b")


def test_object_storage_with_options(server: StrictS3) -> None:
    ckpt.install(storage_options=server.options)
    place = "s3://bucket/run/step-1"
    dcp.save(state_of(1), checkpoint_id=place)
    assert loads(place, 1)
    (found,) = ckpt.list_checkpoints(place, storage_options=server.options)
    assert found.state == "committed"


def test_explicit_writers_stay_and_uninstall_undoes_it(tmp_path: Path) -> None:
    ckpt.install()
    ckpt.install()
    stock = dcp.FileSystemWriter(tmp_path / "stock")
    dcp.save(state_of(1), checkpoint_id=tmp_path / "stock", storage_writer=stock)
    assert not is_ours(tmp_path / "stock")
    assert loads(tmp_path / "stock", 1), "what stock PyTorch saved loads"
    with pytest.raises(RuntimeError, match="checkpoint_id"):
        dcp.save(state_of(1))
    ckpt.uninstall()
    ckpt.uninstall()
    dcp.save(state_of(2), checkpoint_id=tmp_path / "after")
    assert not is_ours(tmp_path / "after")


def save_in_a_process(rank: int, place: str) -> bool:
    ckpt.install()
    future = dcp.async_save(
        {f"part{rank}": torch.full((300,), float(rank))},
        checkpoint_id=place,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    future.result()  # type: ignore[union-attr]
    state = {"part0": torch.zeros(300), "part1": torch.zeros(300)}
    dcp.load(state, checkpoint_id=place)
    return bool((state["part0"] == 0).all() and (state["part1"] == 1).all())


@pytest.mark.long
def test_process_mode(tmp_path: Path) -> None:
    """The process that saves is another one, in which nothing is installed."""
    assert run_ranks(2, functools.partial(save_in_a_process, place=str(tmp_path / "a"))) == [True, True]
    assert is_ours(tmp_path / "a")
