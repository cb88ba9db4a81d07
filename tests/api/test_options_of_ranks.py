"""Ranks that pass other options of one save: each save is refused on all ranks, and leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks

import ckpt
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.options import SaveOptions

OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block_digests='sha256'": ({"block_digests": "blake3"}, {"block_digests": "sha256"}),
    "block_digests='blake3'": ({}, {"block_digests": "blake3"}),
    "checks=Checks": ({"checks": "off"}, {}),
    "format='safetensors'": ({"format": "safetensors"}, {}),
    "max_shard_size=1000": (
        {"format": "safetensors", "max_shard_size": 1000},
        {"format": "safetensors", "max_shard_size": 2000},
    ),
    "digests=True": ({"digests": True}, {}),
    "base": ({"base": "base"}, {}),
    "overwrite=False": ({}, {"overwrite": False}),
    "stock_metadata_max_bytes=0": ({}, {"stock_metadata_max_bytes": 0}),
    "flatten_state_dict=False": ({}, {"planner": dcp.DefaultSavePlanner(flatten_state_dict=False)}),
    "per_rank=['b']": ({"options": SaveOptions(per_rank=["b"])}, {}),
}


def state_of(value: float) -> dict[str, Any]:
    return {"a": torch.full((2000,), value), "b": torch.arange(10.0)}


def _attempt(call: Any) -> str:
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def _save_with_others(rank: int, root: str) -> list[str]:
    ckpt.save(state_of(1.0), f"{root}/base", digests=True)
    outcomes = []
    for number, pair in enumerate(OTHER.values()):
        options = dict(pair[rank])
        if "base" in options:
            options["base"] = f"{root}/base"
        for call in (ckpt.save, lambda *args, **named: ckpt.async_save(*args, **named).result()):
            outcomes.append(_attempt(lambda: call(state_of(2.0), f"{root}/step-{number}", **options)))  # noqa: B023
    return outcomes


def test_other_options(tmp_path: Path) -> None:
    by_rank = run_ranks(2, _save_with_others, str(tmp_path))
    assert by_rank[0] == by_rank[1]
    for number, outcome in enumerate(by_rank[0]):
        assert outcome.startswith("SaveFailed"), outcome
        assert [*OTHER][number // 2] in outcome
        assert "with the same options" in outcome
    assert os.listdir(tmp_path) == ["base"]


def _save_frozen(rank: int, root: str) -> list[str]:
    ckpt.save(state_of(1.0), f"{root}/base", digests=True)
    own = f"only-{rank}"
    states = [
        ("replicated", state_of(2.0), ["a"] if rank else []),
        ("pattern", state_of(2.0), ["a"] if rank else ["a", "*b"]),
        ("stages", {own: torch.ones(3), "b": torch.arange(10.0)}, [own, "b"]),  # of a pipeline
        ("spelt otherwise", state_of(2.0), ["b"] if rank else ["[b]", "b*"]),
    ]
    return [
        _attempt(lambda: ckpt.save(state, f"{root}/{name}", base=f"{root}/base", frozen=frozen))  # noqa: B023
        for name, state, frozen in states
    ]


def test_other_frozen_tensors(tmp_path: Path) -> None:
    by_rank = run_ranks(2, _save_frozen, str(tmp_path))
    assert by_rank[0] == by_rank[1]
    replicated, pattern, *accepted = by_rank[0]
    assert "rank 0" in replicated
    assert "frozen= of another rank names 'a'" in replicated
    assert "rank 1" in pattern
    assert "frozen= of another rank names 'b'" in pattern
    assert accepted == ["saved", "saved"]
    assert sorted(os.listdir(tmp_path)) == ["base", "spelt otherwise", "stages"]


def _save_by_dcp(rank: int, root: str) -> tuple[str, str]:
    writer = ckpt.CheckpointWriter(f"{root}/step-1", block_digests=("blake3", "sha256")[rank])
    try:
        dcp.save(state_of(1.0), storage_writer=writer)
    except dcp.CheckpointException as error:
        first = error.failures[0][0]
        return type(first).__name__, str(first)
    return "saved", ""


def test_other_options_of_writers(tmp_path: Path) -> None:
    for kind, text in run_ranks(2, _save_by_dcp, str(tmp_path)):
        assert kind == ConfigurationError.__name__
        assert "rank 0 saves with block_digests='blake3', rank 1 saves with block_digests='sha256'" in text
    assert not list(tmp_path.rglob("commit.json"))


def _manage(rank: int, root: str, mode: Any, local: str | None) -> str:
    algorithm = ("blake3", "sha256")[rank]
    options: dict[str, Any] = {"async_mode": mode, "block_digests": algorithm, "local": local}
    with ckpt.CheckpointManager(root, save=1, preflight=False, **options) as manager:

        def save() -> None:
            manager.step(1, state_of(1.0))
            manager.wait_durable()

        return _attempt(save)


@pytest.mark.parametrize(("mode", "has_local"), [("thread", False), ("process", False), ("thread", True)])
def test_other_options_of_managers(tmp_path: Path, mode: str, has_local: bool) -> None:
    local = str(tmp_path / "near") if has_local else None
    for text in run_ranks(2, _manage, str(tmp_path / "run"), mode, local):
        assert text.startswith("SaveFailed")
        assert "block_digests='blake3'" in text
        assert "block_digests='sha256'" in text
    assert not list(tmp_path.rglob("commit.json"))
