"""Retention where checkpoints name bytes of each other."""

from __future__ import annotations

from pathlib import Path

from support import references

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
