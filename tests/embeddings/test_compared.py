"""Tables whose changes nobody tells: saves find them by comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.row_stores import DictRows

import ckpt
from ckpt.embeddings import Column, DenseRows, Tables, TableShard, compared
from ckpt.embeddings.compared import Comparison
from ckpt.embeddings.rows import Ids

COLUMNS = {"values": Column(4, torch.float32), "adagrad": Column(1, torch.float32)}
BLOCK_ROWS = 5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared, "_BLOCK_BYTES", 20 * BLOCK_ROWS)
    monkeypatch.setattr(compared, "_BATCH_ROWS", 20)


def filled(ids: Ids, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(len(ids), c.width, generator=generator).to(c.dtype) for name, c in COLUMNS.items()
    }


def growing(ids: Ids) -> DictRows:
    rows = DictRows(COLUMNS)
    rows.write(ids, filled(ids))
    return rows


def test_blocks_of_a_dense_table_are_found_to_the_bit() -> None:
    values, adagrad = torch.zeros(103, 4), torch.zeros(103)
    comparison = Comparison(DenseRows(1000, values=values, adagrad=adagrad))
    comparison.look()
    assert [len(each) for each in comparison.look()] == [0, 0]
    values[7, 3] = -0.0
    adagrad[101] = float("nan")
    changed, gone = comparison.look()
    assert changed.tolist() == [1005, 1006, 1007, 1008, 1009, 1100, 1101, 1102]
    assert not len(gone)
    assert [len(each) for each in comparison.look()] == [0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_a_growing_table_is_missed(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = growing(np.arange(0, 0 if seed == 3 else 300, 3))
    comparison = Comparison(rows)
    comparison.look()
    for round in range(30):
        before = {id: row["values"] for id, row in rows.rows.items()}
        ids = np.unique(random.integers(0, 300 + 40 * round, size=random.integers(0, 12)))
        rows.write(ids, filled(ids, round))
        evicted = random.choice([*rows.rows, 0], size=random.integers(0, 40 if round > 20 else 5))
        rows.remove(evicted)
        changed, gone = comparison.look()
        now = rows.rows
        assert now.keys() >= set(changed.tolist())
        assert set(changed.tolist()) >= {id for id in now if before.get(id) is not now[id]["values"]}
        assert gone.tolist() == sorted(before.keys() - now.keys())
        assert len(changed) == len(set(changed.tolist()))


def test_the_same_rows_under_other_ids_are_a_change() -> None:
    rows = growing(np.array([2, 5, 9]))
    comparison = Comparison(rows)
    comparison.look()
    rows.rows[6] = rows.rows.pop(5)
    changed, gone = comparison.look()
    assert changed.tolist() == [2, 6, 9]
    assert gone.tolist() == [5]


def test_ids_that_begin_to_follow_one_another_are_no_change_that_is_missed() -> None:
    rows = growing(np.array([2, 3, 5]))
    comparison = Comparison(rows)
    comparison.look()
    rows.write(np.array([4]), filled(np.array([4]), 1))
    assert [each.tolist() for each in comparison.look()] == [[2, 3, 4, 5], []]
    rows.remove(np.array([2, 4]))
    assert [each.tolist() for each in comparison.look()] == [[3, 5], [2, 4]]


def test_a_table_that_nobody_tells_of_is_saved_by_its_changes(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    values, adagrad, rows = torch.randn(5000, 4), torch.zeros(5000), growing(np.arange(0, 900, 3))
    tables = Tables(
        TableShard("item", DenseRows(0, values=values, adagrad=adagrad), compare=True),
        TableShard("user", rows, compare=True, max_deltas=3),
    )
    expected = []
    for step in range(8):
        tables.async_save({}, tmp_path / f"{step}")
        expected.append((values.clone(), dict(rows.rows)))
        ids = random.integers(0, 900, size=4)
        values[ids] += 1
        adagrad[ids] += 1
        rows.write(ids, filled(ids, step))
        rows.remove(random.integers(0, 1000, size=3))
        if step == 4:  # another process goes on
            tables.save({}, tmp_path / "now")
            tables = Tables(
                TableShard("item", DenseRows(0, values=values, adagrad=adagrad), compare=True),
                TableShard("user", rows, compare=True, max_deltas=3),
            )
            tables.restore(tmp_path / "now")
    tables._wait()
    sizes = [next(iter(ckpt.list_checkpoints(tmp_path / f"{step}"))).size_bytes or 0 for step in range(8)]
    assert max(sizes[1:]) < sizes[0] / 2
    for step, (item, user) in enumerate(expected):
        back, others = torch.zeros(5000, 4), DictRows(COLUMNS)
        Tables(TableShard("item", DenseRows(0, values=back, adagrad=torch.zeros(5000)))).restore(
            tmp_path / f"{step}"
        )
        Tables(TableShard("user", others)).restore(tmp_path / f"{step}")
        assert torch.equal(back, item)
        assert others.rows.keys() == user.keys()
        assert all(torch.equal(row["values"], user[id]["values"]) for id, row in others.rows.items())


@pytest.mark.parametrize("room", [1 << 20, 100])
def test_rows_may_change_without_notice_once_the_call_is_over(tmp_path: Path, room: int) -> None:
    values = torch.zeros(300, 4)
    tables = Tables(TableShard("item", DenseRows(0, values=values), compare=True, max_aside_bytes=room))
    future = tables.async_save({}, tmp_path / "0")
    assert room > 100 or [*(tmp_path / "0").rglob("*.distcp")]  # without room it waits until all is written
    values[:] = 1
    future.result()
    back = torch.ones(300, 4)
    Tables(TableShard("item", DenseRows(0, values=back))).restore(tmp_path / "0")
    assert not back.any()
    tables.save({}, tmp_path / "1")
    Tables(TableShard("item", DenseRows(0, values=back))).restore(tmp_path / "1")
    assert torch.equal(back, values)


def test_what_a_failed_save_did_not_save_is_in_the_next(tmp_path: Path) -> None:
    values = torch.zeros(300, 4)
    tables = Tables(TableShard("item", DenseRows(0, values=values), compare=True))
    tables.save({}, tmp_path / "0")
    values[3] = 1
    unsaved: Any = {"part": lambda: None}
    with pytest.raises(ckpt.errors.CheckpointError):
        tables.save(unsaved, tmp_path / "1")
    values[50] = 2
    tables.save({}, tmp_path / "1")
    shard = tables.shards[0]
    assert shard._chain is not None
    assert len(shard._chain.generations) == 2
    back = torch.ones(300, 4)
    Tables(TableShard("item", DenseRows(0, values=back))).restore(tmp_path / "1")
    assert torch.equal(back, values)
