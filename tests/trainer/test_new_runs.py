"""A run that does not begin above the steps of its root: it is refused, or the old checkpoints no longer count."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.errors import ConfigurationError, StorageUnavailable
from ckpt.format.run_record import RUN_KEY
from ckpt.options import ManagerOptions
from ckpt.trainer_integration import keeping

NEW: Mapping[str, Any] = {"options": ManagerOptions(on_existing="new-run")}
OLD_STEPS = (500, 600, 700)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step)), "step": step}


def run(root: Path, steps: tuple[int, ...], **options: Any) -> None:
    with ckpt.CheckpointManager(root, save=100, preflight=False, **options) as manager:
        for step in steps:
            manager.step(step, state_of(step))
            manager.wait_durable(240)


def restored(root: Path, **options: Any) -> int | None:
    state = state_of(-1)
    with ckpt.CheckpointManager(root, save=100, preflight=False, **options) as manager:
        found = manager.restore(state)
    assert found is None or state["weight"][0] == found.step
    return None if found is None else found.step


def folders(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


@pytest.mark.parametrize("call", ["step", "save"])
@pytest.mark.parametrize("keeps_record", [True, False])
def test_a_run_below_the_steps_of_its_root_is_refused(tmp_path: Path, call: str, keeps_record: bool) -> None:
    """Before it saves or removes anything; with the three ways out."""
    run(tmp_path, OLD_STEPS)
    if not keeps_record:
        (tmp_path / RUN_KEY).unlink()
    with ckpt.CheckpointManager(tmp_path, save=100, keep=3, preflight=False) as manager:
        for _ in range(2):
            with pytest.raises(
                ConfigurationError, match=r"begins at step 100, not above .*step-00000700"
            ) as caught:
                getattr(manager, call)(100, state_of(100))
        for way in ("restore()", "another root", 'ManagerOptions(on_existing="new-run")'):
            assert way in str(caught.value)
        assert folders(tmp_path) == [*OLD_STEPS]
        assert manager.restore(state_of(-1)) is not None
        assert manager.save(701, state_of(701)), "restore() is the first way out"


def test_it_is_refused_at_its_first_step_though_no_save_is_due(tmp_path: Path) -> None:
    run(tmp_path, OLD_STEPS)
    with (
        ckpt.CheckpointManager(tmp_path, save=10**6, preflight=False) as manager,
        pytest.raises(ConfigurationError, match="begins at step 1"),
    ):
        manager.step(1, state_of(1))


def _refused(rank: int, root: str) -> str:
    with (
        ckpt.CheckpointManager(root, save=100, preflight=False) as manager,
        pytest.raises(ConfigurationError) as caught,
    ):
        manager.step(100, state_of(100))
    with ckpt.CheckpointManager(root, save=100, keep=1, **NEW) as manager:
        manager.step(100, state_of(100))
        manager.step(200, state_of(200))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["step", "save"])
@pytest.mark.parametrize("kind", ["plain", "local", "fallback"])
def test_a_run_that_begins_at_the_newest_step_overwrites_nothing(
    tmp_path: Path, call: str, kind: str
) -> None:
    root = tmp_path / "root"
    tier: dict[str, Any] = {} if kind == "plain" else {kind: tmp_path / "tier"}
    run(root, OLD_STEPS, **tier)
    before = (root / "step-00000700" / "commit.json").read_bytes()
    with ckpt.CheckpointManager(root, save=100, preflight=False, **tier) as manager:
        with pytest.raises(ConfigurationError, match=r"begins at step 700, not above .* be overwritten"):
            getattr(manager, call)(700, state_of(7))
        assert manager.restore(state_of(-1)) is not None
        assert not manager.save(700, state_of(7)), "it has been saved already"
    assert (root / "step-00000700" / "commit.json").read_bytes() == before
    run(root, (700,), **tier, **NEW)
    assert restored(root, **tier) == 700
    assert (root / "step-00000700" / "commit.json").read_bytes() != before, "in place of the old one"


def test_a_run_may_save_its_own_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is not known what the root held when it began."""
    listed = PosixStore.folders

    def refused(self: PosixStore) -> Iterator[str]:
        raise StorageUnavailable("no answer", url=self.url)

    monkeypatch.setattr(PosixStore, "folders", refused)
    with ckpt.CheckpointManager(tmp_path, save=100, preflight=False) as manager:
        assert manager.save(100, state_of(100))
        manager.wait_durable(240)
        monkeypatch.setattr(PosixStore, "folders", listed)
        assert not manager.save(100, state_of(100)), "it has been saved already"
        assert manager.save(200, state_of(200))
    assert restored(tmp_path) == 200


def test_saves_that_did_not_finish_hide_no_earlier_run(tmp_path: Path) -> None:
    on_record = tmp_path / "on record"
    listed = tmp_path / "listed"
    for root in (on_record, listed):
        run(root, OLD_STEPS)
        for step in range(701, 722):
            (root / f"step-{step:08d}").mkdir()
            (root / f"step-{step:08d}" / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(ConfigurationError, match="not above step 700 "):
        run(on_record, (100,))
    run(on_record, (701, 800))
    assert restored(on_record) == 800

    (listed / RUN_KEY).unlink()
    with ckpt.CheckpointManager(listed, save=100, preflight=False) as manager:
        with pytest.raises(ConfigurationError, match="begins at step 100, not above step 7"):
            manager.step(100, state_of(100))
        found = manager.restore(state_of(-1))
        assert found is not None
        assert found.step == 700


def test_all_ranks_decide_the_same(tmp_path: Path) -> None:
    run(tmp_path, OLD_STEPS)
    first, second = run_ranks(2, _refused, str(tmp_path))
    assert first == second
    assert "step-00000700" in first
    assert folders(tmp_path) == [200, *OLD_STEPS]
    assert restored(tmp_path) == 200


@pytest.mark.parametrize("keeps_record", [True, False])
def test_a_new_run_gives_the_old_checkpoints_up(tmp_path: Path, keeps_record: bool) -> None:
    run(tmp_path, OLD_STEPS)
    if not keeps_record:
        (tmp_path / RUN_KEY).unlink()
    run(tmp_path, (100, 200, 300, 400), keep=3, **NEW)
    assert folders(tmp_path) == [200, 300, 400, *OLD_STEPS]
    assert restored(tmp_path) == 400
    with ckpt.CheckpointManager(tmp_path, save=100, keep=3, **NEW) as manager:
        assert manager.restore(state_of(-1)) is not None
        for step in (500, 600):
            manager.step(step, state_of(step))
    assert folders(tmp_path) == [400, 500, 600, 700], "their steps are saved in place of the old ones"
    assert restored(tmp_path, **NEW) == 600


def test_a_new_run_that_ends_before_its_first_save_gives_nothing_up(tmp_path: Path) -> None:
    run(tmp_path, OLD_STEPS)
    run(tmp_path, (1, 2), **NEW)
    assert restored(tmp_path) == 700


def test_the_best_of_a_new_run_is_its_own(tmp_path: Path) -> None:
    rule = keeping.best(1, "loss")
    for steps, loss, options in ((OLD_STEPS, 0.1, {}), ((100, 200), 2.0, NEW)):
        with ckpt.CheckpointManager(tmp_path, save=100, keep=rule, preflight=False, **options) as manager:
            for step in steps:
                manager.step(step, state_of(step), metrics={"loss": loss - step / 1e6})
    with ckpt.CheckpointManager(tmp_path, save=100, keep=rule) as manager:
        found = manager.restore(state_of(-1), step="best")
    assert found is not None
    assert found.step == 200


def test_what_is_no_run_of_before_is_not_refused(tmp_path: Path) -> None:
    empty, unfinished, initial, later = (tmp_path / str(number) for number in range(4))
    run(empty, (100,))
    run(unfinished, OLD_STEPS)
    shutil.rmtree(unfinished / "step-00000600")
    for name in (RUN_KEY, "step-00000500/commit.json", "step-00000500/.metadata"):
        (unfinished / name).unlink()
    (unfinished / "step-00000700" / "commit.json").unlink()
    (unfinished / "step-00000700" / ".metadata").unlink()
    run(unfinished, (100,))  # saves that were killed
    with ckpt.CheckpointManager(initial, save=100) as manager:
        assert manager.restore(state_of(-1), initial=empty / "step-00000100") is not None
        assert manager.step(100, state_of(100))
    run(later, OLD_STEPS)
    run(later, (800,))


def test_going_back_in_a_run_is_no_new_run(tmp_path: Path) -> None:
    run(tmp_path, OLD_STEPS)
    with ckpt.CheckpointManager(tmp_path, save=100) as manager:
        manager.restore(state_of(-1), step=500)
        assert manager.step(600, state_of(600))


def test_storage_that_gives_no_answer_is_asked_again_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, OLD_STEPS)

    def refused(self: PosixStore) -> Iterator[str]:
        raise StorageUnavailable("no answer", url=self.url)

    (tmp_path / RUN_KEY).unlink()
    monkeypatch.setattr(PosixStore, "folders", refused)
    with ckpt.CheckpointManager(tmp_path, save=100, preflight=False) as manager:
        with caplog.at_level(logging.WARNING):
            for step in (98, 99):
                manager.step(step, state_of(step))
        assert caplog.text.count("is not known") == 1
        monkeypatch.undo()
        with pytest.raises(ConfigurationError, match="begins at step 100"):
            manager.step(100, state_of(100))


def _local(folder: Path) -> dict[str, Any]:
    return {"local": folder / "local"}


@pytest.mark.slow
def test_checkpoints_that_only_the_nodes_have(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run(root, OLD_STEPS, **_local(tmp_path))
    shutil.rmtree(root)
    with pytest.raises(ConfigurationError, match=r"begins at step 100, .*local.*step-00000700"):
        run(root, (100,), **_local(tmp_path))
    run(root, (100, 200), **_local(tmp_path), **NEW)
    assert restored(root, **_local(tmp_path)) == 200
    assert folders(root) == [100, 200]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "fallback"])
def test_a_new_run_with_a_tier(tmp_path: Path, kind: str) -> None:
    root, tier = tmp_path / "root", {kind: tmp_path / "tier"}
    run(root, OLD_STEPS, **tier)
    with pytest.raises(ConfigurationError, match="begins at step 100"):
        run(root, (100,), **tier)
    run(root, (100, 200), keep=1, **tier, **NEW)
    assert restored(root, **tier) == 200
    assert folders(root) == [200, *OLD_STEPS]


def test_a_tier_whose_root_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The nodes alone are asked: no step waits for the root."""
    root = tmp_path / "root"
    run(root, OLD_STEPS, **_local(tmp_path))
    listed = PosixStore.folders

    def refused(self: PosixStore) -> Iterator[str]:
        if str(root) in self.url:
            raise StorageUnavailable("no answer", url=self.url)
        return listed(self)

    (root / RUN_KEY).unlink()
    monkeypatch.setattr(PosixStore, "folders", refused)
    with (
        ckpt.CheckpointManager(root, save=100, preflight=False, **_local(tmp_path)) as manager,
        pytest.raises(ConfigurationError, match=r"local.*step-00000700"),
    ):
        manager.step(100, state_of(100))
    assert "whether the durable place holds checkpoints is not known" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, NEW])
def test_a_tier_whose_root_answers_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Any]
) -> None:
    """What it holds counts at a later save; the new run's checkpoints until then still count."""
    root = tmp_path / "root"
    run(root, OLD_STEPS)

    def refused(self: PosixStore) -> Iterator[str]:
        raise StorageUnavailable("no answer", url=self.url)

    (root / RUN_KEY).unlink()
    monkeypatch.setattr(PosixStore, "folders", refused)
    near = {**_local(tmp_path), **options}
    with ckpt.CheckpointManager(root, save=1, keep=3, preflight=False, **near) as manager:
        manager.step(100, state_of(100))
        monkeypatch.undo()
        refusals = []
        for step in range(101, 104):  # the answer may come a step later
            try:
                manager.step(step, state_of(step))
                manager.wait_durable(240)
            except ConfigurationError as error:
                refusals.append(str(error))
    assert bool(refusals) is not bool(options)
    assert all(f"not above step 700 of {root}/step-00000700" in text for text in refusals)
    assert restored(root, **near) == (103 if options else 700)
    assert not options or folders(root) == [101, 102, 103, *OLD_STEPS]


def test_options_of_another_type(tmp_path: Path) -> None:
    wrong: Any = {"on_existing": "new-run"}
    with pytest.raises(ConfigurationError, match=r"options must be a ckpt\.options\.ManagerOptions"):
        ckpt.CheckpointManager(tmp_path, save=1, options=wrong)
