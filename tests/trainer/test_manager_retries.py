"""`CheckpointManager` after something went wrong or back: what is tried again, looked for again,
saved again.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_manager import (
    MIB,
    damage,
    drive,
    failing,
    held_uploads,
    kinds,
    restored_step,
    run,
    state_of,
    steps_at,
)

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.errors import LoadFailed, NotFound, SaveFailed, StorageFull
from ckpt.trainer_integration import keeping, saving
from ckpt.trainer_integration.events import Event


def test_going_back_in_one_process_saves_the_same_steps_again(tmp_path: Path) -> None:
    """A loss spike: back to step 2, and on. What is saved then is the run, not what it gave up."""
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1), keep=keeping.last(9)) as manager:
        drive(manager, range(1, 6))
        assert manager.restore(state_of(-1), step=2) is not None
        assert manager.step(3, {"weight": torch.full((1000,), 33.0), "step": 3})
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager:
        restored = manager.restore(state := state_of(-1))
        assert restored is not None
        assert restored.step == 3, "4 and 5 were given up"
        assert state["weight"][0] == 33


def test_going_back_while_a_save_is_in_flight(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(
        tmp_path, save=saving.every_steps(1), max_bandwidth_bytes_per_s=8e6
    ) as manager:
        manager.step(1, state_of(1, MIB))
        manager.step(2, state_of(2, MIB))
        assert manager.restore(state_of(-1, MIB), step=1) is not None
        assert manager.step(5, state_of(5, MIB))
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager:
        assert [step for step, _ in manager._saves.history.candidates()] == [5, 1], "step 2 was given up"


def test_the_newest_is_that_in_flight(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(
        tmp_path, save=saving.every_steps(1), max_bandwidth_bytes_per_s=8e6
    ) as manager:
        manager.step(1, state_of(1, MIB))
        manager.step(2, state_of(2, MIB))
        restored = manager.restore(state_of(-1, MIB))
        assert restored is not None
        assert restored.step == 2


def test_a_step_whose_save_failed_can_be_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager:
        for attempt in (manager.wait_durable, functools.partial(manager.step, 2, state_of(2))):
            mend = failing(monkeypatch, StorageFull, "No space left on device")
            manager.step(1, state_of(1))
            with pytest.raises(SaveFailed, match="No space left"):
                attempt()
            mend()
        assert manager.save(1, state_of(1))
        assert manager.wait_durable() == 1
    assert restored_step(tmp_path) == 1


@pytest.mark.parametrize("rule", [saving.overhead_budget(1e-6), saving.young_daly(mtbf_s=1e9)])
def test_a_storage_that_fails_is_not_tried_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: saving.SaveRule
) -> None:
    failing(monkeypatch, StorageFull, "No space left on device")
    events: list[Event] = []
    with ckpt.CheckpointManager(
        tmp_path, save=rule, on_failure="continue", events=[events.append]
    ) as manager:
        for step in range(1, 10):
            manager.step(step, state_of(step))
            if step == 1:
                manager._saves._flight.booked.wait()  # type: ignore[union-attr]
    assert kinds(events, "due", "failed") == [("due", 1), ("failed", 1)]


def test_steps_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    events: list[Event] = []
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1), events=[events.append]) as manager:
        for step in np.arange(1, 3):
            manager.step(step, state_of(int(step)))  # type: ignore[arg-type]
        manager.wait_durable()
        manager.pin(np.int64(2))
    assert kinds(events, "durable") == [("durable", 1), ("durable", 2)]
    assert restored_step(tmp_path, np.int64(1)) == 1


def test_checkpoints_of_stock_pytorch_are_no_reason_to_begin_anew(tmp_path: Path) -> None:
    dcp.save(state_of(7), checkpoint_id=tmp_path / "step-00000007", no_dist=True)
    reason = "step-00000007: it was not written by this library"
    with pytest.raises(LoadFailed, match=rf"{reason}; restore\(initial='.*/step-00000007'\) begins from it$"):
        restored_step(tmp_path)
    with pytest.raises(LoadFailed, match=rf"{reason}$"):
        restored_step(tmp_path, 7)  # initial= goes with 'latest-valid' alone
    run(tmp_path, range(8, 9))
    assert restored_step(tmp_path) == 8
    damage(tmp_path, 8)
    with pytest.raises(LoadFailed, match=rf"{reason}$"):
        restored_step(tmp_path)  # initial= does not help: the run has a checkpoint of its own


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 100, b"not json at all"])
def test_a_damaged_commit_record_is_passed_over(tmp_path: Path, content: bytes) -> None:
    run(tmp_path, range(1, 3))
    (tmp_path / "step-00000002" / "commit.json").write_bytes(content)
    assert restored_step(tmp_path) == 1


def slow_removal(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let deletions of checkpoints wait for the second event, once the first says that one has
    begun.
    """
    begun, go_on = threading.Event(), threading.Event()
    delete = PosixStore.delete

    def slow(self: PosixStore, keys: Any) -> None:
        if "step-" in self.url:
            begun.set()
            assert go_on.wait(30)
        delete(self, keys)

    monkeypatch.setattr(PosixStore, "delete", slow)
    return begun, go_on


def test_durable_does_not_wait_for_the_removal_of_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, range(1, 2))
    begun, go_on = slow_removal(monkeypatch)
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1), keep=keeping.last(1)) as manager:
        manager.step(2, state_of(2))
        assert begun.wait(30)
        try:
            assert manager.wait_durable(0.1) == 2
        finally:
            go_on.set()
    assert steps_at(tmp_path) == [2]


def test_what_is_pinned_during_a_removal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, range(1, 3))
    begun, go_on = slow_removal(monkeypatch)
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1), keep=keeping.last(1)) as manager:
        manager.step(3, state_of(3))
        assert begun.wait(30)  # step 1 is being removed, step 2 is next
        with ThreadPoolExecutor(1) as other:
            pinned = other.submit(manager.pin, 2)
            time.sleep(0.5)
            go_on.set()
            error = pinned.exception()
    assert steps_at(tmp_path) == ([2, 3] if error is None else [3])
    assert error is None or isinstance(error, NotFound)


def test_the_grace_period_is_also_the_longest_wait_for_the_save_before(tmp_path: Path) -> None:
    rule = saving.every_steps(1) | saving.on_preemption(grace_s=0.05)
    with held_uploads() as go_on, ckpt.CheckpointManager(tmp_path, save=rule) as manager:
        manager.step(1, state_of(1))
        manager._decisions._signals.received = "SIGTERM"
        try:
            with pytest.raises(SaveFailed, match="step 1 is not durable after"):
                manager.step(2, state_of(2))
        finally:
            go_on.set()
    assert steps_at(tmp_path) == [1]


PROGRAM = """
import multiprocessing, sys, torch
import ckpt
from ckpt.trainer_integration import keeping, saving

manager = ckpt.CheckpointManager(
    sys.argv[1], save=saving.every_steps(1), keep=keeping.last(1), max_bandwidth_bytes_per_s=8e6
)
for step in (1, 2, 3):
    manager.step(step, {"weight": torch.full((1 << 20,), float(step))})
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join(30)
print(child.exitcode, manager.durable_step)
"""


@pytest.mark.long
def test_a_program_that_ends_without_closing_loses_nothing(tmp_path: Path) -> None:
    """What is in flight becomes durable, and the rules for keeping are followed; nor does a forked
    child wait for it.
    """
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    # Step 3 is in flight when the child ends, unless the machine is very slow.
    assert (ended.returncode, ended.stdout) in ((0, "0 2\n"), (0, "0 3\n")), ended.stderr
    assert "Traceback" not in ended.stderr
    assert steps_at(tmp_path) == [3]
