"""A manager's saves refer to the last checkpoint that it saved or restored."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from support.ranks import run_ranks
from support.states import bits, digest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.format.records import CommitRecord, decode_commit
from ckpt.options import ManagerOptions
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
    assert caplog.text.count("everything is saved again") == 1
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
    assert "everything is saved again" in caplog.text
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


def _lose(root: Path, step: int, how: str) -> None:
    """Have a file of a checkpoint be gone, short, long or another one; its records stay."""
    (data,) = (root / f"step-{step:08d}/rank-00000").glob("*.distcp")
    whole = data.read_bytes()
    data.unlink()
    if how == "short":
        data.write_bytes(whole[: len(whole) // 2])
    elif how == "long":
        data.write_bytes(whole + b"?")
    elif how == "zeros":
        data.write_bytes(bytes(len(whole)))


def _loads(root: Path, step: int) -> None:
    found = state_at(0)
    ckpt.load(found, root / f"step-{step:08d}")
    assert digest(found) == digest(state_at(step))


@pytest.mark.parametrize("how", ["gone", "short", "long", "zeros"])
@pytest.mark.parametrize("frozen", [(), ("base",)])
def test_data_of_the_base_that_is_lost_is_saved_again(
    tmp_path: Path, how: str, frozen: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A lifecycle rule took it, or a person: what is acknowledged afterwards loads."""
    with manager_of(tmp_path, frozen=frozen) as manager:
        manager.step(1, state_at(1), rng=False)
        manager.wait_durable()
        _lose(tmp_path, 1, how)
        for step in (2, 3):
            manager.step(step, state_at(step), rng=False)
    assert caplog.text.count("everything is saved again") == 1
    assert [owners(tmp_path, step) for step in (2, 3)] == [set(), {"step-00000002"}]
    for step in (2, 3):
        _loads(tmp_path, step)


@pytest.mark.parametrize("frozen", [(), ("base",)])
def test_data_of_an_earlier_owner_that_is_lost_is_saved_again(
    tmp_path: Path, frozen: tuple[str, ...]
) -> None:
    """Not of the base, but of a checkpoint that it names."""
    with manager_of(tmp_path, frozen=frozen, async_mode="off") as manager:
        for step in (1, 2):
            manager.step(step, state_at(step), rng=False)
        _lose(tmp_path, 1, "gone")
        manager.step(3, state_at(3), rng=False)
    assert owners(tmp_path, 3) == set()
    _loads(tmp_path, 3)


@pytest.mark.parametrize("frozen", [(), ("base",)])
def test_a_lost_file_of_another_rank(tmp_path: Path, frozen: tuple[str, ...]) -> None:
    """Each file is looked at by one rank; what it finds has all ranks save everything."""
    run_ranks(2, _lose_on_ranks, str(tmp_path), frozen)
    for step in (2, 3):
        found = {"base": torch.zeros(40_000), "adapter": torch.zeros(10), "step": 0}
        ckpt.load(found, tmp_path / f"step-{step:08d}")
        assert digest(found) == digest(state_at(step))


def _lose_on_ranks(rank: int, root: str, frozen: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def sharded(step: int) -> dict[str, Any]:
        state = state_at(step)
        return state | {"base": distribute_tensor(state["base"], mesh, [Shard(0)])}

    with manager_of(Path(root), frozen=frozen) as manager:
        manager.step(1, sharded(1), rng=False)
        manager.wait_durable()
        if rank == 0:
            (data,) = Path(root, "step-00000001/rank-00001").glob("*.distcp")
            data.unlink()
        torch.distributed.barrier()
        for step in (2, 3):
            manager.step(step, sharded(step), rng=False)


# -- going back ----------------------------------------------------------------------------------------


def branch_at(step: int, branch: int) -> dict[str, Any]:
    """A state whose large tensor changed last at an even step: odd ones name bytes of the step before."""
    large = torch.arange(40_000.0) + 100 * branch + step // 2
    return {"base": large, "adapter": torch.full((10,), float(step) + 100 * branch), "step": step}


def folders(root: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-0000000") for path in root.glob("step-*"))


def _check_branch(root: Path, branches: dict[int, int]) -> None:
    """The newest checkpoint, and each step, are those of the branch on which the run saved it last."""
    with manager_of(root) as manager:
        state = branch_at(0, 0)
        wanted: list[Any] = ["latest-valid", *branches]
        for number in wanted:
            restored = manager.restore(state, step=number, rng=False)
            assert restored is not None
            assert restored.step == (number if isinstance(number, int) else max(branches))
            assert digest(state) == digest(branch_at(restored.step, branches[restored.step]))


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("mode", ["thread", "off"])
def test_steps_are_reached_again_after_going_back(tmp_path: Path, restarts: bool, mode: Any) -> None:
    """A superseded checkpoint that others name is not replaced: the new one is saved in the same root."""
    managers = [manager_of(tmp_path, async_mode=mode)]
    for branch in range(4):
        if restarts and branch:
            managers[-1].close()
            managers.append(manager_of(tmp_path, async_mode=mode))
        if branch:
            managers[-1].restore(branch_at(0, 0), step=1, rng=False)
        for step in range(2 if branch else 1, 6 + 2 * branch):
            assert managers[-1].step(step, branch_at(step, branch), rng=False)
            managers[-1].wait_durable()
    managers[-1].close()
    _check_branch(tmp_path, {1: 0} | dict.fromkeys(range(2, 12), 3))


def test_what_was_saved_again_goes_when_no_checkpoint_names_it(tmp_path: Path) -> None:
    events: list[Event] = []
    with manager_of(tmp_path, keep=10, async_mode="off", events=[events.append]) as manager:
        for step in range(1, 6):
            manager.step(step, branch_at(step, 0), rng=False)
        manager.restore(branch_at(0, 0), step=1, rng=False)
        for step in range(2, 6):
            manager.step(step, branch_at(step, 1), rng=False)
    assert folders(tmp_path) == ["1", "2.again", "3", "4.again", "5"]
    removed = [(event.step, event.reason) for event in events if event.kind == "removed"]
    assert removed == [(2, "it was saved again"), (4, "it was saved again")]
    _check_branch(tmp_path, {1: 0} | dict.fromkeys(range(2, 6), 1))


def test_a_new_run_in_an_old_root(tmp_path: Path) -> None:
    options: Any = {"async_mode": "off", "options": ManagerOptions(on_existing="new-run")}
    for branch in (0, 1):
        with manager_of(tmp_path, **options) as manager:
            for step in range(1, 6):
                manager.step(step, branch_at(step, branch), rng=False)
    _check_branch(tmp_path, dict.fromkeys(range(1, 6), 1))


def test_going_back_on_ranks(tmp_path: Path) -> None:
    run_ranks(2, _go_back_on_ranks, str(tmp_path))
    _check_branch(tmp_path, {1: 0} | dict.fromkeys(range(2, 6), 1))


def _go_back_on_ranks(rank: int, root: str) -> None:
    with manager_of(Path(root)) as manager:
        for branch in (0, 1):
            if branch:
                manager.restore(branch_at(0, 0), step=1, rng=False)
            for step in range(2 if branch else 1, 6):
                manager.step(step, branch_at(step, branch), rng=False)
