"""Run a short fault campaign (`make test-faults`: a long one); see it notice a broken library."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.servers import S3Server

import ckpt.writing.coordinator
import ckpt.writing.writer
from ckpt.consistency import environment
from faults.campaign import campaign, run, table
from faults.campaign_faults import FAULTS, UNSEEN, draw


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_round(s3: S3Server) -> None:
    """Each class of faults once; those that wait for a deadline overlap."""
    rows, wrong = campaign(range(len(FAULTS)), s3, at_once=4)
    assert not wrong, "\n".join(f"{outcome.trial}: {outcome.problems}" for outcome in wrong)
    *_, total = rows
    ran = total.saves + total.loads
    assert ran >= len(FAULTS) - 8, table(rows)  # without root, eight classes are skipped
    assert total.injected >= ran // 2, table(rows)


def seeds_of(fault: str, wanted: Callable[[Any], bool] = lambda trial: True) -> list[int]:
    first = FAULTS.index(fault)
    return [seed for seed in range(first, 100 * len(FAULTS), len(FAULTS)) if wanted(draw(seed))]


def writes_in_place() -> None:
    """Have saves use the same names, so that one that fails destroys the checkpoint before it."""
    environment.token = lambda: "0" * 16


def acknowledges_without_a_commit() -> None:
    vars(ckpt.writing.coordinator)["publish"] = lambda *args, **kwargs: True


def dies_before_it_begins() -> None:
    os._exit(1)


def test_a_rank_that_dies_by_itself_is_noticed(s3: S3Server) -> None:
    trial = replace(draw(FAULTS.index(UNSEEN)), ranks=1, first=True, in_background=False)
    assert run(trial, s3, dies_before_it_begins).problems == ["rank 0 died"]


@pytest.mark.parametrize("breakage", [writes_in_place, acknowledges_without_a_commit])
def test_a_broken_commit_is_noticed(s3: S3Server, breakage: Callable[[], None]) -> None:
    def late_and_over_an_old_one(trial: Any) -> bool:
        return trial.ranks == 1 and not trial.first and trial.position > 8 and not trial.in_background

    seeds = seeds_of("SIGKILL at a system call", late_and_over_an_old_one)[:3]
    assert any(run(draw(seed), s3, breakage).problems for seed in seeds)


def test_values_that_were_never_saved_are_noticed(s3: S3Server) -> None:
    """Only checksums tell of damage by the network that the server has not seen."""
    alone = replace(draw(FAULTS.index(UNSEEN)), ranks=1, first=True, in_background=False, lasts=False)
    in_a_part = replace(alone, position=4)  # after two looks, and the beginning of the upload
    outcome = run(in_a_part, s3)
    assert outcome.damage is not None
    assert not outcome.problems
    unchecked = run(in_a_part, s3, verify=False)
    assert any("never saved" in problem for problem in unchecked.problems)
