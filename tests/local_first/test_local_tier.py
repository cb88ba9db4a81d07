"""`CheckpointManager(local=..., fallback=...)`: near first, durable behind the trainer, restored from the nearest."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import flip
from support.proxy import Call, fault_proxy
from support.ranks import exit_code_of
from support.strict_s3 import StrictS3, strict_s3
from typer.testing import CliRunner

import ckpt
from ckpt.cli.app import app
from ckpt.errors import ConfigurationError, LoadFailed, SaveFailed
from ckpt.local_first import drain_process
from ckpt.local_first.drain_process import STATUS, read_status
from ckpt.local_first.folder import RunFolder, mount_of
from ckpt.trainer_integration import keeping
from ckpt.trainer_integration.events import Event

PATIENCE_S = 60.0


class Log(list[Event]):
    """Events, which threads append and a test waits for."""

    def steps(self, kind: str) -> list[int | None]:
        return [event.step for event in list(self) if event.kind == kind]

    def of(self, kind: str) -> Event:
        return next(event for event in self if event.kind == kind)

    def wait_for(self, kind: str, step: int | None = None) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not any(event.kind == kind and step in (None, event.step) for event in list(self)):
            assert time.monotonic() < deadline_s, f"no {kind} of {step}: {[(e.kind, e.step) for e in self]}"
            time.sleep(0.05)


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((300_000,), float(step)), "step": torch.tensor(step)}


def manager_of(folder: Path, log: Log, **more: Any) -> ckpt.CheckpointManager:
    options: dict[str, Any] = {"local": folder / "local", "preflight": False, **more}
    return ckpt.CheckpointManager(folder / "durable", save=1, events=[log.append], **options)


def train(folder: Path, steps: range, **more: Any) -> Log:
    log = Log()
    with manager_of(folder, log, **more) as manager:
        for step in steps:
            manager.step(step, state_of(step))
        manager.wait_durable(PATIENCE_S)
    return log


def restored(folder: Path, **more: Any) -> tuple[int | None, Log]:
    """Return the step that is restored; its values are checked."""
    log, state = Log(), state_of(0)
    with manager_of(folder, log, **more) as manager:
        found = manager.restore(state)
    if found is None:
        return None, log
    assert torch.equal(state["weights"], state_of(found.step)["weights"])
    assert int(state["step"]) == found.step
    return found.step, log


def local_of(folder: Path, name: str = "local") -> Path:
    (run,) = (folder / name).iterdir()
    return run


@pytest.fixture(scope="module")
def _two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder, range(1, 3))
    return folder


@pytest.fixture
def trained(_two_steps: Path, tmp_path: Path) -> Path:
    """A folder with a run of two steps that have become durable: a copy, as if it had been made there."""
    shutil.copytree(_two_steps / "durable", tmp_path / "durable")
    here, there = local_of(_two_steps), RunFolder(tmp_path / "local", tmp_path / "durable")
    shutil.copytree(here, there.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".ckpt-job.lock"))
    marker = Path(there.path) / "ckpt-local.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"durable": there.durable}))
    return tmp_path


def data_file(checkpoint: Path) -> Path:
    (file,) = checkpoint.glob("rank-*/*.distcp")
    return file


def test_staged_local_durable(tmp_path: Path) -> None:
    log = train(tmp_path, range(1, 4), keep=2)
    for step in (1, 2, 3):
        kinds = [event.kind for event in log if event.step == step]
        assert [kind for kind in kinds if kind in ("staged", "local", "durable")] == [
            "staged",
            "local",
            "durable",
        ]
    assert log.of("local").values["local_s"] > 0
    assert log.of("local").url.startswith(str(tmp_path / "local"))
    assert log.of("durable").url.startswith(str(tmp_path / "durable"))
    assert sorted(path.name for path in (tmp_path / "durable").glob("step-*")) == [
        "step-00000002",
        "step-00000003",
    ]
    assert ckpt.verify(tmp_path / "durable" / "step-00000003").ok
    assert sorted(path.name for path in local_of(tmp_path).glob("step-*")) == [
        "step-00000002",
        "step-00000003",
    ]


class _Sending(Log):
    """A listener that sends in the background, as those that talk to a server."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.append(event)

    def flush(self) -> None:
        self.sent += self


def test_what_becomes_durable_at_the_end_is_sent(tmp_path: Path) -> None:
    log = _Sending()
    with ckpt.CheckpointManager(
        tmp_path / "durable", save=1, local=tmp_path / "local", preflight=False, events=[log]
    ) as manager:
        manager.step(1, state_of(1))
    assert "durable" in [event.kind for event in log.sent]


def test_a_rule_that_fails_tells_nothing_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(keeping.KeepRule):
        def keeps(self, checkpoints: Any, now_s: float) -> dict[int, str]:
            raise ValueError("a mistake")

    with caplog.at_level(logging.INFO):
        log = train(tmp_path, range(1, 3), keep=Broken())
    assert [(each, log.steps(each)) for each in ("local", "durable")] == [
        ("local", [1, 2]),
        ("durable", [1, 2]),
    ]
    assert "step 2 local: 1.2 MB in" in caplog.text
    assert "step 2 durable: 1.2 MB sent" in caplog.text


@pytest.mark.long
def test_no_wait_for_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    """The store gives no answer any more when a checkpoint has just become durable."""
    is_dead = threading.Event()
    with strict_s3() as server, fault_proxy(server) as proxy:

        def rule(call: Call) -> int | str:
            if call.method == "PUT" and call.key.endswith("step-00000002/commit.json"):
                is_dead.set()
            return "stall" if is_dead.is_set() and "ckpt-run" in call.key else "pass"

        proxy.rule, log = rule, Log()
        local = ckpt.LocalTier(tmp_path / "local", drain_timeout_s=1.0, answer_timeout_s=0.5)
        more: dict[str, Any] = {"storage_options": proxy.options, "preflight": False, "local": local}
        with ckpt.CheckpointManager("s3://bucket/run", save=1, events=[log.append], **more) as manager:
            manager.step(1, state_of(1))
            manager.wait_durable(PATIENCE_S)
            began_s = time.monotonic()
            manager.step(2, state_of(2))
            assert manager.wait_durable(8.0) == 2
        assert time.monotonic() - began_s < PATIENCE_S  # a request alone waits for longer


def test_ls_tells_what_is_durable(trained: Path) -> None:
    run = local_of(trained)
    shutil.copytree(run / "step-00000002", run / "step-00000003")
    lines = CliRunner().invoke(app, ["ls", str(run)]).output.splitlines()
    assert [[word for word in line.split() if word in ("durable", "local")] for line in lines[1:]] == [
        ["durable"],
        ["durable"],
        ["local"],
    ]
    listed = json.loads(CliRunner().invoke(app, ["ls", str(trained / "local"), "--json"]).output)
    assert sorted(each["state"] for each in listed["checkpoints"]) == ["durable", "durable", "local"]


def test_a_drain_of_the_wrong_folder_says_which_one_is_meant(trained: Path) -> None:
    tmp_path = trained
    output = CliRunner().invoke(app, ["drain", str(tmp_path / "local"), str(tmp_path / "durable")]).output
    assert f"{local_of(tmp_path).name} is the folder of the run" in output.replace("\n", "")


def test_restore_reads_nothing_from_afar(trained: Path) -> None:
    flip(data_file(trained / "durable" / "step-00000002"), 600_000)  # nobody reads it
    step, log = restored(trained)
    assert step == 2
    values = log.of("restored").values
    assert values["durable_bytes"] == values["neighbours_bytes"] == 0
    assert values["node_bytes"] > 1_200_000


def test_a_damaged_file_of_the_node_is_read_from_the_durable_place(trained: Path) -> None:
    flip(data_file(local_of(trained) / "step-00000002"), 600_000)
    step, log = restored(trained)
    assert step == 2
    assert 0 < log.of("restored").values["durable_bytes"] < 1_210_000  # no more than the request that met it


@pytest.mark.parametrize("fault", ["damaged", "missing", "cut"])
def test_what_is_damaged_and_not_durable_is_passed_over(trained: Path, fault: str) -> None:
    shutil.rmtree(trained / "durable" / "step-00000002")
    (trained / "durable" / "ckpt-run.json").unlink()
    (local_of(trained) / STATUS).unlink()
    file = data_file(local_of(trained) / "step-00000002")
    if fault == "damaged":
        flip(file, 600_000)
    elif fault == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    step, log = restored(trained)
    assert step == 1
    assert log.steps("passed_over") == [2]


def test_a_run_that_only_a_lost_node_has_is_no_new_run(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2))
    shutil.rmtree(tmp_path / "durable")
    (local_of(tmp_path) / STATUS).unlink()
    data_file(local_of(tmp_path) / "step-00000001").unlink()
    with pytest.raises(LoadFailed, match="the nodes have 0 of its 1 parts, and it is not durable"):
        restored(tmp_path)


def test_a_local_checkpoint_that_is_newer_comes_first(trained: Path) -> None:
    shutil.rmtree(trained / "durable" / "step-00000002")
    (trained / "durable" / "ckpt-run.json").unlink()
    (local_of(trained) / STATUS).unlink()
    step, log = restored(trained)
    assert step == 2
    assert log.of("restored").values["durable_bytes"] == 0


def test_what_was_removed_does_not_come_back(trained: Path) -> None:
    """Who removes a checkpoint from the root, or all of them, to go on from an earlier one does not get it from a node."""
    ckpt.remove(trained / "durable" / "step-00000002")
    step, log = restored(trained)
    assert step == 1
    assert {*log.steps("passed_over")} == {2}
    state = state_of(0)
    with manager_of(trained, Log()) as manager:
        assert manager.restore(state, step=2)
    assert int(state["step"]) == 2
    shutil.rmtree(trained / "durable")
    with pytest.raises(LoadFailed, match=r"is not in .*durable any more: .* restore\(step=2\) takes it"):
        restored(trained)


@pytest.mark.slow
def test_an_older_one_of_the_nodes_does_not_come_before_a_durable_one(
    trained: Path,
) -> None:
    tmp_path = trained
    train(tmp_path, range(3, 4))
    for path in ("durable/step-00000003", f"{local_of(tmp_path)}/step-00000003"):
        shutil.rmtree(tmp_path / path)
    shutil.copytree(tmp_path / "durable" / "step-00000001", local_of(tmp_path) / "step-00000001")
    shutil.rmtree(local_of(tmp_path) / "step-00000002")
    step, log = restored(tmp_path)
    assert step == 2
    assert log.steps("passed_over") == [3]


def test_a_durable_checkpoint_that_is_newer_comes_first(trained: Path) -> None:
    ckpt.copy(trained / "durable" / "step-00000002", trained / "durable" / "step-00000009")
    log, state = Log(), state_of(0)
    with manager_of(trained, log) as manager:
        found = manager.restore(state)
    assert found is not None
    assert found.url.endswith("durable/step-00000009")


def test_going_back_gives_up_what_is_local_too(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4), local=ckpt.LocalTier(tmp_path / "local", keep=9))
    log = Log()
    with manager_of(tmp_path, log, local=ckpt.LocalTier(tmp_path / "local", keep=9)) as manager:
        found = manager.restore(state_of(0), step=1)
        assert found is not None
        assert found.step == 1
        manager.step(2, state_of(2))
        manager.wait_durable(PATIENCE_S)
    step, _ = restored(tmp_path)
    assert step == 2


@pytest.mark.parametrize("last", [3, 4])
def test_what_was_dropped_before_going_back_removes_nothing_later(tmp_path: Path, last: int) -> None:
    """Step 2 is dropped while the root gives no answer; the run goes back, and saves it again.

    After step 3 it is to be dropped with the next save; after step 4 its files are to be removed.
    """
    with dead_store() as (_, options, dead):
        dead.set()
        log = Log()
        local = ckpt.LocalTier(tmp_path / "local", drain_timeout_s=0.0, answer_timeout_s=0.5)
        more: dict[str, Any] = {"storage_options": options, "preflight": False, "local": local}
        with ckpt.CheckpointManager(
            "s3://bucket/run", save=1, keep=keeping.last(1), events=[log.append], **more
        ) as manager:
            tier: Any = manager._saves._tier  # type: ignore[attr-defined]
            look = tier._watch._look
            tier._watch._look = lambda: None
            for step in range(1, last + 1):
                manager.step(step, state_of(step))
                log.wait_for("local", step)
            assert manager.restore(state_of(0), step=1) is not None
            manager.step(2, state_of(2))
            assert manager._saves.settle() is None
            tier._watch._look = look
            for _ in range(2):
                tier.wait_looked(time.monotonic() + PATIENCE_S)
            assert (local_of(tmp_path) / "step-00000002" / "commit.json").exists()
            assert [each.step for each in tier.history.durable()] == [1, 2]
        end_carriers(tmp_path)


def test_two_runs_share_a_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with ckpt.CheckpointManager(
            tmp_path / name, save=1, local=tmp_path / "local", preflight=False
        ) as manager:
            manager.step(1, state_of(1 if name == "one" else 2))
    assert len([*(tmp_path / "local").iterdir()]) == 2
    state = state_of(0)
    with ckpt.CheckpointManager(
        tmp_path / "one", save=1, local=tmp_path / "local", preflight=False
    ) as manager:
        manager.restore(state)
    assert int(state["step"]) == 1


def test_two_jobs_of_one_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.local_first.folder._PATIENCE_S", 0.2)
    with (
        manager_of(tmp_path, Log()),
        pytest.raises(ConfigurationError, match="this process that was not closed saves to"),
    ):
        manager_of(tmp_path, Log())
    with manager_of(tmp_path, Log()):
        lock = local_of(tmp_path) / ".ckpt-job.lock"
        lock.write_text(lock.read_text().replace(f"pid {os.getpid()}", "pid 1"))
        with pytest.raises(ConfigurationError, match=r"another job .* pid 1 .* saves to"):
            manager_of(tmp_path, Log())
    manager_of(tmp_path, Log()).close()


def test_a_root_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with ckpt.CheckpointManager("~/run", save=1, local="~/local", preflight=False) as manager:
        manager.step(1, state_of(1))
        assert manager.wait_durable(PATIENCE_S) == 1
    assert ckpt.verify(tmp_path / "home" / "run" / "step-00000001").ok
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_bad_arguments(tmp_path: Path) -> None:
    for wrong, text in (
        ({"local": "s3://bucket/run"}, "a folder of this node, not a URL"),
        ({"local": tmp_path / "durable" / "inside"}, "lie in each other"),
        ({"fallback": tmp_path / "other"}, "local= or fallback="),
        ({"references": True}, "without references="),
    ):
        with pytest.raises(ConfigurationError, match=text):
            manager_of(tmp_path, Log(), **wrong)
    for tier in (
        {"keep": 0},
        {"keep": "3"},
        {"budget_bytes": 0},
        {"budget_bytes": "5GB"},
        {"drain_timeout_s": -1.0},
        {"drain_timeout_s": None},
        {"copies": 2},
        {"failure_domain": 7},
    ):
        with pytest.raises(ConfigurationError, match="LocalTier"):
            ckpt.LocalTier(tmp_path, **tier)


def test_a_folder_of_another_run(tmp_path: Path) -> None:
    RunFolder(tmp_path / "local", tmp_path / "durable")
    marker = local_of(tmp_path) / "ckpt-local.json"
    marker.write_text(
        json.dumps({"format": "ckpt-storage-local", "version": 1, "durable": "s3://else/where"})
    )
    with pytest.raises(ConfigurationError, match="another run, s3://else/where"):
        manager_of(tmp_path, Log())


def test_a_network_file_system_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, source = mount_of(str(tmp_path))
    assert kind
    assert source
    monkeypatch.setattr("ckpt.local_first.folder.mount_of", lambda path: ("nfs4", "server:/export"))
    with caplog.at_level(logging.WARNING):
        manager_of(tmp_path, Log()).close()
    assert "is on a network file system (nfs4, from server:/export)" in caplog.text


# -- room --------------------------------------------------------------------------------------------------


def test_what_is_durable_makes_room(tmp_path: Path) -> None:
    tier = ckpt.LocalTier(tmp_path / "local", keep=9, budget_bytes=2_600_000)  # two checkpoints
    log = Log()
    with manager_of(tmp_path, log, local=tier) as manager:
        for step in range(1, 6):
            manager.step(step, state_of(step))
            manager.wait_durable(PATIENCE_S)
    assert log.steps("local") == [1, 2, 3, 4, 5]
    assert len([*local_of(tmp_path).glob("step-*")]) == 2


def test_what_was_saved_again_makes_no_room(tmp_path: Path) -> None:
    """The process has said of a folder that it is durable; what was saved into it since is not."""
    tier = ckpt.LocalTier(
        tmp_path / "local", keep=9, budget_bytes=4_000_000, drain_timeout_s=0, answer_timeout_s=0.5
    )
    with dead_store() as (_, options, dead):
        log = Log()
        more: dict[str, Any] = {"storage_options": options, "preflight": False, "on_failure": "continue"}
        with ckpt.CheckpointManager(
            "s3://bucket/run", save=1, local=tier, events=[log.append], **more
        ) as manager:
            manager.step(1, state_of(1))
            manager.step(2, state_of(2))
            manager.wait_durable(PATIENCE_S)
            dead.set()
            assert manager.restore(state_of(0), step=1)
            for step in (2, 3, 4, 5):
                manager.step(step, state_of(step))
            log.wait_for("not_local", 5)
            assert log.steps("not_local") == [5]
            kept = {path.parent.name[-1] for path in local_of(tmp_path).glob("step-*/commit.json")}
            assert kept == {"2", "3", "4"}
            dead.clear()


def test_what_a_killed_save_has_left_is_removed(tmp_path: Path) -> None:
    train(tmp_path, range(1, 2))
    left = local_of(tmp_path) / "step-00000007"
    shutil.copytree(local_of(tmp_path) / "step-00000001", left)
    (left / "commit.json").unlink()
    (left / "notes.txt").write_text("not ours")
    train(tmp_path, range(2, 3))
    assert [path.name for path in left.rglob("*") if path.is_file()] == ["notes.txt"]


def test_no_room_is_no_reason_to_stop(tmp_path: Path) -> None:
    tier = ckpt.LocalTier(tmp_path / "local", budget_bytes=1_000_000)
    log = train(tmp_path, range(1, 4), local=tier)
    assert log.steps("local") == [1]  # its size was not known before
    assert log.steps("not_local") == [2, 3]
    assert {*log.steps("durable")} == {1, 2, 3}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for two and a half checkpoints."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", mount], check=False).returncode:
        pytest.skip("this process may not mount")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_a_disk_that_fills_up(tmp_path: Path, small_disk: Path) -> None:
    """The copy that was staged goes to the durable place, though the local write has failed in its middle."""
    filler = small_disk / "filler"
    log = Log()
    with manager_of(tmp_path, log, local=small_disk / "local") as manager:
        manager.step(1, state_of(1))
        manager.wait_durable(PATIENCE_S)
        filler.write_bytes(bytes(1 << 20))
        manager._saves._tier.has_room = lambda: True  # type: ignore[attr-defined]  # it looks right, until it is written
        manager.step(2, state_of(2))
        manager.wait_durable(PATIENCE_S)
    assert log.steps("not_local") == [2]
    assert log.steps("durable") == [1, 2]
    assert not any(
        path.name.startswith("step-00000002") for path in small_disk.glob("local/*/step-*/commit.json")
    )
    assert restored(tmp_path)[0] == 2


def test_a_disk_without_any_room_is_carried(tmp_path: Path, small_disk: Path) -> None:
    with dead_store() as (_, options, dead):
        log = Log()
        with ckpt.CheckpointManager(
            "s3://bucket/run",
            save=1,
            local=ckpt.LocalTier(small_disk / "local", keep=1, answer_timeout_s=0.5),
            storage_options=options,
            preflight=False,
            events=[log.append],
        ) as manager:
            dead.set()
            manager.step(1, state_of(1))
            manager.step(2, state_of(2))
            log.wait_for("local", 2)
            with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))
            dead.clear()
            assert manager.wait_durable(PATIENCE_S) == 2
    assert log.steps("durable") == [1, 2]


# -- the process -------------------------------------------------------------------------------------------


def _train_and_die(folder: Path) -> None:
    with manager_of(folder, Log()) as manager:
        for step in range(1, 4):
            manager.step(step, state_of(step))
            manager._saves.settle()
        os.kill(os.getpid(), signal.SIGKILL)


def _train_with_children(folder: Path) -> None:
    for step in (1, 2):
        with manager_of(folder, Log()) as manager:
            manager.step(step, state_of(step))
            manager.wait_durable(PATIENCE_S)
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[600], daemon=True)
            child.start()  # as a data loader's worker that stays


@pytest.mark.smoke
def test_a_child_of_a_fork_holds_up_nothing(tmp_path: Path) -> None:
    """The children have the trainer's open files, among them the pipe to the process, and the lock."""
    assert exit_code_of(_train_with_children, tmp_path, timeout_s=PATIENCE_S) == 0


@pytest.mark.smoke
def test_the_process_outlives_the_trainer(tmp_path: Path) -> None:
    assert exit_code_of(_train_and_die, tmp_path) == -signal.SIGKILL
    deadline_s = time.monotonic() + PATIENCE_S
    while not (tmp_path / "durable" / "step-00000003" / "commit.json").exists():
        assert time.monotonic() < deadline_s, (local_of(tmp_path) / "ckpt-drain.log").read_text()
        time.sleep(0.1)
    assert restored(tmp_path)[0] == 3


def test_a_process_that_dies_is_started_again(tmp_path: Path) -> None:
    log = Log()
    with manager_of(tmp_path, log) as manager:
        manager.step(1, state_of(1))
        log.wait_for("durable", 1)
        process = manager._saves._tier._process  # type: ignore[attr-defined]
        os.kill(process.pid, signal.SIGKILL)
        manager.step(2, state_of(2))
        assert manager.wait_durable(PATIENCE_S) == 2
    assert "ended with -9" in log.of("drain_failed").reason


def test_a_process_that_may_not_write_says_so(tmp_path: Path) -> None:
    with strict_s3() as server, fault_proxy(server) as proxy:
        log = Log()
        more: dict[str, Any] = {"storage_options": proxy.options, "preflight": False}
        local = ckpt.LocalTier(tmp_path / "local", drain_timeout_s=0)
        with ckpt.CheckpointManager(
            "s3://bucket/run", save=1, local=local, events=[log.append], **more
        ) as manager:
            proxy.rule = lambda call: 403
            manager.step(1, state_of(1))
            log.wait_for("drain_failed")
        process = manager._saves._tier._process  # type: ignore[attr-defined]
        os.kill(process.pid, signal.SIGKILL)  # the one begun since would wait an hour for the server
    assert "ended with 1" in log.of("drain_failed").reason
    text = (local_of(tmp_path) / "ckpt-drain.log").read_text()
    assert "the credentials have expired" in text
    assert "Fatal Python error" not in text


def test_a_root_that_refuses_is_not_waited_for(tmp_path: Path) -> None:
    with strict_s3() as server, fault_proxy(server) as proxy:
        proxy.rule = lambda call: 403
        local = ckpt.LocalTier(tmp_path / "local", drain_timeout_s=0)
        more: dict[str, Any] = {"storage_options": proxy.options, "preflight": False, "local": local}
        with ckpt.CheckpointManager("s3://bucket/run", save=1, **more) as manager:
            manager.step(1, state_of(1))
            with pytest.raises(SaveFailed, match=r"cannot become durable: step-00000001: .*credentials"):
                manager.wait_durable(5 * PATIENCE_S)
        end_carriers(tmp_path)


def test_a_process_that_dies_again_and_again_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_process, "command_of", lambda *_: ["/bin/false"])
    local = ckpt.LocalTier(tmp_path / "local", drain_timeout_s=0)
    with ckpt.CheckpointManager(tmp_path / "durable", save=1, preflight=False, local=local) as manager:
        manager.step(1, state_of(1))
        with pytest.raises(SaveFailed, match=r"ended with 1: see .*ckpt-drain\.log"):
            manager.wait_durable(5 * PATIENCE_S)


@pytest.mark.slow
def test_a_process_without_work_ends_and_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_process, "_IDLE_S", 0.5)
    log = Log()
    with manager_of(tmp_path, log) as manager:
        process = manager._saves._tier._process  # type: ignore[attr-defined]
        for step in (1, 2):
            manager.step(step, state_of(step))
            assert manager.wait_durable(PATIENCE_S) == step
            deadline_s = time.monotonic() + PATIENCE_S
            while not process.ended():
                assert time.monotonic() < deadline_s, "the process still runs"
                time.sleep(0.05)
    assert log.steps("durable") == [1, 2]
    assert log.steps("drain_failed") == []


def end_carriers(folder: Path) -> None:
    """Kill the processes that carry from a folder: those begun since would wait an hour for their server."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"ckpt.local_first.drain_process" in words and str(folder).encode() in words[-2]:
                os.kill(int(path.name), signal.SIGKILL)


@pytest.mark.long
def test_sigterm_ends_the_process_of_a_trainer_that_has_ended(tmp_path: Path) -> None:
    with dead_store() as (_, options, dead):
        dead.set()
        local = ckpt.LocalTier(tmp_path / "local", drain_timeout_s=0)
        more: dict[str, Any] = {"storage_options": options, "preflight": False, "local": local}
        with ckpt.CheckpointManager("s3://bucket/run", save=1, **more) as manager:
            manager.step(1, state_of(1))
            process = manager._saves._tier._process  # type: ignore[attr-defined]
        text = local_of(tmp_path) / "ckpt-drain.log"
        deadline_s = time.monotonic() + 5 * PATIENCE_S  # a store that is away is asked for a minute at a time
        while "trying again" not in text.read_text():
            assert time.monotonic() < deadline_s, text.read_text()
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        assert process._process.wait(5 * PATIENCE_S) is not None
        assert "step-00000001" in text.read_text().splitlines()[-1]


def test_what_cannot_become_durable_is_told(tmp_path: Path) -> None:
    with dead_store() as (_, options, dead):
        log = Log()
        local = ckpt.LocalTier(tmp_path / "local", drain_timeout_s=1.0, answer_timeout_s=0.5)
        more: dict[str, Any] = {"storage_options": options, "preflight": False, "local": local}
        with ckpt.CheckpointManager("s3://bucket/run", save=1, events=[log.append], **more) as manager:
            dead.set()
            manager.step(1, state_of(1))
            log.wait_for("local", 1)
            flip(data_file(local_of(tmp_path) / "step-00000001"), 600_000)
            dead.clear()
            with pytest.raises(SaveFailed, match=r"cannot become durable: step-00000001: .* checksum"):
                manager.wait_durable(PATIENCE_S)
    assert log.steps("not_durable") == [1]


def test_a_folder_that_disappears_stops_nothing(tmp_path: Path) -> None:
    log = Log()
    with manager_of(tmp_path, log) as manager:
        manager.step(1, state_of(1))
        manager.wait_durable(PATIENCE_S)
        shutil.rmtree(tmp_path / "local")
        (tmp_path / "local").write_text("not a folder")
        manager.step(2, state_of(2))
        manager.wait_durable(PATIENCE_S)
    assert log.steps("durable") == [1, 2]


def test_the_record_of_the_node_does_not_grow(tmp_path: Path) -> None:
    log = Log()
    with manager_of(tmp_path, log) as manager:
        for step in range(1, 8):
            manager.step(step, state_of(step))
            manager.wait_durable(PATIENCE_S)
    record = json.loads((local_of(tmp_path) / "ckpt-run.json").read_text().partition("\n")[0])
    assert len(record["checkpoints"]) < 7


def test_what_was_durable_and_removed_is_not_carried_again(tmp_path: Path) -> None:
    tier = ckpt.LocalTier(tmp_path / "local", keep=9)
    train(tmp_path, range(1, 4), keep=1, local=tier)
    train(tmp_path, range(4, 5), keep=1, local=tier)
    assert [path.name for path in (tmp_path / "durable").glob("step-*")] == ["step-00000004"]
    assert len([*local_of(tmp_path).glob("step-*")]) == 4


def test_a_status_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_status(str(tmp_path)) == {}
    (tmp_path / STATUS).write_text("{")
    assert read_status(str(tmp_path)) == {}


# -- a store that gives no answer --------------------------------------------------------------------------


@contextlib.contextmanager
def dead_store() -> Iterator[tuple[StrictS3, dict[str, Any], threading.Event]]:
    """A server behind a proxy that answers 503 while an event is set."""
    dead = threading.Event()
    with strict_s3() as server, fault_proxy(server) as proxy:

        def rule(call: Call) -> int | str:
            return 503 if dead.is_set() else "pass"

        proxy.rule = rule
        yield server, proxy.options, dead


@pytest.mark.slow
def test_no_step_waits_for_a_store_that_gives_no_answer(tmp_path: Path) -> None:
    with dead_store() as (server, options, dead):
        log = Log()
        more: dict[str, Any] = {"storage_options": options, "preflight": False, "local": tmp_path / "local"}
        with ckpt.CheckpointManager(
            "s3://bucket/run", save=1, keep=keeping.last(2), events=[log.append], **more
        ) as manager:
            manager.step(1, state_of(1))
            log.wait_for("durable", 1)
            dead.set()
            for step in range(2, 8):
                manager.step(step, state_of(step))
            log.wait_for("local", 7)
            assert log.steps("durable") == [1]
            dead.clear()
            assert manager.wait_durable(PATIENCE_S) == 7
        durable = log.steps("durable")
        assert durable == sorted(durable)  # type: ignore[type-var]
        assert {6, 7} <= {*durable}
        assert len([*local_of(tmp_path).glob("step-*")]) <= 4  # others were given up
        steps = {key.split("/")[1] for key in server.objects if key.endswith("commit.json")}
        assert steps == {"step-00000006", "step-00000007"}


@pytest.mark.long
def test_a_restart_while_the_store_gives_no_answer(tmp_path: Path) -> None:
    with dead_store() as (_, options, dead):
        more: dict[str, Any] = {
            "storage_options": options,
            "local": ckpt.LocalTier(tmp_path / "local", drain_timeout_s=1.0),
        }
        log = Log()
        with ckpt.CheckpointManager("s3://bucket/run", save=1, events=[log.append], **more) as manager:
            manager.step(1, state_of(1))
            log.wait_for("durable", 1)
            dead.set()
            manager.step(2, state_of(2))
        assert log.steps("not_durable") == [2]
        log, state = Log(), state_of(0)
        with ckpt.CheckpointManager("s3://bucket/run", save=1, events=[log.append], **more) as manager:
            found = manager.restore(state)
            assert found is not None
            assert found.step == int(state["step"]) == 2
            dead.clear()
            manager.step(3, state_of(3))
            assert manager.wait_durable(PATIENCE_S) == 3
        assert log.steps("durable")[-1] == 3


def test_a_restore_does_not_wait_for_a_store_that_gives_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not one that refuses: a request gets no answer at all, and the SDK would wait for it for minutes."""
    with strict_s3() as server, fault_proxy(server) as proxy:
        tier = ckpt.LocalTier(tmp_path / "local", drain_timeout_s=0.0, answer_timeout_s=0.5)
        more: dict[str, Any] = {"storage_options": proxy.options, "local": tier}
        with ckpt.CheckpointManager("s3://bucket/run", save=1, **more) as manager:
            manager.step(1, state_of(1))
            manager.wait_durable(PATIENCE_S)
        proxy.rule = lambda call: "stall"
        log, state = Log(), state_of(0)
        manager = ckpt.CheckpointManager("s3://bucket/run", save=1, events=[log.append], **more)
        found = manager.restore(state)
        assert found is not None
        assert found.step == int(state["step"]) == 1
        assert log.of("restored").values["durable_bytes"] == 0
        assert (
            "checkpoints stay local until the durable place answers: s3://bucket/run: no answer"
            in caplog.text
        )
        assert "what the nodes have is taken: s3://bucket/run: no answer within 0.5 s" in caplog.text
        manager._saves.hurries = True
        proxy.rule = lambda call: "pass"
        manager.close()


@pytest.mark.long
def test_without_a_whole_checkpoint_the_durable_place_is_waited_for(tmp_path: Path) -> None:
    with strict_s3() as server, fault_proxy(server) as proxy:
        tier = ckpt.LocalTier(tmp_path / "local", answer_timeout_s=0.0)
        more: dict[str, Any] = {"storage_options": proxy.options, "local": tier, "preflight": False}
        with ckpt.CheckpointManager("s3://bucket/run", save=1, **more) as manager:
            manager.step(1, state_of(1))
            manager.wait_durable(PATIENCE_S)
        shutil.rmtree(tmp_path / "local")
        proxy.rule = lambda call: "delay"
        state = state_of(0)
        with ckpt.CheckpointManager("s3://bucket/run", save=1, **more) as manager:
            found = manager.restore(state)
        assert found is not None
        assert found.step == int(state["step"]) == 1


# -- fallback ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fallback(tmp_path: Path) -> None:
    """What the durable place refuses is committed elsewhere, and moved when it answers again."""
    root, log = tmp_path / "durable", Log()
    more: dict[str, Any] = {"local": None, "fallback": tmp_path / "other"}
    with manager_of(tmp_path, log, **more) as manager:
        manager.step(1, state_of(1))
        manager.wait_durable(PATIENCE_S)
        root.rename(tmp_path / "away")
        root.write_text("not a folder")
        manager.step(2, state_of(2))
        log.wait_for("fallback", 2)
        assert [event.step for event in log if event.kind == "not_durable"][:1] == [2]
        root.unlink()
        (tmp_path / "away").rename(root)
        assert manager.wait_durable(PATIENCE_S) == 2
    assert log.steps("durable") == [1, 2]
    assert ckpt.verify(root / "step-00000002").ok
    assert restored(tmp_path, **more)[0] == 2


def test_restore_from_the_fallback(tmp_path: Path) -> None:
    root, log = tmp_path / "durable", Log()
    more: dict[str, Any] = {"local": None, "fallback": tmp_path / "other"}
    root.write_text("not a folder")
    manager = manager_of(tmp_path, log, **more)
    manager.step(1, state_of(1))
    log.wait_for("fallback", 1)
    manager._saves.hurries = True
    manager.close()
    root.unlink()
    assert restored(tmp_path, **more)[0] == 1
