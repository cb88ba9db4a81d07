"""Ranks save a table together, one is killed, others go on with other shards."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from support.row_stores import DictRows
from support.saves import kill_self

import ckpt
from ckpt.embeddings import Column, DenseRows, Tables, TableShard
from ckpt.embeddings.rows import Ids, Rows
from ckpt.errors import SaveFailed

COLUMNS = {"values": Column(4, torch.float32)}
IDS = 4000


def updated(step: int) -> Ids:
    """The ids that a step changes: all in the first."""
    return np.arange(IDS) if step == 0 else np.random.default_rng(step).integers(0, IDS, 60)


def expected_after(step: int) -> dict[int, float]:
    rows: dict[int, float] = {}
    for number in range(step + 1):
        rows.update((id, id + number / 8) for id in updated(number).tolist())
    return rows


class KilledRows(DictRows):
    """Kills its process at the n-th read."""

    kill_in: int | None = None

    def read(self, ids: Ids, columns: Collection[str]) -> Rows:
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in <= 0:
                kill_self()
        return super().read(ids, columns)


def table_of(rank: int, shards: int) -> tuple[Tables, KilledRows | None]:
    """Ranks beyond the number of shards have none."""
    if rank >= shards:
        return Tables(), None
    rows = KilledRows(COLUMNS, rank, shards)
    return Tables(TableShard("user", rows, shard=rank, shards=shards, max_delta_ratio=0.6)), rows


def train(tables: Tables, rows: KilledRows | None, step: int) -> None:
    if rows is None:
        return
    ids = np.unique(updated(step))
    ids = ids[rows.owns(ids)]
    with tables.shards[0].writing(ids):
        values = torch.from_numpy(ids + step / 8).float().unsqueeze(1).expand(-1, 4)
        rows.write(ids, {"values": values.contiguous()})


def _save_run(
    rank: int, root: str, shards: int, begin: int | None, steps: list[int], killed: int | None
) -> None:
    tables, rows = table_of(rank, shards)
    dense = {"weight": torch.zeros(3)}
    if begin is not None:
        tables.restore(f"{root}/step-{begin}")
    for step in steps:
        train(tables, rows, step)
        dense["weight"] += 1
        if rank == killed and step == steps[-1]:
            assert rows is not None
            rows.kill_in = 2
        save = tables.save if step % 2 == 0 else _async(tables)
        if killed is not None and step == steps[-1]:
            with pytest.raises(SaveFailed):
                save({"dense": dense}, f"{root}/step-{step}", timeout_s=20.0)
        else:
            save({"dense": dense}, f"{root}/step-{step}")


def _async(tables: Tables) -> Any:
    return lambda *args, **kwargs: tables.async_save(*args, **kwargs).result()


def _restore(rank: int, root: str, shards: int, step: int) -> dict[int, float]:
    tables, rows = table_of(rank, shards)
    assert rows is not None
    tables.restore(f"{root}/step-{step}")
    assert all((row["values"] == row["values"][0]).all() for row in rows.rows.values())
    return {id: float(row["values"][0]) for id, row in rows.rows.items()}


def restored(root: str, shards: int, step: int) -> dict[int, float]:
    rows: dict[int, float] = {}
    for part in run_ranks(shards, _restore, root, shards, step):
        assert not rows.keys() & part.keys()
        rows.update(part)
    return rows


def listed(url: str) -> Any:
    (checkpoint,) = ckpt.list_checkpoints(url)
    return checkpoint


@pytest.mark.long
def test_a_rank_is_killed_and_others_go_on_with_other_shards(tmp_path: Path) -> None:
    root = str(tmp_path)
    run_ranks(3, _save_run, root, 2, None, [0, 1, 2, 3], None)
    sizes = [listed(f"{root}/step-{step}").size_bytes for step in range(4)]
    assert max(sizes[1:]) < sizes[0] / 3
    run_ranks(3, _save_run, root, 2, 3, [4], 1, killed=[1])
    assert not (tmp_path / "step-4" / "commit.json").exists()
    assert restored(root, 3, 3) == expected_after(3)
    # The same shards go on with deltas, others begin with a base.
    run_ranks(3, _save_run, root, 2, 3, [4, 5], None)
    assert restored(root, 1, 5) == expected_after(5)
    assert listed(f"{root}/step-5").bases
    run_ranks(3, _save_run, root, 3, 5, [6, 7], None)
    for shards in (2, 3):
        assert restored(root, shards, 7) == expected_after(7)
    assert restored(root, 2, 0) == expected_after(0)


def test_two_ranks_save_their_shards_of_a_table(tmp_path: Path) -> None:
    run_ranks(2, _save_run, str(tmp_path), 2, None, [0, 1], None)
    assert restored(str(tmp_path), 2, 1) == expected_after(1)


def _split_anew(rank: int, root: str) -> list[int]:
    def keep(first: int, stop: int) -> tuple[torch.Tensor, TableShard]:
        values = torch.zeros(stop - first, 4)
        return values, TableShard("item", DenseRows(first, values=values), shard=rank, shards=2)

    _, shard = keep(50 * rank, 50 * rank + 50)
    Tables(shard).save({}, f"{root}/0")
    values, shard = keep(60 * rank, 60 + 40 * rank)
    tables = Tables(shard)
    tables.restore(f"{root}/0")
    bitmap = torch.zeros(len(values), dtype=torch.bool)
    bitmap[-5] = True
    with shard.writing(bitmap):
        values[-5] = 1.0
    tables.save({}, f"{root}/1")
    whole = torch.zeros(100, 4)
    Tables(TableShard("item", DenseRows(0, values=whole))).restore(f"{root}/1")
    return whole[:, 0].nonzero().flatten().tolist()


@pytest.mark.long
def test_ranks_that_keep_other_rows_than_before_begin_anew(tmp_path: Path) -> None:
    assert run_ranks(2, _split_anew, str(tmp_path)) == [[55, 95]] * 2
