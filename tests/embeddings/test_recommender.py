"""The example's recommender loses no update when it is killed, and its ledger would notice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rooms import ROOT

from examples.recommender import __main__ as command
from examples.recommender import campaign
from examples.recommender.click_log import SAMPLES, SLICES, TABLES, ClickLog
from examples.recommender.hash_rows import HashRows
from examples.recommender.kills import ALL, LAUNCHER, drawn_kill
from examples.recommender.launch import WRONG
from examples.recommender.ledger import Ledger, LedgerWrong
from examples.recommender.model import exact
from examples.recommender.options import Options
from examples.recommender.server import Server, sums

OPTIONS = Options(root="unused", save_every=5, evict_after=8, width=4)


def trained(step: int, *, skip: int = 0, twice: int = 0) -> dict[str, HashRows]:
    """Rows as one process would have them after a step, with mistakes in some batches."""
    tables = {table: HashRows(OPTIONS.width) for table in TABLES}
    log = ClickLog(OPTIONS.seed)
    for batch in range(1, step + 1):
        for table, ids in log.batch(batch).ids.items():
            once, counts = np.unique(ids, return_counts=True)
            for _ in range(0 if batch == skip else 2 if batch == twice else 1):
                tables[table].update(once, counts, np.ones((len(once), OPTIONS.width), np.float32), batch)
        if OPTIONS.is_eviction(batch):
            for rows in tables.values():
                rows.remove(rows.unused_since(batch - OPTIONS.evict_after))
    return tables


def test_the_ledger_agrees_with_rows_that_have_each_update_once() -> None:
    tables = trained(20)
    Ledger(OPTIONS).check_rows(20, tables, "here")
    ever = np.unique(
        np.concatenate([ClickLog(OPTIONS.seed).batch(step).ids["users"] for step in range(1, 21)])
    )
    assert 100 < len(tables["users"]) < len(ever)  # some are evicted


@pytest.mark.parametrize(
    ("step", "mistake", "text"),
    [
        (8, {"skip": 7}, "has lost an update|is missing"),
        (8, {"twice": 7}, "has an update twice"),
        (9, {}, "has an update from after the cut|should not be there"),
        (7, {}, "has lost an update|is missing"),
    ],
)
def test_the_ledger_notices_updates_that_are_lost_twice_or_late(
    step: int, mistake: dict[str, int], text: str
) -> None:
    with pytest.raises(LedgerWrong, match=text):
        Ledger(OPTIONS).check_rows(8, trained(step, **mistake), "here")


def test_trainers_share_a_batch() -> None:
    log = ClickLog(3)
    whole = log.batch(7)
    assert len(whole.labels) == SLICES * SAMPLES
    for trainers in (1, 2, 4, SLICES):
        parts = [log.slices(7, trainer, trainers) for trainer in range(trainers)]
        ids = np.concatenate([each.ids["users"] for part in parts for each in part])
        assert np.array_equal(np.sort(ids), np.sort(whole.ids["users"]))


def test_rows_begin_with_their_first_update_and_are_zero_again_after_eviction() -> None:
    rows = HashRows(2)
    ids = np.array([5, 9])
    assert not rows.lookup(ids).any()
    assert len(rows) == 0
    rows.update(ids, np.array([1, 3]), np.array([[0.5, -0.5], [0.25, 0]], np.float32), batch=4)
    assert rows.read(np.array([9]), ["ledger"])["ledger"].tolist() == [[3, 12, 48, 4]]
    assert (np.sign(rows.lookup(ids)) == [[-1, 1], [-1, 0]]).all()
    rows.remove(np.array([9, 77]))
    assert rows.holds(np.array([5, 9])).tolist() == [True, False]
    rows.update(np.array([8]), np.array([1]), np.zeros((1, 2), np.float32), batch=6)
    assert rows.read(np.array([8]), ["adagrad", "ledger"])["ledger"].tolist() == [[1, 6, 36, 6]]


def test_sums_of_gradients_do_not_depend_on_who_adds_them_up() -> None:
    torch.manual_seed(0)
    ids, gradients = torch.randint(0, 20, (512,)), exact(torch.randn(512, 4))
    ones = torch.ones(512, dtype=torch.int64)
    expected: Any = None
    for parts in (1, 2, 5):
        order = torch.randperm(512)
        cut = [(ids[part], ones[part], gradients[part]) for part in order.chunk(parts)]
        once = [tuple(map(torch.from_numpy, sums([each]))) for each in cut]
        result = sums(once)  # type: ignore[arg-type]
        expected = expected or result
        assert all(np.array_equal(a, b) for a, b in zip(result, expected, strict=True))
    assert not torch.equal(gradients, torch.zeros_like(gradients))


def test_a_lookup_after_a_cut_sees_what_was_evicted(tmp_path: Path) -> None:
    options = replace(OPTIONS, root=str(tmp_path), trainers=1, servers=1, staleness=0, evict_after=3)
    server, (seldom, often) = Server(options, 0, 0), torch.tensor([7, 8])
    for batch in range(1, 6):
        ids = (seldom if batch == 1 else often).reshape(1)
        rows = ids, torch.ones(1, dtype=torch.int64), torch.ones(1, options.width)
        server.update(0, 0, batch, dict.fromkeys(TABLES, rows)).wait()
    wanted = {table: torch.tensor([7, 8]) for table in TABLES}
    before, after = server.lookup(5, wanted).wait(), server.lookup(6, wanted)
    assert not after.done()  # all updates are applied, but the cut is still to come
    server.mark(0, 0, 5)
    server.save(5).result()
    for table in TABLES:
        assert before[table].count_nonzero(dim=1).tolist() == [options.width] * 2
        assert after.wait()[table].count_nonzero(dim=1).tolist() == [0, options.width]


def test_kills_are_drawn_by_the_seed_and_most_meet_a_save() -> None:
    kills = [drawn_kill(random.Random(seed), 5) for seed in range(300)]
    assert kills == [drawn_kill(random.Random(seed), 5) for seed in range(300)]
    assert {kill.victim for kill in kills} == {LAUNCHER, ALL, *range(5)}
    assert sum(kill.save > 0 for kill in kills) > 200
    assert any(kill.at_commit for kill in kills)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the root of the repository."""
    arguments = [sys.executable, *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", [["--kills", "6"], ["--kills", "3", "--deterministic"]])
def test_no_kill_loses_an_update(mode: list[str]) -> None:
    done = run("-m", campaign.__name__, "--seed", "7", *mode)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every resume was right" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_ledger_notices_a_wrong_cut(tmp_path: Path) -> None:
    script = str(ROOT / "tests/embeddings/recommender_mutants.py")
    right = run(script, "none", str(tmp_path / "none"))
    assert right.returncode == 0, right.stdout + right.stderr
    for mutant in ("no-wait", "no-queue", "forgetful"):
        wrong = run(script, mutant, str(tmp_path / mutant))
        assert wrong.returncode == WRONG, wrong.stdout + wrong.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_command_goes_on_with_other_numbers_of_processes(tmp_path: Path) -> None:
    for trainers, servers, steps in ((2, 2, 10), (1, 3, 20)):
        numbers = ["--trainers", str(trainers), "--servers", str(servers), "--steps", str(steps)]
        done = run(
            "-m",
            command.__package__,
            "--root",
            str(tmp_path),
            *numbers,
            "--save-every",
            "5",
            "--print-every",
            "5",
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"restored from {tmp_path}/step-000010" in done.stdout
    assert "no update is lost, none is there twice" in done.stdout
    assert (tmp_path / "step-000020" / "commit.json").exists()
    assert not (tmp_path / "step-000005").exists()
