"""What the tools say of how far they are: `progress=`, which counts what each has to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.commands import judge_age_by_mtime, with_files

import ckpt
from ckpt.report.report import make_report
from ckpt.transfer.reports import Amount, Tally


class Reports:
    """All that was reported."""

    def __init__(self) -> None:
        self.all: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        assert 0 <= done <= total
        if self.all and noun_of(self.all[-1][1]) == noun_of(total):
            assert done >= self.all[-1][0]
            assert size_of(done) >= size_of(self.all[-1][0])
        self.all.append((done, total))

    @property
    def last(self) -> dict[str, tuple[int, int]]:
        """The last of each kind."""
        return {noun_of(total): (done, total) for done, total in self.all}


def noun_of(amount: int) -> str:
    return amount.noun if isinstance(amount, Amount) else "byte"


def size_of(amount: int) -> int:
    return (amount.size_bytes or 0) if isinstance(amount, Amount) else amount


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        ckpt.save({"w": torch.ones(1000)}, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def test_a_removal_counts_objects_and_their_bytes(run: Path) -> None:
    with_files(run / "step-3", 600, 10)
    reports = Reports()
    ckpt.remove(run / "step-3", progress=reports)
    done, total = reports.last["object"]
    assert done == total == 602  # the files, the manifest and the index
    assert len({int(done) for done, _ in reports.all}) == 4
    assert size_of(done) == size_of(total)
    assert 6000 < size_of(total) < 20_000
    assert not (run / "step-3").exists()
    reports = Reports()
    ckpt.remove(run / "step-2", dry_run=True, progress=reports)
    assert not reports.all


def test_looks_count_folders_runs_and_checkpoints(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_age_by_mtime(monkeypatch)
    ckpt.list_checkpoints(run, progress=(listed := Reports()))
    assert listed.last == {"folder": (4, 4), "run": (1, 1)}
    assert {int(total) for _, total in listed.all} == {1, 4}  # as they are found
    for step in (2, 3):
        (run / f"step-{step}" / "commit.json").unlink()
    for is_dry in (True, False):
        found = ckpt.collect_garbage(run, grace_s=-5, dry_run=is_dry, progress=(reports := Reports()))
        objects = len(found.items)
        assert objects >= 6
        assert reports.last == {"folder": (4, 4), "checkpoint": (3, 3), "object": (objects, objects)}
        assert size_of(reports.all[-1][0]) == found.freed_bytes


@pytest.mark.parametrize("make", [ckpt.inspect, make_report])
def test_a_look_at_one_counts_bytes_of_its_index(run: Path, make: Callable[..., object]) -> None:
    index = next((run / "step-1").glob("rank-*/*index*")).stat().st_size
    make(run / "step-1", progress=(reports := Reports()))
    assert reports.all == [(0, index), (index, index)]
    make(str(run / "step-1"))


def test_a_report_of_a_run_counts_both(run: Path) -> None:
    make_report(run, progress=(reports := Reports()))
    assert reports.last.keys() == {"folder", "run", "byte"}
    assert reports.all[-1][0] == reports.all[-1][1] > 100


def test_amounts_go_to_other_processes() -> None:
    copied = pickle.loads(pickle.dumps(Amount(3, "object", 70)))
    assert (copied, copied.noun, copied.size_bytes) == (3, "object", 70)


def test_a_read_that_is_tried_again_counts_once() -> None:
    tally = Tally(reports := Reports())
    tally.expect(10)
    tally.add(7)
    tally.add(10)
    tally.expect(5)
    assert reports.all == [(0, 10), (7, 10), (10, 10), (10, 15)]
