"""A manager's saves refer to the last checkpoint that it saved or restored."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.states import bits

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.format.records import CommitRecord, decode_commit
from ckpt.trainer_integration.events import Event


def record_of(place: Path) -> CommitRecord:
    return decode_commit((place / "commit.json").read_bytes(), url=str(place), key="commit.json")


def state_at(step: int) -> dict[str, Any]:
    base = torch.arange(40_000.0)
    return {"base": base, "adapter": torch.full((10,), float(step)), "step": step}


def manager_of(root: Path, **options: Any) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(root, save=1, preflight=False, references=True, **options)


def save_steps(root: Path, steps: range, **options: Any) -> list[Event]:
    events: list[Event] = []
    with manager_of(root, events=[events.append], **options) as manager:
        for step in steps:
            manager.step(step, state_at(step), rng=False)
    return events


def owners(root: Path, step: int) -> set[str]:
    return set(record_of(root / f"step-{step:08d}").owners)


@pytest.mark.parametrize("mode", ["thread", "off"])
def test_each_save_refers_to_the_last(tmp_path: Path, mode: Any) -> None:
    events = save_steps(tmp_path, range(1, 4), frozen=["base"], async_mode=mode)
    durable = [event for event in events if event.kind == "durable"]
    assert durable[0].values["size_bytes"] > 160_000
    assert "carried_bytes" not in durable[0].values
    for event in durable[1:]:
        assert event.values["size_bytes"] < 5000
        assert event.values["carried_bytes"] > 160_000
    assert [owners(tmp_path, step) for step in (1, 2, 3)] == [set(), {"step-00000001"}, {"step-00000001"}]


def test_a_run_that_goes_on_refers_to_what_it_restored(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 4))
    with manager_of(tmp_path) as manager:
        state = state_at(0)
        restored = manager.restore(state, step=2, rng=False)
        assert restored is not None
        assert bits(state["adapter"]) == bits(state_at(2)["adapter"])
        manager.step(3, state_at(3), rng=False)
    assert owners(tmp_path, 3) == {"step-00000001"}
    found = state_at(0)
    ckpt.load(found, tmp_path / "step-00000003")
    assert bits(found["base"]) == bits(state_at(3)["base"])


def test_a_base_that_is_gone_or_unfit_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path) as manager:
        manager.step(1, state_at(1), rng=False)
        manager.wait_durable()
        shutil.rmtree(tmp_path / "step-00000001")
        with caplog.at_level(logging.WARNING):
            manager.step(2, state_at(2), rng=False)
            manager.wait_durable()
    assert caplog.text.count("everything is saved anew") == 1
    assert owners(tmp_path, 2) == set()
    with ckpt.CheckpointManager(tmp_path, save=1, preflight=False) as manager:  # without references
        manager.step(3, state_at(3), rng=False)
    with manager_of(tmp_path) as manager:
        manager.restore(state_at(0), rng=False)
        manager.step(4, state_at(4), rng=False)
    assert owners(tmp_path, 4) == set()
    assert record_of(tmp_path / "step-00000004").is_referable


def test_on_ranks(tmp_path: Path) -> None:
    run_ranks(2, _save_on_ranks, str(tmp_path))
    assert owners(tmp_path, 3) == {"step-00000001"}


def _save_on_ranks(rank: int, root: str) -> None:
    save_steps(Path(root), range(1, 4), frozen=["base"])


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="frozen= is for references=True"):
        ckpt.CheckpointManager(tmp_path, save=1, frozen=["base"])
    with pytest.raises(ConfigurationError, match="references must be"):
        ckpt.CheckpointManager(tmp_path, save=1, references="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="frozen must be a list"):
        manager_of(tmp_path, frozen="base")


def test_a_restored_link_to_another_folder_is_no_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path / "first", range(1, 2))
    (tmp_path / "second").mkdir()
    (tmp_path / "second/step-00000001").symlink_to(tmp_path / "first/step-00000001")
    with caplog.at_level(logging.WARNING), manager_of(tmp_path / "second") as manager:
        assert manager.restore(state_at(0), step=1, rng=False) is not None
        manager.step(2, state_at(2), rng=False)
    assert "everything is saved anew" in caplog.text
    assert owners(tmp_path / "second", 2) == set()


@pytest.mark.parametrize("frozen", [(), ("base",)])
def test_an_owner_that_is_gone_or_damaged_is_done_without(tmp_path: Path, frozen: tuple[str, ...]) -> None:
    """The base stands, but not what it names of an earlier one."""
    with manager_of(tmp_path, async_mode="off", frozen=frozen) as manager:
        for step in (1, 2):
            manager.step(step, state_at(step), rng=False)
        shutil.rmtree(tmp_path / "step-00000001")
        manager.step(3, state_at(3), rng=False)
        assert owners(tmp_path, 3) == set()
        (manifest,) = (tmp_path / "step-00000003/rank-00000").glob("*.json")
        manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
        manager.step(4, state_at(4), rng=False)
    assert owners(tmp_path, 4) == set()
