"""`CheckpointManager.restore` while another process works at the same run, where the record knows more
than is there, and for a run that begins with another's checkpoint.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.clock import SkippingClock
from support.commands import run_json
from test_manager import damage, restored_step, run, state_of, steps_at

import ckpt
from ckpt import collective
from ckpt.backends.memory import MemoryStore, inject
from ckpt.backends.options import redact_url
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import register
from ckpt.consistency import environment
from ckpt.errors import CheckpointError, ConfigurationError, LoadFailed, NotFound, StorageFull
from ckpt.format.run_record import RUN_KEY
from ckpt.trainer_integration.events import Event, JsonLines
from ckpt.trainer_integration.run import async_modes
from ckpt.state import training_state
from ckpt.writing import staging_memory

MOMENTS = {
    "before it is looked at": ("stat", "commit.json"),
    "while it is looked at": ("list", ""),
    "while it is loaded": ("read_into", ".distcp"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_moves_on_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """At each look another manager commits the next step, and removes the one that was found."""
    name, suffix = MOMENTS[moment]
    operation = getattr(PosixStore, name)
    other = ckpt.CheckpointManager(tmp_path, save=1, keep=1)
    other.step(1, state_of(1))
    other.wait_durable()
    moves: list[int] = []

    def moved_on(self: PosixStore, key: str = "", *rest: Any) -> Any:
        step = other.durable_step or 0
        if len(moves) < 3 and self.url.endswith(f"step-{step:08d}") and key.endswith(suffix):
            moves.append(step)
            other.step(step + 1, state_of(step + 1))
            other.wait_durable()
            other._saves.wait_booked()
        return operation(self, key, *rest)

    with environment.replaced(SkippingClock()):
        monkeypatch.setattr(PosixStore, name, moved_on)
        assert restored_step(tmp_path) == 4
    assert moves == [1, 2, 3]
    assert steps_at(tmp_path) == [4]


def test_a_run_that_always_moves_on_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, range(1, 2))
    stat, newest = PosixStore.stat, [1]

    def moved_on(self: PosixStore, key: str) -> Any:
        if self.url.endswith(f"step-{newest[0]:08d}") and key == "commit.json":
            newest[0] += 1
            (tmp_path / f"step-{newest[0] - 1:08d}").rename(tmp_path / f"step-{newest[0]:08d}")
        return stat(self, key)

    monkeypatch.setattr(PosixStore, "stat", moved_on)
    with pytest.raises(LoadFailed, match="removed faster than they can be read"):
        restored_step(tmp_path)


@pytest.mark.parametrize("what", ["folders", "commits"])
def test_a_run_copied_in_part_is_no_new_run(tmp_path: Path, what: str) -> None:
    root = tmp_path / "run"
    run(root, range(1, 4))
    for folder in root.glob("step-*"):
        if what == "folders":
            shutil.rmtree(folder)
        else:
            (folder / "commit.json").unlink()
    with pytest.raises(LoadFailed, match=rf"{RUN_KEY} lists 3 checkpoints \(steps 1 to 3\) as committed"):
        restored_step(root)
    (root / RUN_KEY).unlink()
    assert restored_step(root) is None


@pytest.mark.parametrize("what", ["folders", "commits"])
def test_newer_checkpoints_that_are_gone_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Restored from a copy that is not whole, or after somebody tidied up: work is lost, and not silently."""
    run(tmp_path, range(1, 6))
    for step in (3, 4, 5):
        folder = tmp_path / f"step-{step:08d}"
        shutil.rmtree(folder) if what == "folders" else (folder / "commit.json").unlink()
    events: list[Event] = []
    with ckpt.CheckpointManager(tmp_path, save=1, events=[events.append]) as manager:
        restored = manager.restore(state_of(-1))
        assert restored is not None
        assert restored.step == 2
        (lost,) = restored.passed_over
        assert lost.step == 5
        assert lost.url.endswith("step-00000005")
        text = (
            f"{RUN_KEY} lists 3 checkpoints (steps 3 to 5) as committed, but no checkpoint is there any more"
        )
        assert text in lost.reason
        assert "of step 2: stop and bring it back" in lost.reason
        assert [(each.step, each.reason) for each in events if each.kind == "passed_over"] == [
            (5, lost.reason)
        ]
        assert f"step 5 passed over: {lost.reason}" in caplog.text
        manager.step(3, state_of(3))
    assert {path.name for path in tmp_path.glob("step-*")} >= {"step-00000003"}, "in its old place"
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:  # those were given up, with the next checkpoint
        restored = manager.restore(state_of(-1))
        assert restored is not None
        assert (restored.step, restored.passed_over) == (3, ())
        with pytest.raises(NotFound, match="of step 5"):
            manager.restore(state_of(-1), step=5)


def test_it_needs_no_stock_metadata(tmp_path: Path) -> None:
    """A tool that leaves out files whose name begins with a dot has copied all that is read."""
    run(tmp_path, range(1, 3))
    for path in tmp_path.rglob(".metadata"):
        path.unlink()
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        restored = manager.restore(state_of(-1))
    assert restored is not None
    assert (restored.step, restored.passed_over) == (2, ())


def trained_one() -> dict[str, Any]:
    """A model and an optimizer whose moments exist, with numbers of single steps."""
    model = torch.nn.Sequential(torch.nn.Linear(37, 41), torch.nn.BatchNorm1d(41))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 37)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_memory_for_the_first_save_is_made_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first step that is not saved: who only restores keeps no memory."""
    made_by, real = [], staging_memory._fresh

    def make(nbytes: int) -> torch.Tensor:
        made_by.append(threading.current_thread().name)
        return real(nbytes)

    monkeypatch.setattr(staging_memory, "_fresh", make)

    def begin(root: str, **options: Any) -> ckpt.CheckpointManager:
        own = ckpt.Stager()
        for module in (collective, async_modes):
            monkeypatch.setattr(module, "stager", own)
        made_by.clear()
        return ckpt.CheckpointManager(tmp_path / root, save=2, **options)

    with begin("run") as manager:
        assert manager.restore(**trained_one()) is None
        assert not manager.step(1, **trained_one())
        assert manager.step(2, **trained_one())
    assert made_by == ["MainThread"]  # nobody knew the size
    for root, initial in (("run", None), ("next", tmp_path / "run" / "step-00000002")):
        with begin(root) as manager:
            assert manager.restore(initial=initial, **trained_one()) is not None
            assert made_by == []
            assert not manager.step(3, **trained_one())
            assert manager.step(4, **trained_one())
        assert made_by == ["ckpt-memory"]
    for options in ({"references": True}, {"async_mode": "off"}):
        with begin("run", **options) as manager:
            assert manager.restore(**trained_one()) is not None
            assert not manager.step(5, **trained_one())
            assert made_by == []


def test_ls_and_restore_agree_on_the_latest(tmp_path: Path) -> None:
    """A data file is gone, a commit is damaged, steps were given up, and one is the user's own."""
    run(tmp_path, range(1, 7))
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        assert manager.restore(state_of(-1), step=4) is not None
        manager.step(5, state_of(5))
        manager.save(7, state_of(7))
        manager.save(8, state_of(8))
    ckpt.save(state_of(99), tmp_path / "mine", tags={"step": "99"})
    next((tmp_path / "step-00000008").rglob("*.distcp")).unlink()
    damage(tmp_path, 7, "commit.json")
    listed = run_json("ls", tmp_path)["checkpoints"]
    assert [each["path"] for each in listed if each["latest"]] == ["step-00000005"]
    assert restored_step(tmp_path) == 5


def test_the_age_of_a_restored_checkpoint_is_its_own(tmp_path: Path) -> None:
    class Earlier(environment.Environment):
        def now(self) -> float:
            return time.time() - 3000

    with environment.replaced(Earlier()):
        run(tmp_path, range(1, 2))
    events: list[Event] = []
    options: dict[str, Any] = {"save": 1, "max_undurable_s": 2000.0, "events": [events.append]}
    with ckpt.CheckpointManager(tmp_path, **options) as manager:
        manager.restore(state_of(-1))
        manager.step(2, state_of(2))  # that nothing became durable for so long is no fault of this process
    ages = {
        event.kind: event.values["durable_age_s"] for event in events if event.kind in ("restored", "durable")
    }
    assert 3000 <= ages["restored"] < 3600
    assert ages["durable"] < 600


# -- initial -----------------------------------------------------------------------------------------------


def trained(seed: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("place", ["beside", "in the run"])
def test_a_run_begins_with_a_checkpoint_of_stock_pytorch(tmp_path: Path, place: str) -> None:
    root = tmp_path / "run"
    stock = root / "step-7" if place == "in the run" else tmp_path / "old" / "step_7_ckp"
    model, optimizer = trained(1)
    values = {
        name: part.state_dict() for name, part in training_state(model=model, optimizer=optimizer).items()
    }
    del values["rng"]
    dcp.save(values, checkpoint_id=stock, no_dist=True)
    for step in (7, 8):  # the second time the run has a checkpoint of its own
        other, its_optimizer = trained(2)
        with ckpt.CheckpointManager(root, save=1) as manager:
            restored = manager.restore(initial=stock, model=other, optimizer=its_optimizer)
            assert restored is not None
            assert (restored.step, restored.is_initial) == (step, step == 7)
            assert torch.equal(other.weight, model.weight)
            moments = [values["exp_avg"] for values in its_optimizer.state.values()]
            assert all(map(torch.equal, moments, (each["exp_avg"] for each in optimizer.state.values())))
            assert manager.durable_step == (None if step == 7 else 8)
            manager.step(step + 1, model=other, optimizer=its_optimizer)
    assert steps_at(root) == [8, 9]


def test_initial_is_for_runs_without_checkpoints(tmp_path: Path) -> None:
    ckpt.save(state_of(5), tmp_path / "pretrained")
    root = tmp_path / "run"
    with ckpt.CheckpointManager(root, save=1) as manager:
        restored = manager.restore(state := state_of(-1), initial=tmp_path / "pretrained")
        assert restored is not None
        assert (restored.step, state["weight"][0]) == (0, 5)
        with pytest.raises(ConfigurationError, match="latest-valid"):
            manager.restore(state, step=3, initial=tmp_path / "pretrained")
        with pytest.raises(NotFound):
            manager.restore(state, initial=tmp_path / "nothing")
        manager.step(1, state_of(1))
    damage(root, 1)
    with (
        pytest.raises(LoadFailed, match="no checkpoint can be loaded"),
        ckpt.CheckpointManager(root, save=1) as manager,
    ):
        manager.restore(state_of(-1), initial=tmp_path / "pretrained")


# -- secrets -----------------------------------------------------------------------------------------------

SECRET = "hunter2secret"


@pytest.fixture
def vault() -> str:
    """A place whose URL holds a password, as those of ftp, sftp, smb and webdav may."""

    def factory(url: str, options: Any, *, threads: int) -> MemoryStore:
        return MemoryStore(redact_url(url).replace("vault://", "memory://"), options, threads=threads)

    register("vault", factory)
    return f"vault://trainer:{SECRET}@host/run"


@pytest.mark.parametrize("async_mode", ["thread", "off"])
def test_a_password_in_the_url_is_not_shown(
    vault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, async_mode: Any
) -> None:
    caplog.set_level(logging.DEBUG, logger="ckpt")
    lines = tmp_path / "events.jsonl"
    texts: list[str] = []

    def no_more_data(operation: str, key: str, when: str) -> None:
        if operation == "put" and key.endswith(".distcp"):
            raise StorageFull("no room for it", key=key)

    def fails(call: Callable[[], object]) -> None:
        with pytest.raises(CheckpointError) as caught:
            call()
        texts.extend([repr(caught.value), str(caught.value), repr(vars(caught.value))])

    options: dict[str, Any] = {"save": 1, "keep": 1, "events": [JsonLines(lines)], "async_mode": async_mode}
    with ckpt.CheckpointManager(vault, storage_options={"visibility_lag_s": 0}, **options) as manager:
        assert manager.restore(state_of(-1)) is None
        for step in (1, 2):
            manager.step(step, state_of(step))
        manager.wait_durable()
        texts += [repr(manager.restore(state_of(-1))), repr(manager._saves.uploads)]
        assert "visibility_lag_s" not in texts[-1]
        for call in (
            lambda: manager.restore(state_of(-1), step=77),
            lambda: manager.restore({"weight": torch.zeros(7)}),
            lambda: manager.annotate(99, {"loss": 1.0}),
            lambda: manager.pin(99),
        ):
            fails(call)
        inject("memory://host/run", no_more_data)
        fails(lambda: manager.save(3, state_of(3)) and manager.wait_durable())
    with ckpt.CheckpointManager(f"{vault}/other", preflight=False, **options) as manager:
        texts.append(repr(manager.restore(state_of(-1), initial=f"{vault}/step-00000002")))
    texts += [caplog.text, lines.read_text()]
    assert SECRET not in "".join(texts)
    assert "vault://host/run/step-00000002" in "".join(texts)
