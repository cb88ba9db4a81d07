"""The run's record, where clocks go back between two jobs."""

from __future__ import annotations

from pathlib import Path

from ckpt.format.run_record import RunCheckpoint
from ckpt.trainer_integration.run.history import History


def saved(step: int, at_s: float) -> RunCheckpoint:
    return RunCheckpoint(step=step, path=f"step-{step:08}", saved_at_s=at_s)


def test_a_step_that_is_saved_again_by_an_earlier_clock(tmp_path: Path) -> None:
    """It was given up by this very job, and is there anew."""
    before = History(str(tmp_path), None)
    for step in range(1, 5):
        before.add(saved(step, 10_000.0 + step))
    again = History(str(tmp_path), None)
    again.go_on_from(2)
    again.add(saved(3, 5.0))
    assert [old.step for old in History(str(tmp_path), None).durable()] == [1, 2, 3]
    again.add(saved(4, 6.0))
    found = History(str(tmp_path), None).durable()
    assert [(old.step, old.saved_at_s) for old in found if old.step != 3] == [
        (1, 10_001.0),
        (2, 10_002.0),
        (4, 6.0),
    ]


def test_what_another_process_has_given_up_stays_so(tmp_path: Path) -> None:
    first = History(str(tmp_path), None)
    first.add(saved(1, 1.0))
    first.add(saved(2, 2.0))
    second = History(str(tmp_path), None)
    second.go_on_from(1)
    second.add(saved(3, 3.0))
    first.add(saved(4, 4.0))
    assert [old.step for old in History(str(tmp_path), None).durable()] == [1, 3, 4]
