"""Retention where checkpoints name bytes of each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import references

from ckpt.backends.base import Store
from ckpt.errors import NotFound
from ckpt.format.run_record import RunCheckpoint
from ckpt.trainer_integration import keeping
from ckpt.trainer_integration.run.history import History


def test_a_base_goes_in_the_pass_in_which_its_last_referrer_goes(tmp_path: Path) -> None:
    history = History(str(tmp_path), None)
    removed: list[list[int]] = []
    bases = {1: [], 2: [1], 3: [2], 4: [], 5: [], 6: []}  # by step
    for step, others in bases.items():
        path = history.path(step)
        references.save(history.url(path), [history.path(other) for other in others])
        history.add(RunCheckpoint(step=step, path=path, saved_at_s=float(step)))
        retired = list(history.retire(keeping.last(2), path))
        assert [failure for _, failure in retired] == [None] * len(retired)
        removed.append([checkpoint.step for checkpoint, _ in retired])
        assert history.referred == ({1} if step == 3 else {1, 2} if step == 4 else set())
    assert removed == [[], [], [], [], [3, 2, 1], [4]]
    assert [old.step for old in history.durable()] == [5, 6]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "step-00000005",
        "step-00000006",
    ]
    history.close()


def test_a_removal_that_waits_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where storage lags, two minutes pass between the commit record and the rest."""
    history = History(str(tmp_path), None)
    for step in (1, 2, 3):
        references.save(history.url(history.path(step)))
        history.add(RunCheckpoint(step=step, path=history.path(step), saved_at_s=float(step)))
    waits: list[list[int]] = []

    def wait(store: Store) -> None:
        with ThreadPoolExecutor() as threads:  # others have locks of their own
            threads.submit(history.annotate, 3, {"loss": 1.0}).result(60)
            with pytest.raises(NotFound):
                threads.submit(history.annotate, len(waits) + 1, pinned=True).result(60)
        waits.append([old.step for old in history.durable()])

    monkeypatch.setattr("ckpt.tools.remove.wait_for_pins", wait)
    retired = list(history.retire(keeping.last(1), history.path(3)))
    assert [(checkpoint.step, failure) for checkpoint, failure in retired] == [(1, None), (2, None)]
    assert waits == [[2, 3], [3]]
    assert history.durable()[0].metrics == {"loss": 1.0}
    history.close()
