"""`CheckpointManager` with tables: one save of state and tables, one restore, one rule for what stays."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from support.row_stores import DictRows

import ckpt
from ckpt.embeddings import Column, DenseRows, Tables, TableShard
from ckpt.embeddings.rows import Ids
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.trainer_integration import saving
from ckpt.trainer_integration.events import Event

ROWS = 200
COLUMNS = {"values": Column(1, torch.float32)}


class Run:
    """A run whose dense weight is its step, as are the rows that a step changes."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.values, self.weight = torch.zeros(ROWS, 4), torch.zeros(3)
        self.shard = TableShard("item", DenseRows(0, values=self.values), max_deltas=3, max_delta_ratio=2.0)
        self.events: list[Event] = []
        self.manager = ckpt.CheckpointManager(
            root,
            save=saving.every_steps(1),
            tables=Tables(self.shard),
            events=[self.events.append],
            **options,
        )

    def step(self, number: int) -> None:
        self.weight.fill_(number)
        with self.shard.writing(rows_of(number)):
            self.values[rows_of(number)] = float(number)
        self.manager.step(number, {"weight": self.weight})

    def restore(self) -> int:
        restored = self.manager.restore({"weight": self.weight})
        return 0 if restored is None else restored.step


def rows_of(step: int) -> torch.Tensor:
    return torch.arange(step, ROWS, 17)


def expected_after(step: int) -> torch.Tensor:
    values = torch.zeros(ROWS, 4)
    for number in range(1, step + 1):
        values[rows_of(number)] = float(number)
    return values


def checkpoints(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


@pytest.mark.parametrize("mode", ["thread", "off"])
def test_a_run_saves_and_resumes_state_and_tables_as_one(
    tmp_path: Path, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, keep=1, async_mode=mode)
    assert run.restore() == 0
    stayed = []
    with run.manager:
        for step in range(1, 9):
            run.step(step)
            run.manager.wait_durable()
            run.manager._saves.wait_booked()
            stayed.append(checkpoints(tmp_path))
    # What the newest names stays, and goes with the next merge.
    assert stayed[3] == [1, 2, 3, 4]
    assert all(1 in kept for kept in stayed)
    assert max(map(len, stayed)) <= 4
    (preflight,) = (event for event in run.events if event.kind == "preflight")
    assert preflight.values["size_bytes"] == run.values.nbytes + run.weight.nbytes
    again = Run(tmp_path, async_mode=mode, keep=1)
    assert again.restore() == 8
    assert "not asked for" not in caplog.text
    assert torch.equal(again.values, expected_after(8))
    assert (again.weight == 8).all()
    with again.manager:
        again.step(9)
    last = ckpt.inspect(tmp_path / "step-00000009").commit
    assert last is not None
    assert last.bases  # it goes on with the chain


@pytest.mark.parametrize("lost", ["all", "rows"])
def test_what_a_failed_save_did_not_save_is_in_the_next(tmp_path: Path, lost: str) -> None:
    """Also where the records of the base are there, and its rows are not: no save that names them is acknowledged."""
    run = Run(tmp_path, on_failure="continue", async_mode="off")
    with run.manager:
        run.step(1)
        for data in [*(tmp_path / "step-00000001").rglob("*.distcp")]:
            data.unlink()
        if lost == "all":
            shutil.rmtree(tmp_path / "step-00000001")
        run.step(2)
        assert isinstance(run.manager._saves.last_failure, CheckpointError)
        run.step(3)
        assert run.manager.wait_durable() == 3
    again = Run(tmp_path)
    assert again.restore() == 3
    assert torch.equal(again.values, expected_after(3))


def test_steps_are_reached_again_after_going_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.manager:
        for step in range(1, 5):
            run.step(step)
    for last in (5, 6):
        run = Run(tmp_path)
        with run.manager:
            run.manager.restore({"weight": run.weight}, step=1)
            for step in range(2, last + 1):
                run.step(step)
    again = Run(tmp_path)
    assert again.restore() == 6
    assert torch.equal(again.values, expected_after(6))


@pytest.mark.parametrize("how", ["same process", "new process", "lost record"])
def test_steps_that_were_given_up_do_not_come_back(tmp_path: Path, how: str) -> None:
    """After a restart the run resumes from the step that it saved last, not from a later one of before."""
    run = Run(tmp_path)
    for step in range(1, 7):
        run.step(step)
    if how != "same process":
        run.manager.close()
        run = Run(tmp_path)
    if how == "lost record":
        (tmp_path / "ckpt-run.json").unlink()
    with run.manager:
        run.manager.restore({"weight": run.weight}, step=2)
        for step in (3, 4):
            run.step(step)
    again = Run(tmp_path)
    with again.manager:
        assert again.restore() == 4
        assert torch.equal(again.values, expected_after(4))
        again.step(5)
    last = Run(tmp_path)
    with last.manager:
        assert last.restore() == 5
    assert torch.equal(last.values, expected_after(5))


def test_a_damaged_table_is_passed_over_with_its_state(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.manager:
        run.step(1)
        run.step(2)
    (data,) = (tmp_path / "step-00000002" / "rank-00000").glob("*.distcp")
    content = bytearray(data.read_bytes())
    place = content.index(torch.full([4], 2.0).numpy().tobytes())  # a row, not the state
    content[place] ^= 1
    data.write_bytes(content)
    again = Run(tmp_path)
    assert again.restore() == 1
    assert torch.equal(again.values, expected_after(1))
    assert (again.weight == 1).all()
    again.step(2)  # a base, beside what is damaged
    again.manager.close()
    assert torch.equal(again.values, expected_after(2))


def test_tables_alone_may_be_saved_and_must_be_there(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.manager:
        run.manager.step(1)
    ckpt.save({"weight": torch.zeros(3)}, tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match="has no table 'item'"):
        Run(tmp_path).restore()


def test_misuse_is_one_clear_error(tmp_path: Path) -> None:
    tables = Tables(TableShard("item", DenseRows(0, values=torch.zeros(1, 4))))
    wrong: Any = tables.shards[0]
    with pytest.raises(ConfigurationError, match=r"must be a ckpt\.embeddings\.Tables, not"):
        ckpt.CheckpointManager(tmp_path, save=1, tables=wrong)
    with ckpt.CheckpointManager(tmp_path, save=1, tables=tables, frozen=["weight"]) as manager:
        for step in (1, 2):
            manager.step(step, {"weight": torch.zeros(100_000), "bias": torch.full([1], float(step))})
    commit = ckpt.inspect(tmp_path / "step-00000002").commit
    assert commit is not None
    assert commit.bases


def updated(step: int) -> Ids:
    return np.arange(step, step + (50 if step == 1 else 5))


def _train(rank: int, root: str, steps: list[int], process_mode: bool) -> list[float]:
    ranks = torch.distributed.get_world_size()
    rows = DictRows(COLUMNS, rank, ranks)
    shard = TableShard("user", rows, shard=rank, shards=ranks)
    weight = torch.zeros(3)
    if process_mode:
        with pytest.raises(ConfigurationError, match="tables= needs async_mode"):
            ckpt.CheckpointManager(root, save=1, tables=Tables(shard), async_mode="process")
    with ckpt.CheckpointManager(root, save=1, tables=Tables(shard), keep=1) as manager:
        manager.restore({"weight": weight})
        for step in steps:
            weight += 1
            ids = updated(step)
            ids = ids[rows.owns(ids)]
            with shard.writing(ids):
                rows.write(ids, {"values": torch.full([len(ids), 1], float(step))})
            manager.step(step, {"weight": weight})
    own = sum(float(row["values"]) for row in rows.rows.values())
    return [own, float(weight[0])]


def test_a_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    expected = {int(id): float(step) for step in range(1, 5) for id in updated(step)}
    run_ranks(2, _train, str(tmp_path), [1, 2], True)
    (own, weight), *others = run_ranks(3, _train, str(tmp_path), [3, 4], False)
    assert own + sum(part for part, _ in others) == sum(expected.values())
    assert weight == 4
    assert checkpoints(tmp_path) == [3, 4]
    rows = DictRows(COLUMNS)
    Tables(TableShard("user", rows)).restore(tmp_path / "step-00000004")
    assert {id: float(row["values"]) for id, row in rows.rows.items()} == expected
