"""The run's record, which the manager that trains and those of other processes write."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.commands import run_json
from test_manager import run, state_of, steps_at

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.errors import FormatError, NotFound, StorageUnavailable
from ckpt.format.run_record import RUN_KEY, RunCheckpoint, read_run, write_run
from ckpt.trainer_integration import keeping


def recorded(root: Path) -> dict[int, RunCheckpoint]:
    record = read_run(PosixStore(str(root)))
    return {} if record is None else {checkpoint.step: checkpoint for checkpoint in record.checkpoints}


def save(manager: ckpt.CheckpointManager, step: int) -> None:
    manager.save(step, state_of(step))
    manager.wait_durable()
    manager._saves.wait_booked()


def test_managers_of_two_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    trainer = ckpt.CheckpointManager(tmp_path, save=1)
    evaluator = ckpt.CheckpointManager(tmp_path, save=1)
    save(trainer, 1)
    evaluator.annotate(1, {"loss": 0.5})
    save(trainer, 2)
    evaluator.pin(1)
    evaluator.annotate(2, {"loss": 0.4})
    trainer.annotate(1, {"accuracy": 0.9})
    assert recorded(tmp_path).keys() == {1, 2}
    assert recorded(tmp_path)[1].pinned
    assert recorded(tmp_path)[1].metrics == {"loss": 0.5, "accuracy": 0.9}
    assert recorded(tmp_path)[2].metrics == {"loss": 0.4}


def test_two_processes_that_give_up_each_other_leave_a_checkpoint(tmp_path: Path) -> None:
    """A job goes on elsewhere, though the process that it replaces still runs."""
    save(ckpt.CheckpointManager(tmp_path, save=1), 2)
    job, zombie = (ckpt.CheckpointManager(tmp_path, save=1, keep=1) for _ in range(2))
    for manager in (job, zombie):
        assert manager.restore(state_of(-1)) is not None
    save(zombie, 4)
    save(job, 3)
    zombie.annotate(4, {"loss": 0.5})
    assert all(checkpoint.superseded for checkpoint in recorded(tmp_path).values())
    (tmp_path / "step-00000005" / "rank-00000").mkdir(parents=True)  # a save that was killed
    (tmp_path / "step-00000005" / "rank-00000" / "0-0.distcp").write_bytes(b"data")
    listed = run_json("ls", tmp_path)["checkpoints"]
    assert [each["path"] for each in listed if each["latest"]] == ["step-00000004"]
    restored = ckpt.CheckpointManager(tmp_path, save=1).restore(state_of(-1))
    assert restored is not None
    assert restored.step == 4


def test_what_another_process_pins_stays(tmp_path: Path) -> None:
    keep = keeping.last(1) | keeping.best(1, "loss")
    trainer = ckpt.CheckpointManager(tmp_path, save=1, keep=keep)
    evaluator = ckpt.CheckpointManager(tmp_path, save=1)
    for step in range(1, 5):
        save(trainer, step)
        if step == 1:
            evaluator.pin(1)
        if step == 2:
            evaluator.annotate(2, {"loss": 0.5})
    assert steps_at(tmp_path) == [1, 2, 4]
    with pytest.raises(NotFound, match="step 3"):
        evaluator.pin(3)
    state = state_of(-1)
    restored = ckpt.CheckpointManager(tmp_path, save=1, keep=keep).restore(state, step="best")
    assert restored is not None
    assert restored.step == 2


@pytest.mark.parametrize("moment", ["before it writes", "after it has written"])
def test_another_process_that_writes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    trainer = ckpt.CheckpointManager(tmp_path, save=1)
    evaluator = ckpt.CheckpointManager(tmp_path, save=1)
    save(trainer, 1)
    put = PosixStore.put

    def meets_another(self: PosixStore, key: str, body: Any, **options: Any) -> None:
        if key != RUN_KEY:
            put(self, key, body, **options)
            return
        monkeypatch.setattr(PosixStore, "put", put)
        if moment == "before it writes":
            save(trainer, 2)
            put(self, key, body, **options)
        else:
            before = (tmp_path / RUN_KEY).read_bytes()
            put(self, key, body, **options)
            (tmp_path / RUN_KEY).write_bytes(before)  # by one that had read before, and wrote after

    monkeypatch.setattr(PosixStore, "put", meets_another)
    evaluator.pin(1)
    assert recorded(tmp_path)[1].pinned
    save(trainer, 3)
    assert recorded(tmp_path).keys() == {1, 3} | ({2} if moment == "before it writes" else set())
    assert recorded(tmp_path)[1].pinned


def test_a_pin_that_comes_between_the_size_and_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is longer then, and what is read of it is only a part."""
    trainer = ckpt.CheckpointManager(tmp_path, save=1, keep=1)
    evaluator = ckpt.CheckpointManager(tmp_path, save=1)
    save(trainer, 1)
    stat = PosixStore.stat

    def pinned_meanwhile(self: PosixStore, key: str) -> Any:
        size = stat(self, key)
        if key == RUN_KEY:
            monkeypatch.setattr(PosixStore, "stat", stat)
            evaluator.annotate(1, {"loss": 0.5})
            evaluator.pin(1)
        return size

    monkeypatch.setattr(PosixStore, "stat", pinned_meanwhile)
    save(trainer, 2)
    assert steps_at(tmp_path) == [1, 2]
    assert recorded(tmp_path)[1].pinned
    assert recorded(tmp_path)[1].metrics == {"loss": 0.5}


def test_a_step_that_two_processes_save(tmp_path: Path) -> None:
    """The later save is the checkpoint; the earlier one's process does not put its own entry over it."""
    earlier = ckpt.CheckpointManager(tmp_path, save=1, keep=1)
    later = ckpt.CheckpointManager(tmp_path, save=1)
    assert later.restore(state_of(-1)) is None
    save(earlier, 1)
    save(later, 1)
    later.annotate(1, {"loss": 0.5})
    later.pin(1)
    checkpoint = recorded(tmp_path)[1]
    save(earlier, 2)
    assert recorded(tmp_path)[1] == checkpoint
    assert steps_at(tmp_path) == [1, 2]


def test_what_could_not_be_recorded_is_recorded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = ckpt.CheckpointManager(tmp_path, save=1, keep=keeping.last(1))
    save(trainer, 1)
    put = PosixStore.put

    def refused(self: PosixStore, key: str, body: Any, **options: Any) -> None:
        if key == RUN_KEY:
            raise StorageUnavailable("not now", url=self.url, key=key)
        put(self, key, body, **options)

    monkeypatch.setattr(PosixStore, "put", refused)
    save(trainer, 2)
    assert "step 2 is durable, but could not be noted" in caplog.text
    assert steps_at(tmp_path) == [1, 2], "nobody knows what others have pinned"
    monkeypatch.setattr(PosixStore, "put", put)
    save(trainer, 3)
    assert recorded(tmp_path).keys() == {3}
    assert steps_at(tmp_path) == [3]


def test_a_record_that_is_lost_or_damaged_is_written_anew(tmp_path: Path) -> None:
    trainer = ckpt.CheckpointManager(tmp_path, save=1)
    save(trainer, 1)
    (tmp_path / RUN_KEY).unlink()
    save(trainer, 2)
    (tmp_path / RUN_KEY).write_bytes(b"{}")
    save(trainer, 3)
    assert recorded(tmp_path).keys() == {1, 2, 3}


def test_a_record_of_a_newer_version_is_not_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        for step in (1, 2):
            save(manager, step)
    store = PosixStore(str(tmp_path))
    record = read_run(store)
    assert record is not None
    write_run(store, msgspec.structs.replace(record, version=2))
    before = (tmp_path / RUN_KEY).read_bytes()
    with ckpt.CheckpointManager(tmp_path, save=1, keep=1) as manager:
        assert manager.restore(state_of(-1)) is not None
        save(manager, 3)
        with pytest.raises(FormatError, match="upgrade this one"):
            manager.pin(1)
    assert (tmp_path / RUN_KEY).read_bytes() == before
    assert steps_at(tmp_path) == [1, 2, 3]
    assert "step 3 is durable, but could not be noted in the run's record: " in caplog.text


def test_a_save_that_is_being_recorded_holds_up_no_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ckpt.CheckpointManager(tmp_path, save=1)
    save(trainer, 1)
    put, answered = PosixStore.put, []

    def asked_meanwhile(self: PosixStore, key: str, body: Any, **options: Any) -> None:
        if key == RUN_KEY:
            rule = threading.Thread(target=trainer._saves.history.mtbf_s, daemon=True)
            rule.start()
            rule.join(timeout=60)
            answered.append(not rule.is_alive())
        put(self, key, body, **options)

    monkeypatch.setattr(PosixStore, "put", asked_meanwhile)
    save(trainer, 2)
    assert answered == [True]


PROGRAM = """
import sys, ckpt
evaluator = ckpt.CheckpointManager(sys.argv[1], save=1)
for line in sys.stdin:
    step = int(line)
    evaluator.annotate(step, {"loss": 1.0 / step})
    evaluator.pin(step)
    print("done", flush=True)
"""


@pytest.mark.long
def test_a_process_that_evaluates(tmp_path: Path) -> None:
    run(tmp_path, range(1, 2))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        trainer = ckpt.CheckpointManager(tmp_path, save=1, keep=keeping.last(1))
        for step in range(2, 6):
            save(trainer, step)
            if step % 2 == 0:
                process.stdin.write(f"{step}\n")
                process.stdin.flush()
                assert process.stdout.readline() == "done\n"
        process.stdin.close()
        assert process.wait() == 0
    assert steps_at(tmp_path) == [2, 4, 5]
    assert {step: checkpoint.metrics for step, checkpoint in recorded(tmp_path).items()} == {
        2: {"loss": 0.5}, 4: {"loss": 0.25}, 5: {},
    }  # fmt: skip
