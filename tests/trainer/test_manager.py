"""`CheckpointManager` on one rank: what it saves, keeps, finds again and says, and what failures do
to it.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.proxy import fault_proxy
from support.servers import S3Server

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.errors import (
    AccessDenied,
    CheckpointError,
    ConfigurationError,
    IntegrityError,
    LoadFailed,
    NotFound,
    SaveFailed,
    StorageError,
    StorageFull,
)
from ckpt.format.run_record import RUN_KEY
from ckpt.trainer_integration import keeping, saving
from ckpt.trainer_integration.events import Event
from ckpt.trainer_integration.run.history import History

MIB = 1 << 20


def state_of(step: int, elements: int = 1000) -> dict[str, Any]:
    return {"weight": torch.full((elements,), float(step)), "step": step}


def run(
    root: Path | str,
    steps: range,
    *,
    save: saving.SaveRule | int | None = None,
    metrics: Mapping[int, float] | None = None,
    elements: int = 1000,
    **options: Any,
) -> list[Event]:
    """A run whose state is its step; returns its events."""
    events: list[Event] = []
    rule = save or saving.every_steps(1)
    with ckpt.CheckpointManager(root, save=rule, events=[events.append], **options) as manager:
        for step in steps:
            loss = {"loss": metrics[step]} if metrics and step in metrics else None
            manager.step(step, state_of(step, elements), metrics=loss)
    return events


def drive(manager: ckpt.CheckpointManager, steps: range, reached: list[int] | None = None) -> None:
    for step in steps:
        manager.step(step, state_of(step))
        if reached is not None:
            reached.append(step)


def kinds(events: list[Event], *wanted: str) -> list[tuple[str, int | None]]:
    return [(event.kind, event.step) for event in events if event.kind in wanted]


def steps_at(root: Path) -> list[int]:
    """Steps of the committed checkpoints there, seen without the manager's record."""
    return [
        checkpoint.step or 0 for checkpoint in ckpt.list_checkpoints(root) if checkpoint.state == "committed"
    ]


def restored_step(root: Path | str, step: Any = "latest-valid", **options: Any) -> int | None:
    with ckpt.CheckpointManager(root, save=saving.every_steps(1), preflight=False, **options) as manager:
        state = state_of(-1)
        restored = manager.restore(state, step=step)
        if restored is None:
            return None
        assert state["weight"].tolist() == [float(restored.step)] * 1000
        assert restored.state["step"] == restored.step
        return restored.step


def damage(root: Path, step: int, name: str = "*.distcp") -> None:
    """Flip a bit in the middle of the data of a checkpoint."""
    path = next((root / f"step-{step:08d}").rglob(name))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_run_saves_and_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert restored_step(root) is None
    events = run(root, range(1, 8), save=saving.every_steps(3) | saving.at_steps([1]))
    assert kinds(events, "due", "durable") == [
        (kind, step) for step in (1, 3, 6) for kind in ("due", "durable")
    ]
    due = [event for event in events if event.kind == "due"]
    assert [event.reason for event in due] == [
        "step 1 is listed in at_steps",
        "every 3 steps",
        "every 3 steps",
    ]
    durable = next(event for event in events if event.kind == "durable")
    assert durable.values["size_bytes"] > 4000
    phases = {"plan_s", "write_s", "commit_s"}  # of what follows the stall, and in parts runs beside it
    assert set(durable.values) == {"stall_s", "upload_s", "size_bytes", "durable_age_s", "retries", *phases}
    assert sum(durable.values[phase] for phase in phases) <= durable.values["upload_s"]
    assert steps_at(root) == [1, 3, 6]
    assert restored_step(root) == 6
    assert restored_step(root, 3) == 3
    with pytest.raises(NotFound, match="step 4"):
        restored_step(root, 4)
    with pytest.raises(ConfigurationError, match="newest"):
        restored_step(root, "newest")


@pytest.mark.parametrize("async_mode", ["thread", "off"])
def test_what_changes_after_the_step_does_not_reach_the_checkpoint(
    tmp_path: Path, async_mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, put = threading.Event(), PosixStore.put

    def put_later(self: PosixStore, key: str, *rest: Any, **more: Any) -> None:
        if async_mode == "thread" and key.endswith(".distcp"):
            assert changed.wait(60)
        put(self, key, *rest, **more)

    monkeypatch.setattr(PosixStore, "put", put_later)
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1), async_mode=async_mode) as manager:
        state = {"weight": torch.ones(MIB)}
        assert manager.step(1, state)
        state["weight"].zero_()
        changed.set()
    loaded = {"weight": torch.empty(MIB)}
    ckpt.load(loaded, tmp_path / "step-00000001")
    assert loaded["weight"].min() == 1


def test_first_and_last_step(tmp_path: Path) -> None:
    rule = saving.first_step() | saving.last_step()
    for _ in range(2):  # the second time it goes on, and is no first step any more
        with ckpt.CheckpointManager(tmp_path, save=rule) as manager:
            restored = manager.restore(state := state_of(-1))
            for step in range(restored.step + 1 if restored else 1, 5):
                state["weight"].fill_(step)
                manager.step(step, state, last=step == 4)
        assert steps_at(tmp_path) == [1, 4]


def test_keeping(tmp_path: Path) -> None:
    events = run(tmp_path, range(1, 8), keep=keeping.last(2) | keeping.every_steps(4))
    assert steps_at(tmp_path) == [4, 6, 7]
    assert kinds(events, "removed") == [("removed", step) for step in (1, 2, 3, 5)]
    kept = [(event.step, event.reason) for event in events if event.kind == "kept"]
    last = [(step, "of the last 2") for step in range(1, 8)]
    assert kept == [*last[:5], (4, "every 4 steps"), *last[5:]], "once, and again for another reason"
    assert run(tmp_path, range(8, 9), keep=keeping.last(1))
    assert steps_at(tmp_path) == [8], "what an earlier process of the run saved is known too"


def test_best_and_pinned(tmp_path: Path) -> None:
    keep = keeping.best(1, "loss") | keeping.last(1)
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0}
    run(tmp_path, range(1, 5), keep=keep, metrics=losses)
    assert steps_at(tmp_path) == [2, 4]
    assert restored_step(tmp_path, "best", keep=keep) == 2
    events: list[Event] = []
    with ckpt.CheckpointManager(
        tmp_path, save=saving.every_steps(1), keep=keep, events=[events.append]
    ) as manager:
        manager.pin(2)
        manager.annotate(4, {"loss": 0.5})  # an evaluation that came late
        with pytest.raises(NotFound, match="step 3"):
            manager.annotate(3, {"loss": 0.0})
        manager.restore(state_of(-1))
        manager.step(5, state_of(5), metrics={"loss": 9.0})
    kept = {event.step: event.reason for event in events if event.kind == "kept"}
    assert kept == {2: "pinned", 4: "of the best 1 by loss", 5: "of the last 1"}
    assert steps_at(tmp_path) == [2, 4, 5]
    assert restored_step(tmp_path, "best", keep=keep) == 4
    with pytest.raises(ConfigurationError, match=r"keeping\.best"):
        restored_step(tmp_path, "best")


def test_integers_are_short_for_rules(tmp_path: Path) -> None:
    run(tmp_path, range(1, 8), save=2, keep=2)
    assert steps_at(tmp_path) == [4, 6]


def test_a_metric_that_nobody_reports_costs_no_checkpoint(tmp_path: Path) -> None:
    losses = {step: 1.0 / step for step in range(1, 5)}
    events = run(tmp_path, range(1, 5), keep=keeping.best(1, "losss"), metrics=losses)
    assert steps_at(tmp_path) == [1, 2, 3, 4]
    (warning,) = [event for event in events if event.kind == "unmeasured"]
    assert "'losss'" in warning.reason
    assert "the metrics there: 'loss'" in warning.reason
    with ckpt.CheckpointManager(tmp_path, save=1, keep=keeping.last(1) | keeping.best(1, "late")) as manager:
        manager.annotate(2, {"late": 0.5})  # an evaluation that reports it at last
        manager.step(5, state_of(5))
    assert steps_at(tmp_path) == [2, 5]


def test_nothing_to_save_is_an_error(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(tmp_path, save=100) as manager:
        calls: list[Callable[[], object]] = [
            lambda: manager.step(1),  # at once, not when a save is due
            lambda: manager.save(1),
            lambda: manager.save(1, {}),
            lambda: manager.save(1, model=None),
        ]
        for call in calls:
            with pytest.raises(ConfigurationError, match="nothing to save"):
                call()
    assert not list(tmp_path.iterdir())


def test_what_no_rule_keeps_stays_while_it_is_the_newest(tmp_path: Path) -> None:
    events = run(tmp_path, range(1, 3), keep=keeping.every_steps(2))
    reported = [
        (event.kind, event.step, event.reason) for event in events if event.kind in ("kept", "removed")
    ]
    assert reported == [
        ("kept", 1, "the newest"),
        ("removed", 1, "no rule keeps it"),
        ("kept", 2, "every 2 steps"),
    ]


def test_what_the_run_does_not_know_is_never_removed(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3))
    ckpt.save(state_of(7), tmp_path / "mine")
    ckpt.save(state_of(1), tmp_path / "step-00000000")  # also under a name like the run's own
    (tmp_path / "notes.txt").write_text("keep me")
    run(tmp_path, range(3, 6), keep=keeping.last(1))
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000005", "mine", "step-00000000", "notes.txt", RUN_KEY,
    }  # fmt: skip


def test_damaged_checkpoints_are_passed_over_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, range(1, 6))
    damage(tmp_path, 5)  # seen when it is loaded
    next((tmp_path / "step-00000004").rglob("*.distcp")).unlink()  # seen by its records
    shutil.rmtree(tmp_path / "step-00000003")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1), keep=keeping.last(2)) as manager:
        restored = manager.restore(state := state_of(-1))
        assert restored is not None
        assert restored.step == 2
        assert state["weight"].tolist() == [2.0] * 1000
        assert [passed.step for passed in restored.passed_over] == [5, 4, 3]
        assert "checksum" in restored.passed_over[0].reason
        assert "not there" in restored.passed_over[1].reason
        assert "no checkpoint is there any more" in restored.passed_over[2].reason
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before
        assert "step 5 passed over" in caplog.text
        for step in range(3, 6):
            manager.step(step, state_of(step))
    # Saved beside the damaged ones, and those do not count as ones to keep.
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000004", "step-00000005", "step-00000004.again", "step-00000005.again", RUN_KEY,
    }  # fmt: skip
    assert restored_step(tmp_path) == 5


def test_if_none_can_be_loaded_that_is_an_error(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3))
    damage(tmp_path, 1)
    damage(tmp_path, 2, "*.index")
    with pytest.raises(LoadFailed, match="no checkpoint can be loaded") as caught:
        restored_step(tmp_path)
    assert "step-00000001" in str(caught.value)
    assert "step-00000002" in str(caught.value)


def test_unfinished_saves_are_passed_by(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3))
    (tmp_path / "step-00000002" / "commit.json").unlink()
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000009")
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager:
        restored = manager.restore(state_of(-1))
        assert restored is not None
        assert restored.step == 1
        for step in (2, 3):
            manager.step(step, state_of(step))
    assert steps_at(tmp_path) == [1, 2, 3]


def test_a_state_that_does_not_fit_is_an_error_and_no_reason_to_fall_back(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3))
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager:
        with pytest.raises(LoadFailed, match=r"lacks 1 key\(s\): bias; strict=False") as caught:
            manager.restore({**state_of(-1), "bias": torch.zeros(3)})
        assert "no checkpoint can be loaded" not in str(caught.value)
        with pytest.raises(CheckpointError, match=r"[Ss]ize"):
            manager.restore({"weight": torch.zeros(7)})


def test_discovery_needs_no_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, range(1, 4))

    def none_seen(self: PosixStore, prefix: str = "") -> Iterator[str]:
        return iter(())

    monkeypatch.setattr(PosixStore, "folders", none_seen)  # a listing that lags
    assert restored_step(tmp_path) == 3

    def refused(self: PosixStore, prefix: str = "") -> Iterator[str]:
        raise AccessDenied("not allowed to list")

    monkeypatch.setattr(PosixStore, "folders", refused)
    assert restored_step(tmp_path) == 3
    (tmp_path / RUN_KEY).unlink()
    with pytest.raises(AccessDenied):  # neither a record nor a listing: that nothing is there cannot be said
        restored_step(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 100])
def test_discovery_needs_no_record(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, range(1, 4))
    (tmp_path / RUN_KEY).write_bytes(content)
    assert restored_step(tmp_path) == 3
    assert "its checkpoints are listed" in caplog.text


def test_a_record_that_names_other_places_is_refused(tmp_path: Path) -> None:
    from ckpt.consistency.seal import seal_json, unseal_json
    from ckpt.errors import FormatError
    from ckpt.format.run_record import read_run

    run(tmp_path, range(1, 2))
    record = json.loads(unseal_json((tmp_path / RUN_KEY).read_bytes(), url="", key=""))
    record["checkpoints"][0]["path"] = "../elsewhere"
    (tmp_path / RUN_KEY).write_bytes(seal_json(json.dumps(record).encode()))
    with pytest.raises(FormatError, match="impossible"):
        read_run(PosixStore(str(tmp_path)))


def test_going_back_gives_up_what_came_after(tmp_path: Path) -> None:
    run(tmp_path, range(1, 5))
    events: list[Event] = []
    with ckpt.CheckpointManager(
        tmp_path, save=saving.every_steps(1), keep=keeping.last(2), events=[events.append]
    ) as manager:
        for _ in range(2):
            assert manager.restore(state_of(-1), step=2) is not None
            manager.step(3, state_of(3))
    assert kinds(events, "kept") == [("kept", 2), ("kept", 3), ("kept", 3)]
    # Step 4 belongs to the past that was given up: it is not the latest, nor is it removed.
    assert restored_step(tmp_path) == 3
    assert steps_at(tmp_path) == [2, 3, 4]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    events: list[Event] = []
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(2), events=[events.append]) as manager:
        assert manager.step(2, state_of(2))
        assert not manager.save(2, state_of(2))
        assert not manager.step(3, state_of(3))
        assert manager.save(3, state_of(3))
    assert kinds(events, "not_due", "durable") == [("not_due", 2), ("durable", 2), ("durable", 3)]


SLOW: dict[str, Any] = {"max_bandwidth_bytes_per_s": 8e6, "elements": MIB}  # half a second for a save


def test_busy_wait(tmp_path: Path) -> None:
    events = run(tmp_path, range(1, 4), **SLOW)
    assert kinds(events, "durable", "staged") == [
        (kind, step) for step in (1, 2, 3) for kind in ("staged", "durable")
    ]


def test_busy_skip(tmp_path: Path) -> None:
    events = run(tmp_path, range(1, 4), on_busy="skip", **SLOW)
    assert kinds(events, "durable", "not_due") == [("not_due", 2), ("not_due", 3), ("durable", 1)]
    assert steps_at(tmp_path) == [1]


def test_busy_fail(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match="still in flight"):
        run(tmp_path, range(1, 4), on_busy="fail", **SLOW)
    assert steps_at(tmp_path) == [1], "what was staged is not lost"


def test_removals_do_not_hold_up_who_waited_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_remove, remove = threading.Event(), History._remove

    def remove_later(self: History, *of_which: Any) -> None:
        if may_remove.wait(60):
            remove(self, *of_which)

    monkeypatch.setattr(History, "_remove", remove_later)
    options: dict[str, Any] = {"save": 1, "keep": 1, "async_mode": "off", "on_busy": "fail"}
    with ckpt.CheckpointManager(tmp_path, **options) as manager:
        drive(manager, range(1, 3))
        assert manager.durable_step == 2
        assert steps_at(tmp_path) == [1, 2]
        threading.Timer(0.1, may_remove.set).start()
        assert manager.step(3, state_of(3))  # after the removals: their folders might be saved into again
    assert steps_at(tmp_path) == [3]


def test_durable_and_staged_differ(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(
        tmp_path, save=saving.every_steps(1), max_bandwidth_bytes_per_s=8e6
    ) as manager:
        manager.step(1, state_of(1, MIB))
        assert manager.durable_step is None
        with pytest.raises(SaveFailed, match=r"step 1 is not durable after 0\.01 s"):
            manager.wait_durable(0.01)
        assert manager.wait_durable() == 1
        assert manager.wait_durable() == 1


def failing(monkeypatch: pytest.MonkeyPatch, error: type[StorageError], text: str) -> Callable[[], None]:
    """Let puts of data fail from now on; returns what ends that."""
    put = PosixStore.put

    def broken(self: PosixStore, key: str, body: Any, **options: Any) -> None:
        if key.endswith(".distcp"):
            raise error(text, url=self.url, key=key)
        put(self, key, body, **options)

    monkeypatch.setattr(PosixStore, "put", broken)
    return lambda: monkeypatch.setattr(PosixStore, "put", put)


def test_a_failed_save_is_raised_at_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, range(1, 2))
    failing(monkeypatch, StorageFull, "No space left on device")
    reached: list[int] = []
    with (
        pytest.raises(SaveFailed, match="No space left on device"),
        ckpt.CheckpointManager(tmp_path, save=saving.every_steps(3)) as manager,
    ):
        drive(manager, range(2, 20), reached)
    assert reached[-1] == 5, "saved after step 3, raised when step 6 was to be saved"
    assert restored_step(tmp_path) == 1


def test_with_rules_that_talk_it_is_raised_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, AccessDenied, "the token has expired")
    rule = saving.at_steps([1]) | saving.every_seconds(3600)
    with ckpt.CheckpointManager(tmp_path, save=rule) as manager:
        manager.step(1, state_of(1))
        manager._saves._flight.booked.wait()  # type: ignore[union-attr]
        with pytest.raises(SaveFailed, match="the token has expired"):
            manager.step(2, state_of(2))


def test_a_failed_save_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, StorageFull, "No space left on device")
    with pytest.raises(SaveFailed, match="No space left on device"):
        run(tmp_path, range(1, 2))
    with (
        pytest.raises(ZeroDivisionError),
        ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager,
    ):
        _ = 1 / (0 * manager.step(1, state_of(1)))  # what ended the block matters more


def test_training_can_go_on_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mend = failing(monkeypatch, StorageFull, "No space left on device")
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1), on_failure="continue") as manager:
        manager.step(1, state_of(1))
        manager.step(2, state_of(2))
        with pytest.raises(SaveFailed):  # who asks gets the error
            manager.wait_durable()
        mend()
        manager.step(3, state_of(3))
        assert manager.wait_durable() == 3
    assert "step 1 failed" in caplog.text
    assert "No space left on device" in caplog.text
    assert steps_at(tmp_path) == [3]


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return holds()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_is_no_failure_to_go_on_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: type[BaseException], times: int
) -> None:
    """It ends the program when the save is complete; the second one does so without a wait for the save."""
    come: list[int] = []

    def handler(number: int, frame: object) -> None:
        come.append(number)
        raise ending

    before = signal.signal(signal.SIGINT, handler)
    put = PosixStore.put

    def interrupted(self: PosixStore, key: str, body: Any, **options: Any) -> None:
        while key.endswith(".distcp") and len(come) < times:
            before = len(come)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert until(lambda: len(come) > before)  # noqa: B023 (it is called here)
        put(self, key, body, **options)

    try:
        monkeypatch.setattr(PosixStore, "put", interrupted)
        options: dict[str, Any] = {"save": 1, "async_mode": "off", "on_failure": "continue"}
        with ckpt.CheckpointManager(tmp_path, **options) as manager:
            with pytest.raises(ending):
                manager.step(1, state_of(1))
            monkeypatch.setattr(PosixStore, "put", put)
            is_interrupted = times == 2
            assert manager.step(1, state_of(1)) is is_interrupted, (
                "a save that was interrupted can be repeated"
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps_at(tmp_path) == [1]


def test_too_long_without_a_durable_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, StorageFull, "No space left on device")
    with (
        pytest.raises(SaveFailed, match="no checkpoint has become durable for 1e-06 s") as caught,
        ckpt.CheckpointManager(
            tmp_path, save=saving.every_steps(1), on_failure="continue", max_undurable_s=1e-6
        ) as manager,
    ):
        drive(manager, range(1, 100))
    assert "max_undurable_s" in str(caught.value)


def test_what_is_kept_survives_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, range(1, 3), keep=keeping.last(1))
    failing(monkeypatch, StorageFull, "No space left on device")
    run(tmp_path, range(3, 6), keep=keeping.last(1), on_failure="continue")
    assert restored_step(tmp_path) == 2


def test_a_checkpoint_that_cannot_be_removed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = PosixStore.delete

    def refused(self: PosixStore, keys: Any) -> None:
        if "step-" in self.url:
            raise AccessDenied("not allowed to delete", url=self.url)
        delete(self, keys)

    monkeypatch.setattr(PosixStore, "delete", refused)
    events = run(tmp_path, range(1, 3), keep=keeping.last(1))
    assert kinds(events, "not_removed") == [("not_removed", 1)]
    monkeypatch.setattr(PosixStore, "delete", delete)
    events = run(tmp_path, range(3, 4), keep=keeping.last(1))
    assert kinds(events, "removed") == [("removed", 1), ("removed", 2)]


def test_expired_credentials(s3: S3Server) -> None:
    """Named within one save interval; what is durable stays; the run goes on where it left off."""
    reached: list[int] = []
    with fault_proxy(s3) as proxy:
        root = f"s3://{s3.new_bucket()}/run"
        run(root, range(1, 3), storage_options=proxy.options)

        manager = ckpt.CheckpointManager(root, save=saving.every_steps(2), storage_options=proxy.options)
        manager.restore(state_of(-1))
        proxy.rule = lambda call: 403
        with pytest.raises(SaveFailed, match="the credentials have expired"), manager:
            drive(manager, range(3, 7), reached)
        assert reached == [3, 4, 5]
        proxy.rule = lambda call: "pass"
        assert restored_step(root, storage_options=proxy.options) == 2


def test_preflight_names_what_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1)) as manager:
        monkeypatch.setattr(PosixStore, "free_bytes", lambda self: 2999)
        with pytest.raises(StorageFull, match=r"only 2\.93 KiB are free, but the checkpoint takes 3\.91 KiB"):
            manager.restore(state_of(-1))
        monkeypatch.undo()

        def lossy(self: PosixStore, key: str, offset: int, buffers: Any) -> None:
            for buffer in buffers:
                buffer[:] = bytes(len(buffer))

        monkeypatch.setattr(PosixStore, "read_into", lossy)
        with pytest.raises(IntegrityError, match="the storage returned other bytes than had been written"):
            manager.step(1, state_of(1))
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == [], "what was tried is removed"
        monkeypatch.setattr(PosixStore, "delete", _refuse)
        with pytest.raises(AccessDenied, match=r"trying to delete: not allowed; .* pass preflight=False"):
            manager.step(1, state_of(1))
        monkeypatch.undo()
        assert manager.step(1, state_of(1))
    assert steps_at(tmp_path) == [1]


def _refuse(self: PosixStore, keys: Any) -> None:
    raise AccessDenied("not allowed", url=self.url)


def test_preflight_leaves_nothing_and_can_be_left_out(tmp_path: Path) -> None:
    events = run(tmp_path / "a", range(1, 2))
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"step-00000001", RUN_KEY}
    assert kinds(events, "preflight") == [("preflight", None)]
    assert not kinds(run(tmp_path / "b", range(1, 2), preflight=False), "preflight")


def test_preflight_of_a_place_without_access(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match=r"trying to (make a folder|write)"):
        run(tmp_path / "file" / "run", range(1, 2))


def test_preemption_saves_at_the_end_of_the_step_and_waits(tmp_path: Path) -> None:
    rule = saving.every_steps(100) | saving.on_preemption(grace_s=20)
    events: list[Event] = []
    with ckpt.CheckpointManager(tmp_path, save=rule, events=[events.append]) as manager:
        for step in range(1, 50):
            if step == 7:
                signal.raise_signal(signal.SIGTERM)
            manager.step(step, state_of(step))
            if manager.preempted:
                break
        assert (step, manager.durable_step) == (7, 7)
    assert "SIGTERM" in next(event.reason for event in events if event.kind == "due")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_preemption_during_an_upload_loses_neither(tmp_path: Path) -> None:
    rule = saving.every_steps(1) | saving.on_preemption(grace_s=20)
    with ckpt.CheckpointManager(
        tmp_path, save=rule, on_busy="skip", max_bandwidth_bytes_per_s=8e6
    ) as manager:
        manager.step(1, state_of(1, MIB))
        signal.raise_signal(signal.SIGUSR1)
        manager.step(2, state_of(2, MIB))
        assert manager.preempted
        assert manager.durable_step == 2
    assert steps_at(tmp_path) == [1, 2]


@contextmanager
def held_uploads() -> Iterator[threading.Event]:
    """No data are put before the event is set."""
    go_on, put = threading.Event(), PosixStore.put

    def put_later(self: PosixStore, key: str, *rest: Any, **more: Any) -> None:
        if key.endswith(".distcp"):
            assert go_on.wait(120)
        put(self, key, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixStore, "put", put_later)
        yield go_on


def test_the_grace_period_is_the_longest_wait(tmp_path: Path) -> None:
    rule = saving.on_preemption(grace_s=0.05)
    with held_uploads() as go_on, ckpt.CheckpointManager(tmp_path, save=rule) as manager:
        signal.raise_signal(signal.SIGTERM)
        try:
            with pytest.raises(SaveFailed, match="step 1 is not durable"):
                manager.step(1, state_of(1))
        finally:
            go_on.set()


def test_overhead_budget_and_young_daly_measure_first(tmp_path: Path) -> None:
    rule = saving.overhead_budget(0.0001) | saving.young_daly(mtbf_s=1e6)
    assert kinds(run(tmp_path, range(1, 20), save=rule), "due") == [("due", 1)]


def test_failures_observed_shorten_the_mean_time_between_them(tmp_path: Path) -> None:
    from ckpt.trainer_integration.run.history import History

    assert History(str(tmp_path), None).mtbf_s() == 86_400
    for start in range(3):
        run(tmp_path, range(start, start + 1), save=saving.at_steps(range(9)))
    assert 86_400 / 4 <= History(str(tmp_path), None).mtbf_s() < 86_400 / 4 + 60


def test_a_record_that_cannot_be_read_stops_no_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first rank reads it for a rule of clocks while the others wait for what it decides."""
    stat, asked = PosixStore.stat, []

    def refused(self: PosixStore, key: str) -> Any:
        if key == RUN_KEY:
            asked.append(key)
            raise AccessDenied("not allowed to read", url=self.url, key=key)
        return stat(self, key)

    monkeypatch.setattr(PosixStore, "stat", refused)
    rule = saving.at_steps([9]) | saving.young_daly()
    with ckpt.CheckpointManager(tmp_path, save=rule) as manager:
        manager._saves.stall_s = manager._saves.upload_s = 1.0
        drive(manager, range(1, 9))
        assert len(asked) == 2, "at the first step, and for the rule; not at every step"
        assert manager.step(9, state_of(9))
    assert "failures are not counted: " in caplog.text
    monkeypatch.undo()
    assert steps_at(tmp_path) == [9]


def test_wrong_arguments(tmp_path: Path) -> None:
    wrong_rules: list[dict[str, Any]] = [
        {"keep": "3"}, {"keep": True}, {"keep": 3.0}, {"keep": 0}, {"keep": saving.every_steps(3)},
        {"save": "500"}, {"save": False}, {"save": None}, {"save": -1}, {"save": keeping.last(3)},
    ]  # fmt: skip
    for rules in wrong_rules:
        with pytest.raises(ConfigurationError, match=r"keep|save|every_steps|last"):
            ckpt.CheckpointManager(tmp_path, **{"save": 1, **rules})
    for wrong in ({"on_busy": "queue"}, {"on_failure": "ignore"}, {"async_mode": "fork"}):
        with pytest.raises(ConfigurationError):
            ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="init_process_group"):
        ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1), async_mode="process")
    manager = ckpt.CheckpointManager(tmp_path, save=saving.every_steps(1))
    with pytest.raises(ConfigurationError, match="not both"):
        manager.step(1, state_of(1), other=state_of(1))
    manager.close()
    with pytest.raises(CheckpointError, match="closed"):
        manager.step(2, state_of(2))


def test_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ckpt.manager"):
        run(tmp_path, range(1, 4), save=saving.every_steps(2), keep=keeping.last(1))
    assert "step 2 due: every 2 steps" in caplog.text
    assert re.search(r"step 2 saved: .* kB in \d\.\d\d s, training waited \d\.\d\d s\n", caplog.text)
    per_save = [record for record in caplog.records if record.getMessage().startswith("step 2")]
    assert len(per_save) == 2, "figures and what goes without saying are for listeners"
